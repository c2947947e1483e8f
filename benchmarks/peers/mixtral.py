"""Mixtral as the stand-in for Grok-1 in engines that do not have it: the same sizes.

Against Grok-1 a layer lacks two norms and the caps, and has SiLU for GELU: a little less work.
"""

from __future__ import annotations

from typing import Any


def config(sizes: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face's fields of a Mixtral with the sizes of ours."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": sizes["emb_size"],
        "intermediate_size": sizes["ffn_size"],
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_q_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "head_dim": sizes["key_size"],
        "vocab_size": sizes["vocab_size"],
        "num_local_experts": sizes["num_experts"],
        "num_experts_per_tok": sizes["num_selected_experts"],
        "max_position_embeddings": sizes["sequence_len"],
        "tie_word_embeddings": True,
        "sliding_window": None,
        "rope_theta": sizes["rope_base"],
        "rms_norm_eps": sizes["rms_norm_eps"],
        "bos_token_id": sizes["bos_token"],
        "eos_token_id": sizes["eos_token"],
        "torch_dtype": "float32",
    }
