//! The whole engine over the toy: what callers see.

use super::*;
use crate::backend::Toy;
use crate::config::MemoryPlan;
use crate::grammar::{Grammars, Lazy};
use crate::handle::{Handle, Health, launch};
use crate::request::{Attention, Grammar, Request, Sampling, Usage};
use std::sync::mpsc::{Receiver, channel};

const VOCAB: usize = 258;
const EOS: u32 = 256;
const PAGES: usize = 800;

fn config() -> Config {
    Config { page_size: 4, max_step_tokens: 512, itl_target_ms: None, drafts: 0, ..Config::default() }
}

fn start(config: Config, toy: Toy) -> Handle {
    start_with(config, toy, None)
}

fn start_with(config: Config, toy: Toy, drafter: Option<Drafter>) -> Handle {
    let mut words: Vec<Option<Vec<u8>>> = (0..=255u8).map(|b| Some(vec![b])).collect();
    words.extend([None, None]);
    let whole = toy.vocab == VOCAB;
    let grammars = Lazy::new(move || if whole { Grammars::new(&words, &[EOS]).map(Some) } else { Ok(None) });
    let plan = MemoryPlan { parts: Vec::new(), pages: PAGES, context: 2200 };
    let eos = if toy.vocab == VOCAB { vec![EOS] } else { vec![] };
    let parts = Parts { backend: Backend::Toy(toy), drafter, plan, eos, host: Exec::cpu().unwrap() };
    launch(config, parts, grammars).unwrap()
}

fn toy() -> Toy {
    Toy::new(PAGES, 4, VOCAB)
}

fn request(prompt: Vec<u32>, sampling: Sampling) -> Request {
    Request { prompt, sampling, ..Request::default() }
}

/// The toy's end token comes by chance; it means nothing here.
fn plain() -> Sampling {
    Sampling { ignore_eos: true, ..Sampling::default() }
}

fn submit(handle: &Handle, request: Request) -> Receiver<Event> {
    let (tx, rx) = channel();
    handle.submit(request, move |event| tx.send(event).is_ok()).unwrap();
    rx
}

/// What came of one continuation.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    tokens: Vec<u32>,
    text: String,
    reason: Finish,
    usage: Usage,
}

/// Tokens, text and end of a continuation, as far as they have come.
type Partial = (Vec<u32>, String, Option<(Finish, Usage)>);

fn answers(events: Receiver<Event>) -> Result<Vec<Answer>, String> {
    let mut all: Vec<Partial> = Vec::new();
    for event in events {
        let (Event::Token { choice, .. } | Event::Finished { choice, .. }) = &event else {
            let Event::Failed(why) = event else { unreachable!() };
            return Err(why);
        };
        all.resize(all.len().max(choice + 1), Default::default());
        let of = &mut all[*choice];
        assert!(of.2.is_none(), "an event after the end");
        match event {
            Event::Token { id, text, .. } => {
                of.0.push(id);
                of.1 += &text;
            }
            Event::Finished { text, reason, usage, .. } => {
                of.1 += &text;
                of.2 = Some((reason, usage));
            }
            Event::Prompt(_) | Event::Failed(_) => unreachable!(),
        }
    }
    let answer = |(tokens, text, end): Partial| {
        let (reason, usage) = end.expect("an end");
        Answer { tokens, text, reason, usage }
    };
    Ok(all.into_iter().map(answer).collect())
}

fn one(handle: &Handle, request: Request) -> Answer {
    answers(submit(handle, request)).unwrap().pop().unwrap()
}

fn all_pages_are_back(handle: &Handle) {
    until(handle, |stats| stats.pages_used + stats.running + stats.waiting == 0);
}

/// Waits for what the engine's thread does after it has told the caller.
fn until(handle: &Handle, done: impl Fn(&Stats) -> bool) {
    let start = Instant::now();
    while !done(&handle.stats()) {
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", handle.stats());
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn varied(i: usize) -> Request {
    let sampling = Sampling {
        temperature: [0.0, 0.8, 1.2][i % 3],
        top_k: [0, 20][i % 2],
        top_p: [1.0, 0.9][i / 2 % 2],
        frequency_penalty: [0.0, 0.3][i / 4 % 2],
        seed: Some(i as u64),
        max_tokens: 10 + i % 17,
        ..plain()
    };
    request((0..20 + i % 9).map(|t| ((t * 7 + i % 5) % 256) as u32).collect(), sampling)
}

#[test]
fn a_request_gets_the_same_tokens_alone_and_among_64() {
    let alone: Vec<Answer> = {
        let handle = start(Config { prefix_cache: false, ..config() }, toy());
        (0..64).map(|i| one(&handle, varied(i))).collect()
    };
    for drafts in [0, 3] {
        let handle = start(Config { drafts, ..config() }, toy());
        let all: Vec<_> = (0..64).map(|i| submit(&handle, varied(i))).collect();
        for (events, want) in all.into_iter().zip(&alone) {
            let got = answers(events).unwrap().pop().unwrap();
            assert_eq!((&got.tokens, &got.text, got.reason), (&want.tokens, &want.text, want.reason));
        }
        all_pages_are_back(&handle);
        assert!(handle.stats().cached_tokens > 0);
    }
}

#[test]
fn guesses_change_the_number_of_steps_and_nothing_else() {
    // Three tokens: runs repeat, and one guess in three is right.
    let run = |drafts: usize| {
        let mut toy = Toy::new(PAGES, 4, 3);
        toy.pace = Duration::from_micros(1);
        let handle = start(Config { drafts, ..config() }, toy);
        let sampling =
            Sampling { max_tokens: 300, temperature: 1.0, seed: Some(5), frequency_penalty: 0.01, ..plain() };
        let answer = one(&handle, request(vec![0, 1, 2, 0, 1], sampling));
        (answer, handle.stats())
    };
    let (plain, _) = run(0);
    let (guessed, stats) = run(4);
    assert_eq!(plain, guessed);
    // How many are made goes by measured times, so on a busy machine they may be few: the next test has enough of them. What is
    // right saves a step each, but for those past the last token.
    assert!(stats.drafted_tokens > stats.accepted_tokens, "{stats:?}");
    let saved = stats.generated_tokens - stats.steps;
    assert!((saved..saved + 4).contains(&stats.accepted_tokens), "{stats:?}");
}

#[test]
fn trees_of_guesses_leave_the_distribution_as_it_is() {
    const TOKENS: usize = 80;
    let prompt: Vec<u32> = vec![0, 1, 2, 0, 1, 2, 1, 0, 1, 2, 2, 0, 1];
    let mut toy = Toy::new(PAGES, 4, 3);
    toy.pace = Duration::from_micros(1);
    let handle = start(Config { drafts: 4, max_seqs: 1, ..config() }, toy);
    let mut itself = Backend::Toy(Toy::new(PAGES, 4, 3));
    let pages: Vec<u32> = (0..32).collect();
    // How often the likeliest token was drawn, the second, and the third; how often they should be; and the variance.
    let (mut got, mut want, mut spread) = ([0.0; 3], [0.0; 3], [0.0; 3]);
    for seed in 0..150 {
        let sampling = Sampling { max_tokens: TOKENS, seed: Some(seed), ..plain() };
        let answer = one(&handle, request(prompt.clone(), sampling)).tokens;
        let tokens = [&prompt[..], &answer].concat();
        let seqs = [Seq { new: tokens.len(), past: 0, pages: &pages, ..Seq::default() }];
        let rows: Vec<u32> = (prompt.len() as u32 - 1..tokens.len() as u32 - 1).collect();
        let logits = itself.step(&Batch { tokens: &tokens, seqs: &seqs, logits: &rows, shared: &[] }).unwrap();
        for (row, &token) in logits.chunks_exact(3).zip(&answer) {
            let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
            let mut order = [0, 1, 2];
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            for (rank, &id) in order.iter().enumerate() {
                let p = f64::from(row[id]).exp() / sum;
                got[rank] += f64::from(u8::from(id as u32 == token));
                want[rank] += p;
                spread[rank] += p * (1.0 - p);
            }
        }
    }
    let stats = handle.stats();
    assert!(stats.accepted_tokens > 500 && stats.branches_taken > 50, "{stats:?}");
    for rank in 0..3 {
        // A deviation of 3.3 and more has a probability of 0.001.
        let z = (got[rank] - want[rank]) / f64::sqrt(spread[rank]);
        assert!(z.abs() < 3.3, "rank {rank}: {} times, {:.1} expected: {z:.2}", got[rank], want[rank]);
    }
}

#[test]
fn streaming_answers_are_longer_than_the_context_and_hold_few_pages() {
    let attention = Attention::Streaming { sinks: 4, window: 32 };
    let ask = |i: u32| Request {
        attention,
        ..request(
            (0..300).map(|t| (t * 7 + i) % 250).collect(),
            Sampling { max_tokens: 2500, seed: Some(u64::from(i)), ..plain() },
        )
    };
    let alone = one(&start(config(), toy()), ask(1));
    assert_eq!((alone.tokens.len(), alone.reason), (2500, Finish::Length));
    // Pages for 32 + 4 + 64 tokens and some; with others that do not stream, and with guesses.
    let handle = start(Config { drafts: 3, ..config() }, toy());
    let others: Vec<_> = (0..20).map(|i| submit(&handle, varied(i))).collect();
    let streams: Vec<_> = (0..3).map(|i| submit(&handle, ask(i))).collect();
    until(&handle, |stats| stats.running == 3 && stats.generated_tokens > 1000);
    assert!(handle.stats().pages_used <= 3 * 30, "{:?}", handle.stats());
    let got: Vec<_> = streams.into_iter().map(|e| answers(e).unwrap().pop().unwrap()).collect();
    assert_eq!(got[1].tokens, alone.tokens);
    others.into_iter().for_each(|e| assert_eq!(answers(e).unwrap().len(), 1));
    all_pages_are_back(&handle);
    let much = Request { attention: Attention::Streaming { sinks: 4, window: 5000 }, ..ask(0) };
    let said = handle.submit(much, |_| true).unwrap_err().to_string();
    assert!(said.starts_with("`attention`: has 4 sinks and a window of 5000, expected"), "{said}");
}

#[test]
fn a_small_model_guesses_and_changes_nothing() {
    let sampling = |i: u64| Sampling {
        max_tokens: [60, 15][i as usize % 2],
        temperature: [0.0, 0.7][i as usize % 2],
        seed: Some(i),
        ..plain()
    };
    let run = |drafter: Option<Drafter>, drafts| {
        let mut toy = toy();
        toy.pace = Duration::from_micros(20);
        let handle = start_with(Config { drafts, ..config() }, toy, drafter);
        let all: Vec<_> = (0..6)
            .map(|i| submit(&handle, request((0..40).map(|t| t * 3 + i).collect(), sampling(i.into()))))
            .collect();
        let tokens: Vec<_> = all.into_iter().map(|e| answers(e).unwrap().pop().unwrap().tokens).collect();
        all_pages_are_back(&handle);
        (tokens, handle.stats())
    };
    let (want, plain) = run(None, 0);
    // The same toy, so that all guesses of greedy requests are right; and a pool for some of the requests only.
    for pages in [PAGES, 40] {
        let drafter = Drafter::new(Backend::Toy(Toy::new(pages, 4, VOCAB)), pages, 4, 512);
        let (got, stats) = run(Some(drafter), 4);
        assert_eq!(got, want);
        // How many depends on the clock: guesses go on while they pay.
        assert!(stats.accepted_tokens > 0 && stats.drafter_error.is_none(), "{stats:?}");
        assert!(pages < PAGES || stats.steps <= plain.steps, "{} steps, {} without", stats.steps, plain.steps);
    }
    // One that fails is done without.
    let mut bad = toy();
    bad.fail_at = Some((3, false));
    let (got, stats) = run(Some(Drafter::new(Backend::Toy(bad), PAGES, 4, 512)), 4);
    assert_eq!(got, want);
    assert!(stats.drafter_error.is_some_and(|e| e.contains("the toy fails")));
}

#[test]
fn a_prefix_of_2000_tokens_is_computed_once_for_32_and_changes_no_answer() {
    let prefix: Vec<u32> = (0..2000).map(|i| i * 31 % 256).collect();
    let run = |share: bool| {
        let handle = start(Config { prefix_cache: share, cascade: share, ..config() }, toy());
        let ask = |i: u32| {
            let sampling = Sampling { max_tokens: 6, temperature: 0.0, ..plain() };
            submit(&handle, request(prefix.iter().copied().chain([i, i, i]).collect(), sampling))
        };
        let all: Vec<_> = (0..32).map(ask).collect();
        let tokens: Vec<_> = all.into_iter().map(|e| answers(e).unwrap().pop().unwrap().tokens).collect();
        all_pages_are_back(&handle);
        (tokens, handle.stats())
    };
    let (want, flat) = run(false);
    let (got, shared) = run(true);
    assert_eq!(got, want);
    assert_eq!(flat.computed_tokens, 32 * (2000 + 3 + 5));
    assert_eq!(shared.computed_tokens, 1994 + 32 * (9 + 5));
    // Five steps of six: the last tokens of the prompts, nine at once, read by themselves.
    assert!(shared.cascade_groups > 0 && shared.kv_bytes_read * 3 < shared.kv_bytes_flat, "{shared:?}");
    assert_eq!(flat.kv_bytes_read, flat.kv_bytes_flat);
}

#[test]
fn continuations_share_the_prompt_and_differ() {
    let handle = start(config(), toy());
    let sampling = Sampling { max_tokens: 12, seed: Some(1), ..plain() };
    let prompt: Vec<u32> = (0..101).collect();
    let got = answers(submit(&handle, Request { n: 4, ..request(prompt.clone(), sampling.clone()) })).unwrap();
    assert_eq!(got.len(), 4);
    assert!(got.windows(2).all(|w| w[0].tokens != w[1].tokens));
    assert_eq!(got[0].tokens, one(&start(config(), toy()), request(prompt, sampling)).tokens);
    // The last nine tokens of the prompt once for each; all else once.
    assert_eq!(handle.stats().computed_tokens, 92 + 4 * (9 + 11));
    assert_eq!(got[3].usage, Usage { prompt: 101, cached: 92, generated: 12 });
}

#[test]
fn a_caller_that_goes_away_is_let_go_within_a_step() {
    let mut slow = toy();
    slow.pace = Duration::from_micros(50);
    let handle = start(config(), slow);
    let mut left = 3;
    let sampling = Sampling { max_tokens: 2000, ..plain() };
    let gone = move |_| {
        left -= 1;
        left > 0
    };
    handle.submit(Request { n: 2, ..request(vec![1, 2, 3], sampling.clone()) }, gone).unwrap();
    until(&handle, |stats| stats.aborted == 2);
    all_pages_are_back(&handle);
    assert!(handle.stats().generated_tokens <= 4, "{}", handle.stats().generated_tokens);
    // The same by name, waiting or running, and by a sink that panics.
    let (tx, rx) = channel();
    let id = handle.submit(request(vec![1], sampling.clone()), move |e| tx.send(e).is_ok()).unwrap();
    handle.abort(id);
    assert_eq!(answers(rx).unwrap().pop().map_or(Finish::Aborted, |a| a.reason), Finish::Aborted);
    handle.submit(request(vec![1], sampling), |_| panic!("a sink that panics")).unwrap();
    until(&handle, |stats| stats.aborted == 4);
    all_pages_are_back(&handle);
    assert_eq!(handle.health(), Health::Ok);
}

#[test]
fn a_storm_of_disconnects_leaves_nothing_behind() {
    let handle = start(Config { max_queue: 10_000, drafts: 2, ..config() }, toy());
    for i in 0..500usize {
        let mut events = i % 13;
        let sink = move |_| {
            events = events.saturating_sub(1);
            events > 0
        };
        let prompt = (0..1 + i % 50).map(|t| (t * 3 + i % 7) as u32 % 256).collect();
        let sampling = Sampling { max_tokens: 40, ..plain() };
        handle.submit(Request { n: 1 + i % 3, ..request(prompt, sampling) }, sink).unwrap();
    }
    all_pages_are_back(&handle);
    assert_eq!(handle.health(), Health::Ok);
}

#[test]
fn a_panic_in_a_step_is_told_to_all_and_poisons_the_engine() {
    let mut bad = toy();
    bad.fail_at = Some((20, true));
    // Slow enough that all are asked before it panics.
    bad.pace = Duration::from_millis(5);
    let handle = start(config(), bad);
    let sampling = Sampling { max_tokens: 1000, ..plain() };
    let all: Vec<_> = (0..3).map(|i| submit(&handle, request(vec![i], sampling.clone()))).collect();
    for events in all {
        let why = answers(events).unwrap_err();
        assert!(why.contains("the toy panics"), "{why}");
    }
    let Health::Stopped { reason, crashed: true } = handle.health() else { panic!("{:?}", handle.health()) };
    assert!(reason.contains("the toy panics"));
    let refused = handle.submit(request(vec![1], sampling), |_| true);
    assert!(matches!(refused, Err(Error::Stopped(_))), "{refused:?}");
    assert!(matches!(handle.embed(&[1]), Err(Error::Stopped(_))));
}

#[test]
fn a_step_that_fails_takes_its_requests_and_no_others() {
    let mut bad = toy();
    bad.fail_at = Some((15, false));
    let handle = start(config(), bad);
    let sampling = Sampling { max_tokens: 50, ..plain() };
    let why = answers(submit(&handle, request(vec![1, 2], sampling.clone()))).unwrap_err();
    assert!(why.contains("the toy fails"), "{why}");
    assert_eq!(one(&handle, request(vec![1, 2], sampling)).tokens.len(), 50);
    assert_eq!((handle.health(), handle.stats().failed), (Health::Ok, 1));
}

#[test]
fn a_full_queue_refuses_and_what_was_accepted_is_answered() {
    let mut slow = toy();
    slow.pace = Duration::from_micros(30);
    let handle = start(Config { max_queue: 8, max_queue_tokens: 100, max_seqs: 2, ..config() }, slow);
    let sampling = Sampling { max_tokens: 30, ..plain() };
    let (mut accepted, mut refused) = (Vec::new(), 0);
    for i in 0..100 {
        let (tx, rx) = channel();
        match handle.submit(request(vec![i, 1], sampling.clone()), move |e| tx.send(e).is_ok()) {
            Ok(_) => accepted.push(rx),
            Err(Error::Busy { waiting: 8, tokens: 16 }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 50 && accepted.len() + refused == 100, "{refused}");
    let error = handle.submit(request(vec![7; 101], sampling), |_| true).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "more prompt tokens than may ever wait");
    for events in accepted {
        assert_eq!(answers(events).unwrap()[0].tokens.len(), 30);
    }
    assert_eq!(handle.stats().refused as usize, refused + 1);
    assert_eq!((handle.stats().waiting, handle.stats().waiting_tokens), (0, 0));
}

#[test]
fn a_drain_finishes_what_it_can_and_aborts_the_rest() {
    let mut slow = toy();
    slow.pace = Duration::from_micros(100);
    let handle = start(config(), slow);
    let ask = |max_tokens| submit(&handle, request(vec![1], Sampling { max_tokens, ..plain() }));
    let (short, long) = (ask(10), ask(2000));
    assert!(handle.drain(Duration::from_millis(300)));
    assert_eq!(answers(short).unwrap()[0].reason, Finish::Length);
    assert_eq!(answers(long).unwrap()[0].reason, Finish::Aborted);
    assert_eq!(handle.health(), Health::Stopped { reason: "it was shut down".into(), crashed: false });
    assert!(matches!(handle.submit(request(vec![1], Sampling::default()), |_| true), Err(Error::Stopped(_))));
}

#[test]
fn an_engine_without_handles_answers_what_it_was_asked() {
    let handle = start(config(), toy());
    let events = submit(&handle, request(vec![1], Sampling { max_tokens: 200, ..plain() }));
    drop(handle);
    assert_eq!(answers(events).unwrap()[0].tokens.len(), 200);
}

#[test]
fn deadlines_end_what_waits() {
    let mut slow = toy();
    slow.pace = Duration::from_micros(100);
    let handle = start(Config { max_seqs: 1, ..config() }, slow);
    let sampling = Sampling { max_tokens: 100, ..plain() };
    let runs = submit(&handle, request(vec![1], sampling.clone()));
    let deadline = Some(Instant::now() + Duration::from_millis(20));
    let waits = submit(&handle, Request { deadline, ..request(vec![2], sampling) });
    assert_eq!(answers(waits).unwrap()[0].reason, Finish::Deadline);
    assert_eq!(answers(runs).unwrap()[0].reason, Finish::Length);
}

#[test]
fn stop_texts_and_ids_end_an_answer_and_are_no_part_of_it() {
    let handle = start(config(), toy());
    let base = Sampling { max_tokens: 40, seed: Some(9), ..plain() };
    let whole = one(&handle, request(vec![1], base.clone()));
    assert_eq!((whole.text.len(), whole.reason), (40, Finish::Length));
    // Three characters of the middle as the stop text, and a start of it that comes to nothing.
    let stop = whole.text[20..23].to_string();
    let at = whole.text.find(&stop).unwrap();
    let stops = vec![stop.clone(), format!("{}?", &whole.text[5..7])];
    let cut = one(&handle, request(vec![1], Sampling { stop: stops, ..base.clone() }));
    assert_eq!((cut.text.as_str(), cut.reason), (&whole.text[..at], Finish::Stop));
    let first = whole.tokens.iter().position(|&t| t == whole.tokens[10]).unwrap();
    let by_id = Sampling { stop_ids: vec![whole.tokens[10]], ..base.clone() };
    let cut = one(&handle, request(vec![1], by_id));
    assert_eq!((&cut.tokens[..], cut.reason), (&whole.tokens[..first], Finish::Stop));
    assert_eq!(cut.usage.generated, first + 1, "the end token was generated");
    // An end token ends, but not before `min_tokens`, and not if it is to be ignored.
    let bias = Sampling { logit_bias: vec![(EOS, 100.0)], ignore_eos: false, ..base };
    assert!(one(&handle, request(vec![1], bias.clone())).tokens.is_empty());
    assert_eq!(one(&handle, request(vec![1], Sampling { min_tokens: 5, ..bias.clone() })).tokens.len(), 5);
    let ignored = one(&handle, request(vec![1], Sampling { ignore_eos: true, ..bias }));
    assert_eq!(ignored.tokens, [EOS; 40]);
}

#[test]
fn grammars_hold_with_and_without_guesses() {
    let schema = r#"{"type":"object","properties":{"a":{"enum":["xyxyxyxyxyxyxyxy"]},"b":{"type":"integer"}},"required":["a","b"],"additionalProperties":false}"#;
    let sampling = |grammar| Sampling { max_tokens: 200, seed: Some(3), grammar: Some(grammar), ..Sampling::default() };
    let mut seen = Vec::new();
    for drafts in [0, 4] {
        let handle = start(Config { drafts, ..config() }, toy());
        let got = one(&handle, request(vec![1], sampling(Grammar::JsonSchema(schema.into()))));
        let bytes: Vec<u8> = got.tokens.iter().map(|&t| t as u8).collect();
        let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!((json["a"].as_str(), got.reason), (Some("xyxyxyxyxyxyxyxy"), Finish::Stop));
        seen.push(got);
        let choice = Grammar::Choice(vec!["yes".into(), "no".into()]);
        let got = one(&handle, request(vec![1], sampling(choice)));
        let text: Vec<u8> = got.tokens.iter().map(|&t| t as u8).collect();
        assert!(text == b"yes" || text == b"no", "{text:?}");
        let error = handle.submit(request(vec![1], sampling(Grammar::Regex("(".into()))), |_| true).unwrap_err();
        assert!(matches!(error, Error::Request { field: "grammar", .. }));
    }
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn logprobs_come_with_tokens() {
    let handle = start(config(), toy());
    let sampling = Sampling { max_tokens: 3, temperature: 0.0, logprobs: Some(2), ..plain() };
    for event in submit(&handle, request(vec![1], sampling)) {
        if let Event::Token { id, logprobs, .. } = event {
            let got = logprobs.unwrap();
            assert_eq!((got.chosen.id, got.top.len(), got.top[0].id), (id, 2, id));
            assert!(got.chosen.logprob <= 0.0 && got.top[1].logprob <= got.top[0].logprob);
        }
    }
}

#[test]
fn embeddings_are_means_and_leave_no_pages() {
    let handle = start(config(), toy());
    let tokens: Vec<u32> = (0..1500).map(|i| i % 200).collect();
    let mean = tokens.iter().map(|&t| f64::from(t)).sum::<f64>() / 1500.0;
    assert_eq!(handle.embed(&tokens).unwrap(), [mean as f32; 2]);
    assert!(handle.embed(&[]).is_err() && handle.embed(&[VOCAB as u32]).is_err());
    all_pages_are_back(&handle);
}

#[test]
fn bad_requests_are_refused_with_field_and_value() {
    let handle = start(config(), toy());
    let good = || request(vec![1], Sampling::default());
    let with = |change: fn(&mut Request)| {
        let mut r = good();
        change(&mut r);
        handle.submit(r, |_| true).unwrap_err().to_string()
    };
    for (got, want) in [
        (with(|r| r.prompt.clear()), "`prompt`: is empty"),
        (with(|r| r.prompt = vec![999]), "`prompt`: has token 999, the vocabulary ends before 258"),
        (with(|r| r.prompt = vec![1; 2200]), "`prompt`: has 2200 tokens, at most 2199 fit"),
        (with(|r| r.n = 0), "`n`: is 0, expected 1 to 128"),
        (with(|r| r.sampling.temperature = -1.0), "`temperature`: is -1, expected a number, 0 or more"),
        (with(|r| r.sampling.top_p = 0.0), "`top_p`: is 0, expected more than 0 and at most 1"),
        (with(|r| r.sampling.max_tokens = 0), "`max_tokens`: is 0, expected 1 or more"),
        (
            with(|r| r.sampling.logit_bias = vec![(300, 1.0)]),
            "`logit_bias`: has token 300, the vocabulary ends before 258",
        ),
        (
            with(|r| r.sampling.stop = vec![String::new()]),
            "`stop`: is an empty text, expected texts of a character at least",
        ),
        (with(|r| r.sampling.allowed_tokens = Some(vec![])), "`allowed_tokens`: is empty, expected a token at least"),
    ] {
        assert_eq!(got, want);
    }
    assert_eq!(one(&handle, Request { sampling: Sampling { max_tokens: 2, ..plain() }, ..good() }).tokens.len(), 2);
}
