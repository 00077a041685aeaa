"""A random model that 1, 2, 4 and 8 chips can share, a value of it for each family, and jobs for engines."""

import jax
import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig, ThinkingConfig
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion
from detspec.model.dense import with_fields
from detspec.ops import collectives
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import FAMILY_CFGS, LAYER_CFGS, RANDOM_CFG

SIZES = {"vocab_size": 520, "num_heads": 8, "num_kv_heads": 2}  # 520 / 8 fills no vector, so loops have remainders
CFG = with_fields(RANDOM_CFG, **SIZES)
FAMILIES = {
    **{name: with_fields(cfg, **SIZES) for name, cfg in FAMILY_CFGS.items()},
    "alibi": with_fields(CFG, position_encoding="alibi", dtype="float32"),
}
KINDS = {name: with_fields(cfg, **SIZES, dtype="float32") for name, cfg in LAYER_CFGS.items()}
FAMILIES["mistral"] = with_fields(FAMILIES["mistral"], num_kv_heads=1)
THINKER_CFG = with_fields(CFG, num_layers=3, thinking=ThinkingConfig(chunk=4, in_layer=1, out_layer=2, max_thought=5, end_id=0))
PINNED = Schedule(Numerics(page=16, implementation="cpu", linear="pinned", cache_dtype="bfloat16"), Budget(16, 4))

Facts = tuple[tuple[int, ...], bytes, tuple, tuple, str, tuple]


def schedule_for(cfg: ModelConfig) -> Schedule:
    """`PINNED` with a cache of the model's dtype."""
    return PINNED.with_numerics(cache_dtype=cfg.dtype)


def engine_on(model: Model, **changes) -> Engine:
    """An engine with four places that drafts nothing, unless `changes` say otherwise."""
    shape = {"max_requests": 4, "max_len": 80, "num_speculative_tokens": 3, "schedule": schedule_for(model.cfg)}
    return Engine(model, EngineConfig(**{**shape, "method": "none", "compile_cache": False, **changes}))


def plain_job(model: Model, **changes) -> list[Facts]:
    """Completions of three prompts, greedy and sampled."""
    engine = engine_on(model, **changes)
    prompts = [np.random.default_rng(i).integers(0, model.cfg.vocab_size, 11 + 4 * i).tolist() for i in range(3)]
    sampling = [SamplingParams(max_tokens=24, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0, 1.0, 0.7))]
    return [facts(completion) for completion in engine.generate(prompts, sampling)]


def job(model: Model, *, order: int = 1, **changes) -> list[Facts]:
    """Completions of nine requests of all kinds, in the order of the requests, whatever `order` they come in."""
    prompts, sampling = requests(model.cfg.vocab_size)
    completions = engine_on(model, **changes).generate(prompts[::order], sampling[::order])
    return [facts(completion) for completion in completions][::order]


def requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, greedy and sampled, with and without penalties, biases, filters and reports."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, vocab_size, 37).tolist()
    prompts = [shared[: 5 + 4 * i] + rng.integers(0, vocab_size, i % 3).tolist() for i in range(9)]
    asked = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.7, "logprobs": 2, "logprobs_mode": "processed"},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "prompt_logprobs": 1},
        {"temperature": 1.2, "presence_penalty": 0.5, "min_p": 0.01},
        {"logit_bias": ((7, 4.0), (9, -3.0))},
        {"temperature": 0.7, "top_k": 9},
        {"logprobs": 3},
        {"temperature": 1.0},
    ]
    return prompts, [SamplingParams(max_tokens=12 + 3 * i, seed=i, ignore_eos=True, **how) for i, how in enumerate(asked)]


def facts(completion: Completion) -> Facts:
    """Everything deterministic about a completion."""
    return (
        completion.token_ids,
        np.asarray(completion.logprobs, np.float32).tobytes(),
        tuple(map(str, completion.top_logprobs or ())),
        tuple(map(str, completion.prompt_logprobs or ())),
        completion.finish_reason,
        tuple(map(str, completion.thoughts or ())),
    )


def mlp_added_across_chips(mlp, layer, x, ops):
    """The MLP in the usual layout, a control: `down` is cut along its inputs, and chips add what they have."""
    gate_f32, up_f32 = ops.linears_f32(x, gate=layer["gate"], up=layer["up"])
    gated = ops.gate(gate_f32, up_f32, activation=mlp.activation, dtype=x.dtype)
    if collectives.num_chips() == 1:
        return ops.linear_f32(gated, down=layer["down"]).astype(x.dtype)
    down = collectives.gather(layer["down"].T).T  # [D, F], whole
    own = collectives.own(down)  # [D, F/n]
    return jax.lax.psum(ops.linear_f32(gated, down=own), collectives.CHIPS).astype(x.dtype)
