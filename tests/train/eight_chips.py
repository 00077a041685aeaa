"""Trains on 1, 2, 4 and 8 CPU devices of one process and prints SHA-256 sums as JSON, for `tests/promises/test_training.py`.

Run as `JAX_NUM_CPU_DEVICES=8 python eight_chips.py WORKDIR CONFIG`.
"""

import dataclasses
import hashlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from detspec.model.params import Params
from detspec.train.data_parallel import Slice, sum_over_slices
from detspec.train.experiment import Experiment, Result, load_config
from detspec.train.run import run_experiment

CHIPS = 1, 2, 4, 8
CONTROLS = 1, 2, 4
BREAK_AT = 3  # step before which a run is broken off; a checkpoint is at 2


def main(workdir: Path, config: str) -> dict[str, Any]:
    """Sums of weights after whole runs and after a resumed one; and of gradients of one step that are added in other ways."""
    workdir.mkdir(parents=True)
    experiment = load_config(config).experiment(workdir)
    batch = experiment.batch_at(0)
    return {
        "weights": [run(experiment, workdir / str(chips), chips) for chips in CHIPS],
        "resumed": resumed(experiment, workdir / "resumed"),
        "a slice for each chip": [gradient(experiment, parts(batch, experiment, chips)) for chips in CONTROLS],
        "psum": [gradient_by_psum(experiment, parts(batch, experiment, chips)) for chips in CONTROLS],
    }


def run(experiment: Experiment, workdir: Path, chips: int) -> str:
    """The weights at the end of a run of `chips` in `workdir`, which is made or resumed."""
    workdir.mkdir(exist_ok=True)
    weights = []
    finish = lambda params: weights.append(digest(params)) or Result({}, workdir)  # noqa: E731
    run_experiment(dataclasses.replace(experiment, finish=finish), workdir=workdir, chips=chips, progress=False)
    return weights[0]


def resumed(experiment: Experiment, workdir: Path) -> str:
    """The weights of a run that is broken off on 4 chips and goes on on 2."""

    def batch_at(step: int) -> Any:
        if step == BREAK_AT:
            raise KeyboardInterrupt
        return experiment.batch_at(step)

    try:
        run(dataclasses.replace(experiment, batch_at=batch_at), workdir, 4)
    except KeyboardInterrupt:
        return run(experiment, workdir, 2)
    raise AssertionError("the run was not broken off")


def gradient(experiment: Experiment, slices: list[Slice]) -> str:
    """The gradient of `slices`, one on each chip, as training adds it up."""
    fn = jax.jit(jax.grad(experiment.loss_fn, has_aux=True))
    return digest(sum_over_slices(fn, experiment.init_params(), slices, chips=jax.devices()[: len(slices)])[0])


def parts(batch: Any, experiment: Experiment, number: int) -> list[Slice]:
    """`batch` in `number` slices, which become smaller with every chip."""
    counts = experiment.cut(batch)[0].counts
    leaves, structure = jax.tree.flatten(batch)
    cuts = zip(*(np.split(leaf, number) for leaf in leaves), strict=True)
    return [Slice(jax.tree.unflatten(structure, rows), counts) for rows in cuts]


def gradient_by_psum(experiment: Experiment, slices: list[Slice]) -> str:
    """The gradient as it is usually added up: each chip has one slice, and a collective adds in an order of its own."""
    mesh = Mesh(np.array(jax.devices()[: len(slices)]), ("chips",), axis_types=(AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("chips")), out_specs=PartitionSpec())
    def total(params: Params, part: Slice) -> Params:
        mine = jax.tree.map(lambda leaf: leaf[0], part)
        return jax.lax.psum(jax.grad(experiment.loss_fn, has_aux=True)(params, mine)[0], "chips")

    return digest(total(experiment.init_params(), jax.tree.map(lambda *leaves: np.stack(leaves), *slices)))


def digest(tree: Params) -> str:
    """SHA-256 of all leaves' bytes."""
    sums = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        sums.update(np.asarray(leaf).tobytes())
    return sums.hexdigest()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
