//! The engine over real (tiny, random) models of every family: batches, shared prefixes, guesses and tiers change how an
//! answer is computed and not the answer.
#![allow(missing_docs)]

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use fir::Exec;
use fir_engine::{
    Attention, Config, Engine, Event, Grammar, Handle, Health, KvType, Model, Request, Sampling, Sparse, Stats,
};

const FAMILIES: [&str; 8] = ["llama", "llama-tied", "qwen2", "qwen3", "qwen3-moe", "gemma3", "deepseek2", "deepseek3"];

fn model(family: &str) -> Arc<Model> {
    let mut path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(family);
    if family.starts_with("gguf") {
        path.set_extension("gguf");
    }
    Arc::new(Model::load(&Exec::cpu().unwrap(), &path).unwrap())
}

fn config() -> Config {
    Config {
        memory: Some(64 << 20),
        kv_type: KvType::F32,
        page_size: 4,
        max_step_tokens: 512,
        itl_target_ms: None,
        drafts: 0,
        ..Config::default()
    }
}

fn submit(handle: &Handle, request: Request) -> Receiver<Event> {
    let (tx, rx) = channel();
    handle.submit(request, move |event| tx.send(event).is_ok()).unwrap();
    rx
}

/// Tokens per continuation.
fn tokens(events: Receiver<Event>) -> Vec<Vec<u32>> {
    let mut all: Vec<Vec<u32>> = Vec::new();
    for event in events {
        match event {
            Event::Token { choice, id, .. } => {
                all.resize(all.len().max(choice + 1), Vec::new());
                all[choice].push(id);
            }
            Event::Prompt(_) | Event::Finished { .. } => {}
            Event::Failed(why) => panic!("{why}"),
        }
    }
    all
}

/// Prompts with common beginnings; greedy and sampled.
fn varied(i: usize, vocab: usize) -> Request {
    let sampling = Sampling {
        temperature: [0.0, 0.9][i % 2],
        top_p: [1.0, 0.95][i / 2 % 2],
        repetition_penalty: [1.0, 1.1][i / 4 % 2],
        seed: Some(i as u64),
        max_tokens: 12 + i % 8,
        ignore_eos: true,
        ..Sampling::default()
    };
    let prompt = (0..30 + i % 23).map(|t| if t < 24 { t * 5 + i % 3 } else { t * 7 + i } % (vocab - 3) + 3);
    Request { prompt: prompt.map(|t| t as u32).collect(), sampling, n: 1 + i % 2, ..Request::default() }
}

fn run(model: &Arc<Model>, config: Config, together: bool) -> (Vec<Vec<Vec<u32>>>, Stats) {
    let handle = Engine::start(Arc::clone(model), config).unwrap();
    let vocab = model.config().vocab;
    let answers = if together {
        let all: Vec<_> = (0..64).map(|i| submit(&handle, varied(i, vocab))).collect();
        all.into_iter().map(tokens).collect()
    } else {
        (0..64).map(|i| tokens(submit(&handle, varied(i, vocab)))).collect()
    };
    assert_eq!(handle.health(), Health::Ok);
    // The last event is sent before its sequence is put away.
    let start = Instant::now();
    while handle.stats().running > 0 {
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", handle.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    (answers, handle.stats())
}

#[test]
fn every_family_answers_alike_alone_and_among_64() {
    for family in FAMILIES {
        let model = model(family);
        let (want, _) = run(&model, Config { prefix_cache: false, cascade: false, ..config() }, false);
        let (got, stats) = run(&model, config(), true);
        let wrong = (0..64).filter(|&i| got[i] != want[i]).count();
        assert_eq!(wrong, 0, "{family}: answers that differ");
        assert!(stats.cached_tokens > 0 && stats.pages_used == 0, "{family}: {stats:?}");
    }
}

#[test]
fn guesses_are_exact_on_a_model() {
    let model = model("llama");
    // Long greedy answers of a small model go round in circles, which is where guesses from the text so far are right.
    let circles = |drafts| {
        let handle = Engine::start(Arc::clone(&model), Config { drafts, ..config() }).unwrap();
        let greedy = Sampling { temperature: 0.0, max_tokens: 180, ignore_eos: true, ..Sampling::default() };
        let ask = |i: usize| Request { sampling: greedy.clone(), n: 1, ..varied(i, model.config().vocab) };
        let all: Vec<_> = (0..8).map(|i| submit(&handle, ask(i))).collect();
        let answers: Vec<_> = all.into_iter().map(tokens).collect();
        (answers, handle.stats())
    };
    let ((want, _), (got, stats)) = (circles(0), circles(4));
    assert_eq!(got, want);
    assert!(stats.drafted_tokens > 0, "{stats:?}");
}

#[test]
fn tiers_change_no_answer() {
    let folder = std::env::temp_dir().join(format!("fir-engine-tiers-{}", std::process::id()));
    let model = model("qwen3");
    let (want, _) = run(&model, config(), true);
    // A pool of 100 pages, less than half of what 64 requests want at once.
    let probe = Engine::start(Arc::clone(&model), config()).unwrap();
    let sizes: Vec<u64> = probe.memory().parts.iter().map(|p| p.bytes).collect();
    let page = sizes[2] / probe.memory().pages as u64;
    drop(probe);
    let small = Config {
        memory: Some(sizes[0] + sizes[1] + 100 * page),
        host_tier: 40 * page,
        disk_tier: Some((folder.clone(), 1 << 30)),
        ..config()
    };
    let (got, stats) = run(&model, small.clone(), true);
    assert_eq!(got, want);
    assert_eq!(stats.pages, 100);
    // How much comes back depends on when files are written.
    assert!(stats.evictions > 0 && stats.tier.written > 0, "{stats:?}");
    // A disk alone has some memory on the way to it.
    let (got, stats) = run(&model, Config { host_tier: 0, ..small }, true);
    assert_eq!(got, want);
    assert!(stats.tier.stored > 0, "{stats:?}");
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn grammars_embeddings_and_a_plan_of_memory() {
    let model = model("llama");
    let handle = Engine::start(Arc::clone(&model), config()).unwrap();
    let states = handle.embed(&[5, 6, 7]).unwrap();
    assert_eq!(states.len(), model.config().hidden);
    assert!(states.iter().all(|x| x.is_finite()) && states.iter().any(|x| *x != 0.0));
    let plan = handle.memory().to_string();
    assert!(plan.contains("KV pages") && plan.contains("pages of 4 tokens"), "{plan}");
    let total: u64 = handle.memory().parts.iter().map(|p| p.bytes).sum();
    assert!(total <= 64 << 20, "{total} bytes");
    let tiny = Engine::start(Arc::clone(&model), Config { memory: Some(1000), ..config() }).unwrap_err().to_string();
    assert!(tiny.contains("memory is 1000 bytes, expected"), "{tiny}");
    let sampling = Sampling { grammar: Some(Grammar::Regex("(".into())), ..Sampling::default() };
    let bad = Request { prompt: vec![5], sampling, ..Request::default() };
    assert!(handle.submit(bad, |_| true).unwrap_err().to_string().starts_with("`grammar`: "));
    assert!(handle.drain(std::time::Duration::from_secs(1)));
}

#[test]
fn a_shared_prefix_changes_no_bit_of_what_models_of_bf16_say() {
    for family in ["gguf/llama", "gguf/qwen2", "gguf/gemma3"] {
        let model = model(family);
        let run = |share: bool, cascade: bool| {
            let config = Config {
                memory: Some(200 << 20),
                kv_type: KvType::Bf16,
                page_size: 16,
                prefix_cache: share,
                cascade,
                ..config()
            };
            let handle = Engine::start(Arc::clone(&model), config).unwrap();
            let ask = |i: u32| {
                let prompt = (0..700).map(|t| 2 + t * 31 % 94).chain((0..20).map(|t| 2 + (t * i + i) % 94)).collect();
                let sampling = Sampling {
                    temperature: 0.0,
                    max_tokens: 24,
                    ignore_eos: true,
                    logprobs: Some(1),
                    ..Sampling::default()
                };
                submit(&handle, Request { prompt, sampling, ..Request::default() })
            };
            let all: Vec<_> = (0..24).map(ask).collect();
            let tell = |event| match event {
                Event::Token { id, logprobs, .. } => Some((id, logprobs.unwrap().chosen.logprob.to_bits())),
                Event::Prompt(_) | Event::Finished { .. } => None,
                Event::Failed(why) => panic!("{why}"),
            };
            let answers: Vec<Vec<_>> = all.into_iter().map(|e| e.into_iter().filter_map(tell).collect()).collect();
            (answers, handle.stats())
        };
        let (want, flat) = run(false, false);
        let (got, shared) = run(true, true);
        let wrong = (0..24).filter(|&i| got[i] != want[i]).count();
        assert_eq!(wrong, 0, "{family}: answers that differ");
        assert!(shared.cascade_groups > 0 && shared.kv_bytes_read < shared.kv_bytes_flat, "{family}: {shared:?}");
        assert_eq!(flat.cascade_groups, 0);
        assert!(shared.computed_tokens < flat.computed_tokens / 4, "{family}: {shared:?}");
    }
}

#[test]
fn streaming_and_sparse_requests_run_beside_others() {
    let model = model("llama");
    let vocab = model.config().vocab;
    let streaming = Attention::Streaming { sinks: 4, window: 40 };
    // All blocks, so that the answer is the model's own.
    let sparse = Attention::Sparse(Sparse { block: 16, sinks: 1, local: 1, stride: 1 });
    let ask = |i: usize| {
        let mut request = Request { n: 1, ..varied(i, vocab) };
        request.attention = [streaming, sparse, Attention::Full][i % 3];
        if i.is_multiple_of(3) {
            // Longer than the model's context of 256.
            request.prompt = (0..320).map(|t| (3 + (t * 7 + i) % (vocab - 3)) as u32).collect();
        }
        request
    };
    let alone: Vec<_> = {
        let handle = Engine::start(Arc::clone(&model), config()).unwrap();
        (0..12).map(|i| tokens(submit(&handle, ask(i)))).collect()
    };
    let handle = Engine::start(Arc::clone(&model), config()).unwrap();
    let all: Vec<_> = (0..12).map(|i| submit(&handle, ask(i))).collect();
    let together: Vec<_> = all.into_iter().map(tokens).collect();
    assert_eq!(together, alone);
    let full = Request { attention: Attention::Full, ..ask(1) };
    assert_eq!(tokens(submit(&handle, full)), alone[1]);
    let gemma = Engine::start(self::model("gemma3"), config()).unwrap();
    let said = gemma.submit(ask(0), |_| true).unwrap_err().to_string();
    assert!(said.starts_with("`attention`: ") && said.contains("gemma3"), "{said}");
}

#[test]
fn prompts_are_scored_alike_alone_and_among_others() {
    let score = |handle: &Handle, prompt: &[u32], n: usize| {
        let sampling = Sampling {
            prompt_logprobs: Some(2),
            max_tokens: 4,
            ignore_eos: true,
            temperature: 0.0,
            ..Sampling::default()
        };
        submit(handle, Request { prompt: prompt.to_vec(), sampling, n, ..Request::default() })
    };
    // Each token's number, its bits, and those of the likeliest.
    let told = |events: Receiver<Event>| {
        let scores: Vec<_> =
            events.into_iter().filter_map(|e| if let Event::Prompt(s) = e { Some(s) } else { None }).collect();
        let [scores] = &scores[..] else { panic!("told {} times", scores.len()) };
        let bits =
            |s: &fir_engine::TokenLogprobs| (s.chosen.id, s.chosen.logprob.to_bits(), s.top[0].logprob.to_bits());
        scores.iter().map(bits).collect::<Vec<_>>()
    };
    for family in ["llama", "gemma3", "deepseek2"] {
        let model = model(family);
        let vocab = model.config().vocab as u32;
        let prompts: Vec<Vec<u32>> =
            (1..9).map(|i| (0..i * 23 - 22).map(|t| 3 + (t * 7 + t * t * i) % (vocab - 3)).collect()).collect();
        let handle = Engine::start(Arc::clone(&model), Config { prefix_cache: false, ..config() }).unwrap();
        let alone: Vec<_> = prompts.iter().map(|p| told(score(&handle, p, 1))).collect();
        let handle = Engine::start(Arc::clone(&model), config()).unwrap();
        let beside: Vec<_> = (0..8).map(|i| submit(&handle, varied(i, vocab as usize))).collect();
        let all: Vec<_> = prompts.iter().map(|p| score(&handle, p, 2)).collect();
        let together: Vec<_> = all.into_iter().map(told).collect();
        assert_eq!(together, alone, "{family}");
        beside.into_iter().for_each(|events| assert!(!tokens(events).is_empty()));
        for (scores, prompt) in alone.iter().zip(&prompts) {
            assert_eq!(scores.iter().map(|s| s.0).collect::<Vec<_>>(), prompt[1..], "{family}");
            assert!(scores.iter().all(|s| f32::from_bits(s.1) <= f32::from_bits(s.2) && f32::from_bits(s.2) < 0.0));
        }
        // The very tokens that are generated next have the probability that they have as part of a prompt.
        let sampling =
            Sampling { logprobs: Some(0), max_tokens: 30, ignore_eos: true, seed: Some(3), ..Sampling::default() };
        let answer: Vec<_> = submit(&handle, Request { prompt: prompts[4].clone(), sampling, ..Request::default() })
            .into_iter()
            .filter_map(|e| {
                if let Event::Token { id, logprobs, .. } = e {
                    Some((id, logprobs.unwrap().chosen.logprob))
                } else {
                    None
                }
            })
            .collect();
        let whole: Vec<u32> = prompts[4].iter().copied().chain(answer.iter().map(|a| a.0)).collect();
        let scored = told(score(&handle, &whole, 1));
        for ((_, as_answer), as_prompt) in answer.iter().zip(&scored[prompts[4].len() - 1..]) {
            let as_prompt = f32::from_bits(as_prompt.1);
            assert!(
                (as_answer - as_prompt).abs() < 2e-2,
                "{family}: {as_answer} as an answer, {as_prompt} as a prompt"
            );
        }
    }
}

#[test]
fn prefixes_are_forgotten_on_demand() {
    let model = model("llama");
    let handle = Engine::start(Arc::clone(&model), config()).unwrap();
    let ask = || {
        let request = Request { n: 1, ..varied(1, model.config().vocab) };
        let before = handle.stats().cached_tokens;
        tokens(submit(&handle, request));
        handle.stats().cached_tokens - before
    };
    assert_eq!(ask(), 0);
    assert!(ask() > 0);
    assert!(handle.forget_prefixes().unwrap() > 0);
    assert_eq!(ask(), 0);
}

#[test]
fn an_engine_that_has_ended_leaves_no_files() {
    let folder = std::env::temp_dir().join(format!("fir-engine-ended-{}", std::process::id()));
    let config = Config { disk_tier: Some((folder.clone(), 1 << 20)), ..config() };
    let handle = Engine::start(model("llama"), config).unwrap();
    let files = || std::fs::read_dir(&folder).unwrap().count();
    assert_eq!(files(), 2, "a folder of its own, and its lock");
    assert!(handle.drain(Duration::from_secs(1)));
    assert_eq!(files(), 0);
    std::fs::remove_dir(folder).unwrap();
}
