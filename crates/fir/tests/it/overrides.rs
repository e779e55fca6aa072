//! What an executor's override sees, and that the operator runs when it does not want the call.

use std::sync::{Arc, Mutex};

use fir::attention::{BatchArgs, BatchPlan, MlaArgs, MlaPlan, MlaProblem, Problem, Split};
use fir::exec::{Call, Override};
use fir::kv::{Kv, KvLayout, PagedMla, RaggedKv};
use fir::variant::{Params, Variant, causal, soft_cap, standard};
use fir::{DType, Exec, PageTable, PagedKv, Ragged, Result, Tensor, TensorMut, TensorRef, gemm, norm};

/// Writes down what it sees, and takes the calls of one operator, whose outputs become sevens.
#[derive(Debug, Default)]
struct Watch {
    takes: &'static str,
    seen: Mutex<Vec<String>>,
}

impl Override for Watch {
    fn call(&self, call: Call<'_, '_>) -> Result<bool> {
        let show = |(name, shape): (&str, &[usize])| format!("{name}{shape:?}");
        let inputs: Vec<String> = call.inputs.iter().map(|(n, t)| show((n, t.shape()))).collect();
        let outputs: Vec<String> = call.outputs.iter().map(|(n, t)| show((n, t.shape()))).collect();
        let line = format!("{}: {} {:?} -> {}", call.op, inputs.join(" "), call.numbers, outputs.join(" "));
        self.seen.lock().unwrap().push(line);
        if call.op != self.takes {
            return Ok(false);
        }
        for (name, out) in call.outputs.iter_mut() {
            out.reborrow().typed::<f32>("watch", name)?.data().fill(7.0);
        }
        Ok(true)
    }
}

fn watched(takes: &'static str) -> (Arc<Watch>, Exec) {
    let watch = Arc::new(Watch { takes, ..Watch::default() });
    let exec = Exec::cpu().unwrap().with_override(watch.clone());
    (watch, exec)
}

fn took(watch: &Watch) -> Vec<String> {
    std::mem::take(&mut watch.seen.lock().unwrap())
}

#[test]
fn norms_and_products_are_seen_and_taken() {
    let (watch, exec) = watched("gemm");
    let (x, w, plain) = ([1f32, 2.0, 3.0, 4.0], [1f32; 2], Exec::cpu().unwrap());
    let x = TensorRef::new(&x, &[2, 2]).unwrap();
    let weight = TensorRef::new(&w, &[2]).unwrap();
    let (mut got, mut want) = ([0f32; 4], [0f32; 4]);
    for (exec, out) in [(&exec, &mut got), (&plain, &mut want)] {
        norm::rms_norm(exec, x, weight, 1e-6, TensorMut::new(out, &[2, 2]).unwrap()).unwrap();
    }
    assert_eq!(got, want);
    assert_eq!(took(&watch), ["rmsnorm: hidden_states[2, 2] weight[2] [(\"eps\", 1e-6)] -> output[2, 2]"]);
    gemm::gemm(&exec, x, x, TensorMut::new(&mut got, &[2, 2]).unwrap()).unwrap();
    assert_eq!((got, took(&watch)), ([7.0; 4], vec!["gemm: A[2, 2] B[2, 2] [] -> C[2, 2]".to_owned()]));
    let mut residual = [1f32; 4];
    let (a, b) = (TensorMut::new(&mut got, &[2, 2]).unwrap(), TensorMut::new(&mut residual, &[2, 2]).unwrap());
    norm::fused_add_rms_norm(&exec, a, b, weight, 0.0).unwrap();
    assert_eq!(residual, [8.0; 4]);
    let want = "fused_add_rmsnorm: weight[2] [(\"eps\", 0.0)] -> hidden_states[2, 2] residual[2, 2]";
    assert_eq!(took(&watch), [want]);
    // What is refused is not seen, nor are other operators.
    assert!(norm::rms_norm(&exec, x, weight, -1.0, TensorMut::new(&mut got, &[2, 2]).unwrap()).is_err());
    norm::gemma_rms_norm(&exec, x, weight, 0.0, TensorMut::new(&mut got, &[2, 2]).unwrap()).unwrap();
    assert!(took(&watch).is_empty());
}

/// One attention over pages of 4, or over rows; what was seen of it, and what came out.
fn attend(
    takes: &'static str,
    variant: Variant,
    q_lens: &[u32],
    table: Option<&PageTable<'_>>,
) -> (Vec<String>, Tensor) {
    let (watch, exec) = watched(takes);
    let params = if variant.name() == "SoftCap" { Params::new().f32("soft_cap", 30.0) } else { Params::new() };
    let qo = Ragged::from_lens(q_lens).unwrap();
    let kv = fir::testing::Rng::new(1).tensor(DType::F32, &[6, 4, 1, 8]);
    let rows = Ragged::from_lens(&[5, 9]).unwrap();
    let flat = kv.clone().reshaped(&[24, 1, 8]).unwrap();
    let kv = match table {
        Some(table) => Kv::Paged(PagedKv::new(kv.view(), kv.view(), KvLayout::Nhd).unwrap(), table),
        None => Kv::Ragged(RaggedKv::new(flat.view(), flat.view(), &rows).unwrap()),
    };
    let plan =
        BatchPlan::new(&exec, Problem::new(2, 1, 8, DType::F32, variant), &qo, &[5, 9], Split::Balanced).unwrap();
    let q = Tensor::zeros(DType::F32, &[qo.rows(), 2, 8]).unwrap();
    let mut out = Tensor::zeros(DType::F32, &[qo.rows(), 2, 8]).unwrap();
    let mut lse = Tensor::zeros(DType::F32, &[qo.rows(), 2]).unwrap();
    let args = BatchArgs {
        q: q.view(),
        kv,
        params: &params,
        sm_scale: Some(0.5),
        scratch: &mut plan.scratch(),
        out: out.view_mut(),
        lse: Some(lse.view_mut()),
    };
    plan.run(&exec, args).unwrap();
    (took(&watch), out)
}

#[test]
fn attention_is_seen_as_definitions_have_it() {
    let table = PageTable::with_lens(4, 6, vec![0, 2, 5], vec![3, 1, 0, 5, 2], &[5, 9]).unwrap();
    let (seen, out) = attend("gqa_paged_decode", standard(), &[1, 1], Some(&table));
    let index = "kv_indptr[3] kv_indices[5] kv_last_page_len[2] [(\"sm_scale\", 0.5)] -> output";
    let tensors = "k_cache[6, 4, 1, 8] v_cache[6, 4, 1, 8]";
    assert_eq!(seen, [format!("gqa_paged_decode: q[2, 2, 8] {tensors} {index}[2, 2, 8] lse[2, 2]")]);
    assert!(out.as_slice::<f32>().unwrap().iter().all(|x| *x == 7.0));
    let (seen, out) = attend("", causal(), &[3, 1], Some(&table));
    let want = format!("gqa_paged_prefill_causal: q[4, 2, 8] {tensors} qo_indptr[3] {index}[4, 2, 8] lse[4, 2]");
    assert_eq!(seen, [want]);
    assert!(out.as_slice::<f32>().unwrap().iter().any(|x| *x != 0.0 && *x != 7.0));
    let (seen, _) = attend("", causal(), &[1, 1], None);
    let want = "gqa_ragged_prefill_causal: q[2, 2, 8] k[24, 1, 8] v[24, 1, 8] qo_indptr[3] kv_indptr[3] \
        [(\"sm_scale\", 0.5)] -> output[2, 2, 8] lse[2, 2]";
    assert_eq!(seen, [want]);
    // Neither other variants nor slots to spare have a definition.
    assert!(attend("", soft_cap(), &[1, 1], Some(&table)).0.is_empty());
    assert!(attend("", standard(), &[3, 1], Some(&table)).0.is_empty());
    let spare = PageTable::with_lens(4, 6, vec![0, 3, 6], vec![3, 1, 0, 5, 2, 4], &[5, 9]).unwrap();
    assert!(attend("", causal(), &[1, 1], Some(&spare)).0.is_empty());
}

#[test]
fn latent_attention_is_seen() {
    let (watch, exec) = watched("mla_paged_decode");
    let table = PageTable::with_lens(4, 6, vec![0, 2], vec![3, 1], &[5]).unwrap();
    let f32s = |shape: &[usize]| Tensor::zeros(DType::F32, shape).unwrap();
    let (q, pe, ckv, kpe, mut out) =
        (f32s(&[1, 2, 8]), f32s(&[1, 2, 4]), f32s(&[6, 4, 8]), f32s(&[6, 4, 4]), f32s(&[1, 2, 8]));
    let problem = MlaProblem {
        heads: 2,
        head_dim_ckv: 8,
        head_dim_kpe: 4,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
        out_dtype: DType::F32,
        causal: true,
    };
    let plan = MlaPlan::new(&exec, problem, &Ragged::ones(1).unwrap(), &[5], Split::Balanced).unwrap();
    let args = MlaArgs {
        q_nope: q.view(),
        q_pe: pe.view(),
        kv: PagedMla::new(ckv.view(), kpe.view()).unwrap(),
        table: &table,
        sm_scale: 0.25,
        scratch: &mut plan.scratch(),
        out: out.view_mut(),
        lse: None,
    };
    plan.run(&exec, args).unwrap();
    let want = "mla_paged_decode: q_nope[1, 2, 8] q_pe[1, 2, 4] ckv_cache[6, 4, 8] kpe_cache[6, 4, 4] kv_indptr[2] \
        kv_indices[2] kv_last_page_len[1] [(\"sm_scale\", 0.25)] -> output[1, 2, 8]";
    assert_eq!((took(&watch), out.as_slice::<f32>().unwrap()[0]), (vec![want.to_owned()], 7.0));
}
