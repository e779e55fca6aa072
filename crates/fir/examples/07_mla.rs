//! Multi-head latent attention: all heads share one compressed vector per token, which is key and value at once.

use fir::attention::{MlaArgs, MlaPlan, MlaProblem, Split};
use fir::kv::{PageTable, PagedMla};
use fir::{DType, Exec, Ragged, Tensor};

fn main() -> fir::Result<()> {
    let exec = Exec::cpu()?;
    let (pages, page_size, heads, ckv_dim, kpe_dim) = (3, 4, 16, 64, 8);

    // One request of 10 tokens in pages 2, 0 and 1; a decode.
    let table = PageTable::with_lens(page_size, pages, &[0, 3][..], &[2, 0, 1][..], &[10])?;

    // The compressed vector of position p points along axis p. All rotary parts are alike, but for position 7.
    let mut ckv = vec![0f32; pages * page_size * ckv_dim];
    let mut kpe = vec![0f32; pages * page_size * kpe_dim];
    for p in 0..10 {
        let (page, slot) = table.locate(0, p).expect("a token of the request");
        ckv[(page * page_size + slot) * ckv_dim + p] = 8.0;
        kpe[(page * page_size + slot) * kpe_dim] = if p == 7 { 8.0 } else { 0.0 };
    }
    let ckv = Tensor::from_f32(DType::BF16, &ckv, &[pages, page_size, ckv_dim])?;
    let kpe = Tensor::from_f32(DType::BF16, &kpe, &[pages, page_size, kpe_dim])?;

    // Even heads ask for position 3 by the compressed part, odd ones for position 7 by the rotary part.
    let (mut q_nope, mut q_pe) = (vec![0f32; heads * ckv_dim], vec![0f32; heads * kpe_dim]);
    for h in 0..heads {
        if h % 2 == 0 { q_nope[h * ckv_dim + 3] = 8.0 } else { q_pe[h * kpe_dim] = 8.0 }
    }
    let q_nope = Tensor::from_f32(DType::BF16, &q_nope, &[1, heads, ckv_dim])?;
    let q_pe = Tensor::from_f32(DType::BF16, &q_pe, &[1, heads, kpe_dim])?;

    let (q_dtype, kv_dtype, out_dtype) = (DType::BF16, DType::BF16, DType::BF16);
    let (head_dim_ckv, head_dim_kpe) = (ckv_dim, kpe_dim);
    let problem = MlaProblem { heads, head_dim_ckv, head_dim_kpe, q_dtype, kv_dtype, out_dtype, causal: true };
    let plan = MlaPlan::new(&exec, problem, &Ragged::ones(1)?, table.lens(), Split::Balanced)?;
    let mut out = Tensor::zeros(DType::BF16, &[1, heads, ckv_dim])?;
    let args = MlaArgs {
        q_nope: q_nope.view(),
        q_pe: q_pe.view(),
        kv: PagedMla::new(ckv.view(), kpe.view())?,
        table: &table,
        sm_scale: 1.0, // the model's: it belongs to the head dim before compression, which nobody here knows
        scratch: &mut plan.scratch(),
        out: out.view_mut(),
        lse: None,
    };
    plan.run(&exec, args)?;

    // A head's output is the compressed vector it asked for.
    for (h, row) in out.view().to_f32_vec()?.chunks(ckv_dim).enumerate() {
        let wanted = if h % 2 == 0 { 3 } else { 7 };
        let off = |i: usize| row[i] - if i == wanted { 8.0 } else { 0.0 };
        assert!((0..ckv_dim).all(|i| off(i).abs() < 1e-6), "head {h}: {row:?}");
    }
    println!("{heads} heads found their positions");
    Ok(())
}
