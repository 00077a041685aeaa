"""A model's programs compiled for several chips that are not here: each is one `jax.shard_map`, as when the engine runs it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from detspec.config import ModelConfig
from detspec.generation.init import init_state
from detspec.generation.prefill import prefill
from detspec.held import compiler_options
from detspec.mesh import COPIES, STATE, make_mesh, over_chips, param_shardings
from detspec.model.params import Params, param_shapes
from detspec.planning.exchanges import Exchanges, gathers
from detspec.planning.planning import MAX_LOGIT_BIAS, MAX_STOP_IDS, canonical_step, draft_step
from detspec.roofline import check_devices
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.target_compilers import Compiled, compile_for, devices_of
from detspec.targets import Target


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
    """Compiles one of `PROGRAMS` for the first `chips` devices of `target`, weights and cache cut as `detspec.mesh` does.

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
            max_stop_ids=MAX_STOP_IDS,
            max_logit_bias=MAX_LOGIT_BIAS,
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
