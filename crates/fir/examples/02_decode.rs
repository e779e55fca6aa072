//! Decode: one new token per request, over a paged cache.

use fir::attention::{DecodeArgs, DecodePlan, Problem, Split};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv};
use fir::variant::{self, Params};
use fir::{DType, Exec, TensorMut, TensorRef};

const PAGES: usize = 8;
const PAGE_SIZE: usize = 4;
const DIM: usize = 8;

fn main() -> fir::Result<()> {
    let exec = Exec::cpu()?;

    // Request 0 has 6 tokens in pages 5 and 2, request 1 has 3 in page 7. Ids are checked here, once.
    let table = PageTable::with_lens(PAGE_SIZE, PAGES, &[0, 2, 3][..], &[5, 2, 7][..], &[6, 3])?;

    // One KV head. The key of position p points along axis p, and its value is p everywhere.
    let shape = [PAGES, PAGE_SIZE, 1, DIM];
    let (mut k, mut v) = (vec![0f32; shape.iter().product()], vec![0f32; shape.iter().product()]);
    for (r, &len) in table.lens().iter().enumerate() {
        for p in 0..len as usize {
            let (page, slot) = table.locate(r, p).expect("a token of the request");
            let row = (page * PAGE_SIZE + slot) * DIM;
            k[row + p] = 20.0;
            v[row..row + DIM].fill(p as f32);
        }
    }
    let cache = PagedKv::new(TensorRef::new(&k, &shape)?, TensorRef::new(&v, &shape)?, KvLayout::Nhd)?;

    // Two query heads share the KV head, and each asks for one position.
    let wanted = [4, 0, 2, 1];
    let (mut q, mut out) = ([0f32; 4 * DIM], [0f32; 4 * DIM]);
    for (row, p) in wanted.into_iter().enumerate() {
        q[row * DIM + p] = 20.0;
    }

    // The plan cuts the work over the workers. It serves every layer of the step; only the tensors change.
    let problem = Problem::new(2, 1, DIM, DType::F32, variant::causal());
    let plan = DecodePlan::new(&exec, problem, table.lens(), Split::Balanced)?;
    plan.run(
        &exec,
        DecodeArgs {
            q: TensorRef::new(&q, &[2, 2, DIM])?,
            kv: Kv::Paged(cache, &table),
            params: &Params::new(),
            sm_scale: None,
            scratch: &mut plan.scratch(),
            out: TensorMut::new(&mut out, &[2, 2, DIM])?,
            lse: None,
        },
    )?;
    let found: Vec<f32> = out.chunks(DIM).map(|row| row[0]).collect();
    println!("asked for positions {wanted:?}, found {found:?}");
    assert_eq!(found, wanted.map(|p| p as f32));
    Ok(())
}
