"""A model's programs, compiled for chips that are not here; on several chips each is one `jax.shard_map`, as in an engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from detspec.config import ModelConfig
from detspec.draft.given import RECORDED
from detspec.draft.source import Drafter, draft_fn
from detspec.engine.engine_config import EngineConfig
from detspec.generation.init import init_state
from detspec.generation.loop import dvr_step, ordinary_step
from detspec.generation.prefill import prefill
from detspec.held import compiler_options
from detspec.mesh import COPIES, STATE, make_mesh, over_chips, param_shardings
from detspec.model.params import Params, param_shapes
from detspec.model.work import pass_work
from detspec.planning.exchanges import Exchanges, gathers
from detspec.roofline import Work
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.target_compilers import Compiled, compile_for, devices_of
from detspec.targets import Target

PASSES = ("draft step", "canonical pass")  # programs that a plan consists of


def draft_step(cfg: ModelConfig, schedule: Schedule, params: Params, state: GenState) -> GenState:
    """One step of ordinary decoding, which is also one token of the self draft."""
    return ordinary_step(params, cfg, state, schedule=schedule)


def canonical_step(
    cfg: ModelConfig, schedule: Schedule, params: Params, state: GenState, tokens: jax.Array, length: jax.Array
) -> GenState:
    """Verification and commit of drafts that are read from `tokens [B, max_len]`, `length [B]` of them each."""
    recorded = draft_fn(Drafter(RECORDED, (tokens, length)), schedule)
    return dvr_step(params, cfg, state, draft_fn=recorded, schedule=schedule)[0]


def fill_cache(cfg: ModelConfig, schedule: Schedule, params: Params, state: GenState) -> GenState:
    """Prefill: canonical passes over the prompts, without logits."""
    return prefill(params, cfg, state, schedule=schedule)


PROGRAMS: dict[str, Callable[..., GenState]] = {
    "draft step": draft_step,
    "canonical pass": canonical_step,
    "prefill": fill_cache,
}


def compile_program(
    name: str, cfg: ModelConfig, target: Target, chips: int, *, schedule: Schedule, max_requests: int, max_len: int
) -> Compiled:
    """Compiles one of `PROGRAMS` for the first `chips` devices of `target`; nothing is allocated.

    Weights and cache are cut over several chips as `detspec.mesh` does.

    Raises `InputError` if the model cannot be cut over so many chips, the target has fewer, or a package is missing.
    """
    check_devices(target, chips)
    options = {} if name == "draft step" else compiler_options(schedule.numerics, target.platform)
    if chips == 1:
        args = program_args(name, cfg, schedule, max_requests=max_requests, max_len=max_len)
        return compile_for(target, partial(PROGRAMS[name], cfg, schedule), *args, donate=(1,), options=options)
    mesh = make_mesh(cfg, chips, devices_of(target, chips))
    args = program_args(name, cfg, schedule, max_requests=max_requests, max_len=max_len, mesh=mesh)
    program = over_chips(partial(PROGRAMS[name], cfg, schedule), mesh, args, STATE)
    return compile_for(target, program, *args, donate=(1,), options=options)


def program_args(
    name: str, cfg: ModelConfig, schedule: Schedule, *, max_requests: int, max_len: int, mesh: jax.sharding.Mesh | None = None
) -> tuple[Any, ...]:
    """The shapes that a program takes: weights, state, and recorded drafts where it reads some; with their places on `mesh`."""
    state = jax.eval_shape(
        lambda: init_state(
            cfg,
            max_requests=max_requests,
            max_len=max_len,
            max_stop_ids=EngineConfig.max_stop_ids,
            max_logit_bias=EngineConfig.max_logit_bias,
            schedule=schedule,
        )
    )
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    more = (int32((max_requests, max_len)), int32((max_requests,))) if name == "canonical pass" else ()
    if mesh is None:
        return (param_shapes(cfg), state, *more)

    def placed(spec: jax.sharding.PartitionSpec, tree: Any) -> Any:
        place = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

    return (param_shapes(cfg, sharding=param_shardings(cfg, mesh)), jax.tree.map(placed, STATE, state), *placed(COPIES, more))


def expected(name: str, cfg: ModelConfig, schedule: Schedule, chips: int, *, max_requests: int) -> Exchanges:
    """What one of `PROGRAMS` exchanges by arithmetic, the body of its loop over passes once."""
    if name == "prefill":
        return gathers(cfg, schedule.budget.rows, chips, whole_layers=cfg.num_layers - 1, head=False)
    return gathers(cfg, max_requests if name == "draft step" else schedule.budget.rows, chips)


def work_of(name: str, cfg: ModelConfig, schedule: Schedule, *, live: int, context: int, chips: int = 1) -> tuple[Work, int]:
    """The work on each chip of one of `PASSES` over `live` sequences of `context` positions, and the pass's rows."""
    fed, windows = (schedule.fast(live), live) if name == "draft step" else (schedule, min(live, schedule.budget.groups))
    return pass_work(cfg, fed, windows=windows, context=context, chips=chips), fed.budget.rows
