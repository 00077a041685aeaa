"""Writes a Llama-like Hugging Face folder as a GGUF file, weights unchanged; runs in an environment with `gguf` and numpy."""

import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np

from race_systems.llama_tensors import gguf_name, interleave_rope, read_safetensors


def main() -> None:
    """Reads `hf` below the folder of the first argument, writes `model.gguf` next to it."""
    folder = Path(sys.argv[1])
    write(folder / "hf", folder / "model.gguf")


def write(source: Path, target: Path) -> None:
    """Writes `target` whole or not at all; raises ValueError for models other than Llama's."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config["rope_parameters"]["rope_type"] != "default" or config.get("attention_bias"):
        raise ValueError(f"only models like Llama 2 are written as GGUF, got {config['model_type']!r}")
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
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
    # Prompts and texts are ids. This kind of vocabulary has neither special tokens nor merges.
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    for name, bits in read_safetensors(source):
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj"):
            bits = interleave_rope(bits, head_dim)
        if bits.ndim == 1:  # norms are float32 in every GGUF file
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
