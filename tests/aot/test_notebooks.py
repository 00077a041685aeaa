"""The programs that the notebooks run on their small models compile for Colab's TPUs, a v5e and a v6e, and its GPUs.

Widths, heads, vocabularies and the settings of engines are those of the notebooks. Layers are alike, so there are no more of
them than a program needs. `make test-aot` compiles most of what runs first, each program for one of the TPUs, and some of them
for a T4, an L4 and an A100. The rest takes minutes: `make test-aot ARGS='-k notebook -m sweep'` compiles all programs for all
of them and for an H100.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from compile_proof import ROOT  # noqa: F401  # importing it lets `prove_stages` be found
from fixed_order import PRODUCT, kernels
from hlo import kernel_calls
from jax.sharding import SingleDeviceSharding
from prove_stages.programs import Program, engine_programs

from detspec.checkpoint.load import load_config
from detspec.config import ModelConfig
from detspec.draft.table import source_of
from detspec.engine.device import PLAIN
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, large_passes, needed_plans
from detspec.generation.init import init_state
from detspec.generation.loop import generate_state
from detspec.model.dense import with_fields
from detspec.model.params import Params, init_params
from detspec.presets import preset
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.target_compilers import device_of
from detspec.targets import Target, canonical_schedule, target
from detspec.traces.record_windows import _step
from detspec.train.problems.chunks import Batch
from detspec.train.reasoning_loss import Counts, reasoning_loss

pytestmark = pytest.mark.slow
TARGETS = ("v5e:2x2", "v6e:2x2")
WITHOUT_KERNELS = ("t4", "l4", "a100")
SWEPT = (*TARGETS, *WITHOUT_KERNELS, "h100")
MAX_LEN = 256
SHIPPED = with_fields(load_config("tiny_python"), num_layers=1)
THINKER = load_config("thinking_parity")
assert THINKER.thinking is not None
THINKER = with_fields(THINKER, num_layers=2, thinking=dataclasses.replace(THINKER.thinking, out_layer=2))
SIZES = {"vocab_size": 2048, "d_model": 256, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "d_ff": 512, "head_dim": 64}
RANDOM_QWEN3 = with_fields(preset("qwen3_0_6b"), **SIZES, max_position=1024, tie_embeddings=False)


PREFILL = "prefill_sequences"
SHARED = {PREFILL: "read_sequences"}  # with XLA's products, prefill runs the program of the replays


class Notebook(NamedTuple):
    """A program."""

    make: Callable[[Target], Program]
    kernels: int  # calls of attention's kernel inside, on devices that have it


def engine(cfg: ModelConfig, label: str, *, place: int = 0, large: bool = False, **config: Any) -> Callable[[Target], Program]:
    """The program of an engine whose name ends in `label`, the one at `place` of these; `large` has an audit's passes."""

    def make(device: Target) -> Program:
        settings = EngineConfig(**{"max_requests": 8, **config}, max_len=MAX_LEN, schedule=canonical_schedule(device, cfg))
        assert settings.schedule is not None
        plans = needed_plans(settings, settings.schedule, settings.max_requests, Needs(processing=False))
        programs = engine_programs(cfg, settings, plans, name="")
        own = label if any(program.name.endswith(label) for program in programs) else SHARED[label]
        found = [program for program in programs if program.name.endswith(own)]
        if not large:
            return found[place]
        schedule = large_passes(settings.schedule, MAX_LEN)
        assert schedule != settings.schedule
        return dataclasses.replace(found[place], static={**found[place].static, "schedule": schedule, "asked": PLAIN})

    return make


def training(device: Target) -> Program:
    """The gradient of one slice of a batch."""

    def make() -> tuple[Params, Batch, Counts]:
        batch = Batch(jnp.zeros((4, 65), jnp.int32), jnp.zeros((4, 64)), jnp.zeros((4, 8, 4), jnp.int32))
        return init_params(THINKER, jax.random.key(0)), batch, Counts(jnp.float32(1), jnp.float32(1))

    def loss(params: Params, batch: Batch, counts: Counts) -> Any:
        return reasoning_loss(params, THINKER, batch, counts)

    return Program("training", jax.value_and_grad(loss, has_aux=True), make)


def accuracy(device: Target) -> Program:
    """Generation of the answers that a trained model is judged by."""
    own = canonical_schedule(device, THINKER)
    schedule = own.with_budget(own.budget.rows, 1)
    run = partial(generate_state.__wrapped__, cfg=THINKER, schedule=schedule)
    return Program("accuracy", lambda params, state: run(params, state=state), partial(started, THINKER, schedule, 32), (1,))


def recorded(device: Target) -> Program:
    """A step whose windows are recorded."""
    own = canonical_schedule(device, SHIPPED)
    schedule = own.with_budget(8, 8)
    source = source_of("ngram")

    def make() -> tuple[Params, GenState]:
        params, state = started(SHIPPED, own, 1)
        return params, state.replace(draft=source.init(SHIPPED, schedule, state))

    step = partial(_step.__wrapped__, cfg=SHIPPED, schedule=schedule, source=source)
    return Program("recorded", lambda params, state: step(params, (), state=state), make, (1,))


def started(cfg: ModelConfig, schedule: Schedule, max_requests: int) -> tuple[Params, GenState]:
    """Weights and a state for `max_requests`."""
    room = {"max_requests": max_requests, "max_len": MAX_LEN, "max_stop_ids": 1, "max_logit_bias": 1}
    return init_params(cfg, jax.random.key(0)), init_state(cfg, **room, schedule=schedule)


DRAFTS = {"num_speculative_tokens": 7}
READER: dict[str, Any] = {"max_requests": 1, "thoughts": "self"}
FIRST: Mapping[str, Notebook] = {
    "ordinary": Notebook(engine(SHIPPED, "ordinary", method="none"), 1),
    "none": Notebook(engine(SHIPPED, "8x1 none", method="none"), 1),
    "ngram": Notebook(engine(SHIPPED, " ngram", method="ngram", **DRAFTS), 2),  # a narrow pass and a wide one
    "self": Notebook(engine(SHIPPED, "8x8 self", method="self", **DRAFTS), 2),  # the fast path and the pass
    "int8": Notebook(engine(SHIPPED, "8x8 int8", method="int8", **DRAFTS), 2),
    "prefill": Notebook(engine(with_fields(SHIPPED, num_layers=2), PREFILL, method="none"), 1),
    # Reading ahead: the backbone's two layers, the thinker twice, the compressor. Verification: these, and the compressor once
    # more. Replay: two layers.
    "thoughts": Notebook(engine(THINKER, "read_sequences", **READER), 5 + 6 + 2),
    "answer": Notebook(engine(THINKER, "1x1 none", **READER), 2),
    "own checkpoint": Notebook(engine(RANDOM_QWEN3, "8x1 none"), 1),
    "training": Notebook(training, 0),
}
# Compiled for TPUs elsewhere: the generator of tests/aot/test_program.py drafts by the fast path, and "none" is the same
# program at other sizes.
ALIKE = ("self", "answer", "own checkpoint")
MORE: Mapping[str, Notebook] = {
    "ordinary, alone": Notebook(engine(SHIPPED, "ordinary", max_requests=1), 1),
    "ordinary, in a crowd": Notebook(engine(SHIPPED, "ordinary", max_requests=32), 1),
    "none, alone": Notebook(engine(SHIPPED, "1x1 none", max_requests=1), 1),
    "none, in a crowd": Notebook(engine(SHIPPED, "32x1 none", max_requests=32), 1),
    "none of 256 rows": Notebook(engine(SHIPPED, "256x1 none", method="none"), 1),
    "ngram of 256 rows": Notebook(engine(SHIPPED, " ngram", place=1, method="ngram", **DRAFTS), 2),
    "self of 256 rows": Notebook(engine(SHIPPED, "32x8 self", method="self", **DRAFTS), 2),
    "int8 of 256 rows": Notebook(engine(SHIPPED, "32x8 int8", method="int8", **DRAFTS), 2),
    "replay": Notebook(engine(SHIPPED, "read_sequences", method="none"), 1),
    "audit": Notebook(engine(SHIPPED, "read_sequences", large=True, max_requests=32), 1),
    "copy": Notebook(engine(SHIPPED, "copy_pages", method="none"), 0),
    "thoughts that are not drafted": Notebook(engine(THINKER, "read_sequences", max_requests=32), 6 + 2),
    "answer of 256 rows": Notebook(engine(THINKER, "256x1 none", **READER), 2),
    "own checkpoint of 256 rows": Notebook(engine(RANDOM_QWEN3, "256x1 none"), 1),
    "own checkpoint, replay": Notebook(engine(RANDOM_QWEN3, "read_sequences"), 1),
    "own checkpoint, audit": Notebook(engine(RANDOM_QWEN3, "read_sequences", large=True, max_requests=32), 1),
    "accuracy": Notebook(accuracy, 6 + 1 + 2),
    "recorded": Notebook(recorded, 1),
}


def dealt() -> list[Any]:
    """Targets and programs in pairs: those of FIRST for one target in turn, and all others as sweeps."""
    turns = [(TARGETS[number % len(TARGETS)], name) for number, name in enumerate(FIRST) if name not in ALIKE]
    turns += [("t4", "none"), ("l4", "ordinary"), ("a100", "answer")]
    others = [(each, name) for name in (*FIRST, *MORE) for each in SWEPT if (each, name) not in turns]
    return [*turns, *(pytest.param(*pair, marks=pytest.mark.sweep) for pair in others)]


@pytest.mark.parametrize(("name", "program"), dealt())
def test_program_of_a_notebook_compiles_with_kernels_inside_where_there_are_some(name: str, program: str):
    device = target(name)
    wanted = {**FIRST, **MORE}[program]
    hlo = wanted.make(device).lower(SingleDeviceSharding(device_of(device))).compile().as_text()
    products = sum(kernel.name == PRODUCT for kernel in kernels(hlo, apart=()))  # of an H100
    # Where products are XLA's, prefill runs the program of the replays, whose last layer attends as well.
    shared = program == "prefill" and canonical_schedule(device, SHIPPED).numerics.linear == "xla"
    assert kernel_calls(hlo, device.platform) - products == (0 if name in WITHOUT_KERNELS else wanted.kernels + shared)
