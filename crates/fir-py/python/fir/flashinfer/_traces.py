"""What each operator is, for :mod:`fir.flashinfer.fi_trace`: its axes (``*``: fixed by the model), tensors, and a reference
in torch. References are text that others run; nothing here runs them."""

from __future__ import annotations

TRACES: dict[str, dict] = {}

_HEAD = "import math\nimport torch\nimport torch.nn.functional as F\n\n\n"


def _trace(api, op_type, name, description, inputs, outputs, reference, tags=()) -> None:
    """``inputs``: ``name`` or ``name=argument``, then its axes, ``:dtype`` where a call does not give it."""
    parsed = {}
    for line in inputs:
        left, _, dtype = line.partition(":")
        name_, shape = left.partition("[")[::2]
        name_, _, source = name_.partition("=")
        parsed[name_] = (source or name_, shape.rstrip("]") if shape else None, dtype or None)
    results = {}
    for line in outputs:
        left, dtype = line.split(":")
        name_, shape = left.partition("[")[::2]
        results[name_] = (shape.rstrip("]"), dtype)
    TRACES[api] = dict(op_type=op_type, name=name, description=description, inputs=parsed, outputs=results, tags=list(tags),
                       reference=_HEAD + reference.strip() + "\n")


_RMS = "x = {x}.float()\n    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * {w}"

for _name, _weight in (("rmsnorm", "weight.float()"), ("gemma_rmsnorm", "(1 + weight.float())")):
    _trace(f"norm.{_name}", "rmsnorm", f"{_name}_h{{hidden_size}}", "Root mean square norm of rows.",
           ("hidden_states=input[batch_size hidden_size*]", "weight[hidden_size*]"),
           ("output[batch_size hidden_size]:hidden_states",),
           f"def run(hidden_states, weight, eps=1e-6):\n    {_RMS.format(x='hidden_states', w=_weight)}\n"
           "    return y.to(hidden_states.dtype)")
for _name, _weight in (("fused_add_rmsnorm", "weight.float()"), ("gemma_fused_add_rmsnorm", "(1 + weight.float())")):
    _trace(f"norm.{_name}", "rmsnorm", f"{_name}_h{{hidden_size}}", "Residual sum, and its root mean square norm.",
           ("hidden_states=input[batch_size hidden_size*]", "residual[batch_size hidden_size*]", "weight[hidden_size*]"),
           ("output[batch_size hidden_size]:hidden_states", "residual[batch_size hidden_size]:residual"),
           "def run(hidden_states, residual, weight, eps=1e-6):\n    total = hidden_states.float() + residual.float()\n"
           f"    {_RMS.format(x='total', w=_weight)}\n    return y.to(hidden_states.dtype), total.to(residual.dtype)")
_trace("norm.layernorm", "layernorm", "layernorm_h{hidden_size}", "Layer norm of rows.",
       ("input[batch_size hidden_size*]", "gemma[hidden_size*]", "beta[hidden_size*]"),
       ("output[batch_size hidden_size]:input",),
       "def run(input, gemma, beta, eps=1e-6):\n    y = F.layer_norm(input.float(), input.shape[-1:], gemma.float(), "
       "beta.float(), eps)\n    return y.to(input.dtype)")

for _name, _act in (("silu_and_mul", "F.silu(a)"), ("gelu_and_mul", "F.gelu(a)"),
                    ("gelu_tanh_and_mul", "F.gelu(a, approximate='tanh')")):
    _trace(f"activation.{_name}", "activation", f"{_name}_h{{two_hidden}}", "A gate's function times the other half.",
           ("input[num_tokens two_hidden*]",), ("output[num_tokens hidden]:input",),
           f"def run(input):\n    a, b = input.float().chunk(2, -1)\n    return ({_act} * b).to(input.dtype)")

_ROTATE = """
def rotate(x, angles, interleave):
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleave else x.float().chunk(2, -1)
    a, b = a.float(), b.float()
    first, second = a * c - b * s, b * c + a * s
    y = torch.stack((first, second), -1).flatten(-2) if interleave else torch.cat((first, second), -1)
    return y.to(x.dtype)
"""
_QK = ("q[nnz num_q_heads* head_dim*]", "k[nnz num_k_heads* head_dim*]")
_QK_OUT = ("q_out[nnz num_q_heads head_dim]:q", "k_out[nnz num_k_heads head_dim]:k")
_PLACES = {
    "": (("indptr[batch_size_plus_1]:int32", "offsets[batch_size]:int32"), "indptr, offsets",
         "    lens = indptr.diff()\n    pos = torch.cat([o + torch.arange(n, device=q.device) for o, n in zip(offsets, lens)])\n"),
    "_pos_ids": (("pos_ids[nnz]:int32",), "pos_ids", "    pos = pos_ids\n"),
}
for _kind in ("", "_llama31"):
    for _way, (_inputs, _args, _pos) in _PLACES.items():
        for _end in ("", "_inplace"):
            _api = f"apply{_kind}_rope{_way}{_end}"
            if _kind:
                _freq = ("    f = theta ** (-torch.arange(0, d, 2, device=q.device) / d)\n"
                         "    smooth = ((f * old / (2 * math.pi) - low) / (high - low)).clamp(0, 1)\n"
                         "    f = (1 - smooth) * f / scale + smooth * f\n")
                _tail = "scale=8.0, theta=5e5, low=1.0, high=4.0, old=8192, interleave=False"
            else:
                _freq = "    f = theta ** (-torch.arange(0, d, 2, device=q.device) / d) / scale\n"
                _tail = "scale=1.0, theta=1e4, interleave=False"
            _trace(f"rope.{_api}", "rope", f"{_kind[1:] + '_' if _kind else ''}rope{_way}{_end}_h{{num_q_heads}}_kv{{num_k_heads}}_d{{head_dim}}",
                   "Rotary position embedding.", (*_QK, *_inputs), _QK_OUT,
                   f"{_ROTATE}\n\ndef run(q, k, {_args}, {_tail}):\n    d = q.shape[-1]\n{_pos}{_freq}"
                   "    angles = pos[:, None].float() * f\n    return rotate(q, angles, interleave), rotate(k, angles, interleave)")

_SCORES = ("logits[batch_size vocab_size*]",)
_PROBS = ("probs[batch_size vocab_size*]",)
_DRAWN = ("samples[batch_size]:int32",)
_CUT = {
    "top_k": "    kth = probs.topk(top_k, -1).values[:, -1:]\n    probs = torch.where(probs >= kth, probs, 0.0)\n",
    "top_p": ("    order = probs.sort(-1, descending=True)\n    before = order.values.cumsum(-1) - order.values\n"
              "    kept = torch.zeros_like(probs).scatter(-1, order.indices, torch.where(before < top_p, order.values, 0.0))\n"
              "    probs = kept\n"),
    "min_p": "    probs = torch.where(probs >= min_p * probs.amax(-1, keepdim=True), probs, 0.0)\n",
}
_DRAW = "    return torch.multinomial(probs, 1).flatten().int()"
_trace("sampling.softmax", "softmax", "softmax_v{vocab_size}", "Probabilities of logits.", _SCORES,
       ("probs[batch_size vocab_size]:float32",),
       "def run(logits, temperature=1.0):\n    return torch.softmax(logits.float() / temperature, -1)")
_trace("sampling.sampling_from_logits", "sampling", "sampling_from_logits_v{vocab_size}", "A class of each row.", _SCORES,
       _DRAWN, f"def run(logits):\n    probs = torch.softmax(logits.float(), -1)\n{_DRAW}")
_trace("sampling.sampling_from_probs", "sampling", "sampling_from_probs_v{vocab_size}", "A class of each row.", _PROBS,
       _DRAWN, f"def run(probs):\n{_DRAW}")
for _name in ("top_k", "top_p", "min_p"):
    _trace(f"sampling.{_name}_sampling_from_probs", "sampling", f"{_name}_sampling_v{{vocab_size}}",
           "A class of what a filter leaves.", (*_PROBS, f"{_name}:{'int32' if _name == 'top_k' else 'float32'}"), _DRAWN,
           f"def run(probs, {_name}):\n{_CUT[_name]}{_DRAW}")
for _name, _of, _first in (("from_logits", _SCORES, "    probs = torch.softmax(logits.float(), -1)\n"), ("from_probs", _PROBS, "")):
    _trace(f"sampling.top_k_top_p_sampling_{_name}", "sampling",
           f"top_k_top_p_sampling{'_from_logits' if _first else ''}_v{{vocab_size}}", "A class of what both filters leave.",
           (*_of, "top_k:int32", "top_p:float32"), _DRAWN,
           f"def run({'logits' if _first else 'probs'}, top_k, top_p):\n{_first}{_CUT['top_k']}"
           f"    probs = probs / probs.sum(-1, keepdim=True)\n{_CUT['top_p']}{_DRAW}")
for _name in ("top_k", "top_p"):
    _trace(f"sampling.{_name}_renorm_probs", "sampling", f"{_name}_renorm_probs_v{{vocab_size}}",
           "What a filter leaves, made to sum to 1.", (*_PROBS, f"{_name}:{'int32' if _name == 'top_k' else 'float32'}"),
           ("renormed[batch_size vocab_size]:float32",),
           f"def run(probs, {_name}):\n{_CUT[_name]}    return probs / probs.sum(-1, keepdim=True)")
_trace("sampling.top_k_mask_logits", "sampling", "top_k_mask_logits_v{vocab_size}", "Logits, -inf for all but the largest.",
       (*_SCORES, "top_k:int32"), ("masked[batch_size vocab_size]:float32",),
       "def run(logits, top_k):\n    kth = logits.topk(top_k, -1).values[:, -1:]\n"
       "    return torch.where(logits >= kth, logits, -math.inf)")

_STATE = "[seq_len num_heads* head_dim*]", "[seq_len num_heads*]"
_MERGED = ("v_merged[seq_len num_heads head_dim]:{}", "s_merged[seq_len num_heads]:float32")
_trace("cascade.merge_state", "cascade", "merge_state_h{num_heads}_d{head_dim}", "Merges two attention states; base 2.",
       (f"v_a{_STATE[0]}", f"s_a{_STATE[1]}", f"v_b{_STATE[0]}", f"s_b{_STATE[1]}"), [m.format("v_a") for m in _MERGED],
       "def run(v_a, s_a, v_b, s_b):\n    s = torch.logaddexp2(s_a, s_b)\n"
       "    a, b = torch.exp2(s_a - s)[..., None], torch.exp2(s_b - s)[..., None]\n"
       "    return (v_a.float() * a + v_b.float() * b).to(v_a.dtype), s")
_trace("cascade.merge_states", "cascade", "merge_states_h{num_heads}_d{head_dim}", "Merges attention states; base 2.",
       ("v[seq_len num_states num_heads* head_dim*]", "s[seq_len num_states num_heads*]"), [m.format("v") for m in _MERGED],
       "def run(v, s):\n    total = torch.logsumexp(s * math.log(2), 1) / math.log(2)\n"
       "    w = torch.exp2(s - total[:, None])[..., None]\n    return (v.float() * w).sum(1).to(v.dtype), total")

_trace("gemm.mm_bf16", "gemm", "gemm_bf16_N{N}_K{K}", "A product of matrices.", ("A=a[M K*]", "B=b[K* N*]"),
       ("C[M N]:A",), "def run(A, B):\n    return (A.float() @ B.float()).to(A.dtype)")
_trace("gemm.bmm_bf16", "gemm", "bmm_bf16_N{N}_K{K}", "Products of matrices.", ("A[batch M K*]", "B[batch K* N*]"),
       ("C[batch M N]:A",), "def run(A, B):\n    return (A.float() @ B.float()).to(A.dtype)")
_trace("topk.top_k", "topk", "top_k_d{d}", "The largest of each row.", ("input[batch_size d*]", "k:int32"),
       ("values[batch_size k]:input", "indices[batch_size k]:int64"),
       "def run(input, k):\n    found = input.topk(k, -1)\n    return found.values, found.indices")

_ATTEND = """
def attend(q, k, v, sm_scale, causal):
    n, m, g = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(g, 1), v.float().repeat_interleave(g, 1)
    s = torch.einsum("nhd,mhd->hnm", q.float(), k) * sm_scale
    if causal:
        i, j = torch.arange(n, device=q.device)[:, None] + m - n, torch.arange(m, device=q.device)
        s = s.masked_fill(j > i, -math.inf)
    lse = torch.logsumexp(s, -1)
    o = torch.einsum("hnm,mhd->nhd", torch.exp(s - lse[..., None]).nan_to_num(0.0), v)
    return o.to(q.dtype), lse.T / math.log(2)
"""
_trace("decode.single_decode_with_kv_cache", "gqa", "single_decode_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}",
       "One query token over plain keys and values.",
       ("q[num_qo_heads* head_dim*]", "k[kv_len num_kv_heads* head_dim*]", "v[kv_len num_kv_heads* head_dim*]"),
       ("output[num_qo_heads head_dim]:q",),
       f"{_ATTEND}\n\ndef run(q, k, v):\n    return attend(q[None], k, v, q.shape[-1] ** -0.5, False)[0][0]", ("stage:decode",))
_trace("prefill.single_prefill_with_kv_cache", "gqa", "single_prefill_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}",
       "One request over plain keys and values.",
       ("q[qo_len num_qo_heads* head_dim*]", "k[kv_len num_kv_heads* head_dim*]", "v[kv_len num_kv_heads* head_dim_vo*]"),
       ("output[qo_len num_qo_heads head_dim_vo]:q",),
       f"{_ATTEND}\n\ndef run(q, k, v, causal=False):\n    return attend(q, k, v, q.shape[-1] ** -0.5, causal)[0]",
       ("stage:prefill",))

_PAGES = ("k_cache=paged_kv_cache.0[num_pages page_size* num_kv_heads* head_dim*]",
          "v_cache=paged_kv_cache.1[num_pages page_size* num_kv_heads* head_dim*]")
_TABLE = ("kv_indptr[len_indptr]:int32", "kv_indices[num_kv_indices]:int32", "kv_last_page_len[batch]:int32",
          "sm_scale:float32")
_OUT = ("output[tokens num_qo_heads head_dim]:q", "lse[tokens num_qo_heads]:float32")
_GATHER = """
    outs = []
    for r in range(len(kv_indptr) - 1):
        pages = kv_indices[kv_indptr[r]:kv_indptr[r + 1]].long()
        n = (len(pages) - 1) * k_cache.shape[1] + int(kv_last_page_len[r])
        k, v = (c[pages].flatten(0, 1)[:n] for c in (k_cache, v_cache))
        outs.append(attend({q}, k, v, sm_scale, {causal}))
    return torch.cat([o for o, _ in outs]), torch.cat([s for _, s in outs])"""
_trace("decode.BatchDecodeWithPagedKVCacheWrapper.run", "gqa_paged",
       "gqa_paged_decode_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}_ps{page_size}", "A decode batch over pages.",
       ("q[tokens num_qo_heads* head_dim*]", *_PAGES, *_TABLE), _OUT,
       f"{_ATTEND}\n\ndef run(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale):"
       + _GATHER.format(q="q[r:r + 1]", causal="False"), ("stage:decode",))
_trace("prefill.BatchPrefillWithPagedKVCacheWrapper.run", "gqa_paged",
       "gqa_paged_prefill_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}_ps{page_size}", "A causal prefill batch over pages.",
       ("q[tokens num_qo_heads* head_dim*]", *_PAGES, "qo_indptr[len_indptr]:int32", *_TABLE), _OUT,
       f"{_ATTEND}\n\ndef run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):"
       + _GATHER.format(q="q[qo_indptr[r]:qo_indptr[r + 1]]", causal="True"), ("stage:prefill",))
_trace("prefill.BatchPrefillWithRaggedKVCacheWrapper.run", "gqa_ragged",
       "gqa_ragged_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}", "A causal prefill batch, one request after another.",
       ("q[tokens num_qo_heads* head_dim*]", "k[kv_tokens num_kv_heads* head_dim*]", "v[kv_tokens num_kv_heads* head_dim_vo*]",
        "qo_indptr[len_indptr]:int32", "kv_indptr[len_indptr]:int32", "sm_scale:float32"),
       ("output[tokens num_qo_heads head_dim_vo]:q", "lse[tokens num_qo_heads]:float32"),
       f"{_ATTEND}\n\ndef run(q, k, v, qo_indptr, kv_indptr, sm_scale):\n    outs = [attend(q[a:b], k[c:d], v[c:d], sm_scale, True)\n"
       "            for a, b, c, d in zip(qo_indptr, qo_indptr[1:], kv_indptr, kv_indptr[1:])]\n"
       "    return torch.cat([o for o, _ in outs]), torch.cat([s for _, s in outs])", ("stage:prefill",))
_trace("mla.BatchMLAPagedAttentionWrapper.run", "mla_paged",
       "mla_paged_decode_h{num_qo_heads}_ckv{head_dim_ckv}_kpe{head_dim_kpe}_ps{page_size}", "Latent attention over pages.",
       ("q_nope[tokens num_qo_heads* head_dim_ckv*]", "q_pe[tokens num_qo_heads* head_dim_kpe*]",
        "ckv_cache[num_pages page_size* head_dim_ckv*]", "kpe_cache[num_pages page_size* head_dim_kpe*]",
        "kv_indptr[len_indptr]:int32", "kv_indices[num_kv_indices]:int32", "kv_len_arr[batch]:int32", "sm_scale:float32"),
       ("output[tokens num_qo_heads head_dim_ckv]:q_nope", "lse[tokens num_qo_heads]:float32"),
       f"{_ATTEND}\n\ndef run(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_len_arr, sm_scale):\n    outs = []\n"
       "    for r in range(len(kv_len_arr)):\n        pages = kv_indices[kv_indptr[r]:kv_indptr[r + 1]].long()\n"
       "        ckv, kpe = (c[pages].flatten(0, 1)[:kv_len_arr[r]] for c in (ckv_cache, kpe_cache))\n"
       "        q = torch.cat((q_nope[r:r + 1], q_pe[r:r + 1]), -1)\n"
       "        outs.append(attend(q, torch.cat((ckv, kpe), -1)[:, None], ckv[:, None], sm_scale, False))\n"
       "    return torch.cat([o for o, _ in outs]), torch.cat([s for _, s in outs])", ("stage:decode",))
