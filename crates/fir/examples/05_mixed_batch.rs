//! A mixed batch: a prompt, a chunk of a longer one and a decode in one plan, over keys and values that lie one
//! request after another.

use fir::attention::{BatchArgs, BatchPlan, Problem, Split};
use fir::kv::{Kv, RaggedKv};
use fir::variant::{self, Params};
use fir::{DType, Exec, Ragged, TensorMut, TensorRef};

const QO_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;

fn main() -> fir::Result<()> {
    let exec = Exec::cpu()?;
    let wave = |step: f32, n: usize| (0..n).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();

    // A prompt of 5 tokens; the last 3 of a prompt of 9; the newest of 7. Lengths of KV count the query tokens.
    let (qo, kv) = (Ragged::from_lens(&[5, 3, 1])?, Ragged::from_lens(&[5, 9, 7])?);
    let q = wave(0.9, qo.rows() * QO_HEADS * DIM);
    let (k, v) = (wave(0.4, kv.rows() * KV_HEADS * DIM), wave(0.6, kv.rows() * KV_HEADS * DIM));
    let kv_shape = [kv.rows(), KV_HEADS, DIM];
    let cache = RaggedKv::new(TensorRef::new(&k, &kv_shape)?, TensorRef::new(&v, &kv_shape)?, &kv)?;
    let (mut out, mut lse) = (vec![0f32; q.len()], vec![0f32; qo.rows() * QO_HEADS]);
    let shape = [qo.rows(), QO_HEADS, DIM];

    // `Fixed` cuts every request at the same positions whatever is beside it: bits do not depend on the batch.
    let problem = Problem::new(QO_HEADS, KV_HEADS, DIM, DType::F32, variant::causal());
    let mut plan = BatchPlan::new(&exec, problem, &qo, kv.lens(), Split::Fixed(256))?;
    let args = BatchArgs {
        q: TensorRef::new(&q, &shape)?,
        kv: Kv::Ragged(cache),
        params: &Params::new(),
        sm_scale: None,
        scratch: &mut plan.scratch(),
        out: TensorMut::new(&mut out, &shape)?,
        lse: Some(TensorMut::new(&mut lse, &shape[..2])?),
    };
    plan.run(&exec, args)?;
    // The first token of a prompt sees itself alone, so it gets its own value; query heads 0 and 1 read KV head 0.
    assert_eq!(out[..DIM], v[..DIM]);
    assert_eq!(out[DIM..2 * DIM], v[..DIM]);

    // The prompt alone, in the same plan's memory, gives the same bits.
    let (qo, kv) = (Ragged::from_lens(&[5])?, Ragged::from_lens(&[5])?);
    plan.refill(&qo, kv.lens())?;
    let cache = RaggedKv::new(TensorRef::new(&k, &kv_shape)?, TensorRef::new(&v, &kv_shape)?, &kv)?;
    let (kv, shape, mut alone) = (Kv::Ragged(cache), [5, QO_HEADS, DIM], [0f32; 5 * QO_HEADS * DIM]);
    let (q, scratch) = (TensorRef::new(&q[..alone.len()], &shape)?, &mut plan.scratch());
    let (params, out_alone) = (&Params::new(), TensorMut::new(&mut alone, &shape)?);
    plan.run(&exec, BatchArgs { q, kv, params, sm_scale: None, scratch, out: out_alone, lse: None })?;
    println!("log-sum-exp of the prompt's last token: {:.3?}", &lse[4 * QO_HEADS..5 * QO_HEADS]);
    assert_eq!(alone, out[..alone.len()]);
    Ok(())
}
