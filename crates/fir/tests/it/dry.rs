//! The dry lane: everything up to the launch, with no GPU and no compiler. What is launched is a snapshot.

use std::fmt::Write as _;

use fir::exec::{Arch, Gpu};
use fir::{DType, Error, Exec, Result, Tensor, TensorMut, TensorRef, activation, jit, norm};

/// The launches of `work` on an H200 that is not there, each of a kernel that the JIT lane compiles.
fn launches(work: impl FnOnce(&Exec) -> Result<()>) -> String {
    let gpu = Gpu::dry(Arch::HOPPER);
    work(&Exec::Cuda(gpu.clone())).unwrap();
    let (mut text, kernels) = (String::new(), jit::kernels());
    for launch in gpu.launches() {
        assert!(kernels.iter().any(|k| k.name() == launch.kernel), "{} is not in jit::kernels()", launch.kernel);
        writeln!(text, "{launch}").unwrap();
    }
    assert!(gpu.launches().is_empty(), "they are taken once");
    text
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape).unwrap()
}

#[test]
fn norms_are_launched_by_the_length_of_their_rows() {
    let mut text = String::new();
    for (dtype, shape) in [
        (DType::BF16, [64, 4096]),
        (DType::BF16, [300, 8192]),
        (DType::F16, [1000, 128]),
        (DType::F32, [3, 30_000]),
        // Rows that do not end on 16 bytes.
        (DType::BF16, [3, 515]),
    ] {
        let (x, w, mut out) = (zeros(dtype, &shape), zeros(dtype, &shape[1..]), zeros(dtype, &shape));
        writeln!(text, "# {dtype} {shape:?}").unwrap();
        text += &launches(|exec| norm::rms_norm(exec, x.view(), w.view(), 1e-6, out.view_mut()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn every_norm_passes_its_arguments_on() {
    let (x, mut a, mut b) =
        (zeros(DType::BF16, &[6, 256]), zeros(DType::BF16, &[6, 256]), zeros(DType::BF16, &[6, 256]));
    let (w, g, mut q) = (zeros(DType::F32, &[256]), zeros(DType::BF16, &[256]), zeros(DType::E4M3, &[6, 256]));
    let (x, w, g, eps) = (x.view(), w.view(), g.view(), 1e-6);
    let text = launches(|exec| {
        norm::gemma_rms_norm(exec, x, w, eps, a.view_mut())?;
        norm::fused_add_rms_norm(exec, a.view_mut(), b.view_mut(), g, eps)?;
        norm::layer_norm(exec, x, g, w, eps, a.view_mut())?;
        norm::fused_add_rms_norm_quant(exec, x, b.view_mut(), g, 0.25, eps, q.view_mut())?;
        norm::layer_norm_quant(exec, x, g, w, 0.5, eps, q.view_mut())?;
        // Queries and keys in one tensor of three heads and two, with gaps.
        let (mut one, mut two) = (vec![0f32; 5 * 400], vec![0f32; 5 * 400]);
        let heads = TensorMut::strided(&mut one, &[5, 3, 64], &[400, 64, 1])?;
        let keys = TensorMut::strided(&mut two, &[5, 2, 64], &[400, 80, 1])?;
        let w = w.slice(0, 0..64)?;
        norm::qk_rms_norm(exec, heads, keys, w, w, eps)
    });
    insta::assert_snapshot!(text);
}

#[test]
fn activations_are_cut_into_parts() {
    let mut text = String::new();
    for (dtype, shape) in
        [(DType::BF16, [64, 8192]), (DType::F32, [7, 16]), (DType::F16, [2, 28_672]), (DType::BF16, [2, 30])]
    {
        let (x, mut out) = (zeros(dtype, &shape), zeros(dtype, &[shape[0], shape[1] / 2]));
        writeln!(text, "# {dtype} {shape:?}").unwrap();
        text += &launches(|exec| activation::silu_and_mul(exec, x.view(), out.view_mut()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn tensors_without_elements_launch_nothing() {
    for shape in [[0, 8], [3, 0], [0, 0], [1 << 50, 0]] {
        let (x, w, mut out) = (zeros(DType::F16, &shape), zeros(DType::F16, &shape[1..]), zeros(DType::F16, &shape));
        assert_eq!(launches(|exec| norm::rms_norm(exec, x.view(), w.view(), 0.0, out.view_mut())), "");
        assert_eq!(launches(|exec| norm::layer_norm(exec, x.view(), w.view(), w.view(), 0.0, out.view_mut())), "");
        let mut half = zeros(DType::F16, &[shape[0], shape[1] / 2]);
        assert_eq!(launches(|exec| activation::gelu_and_mul(exec, x.view(), half.view_mut())), "");
    }
}

#[test]
fn refusals_are_the_same_as_on_the_cpu() {
    let data = vec![0f32; 4000];
    let exec = Exec::dry(Arch::HOPPER);
    let x = TensorRef::strided(&data, &[4, 8], &[100, 2]).unwrap();
    let (w, mut out) = (zeros(DType::F32, &[8]), zeros(DType::F32, &[4, 8]));
    let error = norm::rms_norm(&exec, x, w.view(), 0.0, out.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "rms_norm: layout of `x`: stride 2 of the last axis, expected 1");
    let ints = zeros(DType::I32, &[8]);
    let error = norm::rms_norm(&exec, out.clone().view(), ints.view(), 0.0, out.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "rms_norm: `weight` is i32, expected f32, f16 or bf16");
    let x = zeros(DType::I32, &[2, 8]);
    let error = activation::silu_and_mul(&exec, x.view(), zeros(DType::I32, &[2, 4]).view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "silu_and_mul: `x` is i32, expected f32, f16 or bf16");
    let error = fir::topk::top_k(
        &exec,
        out.view(),
        fir::topk::TopKOrder::Value,
        zeros(DType::F32, &[4, 2]).view_mut(),
        zeros(DType::I32, &[4, 2]).view_mut(),
    );
    assert!(matches!(error, Err(Error::Unsupported { op: "top_k", .. })), "{error:?}");
}

#[test]
fn a_missing_device_is_explained() {
    // Where there is one, this says nothing.
    if let Err(e) = Exec::cuda(0) {
        let text = e.to_string();
        assert!(text.contains("driver") || text.contains("NVRTC") || text.contains("sm_80"), "{text}");
    }
    assert!(zeros(DType::F32, &[4]).to_device(&Gpu::dry(Arch::HOPPER)).is_err());
}
