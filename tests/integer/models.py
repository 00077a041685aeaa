"""Small random integer models, and what the definition says of their texts."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.config import ModelConfig, RopeScaling
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion
from detspec.integer.audit import AuditedText, audited_by_spec
from detspec.integer.spec import Sizes
from detspec.jobs.oracle import as_floats
from detspec.model.dense import dense_config
from detspec.model.to_integer import integer_config, integer_params, spec_model
from detspec.sampling_params import FIELDS, SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import random_model

SMALL = {"vocab_size": 211, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "d_ff": 96}
CFGS: dict[str, ModelConfig] = {
    name: dense_config(**{**SMALL, "dtype": "float32", **changes})
    for name, changes in {
        "plain, tied": {"tie_embeddings": True},
        "qkv_bias, llama3": {"qkv_bias": True, "rope_scaling": RopeScaling("llama3", factor=8.0, original_max_position=16)},
        "qk_norm, slides, linear": {
            "qk_norm": True,
            "rope_scaling": RopeScaling("linear", factor=4.0),
            "sliding_window": 7,
            "sliding_layers": (True, False),
            "num_kv_heads": 1,
        },
    }.items()
}
GEMMA = {"norm_plus_one": True, "scale_embeddings": True, "activation": "gelu_tanh", "tie_embeddings": True}
YARN = RopeScaling("yarn", factor=4.0, original_max_position=16, attention_factor=1.14)
FAMILIES: dict[str, ModelConfig] = {
    name: dense_config(**{**SMALL, "dtype": "float32", **changes})
    for name, changes in {
        "gemma": GEMMA,
        "gemma2": {
            **GEMMA,
            "post_norms": True,
            "score_dim": 20.0,
            "attn_softcap": 5.0,
            "logit_softcap": 3.0,
            "sliding_window": 9,
            "sliding_layers": (True, False),
        },
        "gemma3": {
            **GEMMA,
            "post_norms": True,
            "qk_norm": True,
            "score_dim": 20.0,
            "rope_theta": 1e6,
            "rope_scaling": RopeScaling("linear", factor=8.0),
            "sliding_rope_theta": 1e4,
            "sliding_window": 9,
            "sliding_layers": (True, False),
        },
        "olmo3": {
            "pre_norms": False,
            "post_norms": True,
            "qk_norm": True,
            "qk_norm_of": "width",
            "sliding_rope_theta": 1e4,
            "sliding_window": 9,
            "sliding_layers": (True, False),
        },
        "exaone4": {
            "pre_norms": False,
            "post_norms": True,
            "qk_norm": True,
            "sliding_window": 9,
            "sliding_layers": (True, False),
            "unrotated_layers": (False, True),
        },
        "granite": {
            "embed_scale": 3.0,
            "residual_scale": 0.7,
            "logit_divisor": 3.0,
            "score_scale": 0.2,
            "tie_embeddings": True,
        },
        "ernie": {"rope_interleaved": True},
        "glm4": {"post_norms": True, "rotary_dim": 8, "rope_interleaved": True, "qkv_bias": True},
        "phi3, longrope": {
            "rotary_dim": 12,
            "rope_scaling": RopeScaling(
                "longrope", 2.0, 16, attention_factor=1.2, short_factors=(1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
            ),
        },
        "qwen2, yarn": {"qkv_bias": True, "rope_scaling": YARN},
        "qwen3, yarn": {"qk_norm": True, "rope_scaling": dataclasses.replace(YARN, truncate=False)},
        "smollm3": {"unrotated_layers": (False, True), "tie_embeddings": True},
    }.items()
}
SCHEDULE = Schedule(Numerics(page=16, implementation="reference", linear="xla", cache_dtype="int8"), Budget(16, 4))
MODES = ("raw", "processed", "tempered")


class Both(NamedTuple):
    """A model as engines take it, and as the definition does."""

    model: Model
    weights: dict[str, Any]
    shape: Sizes


def both(cfg: ModelConfig, params: Any, bits: int = 15) -> Both:
    """The integer model of weights in floats, with activations of so many `bits`."""
    return of_integers(integer_config(cfg, bits), integer_params(cfg, params, bits))


def of_integers(cfg: ModelConfig, params: Any) -> Both:
    """A model whose weights are integers already."""
    return Both(Model(cfg, params, None, (), digest_model(cfg, params)), *spec_model(cfg, params))


@cache
def small(name: str, bits: int = 15) -> Both:
    """The model of `CFGS` or `FAMILIES` with random weights, the same in every run."""
    cfg = {**CFGS, **FAMILIES}[name]
    return both(cfg, float_params(name), bits)


@cache
def float_params(name: str) -> Any:
    """The weights in floats that `small` has; norms of `FAMILIES` are random, too."""
    cfg = {**CFGS, **FAMILIES}[name]
    params = random_model(cfg)
    if name in CFGS:
        return params
    rng = np.random.default_rng(len(name))

    def drawn(path: Any, x: Any) -> Any:
        is_norm = jax.tree_util.keystr(path).endswith("_norm']")
        return x + 0.3 * rng.standard_normal(x.shape).astype(np.float32) if is_norm else x

    return jax.tree.map_with_path(drawn, params)


def make_engine(model: Model, **changes: Any) -> Engine:
    """An engine with few places and pages."""
    config = {"max_requests": 3, "max_len": 64, "method": "none", "num_speculative_tokens": 3, "schedule": SCHEDULE}
    return Engine(model, EngineConfig(**{**config, "compile_cache": False, **changes}))


def bits(completions: Sequence[Completion]) -> list[tuple[tuple[int, ...], bytes]]:
    """Tokens and the bits of their log-probabilities."""
    return [(tuple(c.token_ids), np.asarray(c.logprobs, np.float32).tobytes()) for c in completions]


def defined(of: Both, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> tuple[tuple[int, ...], bytes]:
    """Tokens that the definition chooses at each place of `tokens`, given those before, and the bits of log-probabilities.

    The text is read at once: no page, no window, no draft.
    """
    asked = {name: getattr(sampling, name) for name in set(AuditedText._fields) & set(FIELDS)}
    text = AuditedText([*prompt, *tokens], len(prompt), stop_ids=sampling.stop_token_ids, **asked)
    found = audited_by_spec(of.weights, of.shape, text)
    new = slice(len(prompt) - 1, None)
    return tuple(found.chosen[new].tolist()), as_floats(found.logprobs[new]).tobytes()


PROMPTS = [np.random.default_rng(i).integers(0, SMALL["vocab_size"], n).tolist() for i, n in enumerate((3, 17, 1, 30, 9, 22))]
PROMPTS += [[*PROMPTS[3][:25], 5, 6], PROMPTS[1][:12]]
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20, "logprobs_mode": "processed"},
    {"temperature": 0.7, "top_p": 0.8, "logprobs_mode": "tempered"},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs_mode": "processed"},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": -0.5},
    {"temperature": 1e6, "max_tokens": 9, "min_tokens": 9, "stop_token_ids": tuple(range(16))},
    {"temperature": 0.5, "logit_bias": {7: 100.0, 8: 99.5, 9: -100.0}, "logprobs_mode": "processed"},
)
SAMPLING = [
    SamplingParams(**{"max_tokens": 6 + 3 * (i % 3), "seed": 2**31 + i, "logprobs": 1, **change})
    for i, change in enumerate(CHANGES)
]
