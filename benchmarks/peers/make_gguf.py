"""Writes the benchmark's model for llama.cpp: its Grok architecture, float32 or Q8_0.

    make_gguf.py SIZES_JSON WEIGHTS.npz OUT.gguf f32|q8_0

Run by `run.py` with the Python of llama.cpp's environment. The weights are float32 under the
checkpoint's names; llama.cpp wants [out, in] where these are [in, out].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BYTE_PIECE, WORD, CONTROL, UNKNOWN = 6, 1, 3, 2  # kinds of pieces
NORMS = {
    "rms_norm": "attn_norm",
    "rms_norm_1": "attn_output_norm",
    "rms_norm_2": "ffn_norm",
    "rms_norm_3": "layer_output_norm",
}
MATRICES = {
    "multi_head_attention/query": "attn_q",
    "multi_head_attention/key": "attn_k",
    "multi_head_attention/value": "attn_v",
    "multi_head_attention/linear": "attn_output",
    "moe/linear": "ffn_gate_exps",
    "moe/linear_v": "ffn_up_exps",
    "moe/linear_1": "ffn_down_exps",
}


def main() -> None:
    sizes = json.loads(sys.argv[1])
    weights, out, kind = np.load(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    partial = out.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "grok")
    add_sizes(writer, sizes, kind)
    add_vocabulary(writer, sizes["vocab_size"])
    add_weights(writer, weights, sizes["num_layers"], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)


def add_sizes(writer: gguf.GGUFWriter, sizes: dict[str, Any], kind: str) -> None:
    """The config, in llama.cpp's words."""
    writer.add_block_count(sizes["num_layers"])
    writer.add_context_length(sizes["sequence_len"])
    writer.add_embedding_length(sizes["emb_size"])
    writer.add_feed_forward_length(sizes["ffn_size"])
    writer.add_head_count(sizes["num_q_heads"])
    writer.add_head_count_kv(sizes["num_kv_heads"])
    writer.add_key_length(sizes["key_size"])
    writer.add_value_length(sizes["key_size"])
    writer.add_rope_dimension_count(sizes["key_size"])
    writer.add_rope_freq_base(sizes["rope_base"])
    writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_expert_count(sizes["num_experts"])
    writer.add_expert_used_count(sizes["num_selected_experts"])
    writer.add_attn_logit_softcapping(sizes["attn_logit_cap"])
    writer.add_attn_output_scale(sizes["attn_output_multiplier"])
    writer.add_embedding_scale(sizes["embedding_multiplier_scale"])
    writer.add_logit_scale(sizes["output_multiplier_scale"])
    writer.add_vocab_size(sizes["vocab_size"])
    file_type = gguf.LlamaFileType
    writer.add_file_type(file_type.ALL_F32 if kind == "f32" else file_type.MOSTLY_Q8_0)


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Made-up words beside the byte pieces: its server does not start without a vocabulary."""
    pieces = [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
        *((f"<0x{byte:02X}>", 0.0, BYTE_PIECE) for byte in range(256)),
    ]
    pieces += [(f"\u2581t{i}", -float(i), WORD) for i in range(size - len(pieces))]
    names, scores, kinds = (list(column) for column in zip(*pieces, strict=True))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def add_weights(writer: gguf.GGUFWriter, weights: Any, layers: int, kind: str) -> None:
    """Norms and routers stay float32, as llama.cpp's own conversion leaves them."""
    float32, quantized = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0

    def add(name: str, array: Any, large: bool) -> None:
        array = np.ascontiguousarray(array, np.float32)
        if large and kind == "q8_0":
            writer.add_tensor(name, gguf.quants.quantize(array, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, array, raw_dtype=float32)

    add("token_embd.weight", weights["language_model/in_out_embed/embeddings"], True)
    add("output_norm.weight", weights["language_model/rms_norm/scale"], False)
    for i in range(layers):
        layer, block = f"transformer/decoder_layer_{i}", f"blk.{i}"
        for ours, theirs in NORMS.items():
            add(f"{block}.{theirs}.weight", weights[f"{layer}/{ours}/scale"], False)
        for ours, theirs in MATRICES.items():
            add(f"{block}.{theirs}.weight", weights[f"{layer}/{ours}/w"].swapaxes(-1, -2), True)
        add(f"{block}.ffn_gate_inp.weight", weights[f"{layer}/router/w"].T, False)


if __name__ == "__main__":
    main()
