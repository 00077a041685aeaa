"""Models and requests for tests: one whose answers are worked out by hand, and a small random one.

`table_model`: the next token is a function of the last one alone, `next(t) = table[t]`. All matrices of the block are zero,
so the residual stream is the embedding, which is one-hot; RMSNorm of a one-hot vector of width V is `sqrt(V)` at the one;
and the head's row `o` is one-hot at every `t` with `table[t] == o`. Worked example, V = 16, table = [1 2 3 ... 15 0]:

    last token 5   ->   logits 4 at token 6, 0 elsewhere   ->   token 6, log-probability 4 - log(e^4 + 15) = -0.2428
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig, RopeScaling
from detspec.draft.given import NONE, RECORDED
from detspec.draft.self_draft import SELF
from detspec.draft.source import Drafter, DraftParams, DraftSource, draft_fn
from detspec.generation.init import init_state
from detspec.generation.insert import insert, pack_requests
from detspec.generation.loop import Limits, dvr_step, run
from detspec.generation.prefill import prefill
from detspec.model.dense import dense_config, with_fields
from detspec.model.experts import MixtureOfExperts
from detspec.model.params import Params, init_params, param_shapes
from detspec.riders.rider import Entry
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Schedule
from detspec.state import Draft, GenState

if TYPE_CHECKING:
    from tests.shelf import Shape

TABLE_CFG = dense_config(
    vocab_size=16, d_model=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, d_ff=2, norm_eps=1e-30, dtype="float32"
)
LONG_DRAFT = 11  # tokens, more than a window
COUNT_UP = tuple((t + 1) % 16 for t in range(16))
TABLE_LOGPROB = 4 - math.log(math.exp(4) + 15)

# Untied, so that greedy text does not repeat the last token for ever.
RANDOM_CFG = dense_config(vocab_size=211, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=96)

# One value of the config for each family, the same size, sliding windows and rotary lengths shorter than the texts of tests.
GEMMA = {"norm_plus_one": True, "post_norms": True, "scale_embeddings": True, "activation": "gelu_tanh", "score_dim": 20.0}
YARN = RopeScaling("yarn", factor=4.0, original_max_position=16, attention_factor=1.14)
FAMILY_CFGS = {
    name: with_fields(RANDOM_CFG, **changes)
    for name, changes in {
        "llama": {"rope_scaling": RopeScaling("llama3", factor=8.0, original_max_position=16)},
        "mistral": {"num_kv_heads": 1, "sliding_window": 11, "sliding_layers": (True, True)},
        "qwen2": {"qkv_bias": True, "rope_scaling": YARN, "sliding_window": 20, "sliding_layers": (False, True)},
        "qwen3": {"num_kv_heads": 4, "head_dim": 24, "qk_norm": True, "qkv_bias": True, "o_bias": True},
        "gemma2": {**GEMMA, "attn_softcap": 5.0, "logit_softcap": 3.0, "sliding_window": 11, "sliding_layers": (True, False)},
        "gemma3": {
            **GEMMA,
            "qk_norm": True,
            "rope_theta": 1e6,
            "rope_scaling": RopeScaling("linear", factor=8.0),
            "sliding_rope_theta": 1e4,
            "sliding_window": 9,
            "sliding_layers": (True, False),
        },
    }.items()
}

# One for each further kind of layer; families combine these.
LAYER_CFGS = {
    name: with_fields(RANDOM_CFG, **changes)
    for name, changes in {
        "post norms, width norms": {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_of": "width"},
        "unrotated": {
            "sliding_window": 9,
            "sliding_layers": (True, False),
            "unrotated_layers": (False, True),
            "qk_norm": True,
            "qk_norm_of": "rotated",
        },
        "scales": {"embed_scale": 3.0, "residual_scale": 0.7, "logit_divisor": 3.0, "score_scale": 0.2},
        "sinks": {"sinks": True, "sliding_window": 9, "sliding_layers": (True, False)},
        "part rotated": {
            "rotary_dim": 8,
            "rope_interleaved": True,
            "rope_scaling": RopeScaling("longrope", 2.0, 16, attention_factor=1.1, short_factors=(1.0, 1.5, 2.0, 2.5)),
        },
        "parallel": {
            "norm": "layer",
            "norm_bias": True,
            "parallel": True,
            "qkv_bias": True,
            "o_bias": True,
            "gated": False,
            "mlp_bias": True,
            "activation": "gelu",
        },
        "learned positions": {
            "norm": "layer",
            "norm_plus_one": True,
            "learned_positions": True,
            "position_encoding": "none",
            "mlp_bias": True,
            "activation": "relu2",
        },
        "experts": {"experts": MixtureOfExperts(8, 3, 24, renormalised=True), "dense_layers": (True, False)},
        "shared experts": {
            "experts": MixtureOfExperts(
                8,
                2,
                24,
                score="sigmoid",
                renormalised=True,
                scale=1.5,
                correction=True,
                groups=4,
                active_groups=2,
                shared_d_ff=40,
                float32_router=True,
            )
        },
        "chosen experts": {"experts": MixtureOfExperts(8, 4, 20, score="chosen", shared_d_ff=16, shared_gate=True)},
        "clamped experts": {"experts": MixtureOfExperts(8, 4, 20, score="chosen", bias=True, clamp=0.5)},
    }.items()
}

# Most slopes of 12 heads are no powers of two, so their products with distances are rounded.
ALIBI_CFG = with_fields(RANDOM_CFG, num_heads=12, head_dim=8, position_encoding="alibi")

MAX_STOP_IDS = 24
MAX_LOGIT_BIAS = 4


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and what is asked of it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


def table_model(table: Sequence[int] = COUNT_UP, broken: Sequence[int] = ()) -> Params:
    """Weights with `next(t) = table[t]`; all logits after a token of `broken` are nan, and so are its keys and values."""
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), param_shapes(TABLE_CFG))
    params["embed"] = np.eye(16, dtype=np.float32)
    params["embed"][list(broken)] = np.nan
    params["final_norm"] = np.ones(16, np.float32)
    params["head"] = np.zeros((16, 16), np.float32)
    params["head"][list(table), np.arange(16)] = 1.0
    for layer in params["layers"]:
        layer["attn_norm"] = np.ones(16, np.float32)
        layer["mlp_norm"] = np.ones(16, np.float32)
    return jax.tree.map(jnp.asarray, params)


@cache
def random_model(cfg: ModelConfig) -> Params:
    """Random weights, the same in every run; biases too, which training would start from 0."""

    def fill_bias(path: tuple, leaf: jax.Array) -> jax.Array:
        if not jax.tree_util.keystr(path).endswith(("_bias']", "sinks']")):
            return leaf
        key = jax.random.key(zlib.crc32(jax.tree_util.keystr(path).encode()))  # no two biases alike
        return (0.3 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map_with_path(fill_bias, init_params(cfg, jax.random.key(0)))


def state_of(shape: "Shape", requests: Sequence[Request], thoughts=None) -> GenState:
    """The state of `requests`, nothing in the cache, `thoughts` drafted for each if given; the other sequences idle."""
    room = {"max_len": shape.length, "max_stop_ids": MAX_STOP_IDS, "max_logit_bias": MAX_LOGIT_BIAS}
    state = init_state(shape.cfg, max_requests=shape.batch, **room, schedule=shape.schedule)
    thoughts = [()] * len(requests) if thoughts is None else thoughts
    entries = [Entry(b, r.prompt, r.sampling, brings={"thoughts": thoughts[b]}) for b, r in enumerate(requests)]
    return insert(state, pack_requests(state, entries, ()))


@partial(jax.jit, static_argnames=("shape", "source"), donate_argnames=("state",))
def generate_drafted(
    params: Params,
    shape: "Shape",
    state: GenState,
    recorded: DraftParams,
    num_steps: jax.Array,
    *,
    source: str,
    wide_cost: jax.Array | float | None = None,
) -> GenState:
    """Prefills what is missing and runs up to `num_steps` steps, drafted by `source`, one of `SOURCES`.

    `recorded` are the params of `RECORDED`, which the other sources do not read. With `wide_cost`, see `verify`, drafts are
    longer than windows, and there is a pass without drafts; not if windows are aligned.
    """
    schedule = shape.schedule
    state = prefill(params, shape.cfg, state, schedule=schedule)
    is_long = wide_cost is not None and schedule.numerics.alignment == "free"
    drafted_by = draft_fn(Drafter(SOURCES[source], recorded), schedule, LONG_DRAFT if is_long else None)
    narrow = Budget(shape.batch, 1) if is_long else None

    def step(state: GenState) -> GenState:
        if wide_cost is None:
            return dvr_step(params, shape.cfg, state, draft_fn=drafted_by, schedule=schedule)[0]
        choosing = {"narrow": narrow, "wide_cost": wide_cost}
        return dvr_step(params, shape.cfg, state, draft_fn=drafted_by, schedule=schedule, **choosing)[0]

    return run(state, step, limits=Limits(num_steps))[0]


def recorded(shape: "Shape", texts: Sequence[Sequence[int]] = ()) -> DraftParams:
    """The params of `RECORDED` that take each of `texts` for a whole sequence, and know nothing of the other sequences."""
    tokens = np.zeros((shape.batch, shape.length), np.int32)
    for b, text in enumerate(texts):
        tokens[b, : len(text)] = text
    return tokens, np.asarray([len(text) for text in (*texts, *[()] * (shape.batch - len(texts)))], np.int32)


def _told(
    recorded: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule, num_tokens: int
) -> Draft:
    """The recorded drafts, those of ordinary sequences taken as results, unverified."""
    draft = RECORDED.draft(recorded, params, cfg, state, schedule, num_tokens)
    sequence = jnp.arange(draft.chance.shape[0])
    chance = draft.chance * ((1 + sequence % 3) / 4)  # some are believed to be surer than others
    return draft.replace(chance=chance, final=~state.deterministic & (draft.count > 0))


def _both(
    recorded: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule, num_tokens: int
) -> Draft:
    """Recorded drafts for sequences 0, 2, 4, ..., the model's own for the others.

    The model leaves its own keys and values in the slots of all of them.
    """
    own = SELF.draft((), params, cfg, state, schedule, num_tokens)
    drafts = _told(recorded, params, cfg, state, schedule, num_tokens), own
    is_told = jnp.arange(state.live.shape[0]) % 2 == 0

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(is_told.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    chosen = jax.tree.map(choose, *(draft.replace(cache=None) for draft in drafts))
    return chosen.replace(cache=own.cache)


SOURCES: dict[str, DraftSource] = {
    "none": NONE,
    "self": SELF,
    "recorded": RECORDED._replace(draft=_told),
    "both": RECORDED._replace(draft=_both),
}


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """The bit pattern of float32 numbers; nan equals nan, 0 does not equal -0."""
    return np.asarray(x, np.float32).view(np.uint32)
