//! Models against `transformers`: logits of tiny random ones of every family, made by `golden/make.py`.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};

use fir::Exec;
use fir_engine::{Batch, KvCache, KvType, Limits, Model, Runner, Seq, Shared};
use safetensors::SafeTensors;

const FAMILIES: [&str; 8] = ["llama", "llama-tied", "qwen2", "qwen3", "qwen3-moe", "gemma3", "deepseek2", "deepseek3"];
const PAGE: usize = 4;
/// f32 on both sides, in another order: sums of at most 128 terms in up to six layers, for logits of up to 4.1, whose last
/// place is 4.8e-7. 7.2e-6 was measured.
const F32: f32 = 1.5e-5;

struct Golden {
    tokens: Vec<u32>,
    logits: Vec<f32>,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn golden(name: &str) -> Golden {
    let bytes = std::fs::read(folder(name).join("logits.golden")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| {
        let data = file.tensor(name).unwrap().data();
        data.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]).collect::<Vec<_>>()
    };
    Golden {
        tokens: words("tokens").into_iter().map(u32::from_le_bytes).collect(),
        logits: words("logits").into_iter().map(f32::from_le_bytes).collect(),
    }
}

/// A model with a cache and buffers of its own.
struct Bench {
    exec: Exec,
    model: Model,
    kv: KvCache,
    runner: Runner,
}

impl Bench {
    fn new(path: &Path, kv: KvType) -> Self {
        let exec = Exec::cpu().unwrap();
        let model = Model::load(&exec, path).unwrap();
        let kv = KvCache::new(&model, 64, PAGE, kv).unwrap();
        let runner = Runner::new(&model, Limits { max_tokens: 128, max_seqs: 8, max_logits: 128 }).unwrap();
        Self { exec, model, kv, runner }
    }

    fn step(&mut self, batch: &Batch<'_>) -> Vec<f32> {
        self.runner.step(&self.exec, &self.model, &mut self.kv, batch).unwrap().to_vec()
    }

    /// Logits of all positions, the tokens in chunks of these sizes (the last again and again).
    fn all(&mut self, tokens: &[u32], chunks: &[usize], pages: &[u32]) -> Vec<f32> {
        let (mut logits, mut past, mut sizes) = (vec![], 0, chunks.iter());
        let mut size = 1;
        while past < tokens.len() {
            size = sizes.next().copied().unwrap_or(size);
            let now = &tokens[past..tokens.len().min(past + size)];
            let rows: Vec<u32> = (0..now.len() as u32).collect();
            let seqs = [Seq { new: now.len(), past, pages }];
            logits.extend(self.step(&Batch { tokens: now, seqs: &seqs, logits: &rows, shared: &[] }));
            past += now.len();
        }
        logits
    }
}

fn worst(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, |m, e| if e.is_nan() { f32::NAN } else { m.max(e) })
}

/// Pages in no order.
fn pages(from: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| from + i * 7 % n as u32).collect()
}

#[test]
fn logits_match_transformers_whole_in_chunks_and_token_by_token() {
    for name in FAMILIES {
        let g = golden(name);
        let mut bench = Bench::new(&folder(name), KvType::F32);
        let n = g.tokens.len();
        for chunks in [&[n][..], &[5, 16, 1, 7, 3], &[1]] {
            let got = bench.all(&g.tokens, chunks, &pages(3, n.div_ceil(PAGE)));
            let e = worst(&got, &g.logits);
            println!("{name} {chunks:?}: {e:e}");
            assert!(e <= F32, "{name} in chunks of {chunks:?}: off by {e:e}");
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_with_others() {
    for name in FAMILIES {
        let g = golden(name);
        let mut bench = Bench::new(&folder(name), KvType::F32);
        let lens = [11usize, 1, 23, 6];
        let pages: Vec<Vec<u32>> = lens.iter().enumerate().map(|(i, _)| pages(i as u32 * 12, 12)).collect();
        // A first step with all prompts, then two with one token each.
        let steps: Vec<Vec<usize>> = vec![lens.to_vec(), vec![1; 4], vec![1; 4]];
        let mut together: Vec<Vec<f32>> = vec![vec![]; 4];
        let mut past = [0; 4];
        for step in &steps {
            let mut tokens = vec![];
            for (s, &new) in step.iter().enumerate() {
                tokens.extend(&g.tokens[s + past[s]..s + past[s] + new]);
            }
            let seqs: Vec<_> = (0..4).map(|s| Seq { new: step[s], past: past[s], pages: &pages[s] }).collect();
            let rows: Vec<u32> = (0..tokens.len() as u32).collect();
            let got = bench.step(&Batch { tokens: &tokens, seqs: &seqs, logits: &rows, shared: &[] });
            let mut at = 0;
            for s in 0..4 {
                let vocab = bench.model.config().vocab;
                together[s].extend(&got[at * vocab..(at + step[s]) * vocab]);
                at += step[s];
                past[s] += step[s];
            }
        }
        for s in 0..4 {
            let mut alone = Bench::new(&folder(name), KvType::F32);
            let got = alone.all(&g.tokens[s..s + lens[s] + 2], &[lens[s], 1], &pages[s]);
            assert_eq!(got, together[s], "{name}, sequence {s}");
        }
    }
}

#[test]
fn only_the_wanted_rows_are_computed_and_they_are_the_same() {
    for name in FAMILIES {
        let g = golden(name);
        let mut bench = Bench::new(&folder(name), KvType::F32);
        let pages = pages(0, 12);
        let seqs = [Seq { new: 48, past: 0, pages: &pages }];
        let batch = Batch { tokens: &g.tokens, seqs: &seqs, logits: &[4, 47], shared: &[] };
        let got = bench.step(&batch);
        let vocab = bench.model.config().vocab;
        let want = [&g.logits[4 * vocab..5 * vocab], &g.logits[47 * vocab..]].concat();
        let e = worst(&got, &want);
        assert!(e <= F32, "{name}: off by {e:e}");
        assert!(bench.step(&Batch { logits: &[], ..batch }).is_empty());
    }
}

#[test]
fn sequences_that_share_pages_give_what_they_give_apart() {
    for name in FAMILIES {
        let g = golden(name);
        let mut bench = Bench::new(&folder(name), KvType::F32);
        // Eight tokens in two pages for three sequences, the middle one with two new tokens; a fourth shares nothing.
        let first = [0, 1];
        let prompt = [Seq { new: 8, past: 0, pages: &first }];
        bench.step(&Batch { tokens: &g.tokens[..8], seqs: &prompt, logits: &[], shared: &[] });
        let alone = [40, 41, 42];
        let own: Vec<[u32; 3]> = vec![[0, 1, 10], [0, 1, 11], [0, 1, 12]];
        let mut seqs: Vec<_> = own.iter().map(|p| Seq { new: 1, past: 8, pages: p }).collect();
        seqs[1].new = 2;
        seqs.push(Seq { new: 3, past: 0, pages: &alone });
        let tokens = [5, 6, 7, 8, 9, 10, 11];
        let flat = Batch { tokens: &tokens, seqs: &seqs, logits: &[0, 2, 3, 6], shared: &[] };
        let want = bench.step(&flat);
        let got = bench.step(&Batch { shared: &[Shared { first: 0, count: 3, len: 8 }], ..flat });
        let e = worst(&got, &want);
        assert!(e <= F32, "{name}: off by {e:e}");
        let wrong = Batch { shared: &[Shared { first: 0, count: 4, len: 8 }], ..flat };
        let said = bench.runner.step(&bench.exec, &bench.model, &mut bench.kv, &wrong).unwrap_err().to_string();
        assert!(said.contains("shared"), "{said}");
    }
}

#[test]
fn pages_copied_and_moved_hold_the_same_tokens() {
    let g = golden("llama");
    let mut bench = Bench::new(&folder("llama"), KvType::Bf16);
    let want = bench.all(&g.tokens[..10], &[9, 1], &[0, 1, 2]);
    let mut page = vec![0; bench.kv.page_bytes()];
    assert_eq!(page.len(), KvCache::page_bytes_for(&bench.model, PAGE, KvType::Bf16).unwrap());
    for (from, to) in [(0, 20), (1, 21)] {
        bench.kv.read_page(from, &mut page).unwrap();
        bench.kv.write_page(to, &page).unwrap();
    }
    bench.kv.copy_page(2, 22, 1).unwrap();
    let pages = [20, 21, 22];
    let seqs = [Seq { new: 1, past: 9, pages: &pages }];
    let got = bench.step(&Batch { tokens: &g.tokens[9..10], seqs: &seqs, logits: &[0], shared: &[] });
    assert_eq!(got[..], want[9 * 96..]);
}

#[test]
fn bad_batches_are_refused_with_the_field_and_the_values() {
    let mut bench = Bench::new(&folder("llama"), KvType::F32);
    let pages = [0, 1];
    let good = [Seq { new: 2, past: 0, pages: &pages }];
    let batch = Batch { tokens: &[1, 2], seqs: &good, logits: &[1], shared: &[] };
    let mut said =
        |batch: &Batch<'_>| bench.runner.step(&bench.exec, &bench.model, &mut bench.kv, batch).unwrap_err().to_string();
    assert!(said(&Batch { tokens: &[1, 96], ..batch }).contains("96"));
    assert!(said(&Batch { tokens: &[1], ..batch }).contains("2 new tokens"));
    assert!(said(&Batch { logits: &[2], ..batch }).contains("below 2"));
    assert!(said(&Batch { logits: &[1, 0], ..batch }).contains("ascending"));
    let far = [Seq { past: 7, ..good[0] }];
    assert!(said(&Batch { seqs: &far, ..batch }).contains("2 pages of 4, not 3"));
    let long = [Seq { past: 255, ..good[0] }];
    assert!(said(&Batch { seqs: &long, ..batch }).contains("context is 256"));
    let none = [Seq { pages: &[64], ..good[0] }];
    assert!(said(&Batch { seqs: &none, ..batch }).contains("page 64 of a pool of 64"));
    let many = vec![1; 129];
    assert!(said(&Batch { tokens: &many, ..batch }).contains("at most 128"));
}
