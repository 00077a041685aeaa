"""The demonstration on several chips: the same requests on one chip and on all of them; their bits are compared.

The inverse control is the usual layout. It cuts a product along its inputs and adds across chips what each has.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detspec.checkpoint.load import Model
from detspec.demo.demo import DETERMINISTIC, Change, compare, demo_prompts, one_run, ready_engine
from detspec.engine.bits import same_bits
from detspec.engine.certify_mesh import on_one_chip
from detspec.mesh import COPIES, over_chips, place_of
from detspec.ops.collectives import CHIPS
from detspec.sampling_params import SamplingParams

BATCHES = (1, 16)
TEMPERATURES = (0.0, 0.8)
METHOD = "none"  # speed is not the point here, and drafts take long to compile


@dataclasses.dataclass(frozen=True)
class ChipsReport:
    """Changes from one chip to several."""

    changes: tuple[Change, ...]
    num_added: int  # sums of the control that have other bits
    num_sums: int  # sums of the control

    @property
    def held(self) -> bool:
        """Whether no bit changed."""
        return all(change.none for change in self.changes)


def run_chips_demo(
    model: Model, *, max_tokens: int, show: Callable[[str], None], progress: Callable[[str], None] = lambda stage: None
) -> ChipsReport:
    """Generates the demonstration's prompts by `model`, which lies on several chips, and by a copy of it on one.

    Calls `show` with lines of text as soon as they are known, and `progress` with the name of each of the `NUM_STAGES` stages.
    """
    mesh = place_of(model.cfg, model.params)
    assert isinstance(mesh, Mesh)
    one_chip = dataclasses.replace(model, params=on_one_chip(model.params))
    prompts = demo_prompts()
    labels = ("1 chip", f"{mesh.size} chips")
    show(
        f"Changes from one chip to {mesh.size}, of {len(prompts)} deterministic texts and of the bits of log-probabilities:\n\n"
        f"  {'':26}{'texts':>10}{'log-probs':>14}{labels[0] + ' tok/s':>16}{labels[1] + ' tok/s':>16}"
    )
    changes = []
    for batch in BATCHES:
        engines = []
        for label, each in zip(labels, (one_chip, model), strict=True):
            progress(f"batch {batch} on {label}: compiling")
            engines.append(ready_engine(each, batch, prompts, max_tokens, METHOD, DETERMINISTIC))
        for temperature in TEMPERATURES:
            progress(f"batch {batch}, temperature {temperature:g}")
            order = range(len(prompts))
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
            runs = [
                one_run(engine, DETERMINISTIC, label, prompts, order, sampling)
                for label, engine in zip(labels, engines, strict=True)
            ]
            change = compare(*(run.completions for run in runs))
            changes.append(change)
            texts = f"{change.texts}/{change.num_texts}"
            logprobs = f"{change.logprobs}/{change.num_logprobs}"
            speeds = "".join(f"{run.num_tokens / run.seconds:16,.0f}" for run in runs)
            show(f"  {f'batch {batch}, temperature {temperature:g}':26}{texts:>10}{logprobs:>14}{speeds}")
    progress("control")
    num_added, num_sums = added_across_chips(one_chip.params["layers"][0]["down"], mesh)
    control = "a product that is cut along its inputs and added across chips"
    show(f"\nControl: {control}: {num_added} of {num_sums} sums have other bits.")
    if jax.devices()[0].platform == "cpu":
        show("These chips are threads of one processor, so the speeds say nothing about real ones.")
    return ChipsReport(tuple(changes), num_added, num_sums)


NUM_STAGES = len(BATCHES) * (2 + len(TEMPERATURES)) + 1


def added_across_chips(weight: jax.Array, mesh: Mesh) -> tuple[int, int]:
    """How many sums of `weight [out, in]` times a made-up row change if each chip of `mesh` adds a part, and of how many."""
    row = np.random.default_rng(0).standard_normal(weight.shape[1], np.float32)
    whole = np.asarray(weight, np.float32)

    def product(weight: jax.Array, row: jax.Array) -> jax.Array:
        return jnp.einsum("oi,i->o", weight, row, precision="highest")

    def added(weight: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.psum(product(weight, row), CHIPS)

    cut = tuple(jax.device_put(x, NamedSharding(mesh, P(*[None] * (x.ndim - 1), CHIPS))) for x in (whole, row))
    parts = jax.jit(over_chips(added, mesh, cut, COPIES))(*cut)
    same = same_bits(np.asarray(parts), np.asarray(jax.jit(product)(whole, row)))
    return int((~same).sum()), same.size
