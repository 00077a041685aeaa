"""New weights: wherever a trainer keeps them, they need no other programs; who owns them, and what donating them does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from detspec.engine.compiled import PROGRAMS, ProgramCall, Programs
from detspec.engine.engine import Engine
from detspec.engine.programs import copy_pages, prefill_sequences, read_sequences, run_segment
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import facts, make_engine

ASKED = [[5, 6, 7], [9]], [SamplingParams(max_tokens=6), SamplingParams(max_tokens=5, temperature=0.8, seed=3)]


def copied(params):
    return jax.tree.map(jnp.copy, params)


def committed(params):
    return jax.device_put(copied(params), SingleDeviceSharding(jax.devices()[0]))


def of_a_program(params):
    """As an optimiser returns them whose state is committed."""
    return jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 0, tree))(committed(params))


def on_a_mesh_of_one(params):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(copied(params), NamedSharding(mesh, PartitionSpec()))


step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)  # of a trainer
KINDS = (copied, committed, of_a_program, on_a_mesh_of_one, copied)


def num_programs() -> int:
    return sum(len(PROGRAMS.made_from(fn)) for fn in (prefill_sequences, read_sequences, run_segment, copy_pages))


def answers(engine: Engine) -> list[tuple]:
    return [facts(completion) for completion in engine.generate(*ASKED)]


def pointers(params) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("first", [copied, committed])
def test_new_weights_need_no_program_whether_they_are_committed_or_not_and_are_not_copied(model, first):
    engine = make_engine(dataclasses.replace(model, params=first(model.params)), 1, "none")
    before = answers(engine)
    count = num_programs()
    assert count >= 2
    for number, kind in enumerate(KINDS):
        params = kind(model.params)
        engine.update_params(params, f"{number}")
        assert answers(engine) == before
        assert num_programs() == count, kind
        assert pointers(engine.device.model.params) == pointers(params)


def test_committed_arrays_are_another_call_only_where_their_place_is_one(monkeypatch):
    """The control: named by their places, as they were, arrays of the two kinds have a program each."""
    double = jax.jit(lambda x: 2 * x)
    free = jnp.zeros(3)
    bound = committed(free)
    found = Programs()
    begun = [found.start(ProgramCall(double, None, (array,), {}), None) for array in (free, bound)]
    assert begun[0] is begun[1]
    assert begun[0].result()(bound).tolist() == begun[0].result()(free).tolist() == [0] * 3
    places = lambda array, devices: array.sharding if array.committed else None  # noqa: E731
    monkeypatch.setattr("detspec.engine.compiled._sharding_of", places)
    found.forget()
    begun = [found.start(ProgramCall(double, None, (array,), {}), None) for array in (free, bound)]
    assert begun[0] is not begun[1]


def test_weights_that_were_donated_are_one_error_and_new_ones_go_on(model):
    """A trainer's step takes its own float32 masters to write the next ones there, which are the engine's arrays."""
    engine = make_engine(model, 1, "none")
    before = answers(engine)
    masters = copied(model.params)
    engine.update_params(masters, "1")
    step(masters)
    with pytest.raises(InputError, match=r"weights have been deleted: .* donated to a program .* you do not donate"):
        engine.generate(*ASKED)
    assert not engine.has_work
    donated = copied(model.params)
    step(donated)
    with pytest.raises(InputError, match="weights have been deleted"):
        engine.update_params(donated, "2")
    engine.update_params(copied(model.params), "3")
    assert answers(engine) == before


def test_published_copy_survives_a_donation(model):
    """Masters are published as `update_params` says: the next step donates them, and the engine does not notice."""
    engine = make_engine(model, 1, "none")
    before = answers(engine)
    masters = copied(model.params)
    engine.update_params(jax.jit(copied)(masters), "1")
    step(masters)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(masters))
    assert answers(engine) == before
