//! The scheduler with thousands of requests and a clock that is computed: all end, with the right tokens, all pages
//! come back, and nobody waits forever.

use super::*;
use crate::backend::Toy;
use crate::kv::tier::Budget;
use std::collections::HashMap;

const PAGE: usize = 4;

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

struct Sim {
    sched: Scheduler,
    backend: Backend,
    start: Instant,
    clock: Duration,
    /// Per sequence, when each token came.
    came: HashMap<SeqId, Vec<Duration>>,
    longest_step: f64,
}

impl Sim {
    fn new(pages: usize, limits: Limits, tier: Option<Tier>) -> Self {
        let start = Instant::now();
        Self {
            sched: Scheduler::new(limits, pages, tier, start),
            backend: Backend::Toy(Toy::new(pages, PAGE, 50)),
            start,
            clock: Duration::ZERO,
            came: HashMap::new(),
            longest_step: 0.0,
        }
    }

    fn add(&mut self, prompt: Vec<u32>, max_tokens: usize, salt: u64, priority: i32) -> Result<SeqId> {
        let max_len = prompt.len() + max_tokens;
        let id = self.sched.add(Seq::new(prompt, max_len, salt, None), priority, self.start + self.clock)?;
        self.came.insert(id, Vec::new());
        Ok(id)
    }

    /// Schedules, runs and settles one step; returns those that ended, or `None` if nothing ran.
    fn step(&mut self) -> Option<Vec<Seq>> {
        let step = self.sched.schedule(&mut self.backend).unwrap();
        if step.works.is_empty() {
            return None;
        }
        assert!(step.load.tokens <= self.sched.limits.max_tokens);
        let built = self.sched.batch(&step, batch::Lists::default());
        let logits = self.backend.step(&built.batch()).unwrap();
        let next: Vec<u32> = logits.chunks(50).map(largest).collect();
        let took = machine(step.load);
        self.clock += Duration::from_secs_f64(took / 1e3);
        self.sched.cost.learn(step.load, Duration::from_secs_f64(took / 1e3));
        let decoding = step.works.iter().filter(|w| self.sched.seq(w.id).decoding()).count();
        if (1..step.works.len()).contains(&decoding) {
            self.longest_step = f64::max(self.longest_step, took);
        }
        let (mut row, mut ended) = (0, Vec::new());
        for work in &step.works {
            let got = &next[row..row + work.rows];
            row += work.rows;
            let drafts = self.sched.seq(work.id).drafts.clone();
            let right = if work.rows > 1 { drafts.iter().zip(got).take_while(|(a, b)| a == b).count() } else { 0 };
            let got = &got[..got.len().min(right + 1)];
            self.sched.advance(work.id, if work.rows > 1 { 1 + right } else { work.new }, got);
            self.came.get_mut(&work.id).unwrap().extend(got.iter().map(|_| self.clock));
            let seq = self.sched.seq(work.id);
            if seq.tokens.len() >= seq.max_len {
                let (max, mut seq) = (seq.max_len, self.sched.remove(work.id));
                seq.tokens.truncate(max);
                ended.push(seq);
            }
        }
        Some(ended)
    }
}

/// Milliseconds of a step on a machine that is a formula.
fn machine(load: Load) -> f64 {
    2.0 + 0.05 * load.tokens as f64 + 1e-5 * load.pairs as f64 + 0.1 * load.rows as f64
}

fn largest(row: &[f32]) -> u32 {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap() as u32
}

fn limits() -> Limits {
    Limits { page_size: PAGE, max_seqs: 16, max_tokens: 64, itl_target_ms: None, prefix_cache: true, cascade: true }
}

/// The answer to a prompt on a machine of its own.
fn alone(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let mut sim = Sim::new(64, Limits { prefix_cache: false, ..limits() }, None);
    sim.add(prompt.to_vec(), max_tokens, 0, 0).unwrap();
    loop {
        if let Some(seq) = sim.step().unwrap().pop() {
            return seq.tokens;
        }
    }
}

/// Random requests, many with common prefixes, some aborted, some drafted for, on a pool that is far too small.
fn storm(requests: usize, tier: Option<Tier>, seed: u64) -> Counts {
    let mut sim = Sim::new(40, limits(), tier);
    let mut random = Random(seed);
    let prefixes: Vec<Vec<u32>> = (0..5).map(|p| (0..30).map(|i| (i * 7 + p * 3) % 50).collect()).collect();
    let (mut accepted, mut ended, mut aborted, mut idle) = (0, 0, 0, 0);
    let mut known: HashMap<(Vec<u32>, usize), Vec<u32>> = HashMap::new();
    while accepted < requests || sim.sched.waiting() + sim.sched.running().len() > 0 {
        while accepted < requests && sim.sched.waiting() < 30 && random.below(3) > 0 {
            let mut prompt = prefixes[random.below(5)][..1 + random.below(30)].to_vec();
            prompt.extend((0..random.below(20)).map(|_| random.below(4) as u32));
            sim.add(prompt, 1 + random.below(40), random.below(2) as u64, random.below(3) as i32).unwrap();
            accepted += 1;
        }
        for id in sim.sched.running().to_vec() {
            if sim.sched.seq(id).decoding() && random.below(4) == 0 {
                sim.sched.seq_mut(id).drafts = (0..random.below(3)).map(|_| random.below(50) as u32).collect();
            }
        }
        if random.below(20) == 0 {
            let running = sim.sched.running().to_vec();
            if let Some(&id) = running.get(random.below(16)) {
                sim.sched.remove(id);
                aborted += 1;
            }
        }
        match sim.step() {
            Some(done) => {
                idle = 0;
                for seq in done {
                    ended += 1;
                    let prompt = seq.tokens[..seq.prompt].to_vec();
                    let answer = seq.max_len - seq.prompt;
                    let want = known.entry((prompt, answer)).or_insert_with_key(|(p, n)| alone(p, *n));
                    assert_eq!(&seq.tokens, want);
                }
            }
            None => {
                // Only a page on its way from a tier may stop everything, and not for long.
                idle += 1;
                assert!(idle < 5000, "{} wait and nothing runs", sim.sched.waiting());
                if sim.sched.waiting() > 0 {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        }
    }
    assert_eq!(ended + aborted, accepted);
    assert_eq!(sim.sched.pages(), (40, 40), "all pages are back");
    assert_eq!(sim.sched.pool.available() + sim.sched.tree.resident(), 40);
    sim.sched.counts
}

#[test]
fn every_request_of_a_storm_ends_with_the_tokens_it_has_alone() {
    let counts = storm(3000, None, 1);
    assert!(counts.preemptions > 20 && counts.evictions > 1000 && counts.hit_tokens > 10_000, "{counts:?}");
}

#[test]
fn a_storm_through_memory_and_files_changes_nothing() {
    let folder = std::env::temp_dir().join(format!("fir-storm-{}", std::process::id()));
    // Room for 24 pages in memory and 100 in files.
    let budget = Budget { host: 24 * 16, disk: Some((folder.clone(), 100 * 16)) };
    let counts = storm(1500, Some(Tier::new(budget, || {}).unwrap()), 2);
    assert!(counts.restored_tokens > 1000, "{counts:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn files_that_vanish_during_a_storm_change_nothing() {
    let folder = std::env::temp_dir().join(format!("fir-vandal-{}", std::process::id()));
    let budget = Budget { host: 24 * 16, disk: Some((folder.clone(), 100 * 16)) };
    let tier = Tier::new(budget, || {}).unwrap();
    let (stop, vandal_folder) = (std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)), folder.clone());
    let stopped = std::sync::Arc::clone(&stop);
    let vandal = std::thread::spawn(move || {
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            let mut all = std::fs::read_dir(&vandal_folder).unwrap().flatten().map(|e| e.path());
            let Some(own) = all.find(|path| path.is_dir()) else { return };
            for (i, file) in std::fs::read_dir(own).into_iter().flatten().flatten().enumerate() {
                let path = file.path();
                let _ = if i % 2 == 0 { std::fs::remove_file(path) } else { std::fs::write(path, b"torn") };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let counts = std::thread::scope(|s| {
        let storm = s.spawn(move || storm(500, Some(tier), 3));
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        vandal.join().unwrap();
        storm.join().unwrap()
    });
    assert!(counts.evictions > 100, "{counts:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_prefix_is_computed_once_for_all_who_come_at_once() {
    let mut sim = Sim::new(2000, Limits { max_seqs: 32, max_tokens: 256, ..limits() }, None);
    let prefix: Vec<u32> = (0..2000).map(|i| i * 31 % 50).collect();
    for i in 0..32 {
        sim.add(prefix.iter().copied().chain([i, i + 1, i + 2]).collect(), 8, 0, 0).unwrap();
    }
    let mut ended = 0;
    while ended < 32 {
        ended += sim.step().unwrap().len();
    }
    let Backend::Toy(toy) = &sim.backend else { unreachable!() };
    assert_eq!(toy.computed, 1994 + 32 * (CHUNK + 7), "the prefix once, then a chunk and the answer of each");
    assert!(toy.groups > 0);
    // A second wave finds all of it.
    sim.add(prefix, 1, 0, 0).unwrap();
    assert_eq!(sim.step().unwrap()[0].cached, 2000 - CHUNK);
}

#[test]
fn steps_with_prompts_keep_to_the_target_and_prompts_still_end() {
    let mut sim = Sim::new(4000, Limits { itl_target_ms: Some(10.0), max_tokens: 2048, ..limits() }, None);
    for i in 0..4 {
        sim.add(vec![i; 20], 400, 0, 0).unwrap();
    }
    for _ in 0..50 {
        sim.step();
    }
    sim.longest_step = 0.0;
    let long = sim.add((0..6000).map(|i| i % 50).collect(), 4, 0, 0).unwrap();
    while sim.came[&long].is_empty() {
        sim.step().unwrap();
    }
    assert!((7.0..14.0).contains(&sim.longest_step), "the longest step took {} ms", sim.longest_step);
}

#[test]
fn a_long_prompt_does_not_hold_up_short_ones() {
    let mut sim = Sim::new(6000, Limits { max_tokens: 128, ..limits() }, None);
    let long = sim.add((0..16_000).map(|i| i * 13 % 50).collect(), 2, 0, 0).unwrap();
    sim.step();
    let short: Vec<_> = (0..4).map(|i| sim.add(vec![i, 3, 4, 5, i], 2, 0, 0).unwrap()).collect();
    for _ in 0..3 {
        sim.step();
    }
    for id in short {
        assert_eq!(sim.came[&id].len(), 2, "a short answer within three steps");
    }
    while sim.came[&long].is_empty() {
        sim.step().unwrap();
    }
    // 125 steps alone; an endless stream of short prompts takes half of them at most.
    let mut sim = Sim::new(6000, Limits { max_tokens: 128, ..limits() }, None);
    let long = sim.add((0..16_000).map(|i| i * 13 % 50).collect(), 2, 0, 0).unwrap();
    let mut steps = 0;
    while sim.came[&long].is_empty() {
        for i in 0..8 {
            sim.add(vec![(steps * 8 + i) as u32 % 50, i as u32, 7, steps as u32 % 50, 9, 9, 9, 9, 9, 9, 9], 2, 9, 0)
                .unwrap();
        }
        sim.step();
        steps += 1;
    }
    assert!(steps < 270, "{steps} steps");
}

#[test]
fn priority_goes_first_but_starves_nobody() {
    let mut sim = Sim::new(16, Limits { max_seqs: 1, ..limits() }, None);
    let low = sim.add(vec![1, 2, 3], 2, 0, 0).unwrap();
    let high = sim.add(vec![4, 5, 6], 2, 0, 1).unwrap();
    sim.step();
    assert_eq!((sim.came[&high].len(), sim.came[&low].len()), (1, 0));
    // Twice as many of the high ones as can be served: those of the first ten seconds go before, and take twenty.
    let mut n = 0;
    while sim.came[&low].is_empty() {
        if n % 10 == 0 {
            sim.add(vec![n % 50, 5, 6], 20, 0, 1).unwrap();
        }
        sim.step();
        n += 1;
    }
    assert!(sim.clock < LEVEL * 5 / 2, "waited {:?}", sim.clock);
}

#[test]
fn deadlines_are_for_those_that_have_not_run() {
    let mut sim = Sim::new(16, Limits { max_seqs: 1, ..limits() }, None);
    let soon = Some(sim.start + Duration::from_millis(1));
    let mut add =
        |prompt: Vec<u32>| sim.sched.add(Seq { max_len: 20, ..Seq::new(prompt, 0, 0, soon) }, 0, sim.start).unwrap();
    let (runs, waits) = (add(vec![1]), add(vec![2]));
    sim.came.insert(runs, Vec::new());
    sim.step();
    assert!(sim.sched.expired(sim.start).is_empty());
    assert_eq!(sim.sched.expired(sim.start + Duration::from_millis(2)), [waits]);
}

#[test]
fn what_can_never_fit_is_refused() {
    let mut sim = Sim::new(4, limits(), None);
    let error = sim.add(vec![1; 10], 7, 0, 0).unwrap_err().to_string();
    assert!(error.contains("17 tokens") && error.contains("holds 16"), "{error}");
    sim.add(vec![1; 10], 6, 0, 0).unwrap();
    while sim.step().unwrap().is_empty() {}
}
