//! Appends to a paged cache: how near they come to the memory's speed.

mod support;

use fir::kv::{KvLayout, PagedKvMut, PagedMlaMut};
use fir::page::{self, Slots};
use fir::reference::{self, Precision};
use fir::{DType, Tensor};
use support::{Suite, Work, matches, random};

const PAGE_SIZE: usize = 16;

fn main() {
    let mut suite = Suite::new();
    let (levels, heads, dim) = (suite.levels(), 8, 128);
    let batches: &[usize] = if suite.checks_only() { &[5] } else { &[1, 64, 2048] };
    for &tokens in batches {
        let pages = tokens.div_ceil(PAGE_SIZE) + 1;
        // Tokens land in slots far apart, as those of different requests do.
        let slots: Vec<i64> = (0..tokens).map(|t| ((t * 37 + 5) % (pages * PAGE_SIZE)) as i64).collect();
        let wanted: Vec<Option<usize>> = slots.iter().map(|&s| Some(s as usize)).collect();
        let slots = Tensor::from_slice(&slots, &[tokens]).unwrap();
        let (k, v) = (random(1, DType::BF16, &[tokens, heads, dim]), random(2, DType::BF16, &[tokens, heads, dim]));
        let elements = tokens * heads * dim * 2;
        for to in [DType::BF16, DType::E4M3, DType::E2M1x2] {
            let fp4 = to == DType::E2M1x2;
            let name = if fp4 { "nvfp4" } else { to.name() };
            let shape = [pages, PAGE_SIZE, heads, if fp4 { dim / 2 } else { dim }];
            let pool = || Tensor::zeros(to, &shape).unwrap();
            let scales = || Tensor::zeros(DType::E4M3, &[pages, PAGE_SIZE, heads, dim / 16]).unwrap();
            let bytes = elements * 2 + if fp4 { elements / 2 + elements / 16 } else { elements * to.size() };
            for (level, exec) in &levels {
                suite.bench(
                    &format!("append_paged_kv/h{heads}-d{dim}-bf16-{name}/t{tokens}/{level}"),
                    Work { bytes, flops: 0 },
                    [pool(), pool(), scales(), scales()],
                    |[ck, cv, ks, vs]| {
                        let (ck, cv) = (ck.view_mut(), cv.view_mut());
                        let cache = if fp4 {
                            PagedKvMut::nvfp4(ck, cv, ks.view_mut(), vs.view_mut(), KvLayout::Nhd)
                        } else {
                            PagedKvMut::new(ck, cv, KvLayout::Nhd)
                        };
                        let slots = Slots::Mapping(slots.view());
                        page::append_paged_kv(exec, k.view(), v.view(), slots, cache.unwrap()).unwrap();
                    },
                    |[ck, _, ks, _]| {
                        if fp4 {
                            return nvfp4_matches(&k, &wanted, ck, ks);
                        }
                        let empty = pool();
                        matches(ck.view(), dim, |p| reference::page::append(p, empty.view(), k.view(), &wanted, 1.0))
                    },
                );
            }
        }
        let (ckv, kpe) = (random(3, DType::BF16, &[tokens, 512]), random(4, DType::BF16, &[tokens, 64]));
        for (level, exec) in &levels {
            let pool = |dim| Tensor::zeros(DType::BF16, &[pages, PAGE_SIZE, dim]).unwrap();
            suite.bench(
                &format!("append_paged_mla/d512+64-bf16/t{tokens}/{level}"),
                Work { bytes: tokens * 576 * 4, flops: 0 },
                [pool(512), pool(64)],
                |[c, p]| {
                    let cache = PagedMlaMut::new(c.view_mut(), p.view_mut()).unwrap();
                    let slots = Slots::Mapping(slots.view());
                    page::append_paged_mla(exec, ckv.view(), kpe.view(), slots, cache).unwrap();
                },
                |[c, _]| {
                    let empty = pool(512);
                    matches(c.view(), 512, |p| reference::page::append(p, empty.view(), ckv.view(), &wanted, 1.0))
                },
            );
        }
    }
}

/// The codes and block scales of every token are the reference's.
fn nvfp4_matches(k: &Tensor, slots: &[Option<usize>], codes: &Tensor, scales: &Tensor) -> Result<(), String> {
    let x: Vec<f64> = k.view().to_f32_vec().map_err(|e| e.to_string())?.into_iter().map(f64::from).collect();
    let got = codes.as_slice::<fir::tensor::E2m1x2>().map_err(|e| e.to_string())?;
    let got_scales = scales.view().to_f32_vec().map_err(|e| e.to_string())?;
    let row = x.len() / slots.len();
    for (t, slot) in slots.iter().flatten().enumerate() {
        let (want, want_scales) = reference::page::nvfp4(Precision::Exact, &x[t * row..][..row], 1.0);
        let pairs = got[slot * row / 2..][..row / 2].iter().flat_map(|p| [p.0 & 15, p.0 >> 4]);
        if let Some(i) = pairs.zip(&want).position(|(got, want)| got != *want) {
            return Err(format!("token {t}, element {i}: another code than {}", want[i]));
        }
        let pairs = got_scales[slot * row / 16..][..row / 16].iter().zip(&want_scales);
        if let Some(i) = pairs.map(|(got, want)| f64::from(*got) == *want).position(|same| !same) {
            return Err(format!("token {t}, block {i}: another scale than {}", want_scales[i]));
        }
    }
    Ok(())
}
