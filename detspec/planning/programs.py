"""A model's programs, compiled for chips that are not here; on several chips each is one `jax.shard_map`, as in an engine."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from detspec.model.params import Params, param_shapes, pass_work
from detspec.planning.exchanges import Exchanges, gathers
from detspec.roofline import Work, check_devices
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.target_compilers import Compiled, compile_for, devices_of
from detspec.targets import Target

PASSES = ("draft step", "canonical pass")  # programs that a plan consists of


class Deployment(NamedTuple):
    """A model on a target, how it runs there, and the full sequences that it serves: the subject of a plan."""

    cfg: ModelConfig
    target: Target
    schedule: Schedule  # the canonical one, see `targets.canonical_schedule`
    max_requests: int = 32  # on all chips together
    max_len: int = 1024  # positions of each

    @property
    def room(self) -> dict[str, int]:
        """The numbers of requests and positions, as keywords of functions that make caches."""
        return {"max_requests": self.max_requests, "max_len": self.max_len}

    def rows(self, name: str) -> int:
        """Token rows of a pass of the program called `name`."""
        return self.max_requests if name == "draft step" else self.schedule.budget.rows


def draft_step(cfg: ModelConfig, schedule: Schedule, params: Params, state: GenState) -> GenState:
    """A step of ordinary decoding, which is also one token of the self draft."""
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


def compile_program(name: str, deployed: Deployment, chips: int) -> Compiled:
    """Compiles one of `PROGRAMS` for the first `chips` devices of the target; nothing is allocated.

    Weights and cache are cut over several chips as `detspec.mesh` does.

    Raises `InputError` if the model cannot be cut over so many chips, the target has fewer, or a package is missing.
    """
    cfg, target, schedule, *_ = deployed
    check_devices(target, chips)
    options = {} if name == "draft step" else compiler_options(schedule.numerics, target.platform)
    program = partial(PROGRAMS[name], cfg, schedule)
    if chips == 1:
        return compile_for(target, program, *program_args(name, deployed), donate=(1,), options=options)
    mesh = make_mesh(cfg, chips, devices_of(target, chips))
    args = program_args(name, deployed, mesh)
    return compile_for(target, over_chips(program, mesh, args, STATE), *args, donate=(1,), options=options)


def program_args(name: str, deployed: Deployment, mesh: jax.sharding.Mesh | None = None) -> tuple[Any, ...]:
    """The shapes that a program takes: weights, state, and recorded drafts where it reads some; with their places on `mesh`."""
    cfg = deployed.cfg
    most = {"max_stop_ids": EngineConfig.max_stop_ids, "max_logit_bias": EngineConfig.max_logit_bias}
    state = jax.eval_shape(lambda: init_state(cfg, **deployed.room, **most, schedule=deployed.schedule))
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    more = (
        (int32((deployed.max_requests, deployed.max_len)), int32((deployed.max_requests,))) if name == "canonical pass" else ()
    )
    if mesh is None:
        return (param_shapes(cfg), state, *more)

    def placed(spec: jax.sharding.PartitionSpec, tree: Any) -> Any:
        place = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

    return (param_shapes(cfg, sharding=param_shardings(cfg, mesh)), jax.tree.map(placed, STATE, state), *placed(COPIES, more))


def expected(name: str, deployed: Deployment, chips: int) -> Exchanges:
    """The exchanges of one of `PROGRAMS` by arithmetic, the body of its loop over passes once."""
    cfg = deployed.cfg
    rows = deployed.max_requests if name == "draft step" else deployed.schedule.budget.rows
    return (
        gathers(cfg, rows, chips, whole_layers=cfg.num_layers - 1, head=False)
        if name == "prefill"
        else gathers(cfg, rows, chips)
    )


def work_of(name: str, deployed: Deployment, chips: int = 1) -> Work:
    """The work on each chip of one of `PASSES`."""
    live = deployed.max_requests
    schedule = deployed.schedule.fast(live) if name == "draft step" else deployed.schedule
    return pass_work(deployed.cfg, schedule, windows=min(live, schedule.budget.groups), context=deployed.max_len, chips=chips)
