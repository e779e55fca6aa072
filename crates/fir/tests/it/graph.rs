//! Every operator in a CUDA graph: what it does when it is replayed is what it does when it is called. Plans that are refilled
//! in between are in `attention/graph.rs`. And operators one after another, without a graph.

use fir::attention::{
    self, BatchArgs, BatchPlan, BlockMask, CascadeArgs, CascadeLevel, CascadePlan, MlaArgs, MlaPlan, MlaProblem,
    Problem, SparseArgs, SparsePlan, Split,
};
use fir::exec::{Gpu, Graph};
use fir::gemm::{self, GroupedArgs};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedKvMut, PagedMla, Ragged};
use fir::lora::{self, AdaptArgs, RowOf};
use fir::moe::{self, FfnArgs, Gate, RouteArgs, Routing, TableRouteArgs};
use fir::page::{self, Slots};
use fir::quantize::{self, BitOrder, Block};
use fir::rope::{self, Positions};
use fir::sampling::{self, Draw, FilterOrder, PerRow, RngState};
use fir::speculative::{self, ChainArgs};
use fir::tensor::{Bool, E2m1x2, Element};
use fir::testing::Rng;
use fir::topk::{self, TopKOrder};
use fir::variant::{self, Params, Rope};
use fir::{DType, Exec, Result, Tensor, activation, norm};

/// A device, and tensors on it.
struct Device {
    gpu: Gpu,
    exec: Exec,
}

impl Device {
    fn new() -> Option<Self> {
        crate::support::gpu()?;
        let gpu = Gpu::new(0).unwrap();
        Some(Self { exec: Exec::Cuda(gpu.clone()), gpu })
    }

    fn normals(&self, dtype: DType, shape: &[usize]) -> Tensor {
        let n = shape.iter().product();
        Tensor::from_f32(dtype, &Rng::new(n as u64).normals(n), shape).unwrap().to_device(&self.gpu).unwrap()
    }

    fn zeros(&self, dtype: DType, shape: &[usize]) -> Tensor {
        self.gpu.zeros(dtype, shape).unwrap()
    }

    fn of<T: Element>(&self, values: &[T]) -> Tensor {
        Tensor::from_slice(values, &[values.len()]).unwrap().to_device(&self.gpu).unwrap()
    }

    /// Rows that are distributions.
    fn probs(&self, shape: &[usize]) -> Tensor {
        let rows = [shape[..shape.len() - 1].iter().product(), shape[shape.len() - 1]];
        let (x, mut out) = (self.normals(DType::F32, &rows), self.zeros(DType::F32, &rows));
        sampling::softmax(&self.exec, x.view(), 1.0.into(), out.view_mut()).unwrap();
        out.reshaped(shape).unwrap()
    }

    /// All numbers of all tensors.
    fn read(outs: &[Tensor]) -> Vec<f32> {
        let mut all = Vec::new();
        for out in outs {
            let (host, op) = (out.to_host().unwrap(), "read");
            match out.dtype() {
                DType::I32 => all.extend(host.view().typed::<i32>(op, "out").unwrap().data().iter().map(|&x| x as f32)),
                DType::U8 => {
                    all.extend(host.view().typed::<u8>(op, "out").unwrap().data().iter().map(|&x| f32::from(x)))
                }
                DType::E2M1x2 => {
                    let codes = host.view();
                    all.extend(codes.typed::<E2m1x2>(op, "out").unwrap().data().iter().map(|x| f32::from(x.0)));
                }
                _ => all.extend(host.view().to_f32_vec().unwrap()),
            }
        }
        all
    }

    /// Calls `run` with copies of `outs`, then records it with others and replays that.
    #[track_caller]
    fn check(&self, name: &str, outs: &[&Tensor], mut run: impl FnMut(&mut [Tensor]) -> Result<()>) {
        let copies = || -> Vec<Tensor> { outs.iter().map(|&t| t.clone()).collect() };
        let (mut called, mut recorded) = (copies(), copies());
        run(&mut called).unwrap_or_else(|e| panic!("{name}: {e}"));
        let before = Self::read(&recorded);
        let graph =
            Graph::capture(&self.gpu, || run(&mut recorded)).unwrap_or_else(|e| panic!("{name}, recorded: {e}"));
        assert_eq!(before, Self::read(&recorded), "{name}: recording ran it");
        // SAFETY: all tensors that `run` borrows live, and one thread uses them.
        #[expect(unsafe_code, reason = "addresses are recorded, not borrows")]
        unsafe { graph.launch(&self.gpu) }.unwrap();
        assert_eq!(Self::read(&called), Self::read(&recorded), "{name}: replayed");
        assert_ne!(before, Self::read(&called), "{name} did nothing");
    }
}

const STATE: RngState = RngState { seed: 7, offset: 3 };

#[test]
fn token_operators_are_recorded() {
    let Some(d) = Device::new() else { return };
    let exec = &d.exec;
    let (x, w, out) =
        (d.normals(DType::BF16, &[9, 512]), d.normals(DType::BF16, &[512]), d.zeros(DType::BF16, &[9, 512]));
    d.check("rms_norm", &[&out], |o| norm::rms_norm(exec, x.view(), w.view(), 1e-5, o[0].view_mut()));
    d.check("layer_norm", &[&out], |o| norm::layer_norm(exec, x.view(), w.view(), w.view(), 1e-5, o[0].view_mut()));
    d.check("fused_add_rms_norm", &[&x, &x], |o| {
        let [a, b] = o else { unreachable!() };
        norm::fused_add_rms_norm(exec, a.view_mut(), b.view_mut(), w.view(), 1e-5)
    });
    d.check("silu_and_mul", &[&d.zeros(DType::BF16, &[9, 256])], |o| {
        activation::silu_and_mul(exec, x.view(), o[0].view_mut())
    });
    d.check("quantize_fp8", &[&d.zeros(DType::E4M3, &[9, 512]), &d.zeros(DType::F32, &[9, 4])], |o| {
        let [a, b] = o else { unreachable!() };
        quantize::quantize_fp8(exec, x.view(), Block::GROUP, a.view_mut(), b.view_mut())
    });
    d.check("quantize_nvfp4", &[&d.zeros(DType::E2M1x2, &[9, 256]), &d.zeros(DType::E4M3, &[9, 32])], |o| {
        let [a, b] = o else { unreachable!() };
        quantize::quantize_nvfp4(exec, x.view(), 1.0, a.view_mut(), b.view_mut())
    });
    let (bits, parts) = (d.of(&[Bool(1); 37]), Ragged::from_lens(&[3, 30, 4]).unwrap());
    d.check("segment_packbits", &[&d.zeros(DType::U8, &[6])], |o| {
        quantize::segment_packbits(exec, bits.view(), &parts, BitOrder::Little, o[0].view_mut())
    });
    let (q, k) = (d.normals(DType::BF16, &[6, 4, 64]), d.normals(DType::BF16, &[6, 2, 64]));
    let (ids, starts, two) = (d.of(&[3, 4, 5, 90, 91, 92]), d.of(&[3, 90]), Ragged::from_lens(&[3, 3]).unwrap());
    for (name, at) in [
        ("apply_rope at ids", Positions::Ids(ids.view())),
        ("apply_rope of requests", Positions::Ragged { indptr: &two, offsets: starts.view() }),
    ] {
        d.check(name, &[&q, &k], |o| {
            let [a, b] = o else { unreachable!() };
            rope::apply_rope_in_place(exec, at, Rope::default(), a.view_mut(), b.view_mut())
        });
    }
    let pools = [d.zeros(DType::BF16, &[4, 4, 2, 64]), d.zeros(DType::BF16, &[4, 4, 2, 64])];
    let (mapping, requests, places) =
        (d.of(&[0, 5, -1, 9, 10, 11]), d.of(&[0, 0, 0, 1, 1, 1]), d.of(&[2, 3, 4, 0, 1, 2]));
    let table = PageTable::with_lens(4, 4, vec![0, 2, 3], vec![3, 1, 0], &[5, 3]).unwrap();
    for (name, slots) in [
        ("append_paged_kv by slots", Slots::Mapping(mapping.view())),
        (
            "append_paged_kv by requests",
            Slots::Tokens { table: &table, batch_indices: requests.view(), positions: places.view() },
        ),
    ] {
        d.check(name, &pools.each_ref(), |o| {
            let [a, b] = o else { unreachable!() };
            let cache = PagedKvMut::new(a.view_mut(), b.view_mut(), KvLayout::Nhd)?;
            page::append_paged_kv(exec, k.view(), k.view(), slots, cache)
        });
    }
}

#[test]
fn samplers_are_recorded() {
    let Some(d) = Device::new() else { return };
    let exec = &d.exec;
    let (logits, probs) = (d.normals(DType::F32, &[3, 5000]), d.probs(&[3, 5000]));
    let (heat, states) = ([0.5, 1.0, 2.0], [STATE, RngState { seed: 8, ..STATE }, RngState { seed: 9, ..STATE }]);
    let (tokens, like) = (d.zeros(DType::I32, &[3]), d.zeros(DType::F32, &[3, 5000]));
    d.check("softmax", &[&like], |o| sampling::softmax(exec, logits.view(), PerRow::Each(&heat), o[0].view_mut()));
    d.check("top_k_top_p_sample", &[&tokens], |o| {
        let draw = Draw { rng: PerRow::Each(&states), indices: None, out: o[0].view_mut(), valid: None };
        let (k, p) = (PerRow::Each(&[50, 7, 900][..]), PerRow::Each(&[0.9, 0.5, 1.0][..]));
        sampling::top_k_top_p_sample(exec, probs.view(), k, p, FilterOrder::Joint, draw)
    });
    d.check("sample_from_logits", &[&tokens], |o| {
        sampling::sample_from_logits(exec, logits.view(), PerRow::Each(&heat), Draw::new(STATE, o[0].view_mut()))
    });
    d.check("top_p_renorm", &[&like], |o| sampling::top_p_renorm(exec, probs.view(), 0.5.into(), o[0].view_mut()));
    d.check("top_k_mask_logits", &[&like], |o| {
        sampling::top_k_mask_logits(exec, logits.view(), 20.into(), o[0].view_mut())
    });
    d.check("top_k", &[&d.zeros(DType::F32, &[3, 40]), &d.zeros(DType::I32, &[3, 40])], |o| {
        let [a, b] = o else { unreachable!() };
        topk::top_k(exec, logits.view(), TopKOrder::Value, a.view_mut(), b.view_mut())
    });
    let (drafts, target) = (d.probs(&[2, 3, 500]), d.probs(&[2, 4, 500]));
    let drafted = d.of(&[4, 9, 100, 7, 8, 499]).reshaped(&[2, 3]).unwrap();
    d.check("chain_speculative_sample", &[&d.zeros(DType::I32, &[2, 4])], |o| {
        speculative::chain_speculative_sample(
            exec,
            ChainArgs {
                draft_probs: drafts.view(),
                draft_tokens: drafted.view(),
                target_probs: target.view(),
                rng: STATE.into(),
                out: o[0].view_mut(),
                accepted: None,
                emitted: None,
                valid: None,
            },
        )
    });
}

#[test]
fn products_are_recorded() {
    let Some(d) = Device::new() else { return };
    let exec = &d.exec;
    let (x, w, out) =
        (d.normals(DType::BF16, &[10, 128]), d.normals(DType::BF16, &[96, 128]), d.zeros(DType::BF16, &[10, 96]));
    d.check("gemm", &[&out], |o| gemm::gemm(exec, x.view(), w.view(), o[0].view_mut()));
    let (groups, each) = (Ragged::from_lens(&[3, 0, 7]).unwrap(), d.normals(DType::BF16, &[3, 96, 128]));
    d.check("grouped_gemm", &[&out], |o| {
        let (x, w, out) = (x.view().into(), each.view().into(), o[0].view_mut());
        gemm::grouped_gemm(exec, GroupedArgs { x, indptr: &groups, w, weight_indices: None, out })
    });
    let logits = d.normals(DType::F32, &[10, 4]);
    let routed = [d.zeros(DType::I32, &[10, 2]), d.zeros(DType::F32, &[10, 2])];
    d.check("route", &routed.each_ref(), |o| {
        let [ids, weights] = o else { unreachable!() };
        let (ids, weights, logits) = (ids.view_mut(), weights.view_mut(), logits.view());
        moe::route(exec, Routing::default(), RouteArgs { logits, bias: None, ids, weights })
    });
    let (of_tokens, table) = (d.of(&[3i64, 0, 1, 2, 3, 2, 1, 0, 3, 3]), d.of(&[1, 2, 3, 0, 0, 1, 2, 1]));
    let table = table.reshaped(&[4, 2]).unwrap();
    d.check("route_by_table", &routed.each_ref(), |o| {
        let [ids, weights] = o else { unreachable!() };
        let (ids, weights, logits) = (ids.view_mut(), weights.view_mut(), logits.view());
        let (tokens, table, shared) = (of_tokens.view(), table.view(), None);
        moe::route_by_table(exec, TableRouteArgs { logits, tokens, table, shared, ids, weights })
    });
    let (matrices, pairs) = (d.normals(DType::BF16, &[1, 4, 16, 128]), d.of(&[0i64; 10]));
    d.check("adapt", &[&d.zeros(DType::BF16, &[10, 16])], |o| {
        let (x, weights, tokens, experts) = (x.view(), matrices.view(), pairs.view(), of_tokens.view());
        let (adapters, factors, add, out) = (pairs.view(), None, false, o[0].view_mut());
        let (x_of, out_of) = (RowOf::Token, RowOf::Pair);
        lora::adapt(exec, AdaptArgs { x, x_of, weights, tokens, experts, adapters, factors, add, out, out_of })
    });
    let (ids, weights) =
        (d.of(&[0, 1, 2, 3, 3, 2, 1, 0, 0, 2, 1, 3, 2, 0, 3, 1, 0, 1, 2, 3]), d.normals(DType::F32, &[10, 2]));
    let ids = ids.reshaped(&[10, 2]).unwrap();
    let (up, down) = (d.normals(DType::BF16, &[4, 128, 128]), d.normals(DType::BF16, &[4, 128, 64]));
    d.check("moe_ffn", &[&d.zeros(DType::BF16, &[10, 128])], |o| {
        let (w_gate_up, w_down, out) = (up.view().into(), down.view().into(), o[0].view_mut());
        let (x, ids, weights, gate) = (x.view(), ids.view(), weights.view(), Gate::Silu);
        moe::moe_ffn(exec, FfnArgs { x, ids, weights, w_gate_up, w_down, gate, out })
    });
}

#[test]
fn attention_is_recorded() {
    let Some(d) = Device::new() else { return };
    let exec = &d.exec;
    let kv = d.normals(DType::BF16, &[8, 16, 2, 64]);
    let kv = PagedKv::new(kv.view(), kv.view(), KvLayout::Nhd).unwrap();
    let problem = Problem::new(4, 2, 64, DType::BF16, variant::causal());
    let (all, each) = (Ragged::from_lens(&[3]).unwrap(), Ragged::from_lens(&[2, 1]).unwrap());
    let levels = [CascadeLevel { qo: &all, kv_lens: &[32] }, CascadeLevel { qo: &each, kv_lens: &[40, 5] }];
    let plan = CascadePlan::new(exec, problem.clone(), &levels, Split::Balanced).unwrap();
    let table = |indptr: &[i32], pages: &[i32], lens: &[i32]| {
        PageTable::with_lens(16, 8, indptr.to_vec(), pages.to_vec(), lens).unwrap().to_device(&d.gpu).unwrap()
    };
    let (prefix, own) = (table(&[0, 2], &[2, 5], &[32]), table(&[0, 3, 4], &[1, 0, 7, 4], &[40, 5]));
    let (q, params, out) = (d.normals(DType::BF16, &[3, 4, 64]), Params::new(), d.zeros(DType::BF16, &[3, 4, 64]));
    let mut scratch = plan.scratch();
    d.check("cascade", &[&out], |o| {
        let (scratch, out) = (&mut scratch[..], o[0].view_mut());
        let (q, kv) = (q.view(), &[Kv::Paged(kv, &prefix), Kv::Paged(kv, &own)]);
        plan.run(exec, CascadeArgs { q, kv, params: &params, sm_scale: None, scratch, out, lse: None })
    });
    let mask = BlockMask { indptr: &[0, 1, 3], indices: &[1, 0, 1], rows: 3, cols: 32, block_rows: 2, block_cols: 16 };
    let plan = SparsePlan::new(exec, problem, mask, Split::Balanced).unwrap();
    let (rows, mut scratch) = (d.normals(DType::BF16, &[32, 2, 64]), plan.scratch());
    d.check("block-sparse", &[&out], |o| {
        let (k, v, scratch, out) = (rows.view(), rows.view(), &mut scratch, o[0].view_mut());
        plan.run(exec, SparseArgs { q: q.view(), k, v, params: &params, sm_scale: None, scratch, out, lse: None })
    });
    let [q_dtype, kv_dtype, out_dtype] = [DType::BF16; 3];
    let problem =
        MlaProblem { heads: 4, head_dim_ckv: 64, head_dim_kpe: 16, q_dtype, kv_dtype, out_dtype, causal: true };
    let plan = MlaPlan::new(exec, problem, &each, own.lens(), Split::Balanced).unwrap();
    let (ckv, kpe) = (d.normals(DType::BF16, &[8, 16, 64]), d.normals(DType::BF16, &[8, 16, 16]));
    let (q_nope, q_pe) = (d.normals(DType::BF16, &[3, 4, 64]), d.normals(DType::BF16, &[3, 4, 16]));
    let mut scratch = plan.scratch();
    d.check("latent", &[&d.zeros(DType::BF16, &[3, 4, 64])], |o| {
        let (q_nope, q_pe, kv) = (q_nope.view(), q_pe.view(), PagedMla::new(ckv.view(), kpe.view())?);
        let (scratch, out) = (&mut scratch, o[0].view_mut());
        plan.run(exec, MlaArgs { q_nope, q_pe, kv, table: &own, sm_scale: 0.1, scratch, out, lse: None })
    });
    let (o, lse) = (d.normals(DType::BF16, &[3, 5, 4, 64]), d.normals(DType::F32, &[3, 5, 4]));
    d.check("merge_states", &[&d.zeros(DType::BF16, &[3, 4, 64]), &d.zeros(DType::F32, &[3, 4])], |outs| {
        let [a, b] = outs else { unreachable!() };
        attention::merge_states(exec, (o.view(), lse.view()), (a.view_mut(), b.view_mut()))
    });
}

/// Kernels of attention let the next one start at once, and read nothing until the one before has ended: here each reads what that has
/// written, and nobody else waits.
#[test]
fn attention_reads_what_the_kernel_before_it_has_written() {
    let Some(d) = Device::new() else { return };
    let (exec, params) = (&d.exec, Params::new());
    let in_turn = |name: &str, shape: &[usize; 3], run: &mut dyn FnMut(&Tensor, &mut Tensor) -> Result<()>| {
        let mut chain = |wait: bool| {
            let mut all = vec![d.normals(DType::BF16, shape)];
            all.extend((0..8).map(|_| d.zeros(DType::BF16, shape)));
            for i in 0..8 {
                let (before, after) = all.split_at_mut(i + 1);
                run(&before[i], &mut after[0]).unwrap_or_else(|e| panic!("{name}: {e}"));
                if wait {
                    d.gpu.synchronize().unwrap();
                }
            }
            all.iter().map(|out| Device::read(std::slice::from_ref(out))).collect::<Vec<_>>()
        };
        let want = chain(true);
        assert_ne!(want[1], want[2], "{name}");
        for round in 0..20 {
            let got = chain(false);
            assert!(got == want, "{name}: round {round}, call {:?}", got.iter().zip(&want).position(|(a, b)| a != b));
        }
    };
    let pool = d.normals(DType::BF16, &[64, 16, 8, 128]);
    let kv = PagedKv::new(pool.view(), pool.view(), KvLayout::Nhd).unwrap();
    for (name, requests, tokens, len) in [("decodes", 256, 1, 64), ("a prompt", 1, 512, 512)] {
        let qo = Ragged::from_lens(&vec![tokens; requests]).unwrap();
        let pages = len as usize / 16;
        let indptr: Vec<_> = (0..=requests).map(|r| (r * pages) as i32).collect();
        let ids: Vec<_> = (0..requests * pages).map(|i| (i * 7 % 64) as i32).collect();
        let table = PageTable::with_lens(16, 64, indptr, ids, &vec![len; requests]).unwrap().to_device(&d.gpu).unwrap();
        let problem = Problem::new(32, 8, 128, DType::BF16, variant::causal());
        let plan = BatchPlan::new(exec, problem, &qo, table.lens(), Split::Balanced).unwrap();
        let mut scratch = plan.scratch();
        in_turn(name, &[requests * tokens as usize, 32, 128], &mut |q, out| {
            let (q, kv, scratch, out) = (q.view(), Kv::Paged(kv, &table), &mut scratch, out.view_mut());
            plan.run(exec, BatchArgs { q, kv, params: &params, sm_scale: None, scratch, out, lse: None })
        });
    }
    let (qo, lens) = (Ragged::from_lens(&[1; 64]).unwrap(), [128i32; 64]);
    let ids: Vec<_> = (0..128).map(|i| i * 5 % 16).collect();
    let table = PageTable::with_lens(64, 16, (0..=64).map(|r| 2 * r).collect::<Vec<_>>(), ids, &lens).unwrap();
    let table = table.to_device(&d.gpu).unwrap();
    let [q_dtype, kv_dtype, out_dtype] = [DType::BF16; 3];
    let problem =
        MlaProblem { heads: 16, head_dim_ckv: 512, head_dim_kpe: 64, q_dtype, kv_dtype, out_dtype, causal: true };
    let plan = MlaPlan::new(exec, problem, &qo, table.lens(), Split::Balanced).unwrap();
    let (ckv, kpe) = (d.normals(DType::BF16, &[16, 64, 512]), d.normals(DType::BF16, &[16, 64, 64]));
    let (q_pe, mut scratch) = (d.normals(DType::BF16, &[64, 16, 64]), plan.scratch());
    in_turn("latent", &[64, 16, 512], &mut |q_nope, out| {
        let (q_nope, q_pe, kv) = (q_nope.view(), q_pe.view(), PagedMla::new(ckv.view(), kpe.view())?);
        let (scratch, out) = (&mut scratch, out.view_mut());
        plan.run(exec, MlaArgs { q_nope, q_pe, kv, table: &table, sm_scale: 0.1, scratch, out, lse: None })
    });
}
