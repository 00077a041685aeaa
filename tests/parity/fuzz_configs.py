"""Drops, alters and adds keys of each family's `config.json`: a folder loads only where transformers computes the same logits.

    .venv/bin/python tests/parity/fuzz_configs.py                      # all families
    .venv/bin/python tests/parity/fuzz_configs.py --cases glm4 opt     # these

Prints each change after which a folder loads and has other logits in transformers, and how many had which outcome. Where
transformers fails, a value is null, which counts as left out here, or a whole number where it asks for a float.
"""

import argparse
import collections
import json
import logging
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

sys.path += [str(Path(__file__).parents[2])]

from cases import CASES, logits, token_rows, write

from detspec.checkpoint.families.inert import INERT_KEYS
from detspec.checkpoint.hf import load_hf
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.transformer import forward_sequences

Config = dict[str, Any]

TOLERANCE = 2e-5  # relative to the largest logit, as in test_families.py
LENGTH = 40  # longer than sliding windows
OUTCOMES = ("refused", "the same logits", "transformers fails", "others in transformers", "fails")
BAD = OUTCOMES[-2:]
# Values of keys that some family reads, and that would change the computation of another one.
ADDED: Config = {
    "attention_bias": True,
    "attention_multiplier": 0.5,
    "attention_out_bias": True,
    "attn_logit_softcapping": 1.0,
    "clip_qkv": 0.5,
    "embedding_multiplier": 3.0,
    "enable_bias": True,
    "final_logit_softcapping": 1.0,
    "first_k_dense_replace": 1,
    "head_dim": 6,
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "layer_types": ["sliding_attention"] * 3,
    "logit_scale": 2.0,
    "logits_scaling": 3.0,
    "lm_head_bias": True,
    "max_window_layers": 0,
    "mlp_bias": True,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "no_rope_layers": [0, 1, 0],
    "norm_topk_prob": True,
    "num_experts": 3,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 3,
    "num_local_experts": 3,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "position_embedding_type": "nope",
    "query_pre_attn_scalar": 3.0,
    "qkv_bias": True,
    "residual_multiplier": 0.5,
    "rope_interleaved": True,
    "rope_local_base_freq": 100.0,
    "rope_parameters": {"rope_theta": 123.0, "rope_type": "default"},
    "rope_scaling": {"type": "linear", "factor": 3.0},
    "rope_theta": 123.0,
    "rotary_dim": 4,
    "rotary_emb_base": 123.0,
    "rotary_pct": 0.5,
    "routed_scaling_factor": 3.0,
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "shared_expert_intermediate_size": 8,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "use_bias": True,
    "use_bidirectional_attention": True,
    "use_parallel_residual": False,
    "use_qk_norm": False,
    "use_sliding_window": True,
}


def altered(value: Any) -> Iterator[Any]:
    """Other values of the same type, and null."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 0)
    elif isinstance(value, float):
        yield 2 * value
    elif isinstance(value, str):
        yield from ("relu", "other")
    elif isinstance(value, list) and value:
        yield from (value[::-1], value[:-1], [value[0]] * len(value))
    elif value is None:
        yield from (5, True)
    if value is not None:
        yield None


def changes_of(config: Config) -> Iterator[tuple[str, Config]]:
    """Each changed config, and what was done to it."""
    for key, value in config.items():
        if key in ("transformers_version", "dtype", *(INERT_KEYS.keys() - {"model_type", "architectures"})):
            continue
        rest = {name: other for name, other in config.items() if name != key}
        yield f"without {key}", rest
        if isinstance(value, dict):
            for path, inner in changes_of(value):
                yield f"{key}: {path}", {**config, key: inner}
        else:
            for other in altered(value):
                if other != value or type(other) is not type(value):
                    yield f"{key} = {json.dumps(other)}", {**config, key: other}


def all_changes(config: Config) -> Iterator[tuple[str, Config]]:
    """Changes of the keys of a config, as transformers 5 writes it and as 4 did, and keys that it has not."""
    yield "unchanged", config
    yield from changes_of(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        rest = {key: value for key, value in config.items() if key != "rope_parameters"}
        kind = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor", "rope_type")}
        theta = {"rope_theta": rope["rope_theta"]}
        part = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
        scaling = {"rope_scaling": {"type": rope["rope_type"], **kind} if kind else None}
        yield "as transformers 4", {**rest, **theta, **part, **scaling}
        yield "as transformers 4, doubled rope_theta", {**rest, "rope_theta": 2 * rope["rope_theta"], **part, **scaling}
        yield "as transformers 4, doubled scaling", {**rest, **theta, **part, "rope_scaling": {"type": "linear", "factor": 2.0}}
        yield "rope_theta without rope_parameters", {**rest, **theta}
        yield "both", {**config, **theta, **part, **scaling}
    for key, value in ADDED.items():
        if key not in config:
            yield f"with {key}", {**config, key: value}


class Folder:
    """A folder of a case, whose config changes."""

    def __init__(self, case: str, path: Path) -> None:
        self.path = path
        write(case, path)
        self.config: Config = json.loads((path / "config.json").read_text())
        self.rows = list(token_rows(1, LENGTH))
        self.ours: dict[ModelConfig, np.ndarray] = {}

    def outcome(self, config: Config) -> str:
        """Loads the folder with this config, here and in transformers, and returns one of `OUTCOMES`."""
        (self.path / "config.json").write_text(json.dumps(config))
        try:
            cfg, params = load_hf(self.path)
            if cfg not in self.ours:
                self.ours[cfg] = np.asarray(sequences_of(params, cfg, jnp.asarray(self.rows))[0])
        except InputError:
            return "refused"
        except Exception:  # a folder that cannot be used must be refused
            return "fails"
        theirs = self.theirs()
        if theirs is None:
            return "transformers fails"
        agree = np.abs(self.ours[cfg] - theirs).max() < TOLERANCE * np.abs(theirs).max()
        return "the same logits" if agree else "others in transformers"

    def theirs(self) -> np.ndarray | None:
        """Logits of transformers; None if it does not load the folder, or makes weights up."""
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                self.path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            if info["missing_keys"] or info["mismatched_keys"]:
                return None
            return logits(model.eval(), self.rows)
        except Exception:  # whatever it is
            return None


sequences_of = jax.jit(forward_sequences, static_argnames="cfg")


def fuzz(case: str, share: int = 1) -> Iterator[tuple[str, str]]:
    """Yields what was done to a config of a case, and the outcome; of so many changes one is tried, always the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(case, Path(name))
        for what, config in all_changes(folder.config):
            if zlib.crc32(f"{case}: {what}".encode()) % share == 0:
                yield what, folder.outcome(config)
    jax.clear_caches()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--all", action="store_true", help="print what transformers refuses and detspec loads, too")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    jax.config.update("jax_platforms", "cpu")
    counts: collections.Counter[str] = collections.Counter()
    for case in args.cases:
        for what, outcome in fuzz(case):
            counts[outcome] += 1
            if outcome in BAD or (args.all and outcome == "transformers fails"):
                print(f"{case}: {what}: {outcome}", flush=True)
        print(f"# {case}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
