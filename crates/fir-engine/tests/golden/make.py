"""Makes the golden files beside it: tiny models of every family with random weights, and what `transformers` computes.

    python3 -m venv V && V/bin/pip install torch transformers safetensors tokenizers && V/bin/python make.py

Per model: config.json, model.safetensors (f32), tokenizer.json, and logits.golden: a safetensors file with the tokens of
one sequence and the logits of all its positions.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, decoders

HERE = pathlib.Path(__file__).parent
SMALL = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=96, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False,
             bos_token_id=1, eos_token_id=2, pad_token_id=0)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
              n_shared_experts=1, moe_intermediate_size=32, num_experts_per_tok=2, first_k_dense_replace=1,
              num_hidden_layers=3)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32, rope_theta=500000.0)
YARN = dict(rope_type="yarn", factor=4.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.7,
            original_max_position_embeddings=64, rope_theta=10000.0)

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL | dict(rope_parameters=LLAMA3)),
    "llama-tied": lambda: transformers.LlamaConfig(**SMALL | dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL | dict(head_dim=32)),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL | dict(head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
                       norm_topk_prob=True, decoder_sparse_step=1)),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL | dict(head_dim=32, num_hidden_layers=6, sliding_window=8, query_pre_attn_scalar=24,
                       final_logit_softcapping=5.0, attn_logit_softcapping=4.0,
                       hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, intermediate_size=64)),
    "deepseek2": lambda: transformers.DeepseekV2Config(
        **SMALL | LATENT | dict(q_lora_rank=None, n_routed_experts=6, topk_method="greedy", routed_scaling_factor=1.0,
                                norm_topk_prob=False)),
    "deepseek3": lambda: transformers.DeepseekV3Config(
        **SMALL | LATENT | dict(q_lora_rank=24, n_routed_experts=8, n_group=4, topk_group=2, norm_topk_prob=True,
                                routed_scaling_factor=2.5, rope_parameters=YARN)),
}


def cap_scores():
    """Gemma 3's configuration has a bound of the scores, which its published models do not use and its code forgets to
    hand to the function that has it: here it does."""
    from transformers.models.gemma3 import modeling_gemma3 as gemma

    plain = gemma.eager_attention_forward
    gemma.eager_attention_forward = lambda module, *args, **kwargs: plain(
        module, *args, softcap=module.attn_logit_softcapping, **kwargs)


def tokenizer():
    """A token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    return t


def make(name):
    torch.manual_seed(len(name) + ord(name[0]))
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, p in list(model.named_parameters()) + list(model.named_buffers()):
            if not p.is_floating_point() or "inv_freq" in key or "embed_scale" in key:
                continue
            if "norm" in key:
                p.copy_((0.0 if name == "gemma3" else 1.0) + 0.2 * torch.randn_like(p))
            elif "e_score_correction_bias" in key or key.endswith("bias"):
                p.copy_(0.3 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
        tokens = torch.randint(3, config.vocab_size, (1, 48))
        logits = model(tokens).logits[0]
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    save_file({"tokens": tokens[0].to(torch.int32), "logits": logits.contiguous()}, folder / "logits.golden")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {size} bytes, logits of {logits.std():.3f} on average, {float(logits.abs().max()):.3f} at most")
    assert size < 1_000_000, size


if __name__ == "__main__":
    cap_scores()
    for name in sys.argv[1:] or CONFIGS:
        make(name)
