//! What a step of decoding asks of the system's memory: a counting allocator under the whole engine.
#![allow(missing_docs, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::channel;

use fir::Exec;
use fir_engine::{Config, Engine, Event, Model, Request, Sampling};

static COUNT: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);
static LIVE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator as it is; what is counted beside it is no memory of its own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        BYTES.fetch_add(layout.size(), Relaxed);
        LIVE.fetch_add(layout.size(), Relaxed);
        LARGEST.fetch_max(layout.size(), Relaxed);
        // SAFETY: the caller's promises are the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_only_what_it_gives_away_and_gives_back() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf/llama.gguf");
    let model = Arc::new(Model::load(&Exec::cpu().unwrap(), &path).unwrap());
    let config = Config { memory: Some(256 << 20), drafts: 0, ..Config::default() };
    let handle = Engine::start(model, config).unwrap();
    let (tx, rx) = channel();
    let sampling =
        Sampling { temperature: 0.7, max_tokens: 700, ignore_eos: true, seed: Some(1), ..Sampling::default() };
    for i in 0..8u32 {
        let (prompt, tx) = ((0..40).map(|t| 2 + (t * 7 + i) % 94).collect(), tx.clone());
        let mut seen = 0;
        let sink = move |event| {
            if let Event::Token { .. } = event {
                seen += 1;
                if i == 0 && (seen == 150 || seen == 650) {
                    let now = [&COUNT, &BYTES, &LIVE].map(|n| n.load(Relaxed));
                    tx.send((now, LARGEST.swap(0, Relaxed))).unwrap();
                }
            }
            true
        };
        handle.submit(Request { prompt, sampling: sampling.clone(), ..Request::default() }, sink).unwrap();
    }
    let ((before, _), (after, largest)) = (rx.recv().unwrap(), rx.recv().unwrap());
    let per_step = |i: usize| (after[i] - before[i]) as f64 / 500.0;
    let grown = after[2] as i64 - before[2] as i64;
    println!("{} allocations of {} bytes a step; the largest {largest}; grown by {grown}", per_step(0), per_step(1));
    // Buffers are there before the first step. What a step allocates is short lists. Of 375 with two layers about 25 are the
    // engine's: eight texts that callers get, the list of sequences, and those of attention's plan. The others are the operators', of the parts into which
    // they cut their work, of attention's states (16 KB), of ranges that masks are proved on (66 of 36 bytes) and
    // of strides looked at (55 of 64 bytes). Sequences' own lists of tokens, pages and prefixes grow: by some bytes for
    // each token of eight answers.
    assert!(largest <= 16 << 10, "an allocation of {largest} bytes");
    assert!(per_step(0) <= 500.0 && per_step(1) <= (96 << 10) as f64, "{} of {} bytes", per_step(0), per_step(1));
    assert!(grown <= 500 * 8 * 64, "grown by {grown} bytes");
}
