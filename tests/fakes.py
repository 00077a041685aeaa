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

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig, RopeScaling
from detspec.draft.draft_fn import DraftFn
from detspec.draft.none import no_draft
from detspec.draft.recorded import recorded_draft
from detspec.draft.self_draft import self_draft
from detspec.generate.insert import init_state, insert, pack_requests
from detspec.generate.loop import dvr_step, run
from detspec.generate.prefill import prefill
from detspec.model.params import Params, init_params, param_shapes
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.state import Draft, GenState

TABLE_CFG = ModelConfig(
    vocab_size=16, d_model=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, d_ff=2, norm_eps=1e-30, dtype="float32"
)
COUNT_UP = tuple((t + 1) % 16 for t in range(16))
TABLE_LOGPROB = 4 - math.log(math.exp(4) + 15)

# Untied, so that greedy text does not repeat the last token for ever.
RANDOM_CFG = ModelConfig(vocab_size=211, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=96)

# One value of the config for each family, the same size, sliding windows and rotary lengths shorter than the texts of tests.
GEMMA = {"norm_plus_one": True, "post_norms": True, "scale_embeddings": True, "activation": "gelu_tanh", "score_dim": 20.0}
YARN = RopeScaling("yarn", factor=4.0, original_max_position=16, attention_factor=1.14)
FAMILY_CFGS = {
    name: dataclasses.replace(RANDOM_CFG, **changes)
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

# Most slopes of 12 heads are no powers of two, so their products with distances are rounded.
ALIBI_CFG = dataclasses.replace(RANDOM_CFG, num_heads=12, head_dim=8, position_encoding="alibi")

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
        if not path[-1].key.endswith("_bias"):
            return leaf
        key = jax.random.key(zlib.crc32(jax.tree_util.keystr(path).encode()))  # no two biases alike
        return (0.3 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map_with_path(fill_bias, init_params(cfg, jax.random.key(0)))


def state_of(cfg: ModelConfig, requests: Sequence[Request], *, schedule: Schedule, max_len: int) -> GenState:
    """The state of one row per request, nothing in the cache. Shapes depend on the number of requests and `max_len` alone."""
    B = len(requests)
    room = {"max_len": max_len, "max_stop_ids": MAX_STOP_IDS, "max_logit_bias": MAX_LOGIT_BIAS}
    state = init_state(cfg, max_requests=B, **room, schedule=schedule)
    return insert(state, pack_requests(state, range(B), [r.prompt for r in requests], [r.sampling for r in requests], ()))


@partial(jax.jit, static_argnames=("cfg", "schedule", "source"), donate_argnames=("state",))
def generate_drafted(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    recorded: jax.Array,
    recorded_length: jax.Array,
    num_steps: jax.Array,
    *,
    schedule: Schedule,
    source: str,
) -> GenState:
    """Prefills what is missing and runs up to `num_steps` steps, drafted by `draft_source`."""
    state = prefill(params, cfg, state, schedule=schedule)
    draft_fn = draft_source(source, schedule, recorded, recorded_length)
    step_fn = partial(dvr_step, params, cfg, draft_fn=draft_fn, schedule=schedule)
    return run(state, step_fn, max_steps=num_steps, min_live=jnp.int32(1))[0]


def draft_source(source: str, schedule: Schedule, recorded: jax.Array, recorded_length: jax.Array) -> DraftFn:
    """The `draft_fn` called `source`.

    "recorded" takes the guesses of ordinary rows as results, unverified. "both" gives rows 0, 2, 4, ... the recorded guesses
    and the others those of the model itself, which leaves its own keys and values in the slots of all of them.
    """
    if source == "none":
        return no_draft
    own, guess = (
        self_draft(max(schedule.budget.window, 2), schedule),
        recorded_draft(recorded, recorded_length, schedule.budget.window),
    )

    def told(params: Params, cfg: ModelConfig, state: GenState) -> Draft:
        draft = guess(params, cfg, state)
        return draft.replace(final=~state.deterministic & (draft.count > 0))

    def both(params: Params, cfg: ModelConfig, state: GenState) -> Draft:
        drafts = told(params, cfg, state), own(params, cfg, state)
        is_told = jnp.arange(state.live.shape[0]) % 2 == 0

        def choose(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.where(is_told.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        chosen = jax.tree.map(choose, *(draft.replace(cache=None) for draft in drafts))
        return chosen.replace(cache=drafts[1].cache)

    return {"self": own, "recorded": told, "both": both}[source]


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """The bit pattern of float32 numbers; nan equals nan, 0 does not equal -0."""
    return np.asarray(x, np.float32).view(np.uint32)
