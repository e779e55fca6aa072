//! Cascades: against the reference over flat KV, and bit for bit against flat attention.

use fir::attention::{BatchArgs, BatchPlan, CascadeArgs, CascadeLevel, CascadePlan, Problem, Split};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, Ragged, RaggedKv};
use fir::testing::Rng;
use fir::variant::{self, Params, Variant};
use fir::{DType, Exec, Tensor, reference};
use proptest::prelude::*;

use super::case::{Expected, poisoned};
use crate::support::every_exec;

/// Requests that share a prefix, in a pool of pages of one token: any cut of the KV into levels is then a table.
struct Shared {
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Vec<u32>,
    /// Per level, per group: (requests in the group, tokens).
    levels: Vec<Vec<(usize, u32)>>,
}

impl Shared {
    fn new(variant: Variant, q_lens: Vec<u32>, levels: Vec<Vec<(usize, u32)>>, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let problem = Problem::new(4, 2, 24, DType::F32, variant);
        let tokens: u32 = levels.iter().flatten().map(|g| g.1).sum();
        let q = rng.tensor(DType::F32, &[q_lens.iter().sum::<u32>() as usize, 4, 24]);
        let k = rng.tensor(DType::F32, &[tokens as usize + 1, 1, 2, 24]);
        let v = rng.tensor(DType::F32, &[tokens as usize + 1, 1, 2, 24]);
        Self { problem, q, k, v, q_lens, levels }
    }

    fn pool(&self) -> PagedKv<'_> {
        PagedKv::new(self.k.view(), self.v.view(), KvLayout::Nhd).unwrap()
    }

    /// Offsets of the groups' query tokens, and their tables, level by level.
    fn tables(&self) -> Vec<(Ragged, PageTable<'static>)> {
        let mut next = 0;
        self.levels
            .iter()
            .map(|groups| {
                let (mut r, mut q, mut indptr, mut indices) = (0, vec![], vec![0i32], vec![]);
                for &(requests, len) in groups {
                    q.push(self.q_lens[r..r + requests].iter().sum());
                    r += requests;
                    indices.extend(next..next + len as i32);
                    next += len as i32;
                    indptr.push(indices.len() as i32);
                }
                let ones = vec![1; groups.len()];
                (Ragged::from_lens(&q).unwrap(), PageTable::new(1, self.k.shape()[0], indptr, indices, &ones).unwrap())
            })
            .collect()
    }

    /// The flat table: every request with all it sees.
    fn flat(&self) -> (Ragged, PageTable<'static>) {
        let tables = self.tables();
        let (mut indptr, mut indices) = (vec![0i32], vec![]);
        for r in 0..self.q_lens.len() {
            for (groups, (_, table)) in self.levels.iter().zip(&tables) {
                let mut at = 0;
                let g = groups.iter().position(|g| {
                    at += g.0;
                    r < at
                });
                indices.extend_from_slice(table.pages(g.unwrap()));
            }
            indptr.push(indices.len() as i32);
        }
        let ones = vec![1; self.q_lens.len()];
        (
            Ragged::from_lens(&self.q_lens).unwrap(),
            PageTable::new(1, self.k.shape()[0], indptr, indices, &ones).unwrap(),
        )
    }

    fn check(&self, exec: &Exec, params: &Params<'_>, split: Split, expected: &Expected, softmax: bool) {
        let tables = self.tables();
        let lens: Vec<&[u32]> = tables.iter().map(|t| t.1.lens()).collect();
        let levels: Vec<_> = tables.iter().zip(&lens).map(|(t, kv_lens)| CascadeLevel { qo: &t.0, kv_lens }).collect();
        // First of other lengths, so that what is checked was refilled.
        let other: Vec<Vec<u32>> = lens.iter().map(|lens| lens.iter().map(|len| len / 2 + 1).collect()).collect();
        let before: Vec<_> = tables.iter().zip(&other).map(|(t, kv_lens)| CascadeLevel { qo: &t.0, kv_lens }).collect();
        let mut plan = CascadePlan::new(exec, self.problem.clone(), &before, split).unwrap();
        plan.refill(&levels).unwrap();
        let kv: Vec<_> = tables.iter().map(|t| Kv::Paged(self.pool(), &t.1)).collect();
        let mut out = poisoned(DType::F32, &[self.q.shape()[0], 4, 24]);
        let mut lse = poisoned(DType::F32, &[self.q.shape()[0], 4]);
        plan.run(
            exec,
            CascadeArgs {
                q: self.q.view(),
                kv: &kv,
                params,
                sm_scale: None,
                scratch: &mut plan.scratch(),
                out: out.view_mut(),
                lse: softmax.then(|| lse.view_mut()),
            },
        )
        .unwrap();
        expected.check(&format!("{exec:?} {split:?} {:?}", self.levels), out.view(), softmax.then(|| lse.view()));
    }

    fn pays(&self, exec: &Exec) -> bool {
        let tables = self.tables();
        let levels: Vec<_> = tables.iter().map(|(qo, t)| CascadeLevel { qo, kv_lens: t.lens() }).collect();
        CascadePlan::pays(exec, &self.problem, &levels).unwrap()
    }

    fn expected(&self, params: &Params<'_>) -> Expected {
        let (qo, table) = self.flat();
        let levels = self.tables();
        let joined = PageTable::joined(&levels.iter().map(|(qo, table)| (qo, table)).collect::<Vec<_>>()).unwrap();
        for r in (0..self.q_lens.len()).filter(|&r| self.q_lens[r] > 0) {
            assert_eq!(joined.pages(r), table.pages(r), "request {r}");
        }
        let b = reference::attention::Batch {
            q: self.q.view(),
            qo: &qo,
            kv: Kv::Paged(self.pool(), &table),
            variant: &self.problem.variant,
            params,
            sm_scale: f64::from(1.0 / 24f32.sqrt()),
        };
        Expected::of(DType::F32, |p| reference::attention::batch(p, &b))
    }

    /// The same attention with its sums in another order: rows of 24 the other way round, and so all tokens of a
    /// group but the last three, which a causal mask over three query tokens may tell apart.
    fn backwards(&self) -> Self {
        let turned = |t: &Tensor| {
            let mut x = t.view().to_f32_vec().unwrap();
            x.chunks_exact_mut(24).for_each(<[f32]>::reverse);
            x
        };
        let tokens = |t: &Tensor, mut x: Vec<f32>| {
            let mut rows: Vec<&mut [f32]> = x.chunks_exact_mut(2 * 24).collect();
            let mut at = 0;
            for &(_, len) in self.levels.iter().flatten() {
                rows[at..at + (len as usize).saturating_sub(3)].reverse();
                at += len as usize;
            }
            Tensor::from_slice(&rows.concat(), t.shape()).unwrap()
        };
        Self {
            problem: self.problem.clone(),
            q: Tensor::from_slice(&turned(&self.q), self.q.shape()).unwrap(),
            k: tokens(&self.k, turned(&self.k)),
            v: tokens(&self.v, self.v.view().to_f32_vec().unwrap()),
            q_lens: self.q_lens.clone(),
            levels: self.levels.clone(),
        }
    }
}

#[test]
fn cascade_matches_flat_reference_over_one_to_four_levels() {
    let cases = [
        (vec![1, 2], vec![vec![(1, 5), (1, 9)]]),
        (vec![1, 1, 4, 1], vec![vec![(4, 150)], vec![(1, 3), (1, 1), (1, 70), (1, 0)]]),
        (
            vec![2, 1, 0, 1, 3],
            vec![vec![(5, 65)], vec![(2, 10), (3, 0)], vec![(1, 2), (1, 1), (1, 4), (1, 130), (1, 3)]],
        ),
        (
            vec![1; 6],
            vec![vec![(6, 64)], vec![(4, 7), (2, 66)], vec![(2, 1), (2, 2), (2, 3)], (0..6).map(|i| (1, i)).collect()],
        ),
    ];
    let (sinks, slopes) = ([0.5, -1.0, 2.0, 0.0], [0.1, -0.2, 0.3, 0.0]);
    let causal = |v| variant::causal().and(v).unwrap();
    for (q_lens, levels) in cases {
        for (variant, params) in [
            (variant::standard(), Params::new()),
            (variant::causal(), Params::new()),
            (causal(variant::sliding_window()), Params::new().i32("window_left", 20)),
            (causal(variant::alibi()), Params::new().f32_tensor("alibi_slopes", &slopes)),
            (variant::sink(), Params::new().f32_tensor("sink", &sinks)),
            (variant::sigmoid(), Params::new().f32("bias", -2.0)),
        ] {
            let softmax = variant.normalize() == variant::Normalize::Softmax;
            let shared = Shared::new(variant, q_lens.clone(), levels.clone(), 3);
            let expected = shared.expected(&params);
            every_exec(|exec| {
                // Of so few requests and tokens nothing is won.
                assert!(!shared.pays(exec), "{exec:?} {:?}", shared.levels);
                for split in [Split::Balanced, Split::Fixed(64)] {
                    shared.check(exec, &params, split, &expected, softmax);
                }
            });
        }
    }
}

#[test]
fn cascades_pay_where_much_is_shared_and_never_where_nothing_is() {
    let of = |requests: usize, prefix: u32| {
        let levels = vec![vec![(requests, prefix)], vec![(1, 3); requests]];
        Shared::new(variant::causal(), vec![1; requests], levels, 1)
    };
    every_exec(|exec| {
        assert!(of(256, 8_000).pays(exec), "{exec:?}");
        for (requests, prefix) in [(1, 8_000), (64, 0), (0, 8_000)] {
            assert!(!of(requests, prefix).pays(exec), "{exec:?} {requests} {prefix}");
        }
    });
}

/// The bits of a row are its own: in any piece of its prompt, and in any group of a cascade.
#[test]
fn rows_of_bf16_have_their_bits_in_any_company() {
    let mut rng = Rng::new(7);
    let (d, dim) = (DType::BF16, 64);
    let (q, k, v) = (rng.tensor(d, &[900, 1, dim]), rng.tensor(d, &[900, 1, dim]), rng.tensor(d, &[900, 1, dim]));
    let rows = |t: &Tensor, range: std::ops::Range<usize>| t.view().slice(0, range).unwrap().to_f32_vec().unwrap();
    for level in fir::exec::Level::available() {
        let exec = &Exec::cpu_with(level, 3).unwrap();
        let windowed = variant::causal().and(variant::sliding_window()).unwrap();
        let params = Params::new().i32("window_left", 100);
        let piece = |range: std::ops::Range<usize>| {
            let (qo, kv) = (Ragged::from_lens(&[range.len() as u32]), Ragged::from_lens(&[range.end as u32]));
            let (qo, kv) = (qo.unwrap(), kv.unwrap());
            let problem = Problem::new(1, 1, dim, d, windowed.clone());
            let plan = BatchPlan::new(exec, problem, &qo, kv.lens(), Split::Off).unwrap();
            let mut out = poisoned(d, &[range.len(), 1, dim]);
            let (q, end) = (q.view().slice(0, range.clone()).unwrap(), range.end);
            let (k, v) = (k.view().slice(0, 0..end).unwrap(), v.view().slice(0, 0..end).unwrap());
            let (kv, scratch, params) = (Kv::Ragged(RaggedKv::new(k, v, &kv).unwrap()), &mut plan.scratch(), &params);
            let args = BatchArgs { q, kv, params, sm_scale: None, scratch, out: out.view_mut(), lse: None };
            plan.run(exec, args).unwrap();
            out
        };
        assert_eq!(rows(&piece(0..900), 300..400), rows(&piece(300..400), 0..100), "{level}, a piece");

        let table = |lens: &[i32], first: i32| {
            let ends: Vec<i32> = lens.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
            let all = ends.last().unwrap() + lens.last().unwrap();
            let indptr = ends.iter().copied().chain([all]).collect::<Vec<_>>();
            PageTable::with_lens(1, 900, indptr, (first..first + all).collect::<Vec<_>>(), lens).unwrap()
        };
        let pages = |t: &Tensor| t.clone().reshaped(&[900, 1, 1, dim]).unwrap();
        let (k, v) = (pages(&k), pages(&v));
        let among = |requests: usize| {
            let (all, each) = (Ragged::from_lens(&[requests as u32]).unwrap(), Ragged::ones(requests).unwrap());
            let (prefix, own) = (table(&[300], 0), table(&vec![20; requests], 300));
            let levels = [(&all, &prefix), (&each, &own)].map(|(qo, t)| CascadeLevel { qo, kv_lens: t.lens() });
            let problem = Problem::new(1, 1, dim, d, variant::causal());
            let plan = CascadePlan::new(exec, problem, &levels, Split::Fixed(64)).unwrap();
            let pool = PagedKv::new(k.view(), v.view(), KvLayout::Nhd).unwrap();
            let mut out = poisoned(d, &[requests, 1, dim]);
            let (kv, scratch) = (&[Kv::Paged(pool, &prefix), Kv::Paged(pool, &own)], &mut plan.scratch()[..]);
            let (q, params, out_) = (q.view().slice(0, 0..requests).unwrap(), &Params::new(), out.view_mut());
            plan.run(exec, CascadeArgs { q, kv, params, sm_scale: None, scratch, out: out_, lse: None }).unwrap();
            out
        };
        assert_eq!(rows(&among(8), 0..8), rows(&among(9), 0..8), "{level}, a cascade");
    }
}

/// What a serving engine's groups rest on: a cascade whose levels are the pieces that flat attention cuts has its bits, next to
/// requests of two tokens and numbers that are not finite.
#[test]
fn a_cascade_of_pieces_has_the_bits_of_flat_attention() {
    const PIECE: u32 = 64;
    const PAGE: usize = 16;
    for (group, dim) in [(1, 64), (3, 64), (4, 128), (8, 64)] {
        let (requests, prefix, d) = (21usize, 3 * PIECE, DType::BF16);
        // Of two tokens, eight heads are no longer few rows.
        let q_lens: Vec<u32> = (0..requests).map(|r| 1 + u32::from(group < 8 && r % 9 == 4)).collect();
        let own: Vec<u32> = (0..requests as u32).map(|r| 2 + r * 53 % 150).collect();
        let pages_of = |len: u32| len.div_ceil(PAGE as u32);
        let firsts: Vec<u32> =
            own.iter().scan(pages_of(prefix), |at, &len| Some(std::mem::replace(at, *at + pages_of(len)))).collect();
        let (pages, tokens) = (firsts[requests - 1] + pages_of(own[requests - 1]), q_lens.iter().sum::<u32>() as usize);
        let mut rng = Rng::new(group as u64);
        let mut wild = |shape: &[usize], at: &[(usize, f32)]| {
            let mut x = rng.tensor(d, shape).view().to_f32_vec().unwrap();
            at.iter().for_each(|&(i, value)| x[i] = value);
            Tensor::from_slice(&x.iter().map(|&x| half::bf16::from_f32(x)).collect::<Vec<_>>(), shape).unwrap()
        };
        let (heads, page) = (2 * group, PAGE * 2 * dim);
        let q = wild(&[tokens, heads, dim], &[(7 * heads * dim + 5, f32::NAN), (18 * heads * dim, f32::INFINITY)]);
        let k = wild(&[pages as usize, PAGE, 2, dim], &[(firsts[11] as usize * page + 3, f32::NEG_INFINITY)]);
        let v = wild(&[pages as usize, PAGE, 2, dim], &[(firsts[9] as usize * page + dim + 1, f32::INFINITY)]);
        let pool = PagedKv::new(k.view(), v.view(), KvLayout::Nhd).unwrap();
        let table = |stretches: &[Vec<(u32, u32)>]| {
            let (mut indptr, mut indices, mut lens) = (vec![0i32], vec![], vec![]);
            for stretches in stretches {
                for &(first, len) in stretches {
                    indices.extend((first..first + pages_of(len)).map(|p| p as i32));
                }
                indptr.push(indices.len() as i32);
                lens.push(stretches.iter().map(|s| s.1 as i32).sum::<i32>());
            }
            PageTable::with_lens(PAGE, pages as usize, indptr, indices, &lens).unwrap()
        };
        let problem = Problem::new(heads, 2, dim, d, variant::causal());
        let qo = Ragged::from_lens(&q_lens).unwrap();
        let flat = table(&(0..requests).map(|r| vec![(0, prefix), (firsts[r], own[r])]).collect::<Vec<_>>());
        let all = Ragged::from_lens(&[tokens as u32]).unwrap();
        let mut levels: Vec<_> = (0..prefix / PIECE).map(|p| (&all, table(&[vec![(4 * p, PIECE)]]))).collect();
        for piece in 0..own.iter().max().unwrap().div_ceil(PIECE) {
            let len = |r: usize| own[r].saturating_sub(piece * PIECE).min(PIECE);
            let stretch = |r: usize| vec![(firsts[r] + if len(r) > 0 { 4 * piece } else { 0 }, len(r))];
            levels.push((&qo, table(&(0..requests).map(stretch).collect::<Vec<_>>())));
        }
        for level in fir::exec::Level::available() {
            let (exec, params) = (&Exec::cpu_with(level, 3).unwrap(), &Params::new());
            let plan = BatchPlan::new(exec, problem.clone(), &qo, flat.lens(), Split::Fixed(PIECE)).unwrap();
            let (mut want, mut got) = (poisoned(d, &[tokens, heads, dim]), poisoned(d, &[tokens, heads, dim]));
            let (kv, scratch, out) = (Kv::Paged(pool, &flat), &mut plan.scratch(), want.view_mut());
            plan.run(exec, BatchArgs { q: q.view(), kv, params, sm_scale: None, scratch, out, lse: None }).unwrap();
            let of: Vec<_> = levels.iter().map(|(qo, t)| CascadeLevel { qo, kv_lens: t.lens() }).collect();
            let plan = CascadePlan::new(exec, problem.clone(), &of, Split::Fixed(PIECE)).unwrap();
            let kv: Vec<_> = levels.iter().map(|(_, t)| Kv::Paged(pool, t)).collect();
            let (kv, scratch, out) = (&kv[..], &mut plan.scratch()[..], got.view_mut());
            plan.run(exec, CascadeArgs { q: q.view(), kv, params, sm_scale: None, scratch, out, lse: None }).unwrap();
            let bits = |t: &Tensor| -> Vec<u16> {
                let all = t.as_slice::<half::bf16>().unwrap().iter();
                all.map(|x| if x.is_nan() { u16::MAX } else { x.to_bits() }).collect()
            };
            let (want, got) = (bits(&want), bits(&got));
            let row = want.iter().zip(&got).position(|(a, b)| a != b).map(|at| at / dim);
            assert_eq!(row, None, "{level} {group} heads of {dim}: first row that differs");
            let finite = want.iter().filter(|&&x| x != u16::MAX).count();
            assert!(finite > want.len() / 2 && finite < want.len(), "{finite} of {}", want.len());
        }
    }
}

/// Levels of long and of short query tiles beside each other, cut into parts, with a scale of the values.
#[test]
fn a_long_prefix_of_many_requests_matches_the_flat_reference() {
    let (heads, kv_heads, dim, page) = (8, 2, 64, 16);
    for (dtype, kv_dtype, requests, shared, own) in [
        (DType::BF16, DType::BF16, 24, 1500, 70),
        (DType::F16, DType::F16, 5, 2048, 300),
        (DType::BF16, DType::E4M3, 9, 700, 33),
    ] {
        let mut rng = Rng::new(4);
        let lens: Vec<usize> = std::iter::once(shared).chain((0..requests).map(|r| own + 3 * r)).collect();
        let pages: Vec<usize> = lens.iter().map(|n| n.div_ceil(page)).collect();
        let all = pages.iter().sum::<usize>();
        let pool: [Tensor; 2] = [(); 2].map(|()| rng.tensor(kv_dtype, &[all, page, kv_heads, dim]));
        let q = rng.tensor(dtype, &[requests, heads, dim]);
        let kv = || PagedKv::new(pool[0].view(), pool[1].view(), KvLayout::Nhd).unwrap().with_scales(0.5, 3.0).unwrap();
        let table = |which: std::ops::Range<usize>| {
            let (mut indptr, mut indices) = (vec![0i32], Vec::new());
            for r in which.clone() {
                let first = pages[..r].iter().sum::<usize>();
                indices.extend((first..first + pages[r]).rev().map(|p| p as i32));
                indptr.push(indices.len() as i32);
            }
            let lens: Vec<i32> = lens[which].iter().map(|&n| n as i32).collect();
            PageTable::with_lens(page, all, indptr, indices, &lens).unwrap()
        };
        let tables = [table(0..1), table(1..requests + 1)];
        // The flat reference: pages of one token, as the prefix need not end with a page.
        let rows = |t: &PageTable<'_>, r: usize, n: usize| -> Vec<i32> {
            (0..n).map(|j| t.locate(r, j).map(|(p, slot)| (p * page + slot) as i32).unwrap()).collect()
        };
        let (mut indptr, mut indices) = (vec![0i32], Vec::new());
        for r in 0..requests {
            indices.extend(rows(&tables[0], 0, shared));
            indices.extend(rows(&tables[1], r, lens[r + 1]));
            indptr.push(indices.len() as i32);
        }
        let flat = PageTable::new(1, all * page, indptr, indices, &vec![1; requests]).unwrap();
        let one =
            |t: &Tensor| Tensor::from_f32(kv_dtype, &t.view().to_f32_vec().unwrap(), &[all * page, 1, kv_heads, dim]);
        let ones = [one(&pool[0]).unwrap(), one(&pool[1]).unwrap()];
        let (each, together) = (Ragged::ones(requests).unwrap(), Ragged::from_lens(&[requests as u32]).unwrap());
        let b = reference::attention::Batch {
            q: q.view(),
            qo: &each,
            kv: Kv::Paged(
                PagedKv::new(ones[0].view(), ones[1].view(), KvLayout::Nhd).unwrap().with_scales(0.5, 3.0).unwrap(),
                &flat,
            ),
            variant: &variant::causal(),
            params: &Params::new(),
            sm_scale: f64::from(1.0 / (dim as f32).sqrt()),
        };
        let expected = Expected::of(dtype, |p| reference::attention::batch(p, &b));
        every_exec(|exec| {
            for split in [Split::Balanced, Split::Fixed(256)] {
                let problem = Problem { kv_dtype, ..Problem::new(heads, kv_heads, dim, dtype, variant::causal()) };
                let levels = [
                    CascadeLevel { qo: &together, kv_lens: tables[0].lens() },
                    CascadeLevel { qo: &each, kv_lens: tables[1].lens() },
                ];
                let plan = CascadePlan::new(exec, problem, &levels, split).unwrap();
                let (mut out, mut lse) =
                    (poisoned(dtype, &[requests, heads, dim]), poisoned(DType::F32, &[requests, heads]));
                let kv = &[Kv::Paged(kv(), &tables[0]), Kv::Paged(kv(), &tables[1])];
                let (q, params, scratch) = (q.view(), &Params::new(), &mut plan.scratch()[..]);
                let (to, sums) = (out.view_mut(), Some(lse.view_mut()));
                plan.run(exec, CascadeArgs { q, kv, params, sm_scale: None, scratch, out: to, lse: sums }).unwrap();
                let what = format!("{exec:?} {dtype} {kv_dtype} {requests} {split:?}");
                expected.check(&what, out.view(), Some(lse.view()));
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Of four requests and more: the naive errors of a few rows may all be small by luck.
    #[test]
    fn cascade_equals_flat(
        q_lens in prop::collection::vec(1u32..4, 4..9), prefix in 0u32..200, own in prop::collection::vec(0u32..90, 8), seed in 0u64..99,
    ) {
        let n = q_lens.len();
        let levels = vec![vec![(n, prefix)], own[..n].iter().map(|&len| (1, len)).collect()];
        let shared = Shared::new(variant::causal(), q_lens, levels, seed);
        // A row's naive error may be next to none by luck; the worse of two orders of summation rarely is.
        let (mut expected, other) = (shared.expected(&Params::new()), shared.backwards().expected(&Params::new()));
        for (naive, exact, other) in [
            (&mut expected.naive.0, &expected.exact.0, &other.naive.0),
            (&mut expected.naive.1, &expected.exact.1, &other.naive.1),
        ] {
            for ((n, e), o) in naive.iter_mut().zip(exact).zip(other) {
                if (o - e).abs() > (*n - e).abs() {
                    *n = *o;
                }
            }
        }
        shared.check(&Exec::cpu().unwrap(), &Params::new(), Split::Balanced, &expected, true);
    }
}
