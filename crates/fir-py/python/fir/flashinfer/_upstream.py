"""The public names of FlashInfer 0.6.17, module by module, and which of them only Blackwell GPUs have."""

BLACKWELL = {
    "prefill": "fmha_v2_prefill_deepseek fmha_v2_prefill_sm120 trtllm_sage_attention_quantize",
    "mla": """batch_decode_sparse_mla_dsv4 convert_compressed_page_aligned_sparse_indices_to_hca_metadata
        trtllm_batch_decode_sparse_mla_dsv4""",
    "activation": "silu_and_mul_scaled_nvfp4_experts_quantize",
    "norm": "fused_rmsnorm_silu",
    "topk": "top_k_varlen",
    "quantization": """block_scale_interleave e2m1_and_ufp8sf_scale_to_float fp4_quantize mxfp8_grouped_quantize
        nvfp4_batched_quantize nvfp4_block_scale_interleave nvfp4_quantize nvfp4_quantize_paged_kv_cache
        scaled_fp4_grouped_quantize shuffle_matrix_a shuffle_matrix_sf_a silu_and_mul_nvfp4_quantize""",
    "gemm": """batch_deepgemm_fp8_nt_groupwise bmm_mxfp8 gemm_fp8_nt_blockscaled gemm_fp8_nt_groupwise
        group_deepgemm_fp8_nt_groupwise group_gemm_fp8_nt_groupwise group_gemm_mxfp4_nt_groupwise
        group_gemm_mxfp8_mxfp4_nt_groupwise group_gemm_nvfp4_nt_groupwise grouped_mm_fp4 grouped_mm_mxfp8
        mm_M1_16_K6144_N256 mm_M1_16_K7168_N128 mm_M1_16_K7168_N256 mm_bf16_fp4 mm_fp4 mm_fp8 mm_mxfp8
        mm_nvfp4_svdquant nvfp4_quantize_smooth prepare_bf16_fp4_weights prepare_low_latency_gemm_weights
        svdquant_linear tgv_gemm_sm100 trtllm_low_latency_gemm""",
    "fused_moe": "TrtllmGenRoutingResult trtllm_gen_routing",
}

OTHERS = {
    "decode": """BatchDecodeMlaWithPagedKVCacheWrapper BatchDecodeWithPagedKVCacheWrapper
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper cudnn_batch_decode_with_kv_cache fast_decode_plan single_decode_with_kv_cache
        single_decode_with_kv_cache_with_jit_module trtllm_batch_decode_with_kv_cache xqa_batch_decode_with_kv_cache""",
    "prefill": """BatchPrefillWithPagedKVCacheWrapper BatchPrefillWithRaggedKVCacheWrapper
        cudnn_batch_prefill_with_kv_cache fmha_varlen single_prefill_with_kv_cache single_prefill_with_kv_cache_return_lse
        single_prefill_with_kv_cache_with_jit_module trtllm_batch_context_with_kv_cache trtllm_fmha_v2_prefill
        trtllm_ragged_attention_deepseek""",
    "attention": "BatchAttention BatchAttentionWithAttentionSinkWrapper",
    "cascade": """BatchDecodeWithSharedPrefixPagedKVCacheWrapper BatchPrefillWithSharedPrefixPagedKVCacheWrapper
        MultiLevelCascadeAttentionWrapper merge_state merge_state_in_place merge_states""",
    "mla": """BatchMLAPagedAttentionWrapper trtllm_batch_decode_with_kv_cache_mla xqa_batch_decode_with_kv_cache_mla""",
    "sparse": "BlockSparseAttentionWrapper VariableBlockSparseAttentionWrapper convert_bsr_mask_layout",
    "page": """append_paged_kv_cache append_paged_mla_kv_cache get_batch_indices_positions get_seq_lens
        nvfp4_quantize_append_paged_kv_cache nvfp4_quantize_append_paged_kv_cache_with_slot_mapping""",
    "pod": "BatchPODWithPagedKVCacheWrapper PODWithPagedKVCacheWrapper",
    "rope": """apply_llama31_rope apply_llama31_rope_inplace apply_llama31_rope_pos_ids
        apply_llama31_rope_pos_ids_inplace apply_rope apply_rope_inplace apply_rope_pos_ids apply_rope_pos_ids_inplace
        apply_rope_with_cos_sin_cache apply_rope_with_cos_sin_cache_inplace mla_rope_quantize_fp8 rope_quantize_fp8
        rope_quantize_fp8_append_paged_kv_cache""",
    "norm": """fused_add_rmsnorm fused_add_rmsnorm_quant fused_dit_gate_residual_layernorm_gamma_beta
        fused_dit_gate_residual_layernorm_scale_shift fused_dit_residual_layernorm_scale_shift fused_qk_rmsnorm_rope
        gemma_fused_add_rmsnorm gemma_rmsnorm layernorm layernorm_quant rmsnorm rmsnorm_quant""",
    "activation": "gelu_and_mul gelu_tanh_and_mul silu_and_mul",
    "sampling": """chain_speculative_sampling get_seed_and_offset min_p_sampling_from_probs sampling_from_logits
        sampling_from_probs softmax top_k_mask_logits top_k_renorm_prob top_k_renorm_probs top_k_sampling_from_probs
        top_k_top_p_sampling_from_logits top_k_top_p_sampling_from_probs top_p_renorm_prob top_p_renorm_probs
        top_p_sampling_from_probs""",
    "topk": """TopKTieBreak can_implement_filtered_topk top_k top_k_page_table_transform top_k_ragged_transform topk""",
    "logits_processor": """CompileError Compiler FusionRule LegalizationError LogitsPipe LogitsProcessor MinP Op
        ParameterizedOp Sample Softmax TaggedTensor Temperature TensorType TopK TopP compile_pipeline
        legalize_processors""",
    "quantization": """mxfp4_dequantize mxfp4_dequantize_host mxfp4_quantize mxfp8_dequantize_host mxfp8_quantize
        nvfp4_kv_dequantize nvfp4_kv_dequantize_paged nvfp4_kv_quantize packbits per_token_group_quant_8bit
        segment_packbits""",
    "gemm": """SegmentGEMMWrapper bmm_bf16 bmm_fp8 fp8_blockscale_gemm_sm90 grouped_mm_bf16 grouped_mm_fp8 mm_bf16
        tinygemm_bf16""",
    "fused_moe": """alloc_scratchpad bgmv_moe bgmv_moe_expand bgmv_moe_shrink cutlass_fused_moe
        cutlass_fused_moe_workspace_size fill_w_ptr fused_topk_deepseek get_scratchpad_size_bytes has_bgmv_moe
        has_monomoe hash_topk interleave_for_tma_wgmma_up max_num_padded_tokens mono_moe""",
    "utils": """FP4Tensor MaskMode PosEncodingMode TensorLayout determine_attention_backend device_support_pdl
        get_alibi_slopes get_compute_capability is_fa3_backend_supported is_sm90a_supported
        next_positive_power_of_2 BackendSupportedError GPUArchitectureError LibraryError""",
    "concat_ops": "concat_mla_k",
    "jit": """JitSpec MissingJITCacheError build_jit_specs check_cuda_arch clear_cache_dir gen_batch_attention_module
        gen_batch_decode_mla_module gen_batch_decode_module gen_batch_mla_module gen_batch_pod_module
        gen_batch_prefill_attention_sink_module gen_batch_prefill_module gen_customize_batch_attention_module
        gen_customize_batch_decode_module gen_customize_batch_pod_module gen_customize_batch_prefill_module
        gen_customize_pod_module gen_customize_single_decode_module gen_customize_single_prefill_module
        gen_fmha_v2_module gen_jit_spec gen_pod_module gen_single_decode_module gen_single_prefill_module
        get_batch_attention_uri get_batch_decode_mla_uri get_batch_decode_uri get_batch_mla_uri
        get_batch_prefill_attention_sink_uri get_batch_prefill_uri get_pod_uri get_single_decode_uri
        get_single_prefill_uri jit_spec_registry""",
    "testing": """aggregate_gpu_time_across_ranks attention_flops attention_flops_with_actual_seq_lens
        attention_tb_per_sec attention_tb_per_sec_with_actual_seq_lens attention_tflops_per_sec
        attention_tflops_per_sec_with_actual_seq_lens bench_gpu_time bench_gpu_time_with_cuda_event
        bench_gpu_time_with_cudagraph bench_gpu_time_with_cupti bench_kineto calculate_rotation_count count_bytes
        dequantize_fp8 empty_suppress get_l2_cache_size per_block_cast_to_fp8 per_token_cast_to_fp8 quantize_fp8 set_seed
        sleep_after_kernel_run suppress_stdout_stderr""",
    "fi_trace": "fi_trace",
}


def blackwell_only(module: str) -> list[str]:
    """Names of the module that only Blackwell GPUs have."""
    return BLACKWELL.get(module, "").split()
