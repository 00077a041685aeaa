"""Writes a folder like Llama's or Qwen3-MoE's as a GGUF file, weights unchanged; needs `gguf` and numpy."""

import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np

from race_systems.llama_tensors import gguf_name, interleave_rope, read_safetensors, stack_experts

ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
# What llama.cpp's Qwen3-MoE does without asking.
EXPERTS_EVERYWHERE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}


def main() -> None:
    """Reads `hf` below the folder of the first argument, writes `model.gguf` next to it."""
    folder = Path(sys.argv[1])
    write(folder / "hf", folder / "model.gguf")


def write(source: Path, target: Path) -> None:
    """Writes `target` whole or not at all; raises ValueError for other models than those two."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    if kind not in ARCHITECTURES or config["rope_parameters"]["rope_type"] != "default" or config.get("attention_bias"):
        raise ValueError(f"only models like Llama 2 and Qwen3-MoE are written as GGUF, got {kind!r}")
    num_experts = config.get("num_experts", 0)
    if num_experts and any(config[key] != value for key, value in EXPERTS_EVERYWHERE.items()):
        raise ValueError(f"Qwen3-MoE is written as GGUF with {EXPERTS_EVERYWHERE}")
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, ARCHITECTURES[kind])
    head_dim = config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    # Prompts and texts are ids. This kind of vocabulary has neither special tokens nor merges.
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    for name, bits in stack_experts(read_safetensors(source), num_experts):
        part_name = name.split(".")[-2]
        if kind == "llama" and part_name in ("q_proj", "k_proj"):
            bits = interleave_rope(bits, head_dim)
        if bits.ndim == 1 or part_name == "gate":  # norms and routers are float32 in every GGUF file
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, target)


if __name__ == "__main__":
    main()
