"""The tensors of Hugging Face folders like Llama's and Qwen3-MoE's, and their names, row order and stacks in llama.cpp."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
OF_AN_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def read_safetensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bits of all bfloat16 tensors as uint16, which numpy has no bfloat16 for; raises ValueError for other dtypes."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = np.memmap(path, np.uint8, "r", offset=file.tell())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} in {path} must be BF16, got {entry['dtype']}")
            first, end = entry["data_offsets"]
            yield name, np.array(data[first:end]).view(np.uint16).reshape(entry["shape"])


def stack_experts(tensors: Iterable[tuple[str, np.ndarray]], num_experts: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors, but one `...experts.up_proj.weight` [E, F, D] for all `...experts.7.up_proj.weight` [F, D]."""
    matrices: dict[str, dict[int, np.ndarray]] = {}
    for name, bits in tensors:
        found = OF_AN_EXPERT.search(name)
        if not found:
            yield name, bits
            continue
        stacked = OF_AN_EXPERT.sub(".experts.", name)
        matrices.setdefault(stacked, {})[int(found[1])] = bits
        if len(matrices[stacked]) == num_experts:
            whole = matrices.pop(stacked)
            yield stacked, np.stack([whole[expert] for expert in range(num_experts)])
    if matrices:
        raise ValueError(f"experts are missing of {', '.join(matrices)}")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    stem, ending = name.rsplit(".", 1)
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{IN_A_LAYER[part]}.{ending}"


def interleave_rope(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders the rows [N*H, D] of a query or key projection.

    Hugging Face rotates the pairs (i, i + H/2) of a head, llama.cpp the pairs (2i, 2i + 1). With H = 6 the rows 0 1 2 3 4 5
    become 0 3 1 4 2 5.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
