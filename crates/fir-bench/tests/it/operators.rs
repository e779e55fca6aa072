//! The kernel library's operators as solutions of real definitions, on the CPU.

use fir_bench::TraceSet;
use fir_bench::benchmark::{Event, run};
use fir_bench::ops::solution_for;
use fir_bench::schema::{Definition, Status, Trace};
use fir_bench::synth::synthesize;

use crate::support;

/// Whether a definition is looked at: the usual ones, with `FIR_BENCH_ALL=1` all, with a name of an op type all of that.
fn is_wanted(all: &Option<String>, definition: &Definition, usual: &[&str]) -> bool {
    match all.as_deref() {
        None => usual.contains(&definition.name()),
        Some(op_type) => op_type == "1" || op_type == definition.op_type(),
    }
}

/// Definitions that are benchmarked in every run; `FIR_BENCH_ALL=1` takes all that fit in memory.
const USUAL: [&str; 13] = [
    "gemm_n128_k2048",
    "gqa_paged_decode_h32_kv8_d128_ps1",
    "gqa_paged_decode_h32_kv4_d128_ps64",
    "gqa_paged_prefill_causal_h24_kv8_d128_ps1",
    "gqa_paged_prefill_causal_h16_kv1_d128_ps64",
    "gqa_ragged_prefill_causal_h32_kv8_d128",
    "mla_paged_decode_h16_ckv512_kpe64_ps64",
    "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
    "rmsnorm_h1536",
    "fused_add_rmsnorm_h2048",
    "rope_with_cos_sin_cache_neox_style_d128_rd64",
    "top_k_top_p_sampling_from_probs_v128256",
    "top_p_sampling_from_probs_v128256",
];

#[test]
fn every_operator_passes_against_the_references_of_real_definitions() {
    let (Some(data), Some(mut config)) = (support::real_data(), support::quick()) else { return };
    let all = std::env::var("FIR_BENCH_ALL").ok();
    // On a GPU, if `FIR_BENCH_DEVICE` names one.
    config.device = std::env::var("FIR_BENCH_DEVICE").unwrap_or(config.device);
    let from = TraceSet::load(&data).unwrap();
    let mut set = TraceSet::new(support::folder("operators"));
    let mut expected = 0;
    for definition in from.definitions().filter(|d| is_wanted(&all, d, &USUAL)) {
        let Some(solution) = solution_for(definition).unwrap() else { continue };
        let workload = synthesize(set.root(), definition, 1).unwrap();
        let elements =
            |(_, spec): &(String, _)| definition.shape(spec, workload.axes()).unwrap().iter().product::<usize>();
        if definition.inputs().iter().map(elements).sum::<usize>() > 300 << 20 {
            eprintln!("skipped: {} is too large for a test", definition.name());
            continue;
        }
        set.add_definition(definition.clone()).unwrap();
        set.add_solution(solution).unwrap();
        set.add_trace(Trace::of_workload(definition.name(), &workload).unwrap()).unwrap();
        expected += 1;
    }
    let mut faults = Vec::new();
    let traces = run(&mut set, &config, &mut |event| match event {
        Event::Skipped { definition, why, .. } => faults.push(format!("{definition}: skipped: {why}")),
        Event::Done { trace, .. } => {
            let e = trace.evaluation().unwrap();
            if e.status() != Status::Passed {
                faults.push(format!(
                    "{}: {} {:?}: {}",
                    trace.definition(),
                    e.status().name(),
                    e.correctness(),
                    e.log()
                ));
            } else if all.is_some() || config.device != "cpu" {
                let (c, p) = trace.passed().unwrap();
                eprintln!(
                    "{}: {:.4} ms, torch {:.4} ms, error {:.1e}",
                    trace.definition(),
                    p.latency_ms,
                    p.reference_latency_ms,
                    c.max_absolute_error
                );
            }
        }
        _ => {}
    });
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
    assert_eq!(traces.unwrap().len(), expected);
}

/// A real mixture of experts, with fewer and smaller experts: what its reference has of their sizes is replaced too.
fn smaller(definition: &Definition) -> Definition {
    let mut value: serde_json::Value = serde_json::from_str(definition.to_json()).unwrap();
    let mut text = value["reference"].as_str().unwrap().to_owned();
    let split = value["axes"].get("num_experts").is_some() && value["axes"].get("num_local_experts").is_some();
    let small = [
        ("num_experts", 16, &["E = ", "E_global = ", "E_global == "][..]),
        ("num_local_experts", if split { 8 } else { 16 }, &["E = ", "E_local == "]),
        ("hidden_size", 256, &["H = ", "H == "]),
        ("intermediate_size", 128, &["I = ", "I == "]),
        ("gemm1_out_size", 256, &[]),
        ("num_hidden_blocks", 2, &[]),
        ("num_intermediate_blocks", 1, &[]),
        ("num_gemm1_out_blocks", 2, &[]),
    ];
    for (axis, n, written) in small {
        let Some(was) = value["axes"].get(axis).map(|a| a["value"].clone()) else { continue };
        value["axes"][axis]["value"] = n.into();
        for before in written {
            let (old, new) = (format!("{before}{was}"), format!("{before}{n}"));
            // Not where it begins a longer number.
            let whole = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_digit());
            let mut parts = text.split(&old);
            let first = parts.next().unwrap().to_owned();
            text = parts.fold(first, |all, rest| all + if whole(rest) { &new } else { &old } + rest);
        }
    }
    value["reference"] = text.into();
    Definition::from_value(&value).unwrap()
}

#[test]
fn mixtures_of_experts_pass_at_a_smaller_size() {
    let (Some(data), Some(config)) = (support::real_data(), support::quick()) else { return };
    let from = TraceSet::load(&data).unwrap();
    let mut set = TraceSet::new(support::folder("experts"));
    for definition in from.definitions().filter(|d| d.op_type() == "moe") {
        let definition = smaller(definition);
        let workload = synthesize(set.root(), &definition, 2).unwrap();
        let name = definition.name().to_owned();
        set.add_solution(solution_for(&definition).unwrap().unwrap()).unwrap();
        set.add_definition(definition).unwrap();
        set.add_trace(Trace::of_workload(&name, &workload).unwrap()).unwrap();
    }
    let results = support::results(&mut set, &config);
    assert!(results.len() > 10, "{}", results.len());
    for (name, trace) in results {
        let e = trace.evaluation().unwrap();
        assert_eq!(e.status(), Status::Passed, "{name}: {:?} {}", e.correctness(), e.log());
    }
}

/// Definitions whose references are run in every test; `FIR_BENCH_ALL=1` takes all that fit in memory.
const REFERENCES: [&str; 7] = [
    "gdn_decode_qk4_v8_d128_k_last",
    "gdn_prefill_qk4_v8_d128_k_last",
    "gdn_mtp_qk8_v16_d128_k_last",
    "mamba_ssu_decode_h64_d64_s128_ng4",
    "mla_ragged_prefill_causal_h8_qk192_vo128",
    "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64",
    "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64",
];

#[test]
fn references_of_real_definitions_run_and_agree_with_themselves() {
    let (Some(data), Some(mut config)) = (support::real_data(), support::quick()) else { return };
    let all = std::env::var("FIR_BENCH_ALL").ok();
    config.profile_baseline = false;
    (config.evaluating.warmup_runs, config.evaluating.iterations) = (Some(0), Some(1));
    let from = TraceSet::load(&data).unwrap();
    let mut set = TraceSet::new(support::folder("references"));
    for definition in from.definitions().filter(|d| is_wanted(&all, d, &REFERENCES)) {
        // Samplers do not agree with themselves.
        if definition.op_type() == "sampling" {
            continue;
        }
        let workload = synthesize(set.root(), definition, 3).unwrap();
        let bytes = |(_, spec): &(String, fir_bench::schema::TensorSpec)| {
            definition.shape(spec, workload.axes()).unwrap().iter().product::<usize>() * spec.dtype.bytes()
        };
        let total = definition.inputs().iter().map(bytes).sum::<usize>();
        if total > 700 << 20 {
            eprintln!("skipped: {} has {} MiB of inputs", definition.name(), total >> 20);
            continue;
        }
        let mut value: serde_json::Value =
            serde_json::from_str(fir_bench::benchmark::reference_solution(definition).unwrap().to_json()).unwrap();
        value["name"] = format!("again_{}", definition.name()).into();
        set.add_definition(definition.clone()).unwrap();
        set.add_solution(fir_bench::schema::Solution::from_value(&value).unwrap()).unwrap();
        set.add_trace(Trace::of_workload(definition.name(), &workload).unwrap()).unwrap();
    }
    let count = set.definitions().count();
    let mut faults = Vec::new();
    let traces = run(&mut set, &config, &mut |event| match event {
        Event::Skipped { definition, why, .. } => faults.push(format!("{definition}: skipped: {why}")),
        Event::Done { trace, .. } => {
            let e = trace.evaluation().unwrap();
            if e.status() != Status::Passed {
                faults.push(format!("{}: {} {:?} {}", trace.definition(), e.status().name(), e.correctness(), e.log()));
            }
        }
        _ => {}
    });
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
    eprintln!("{count} references ran");
    assert_eq!(traces.unwrap().len(), count);
}
