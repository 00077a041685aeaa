"""Immutable dataclasses that are pytrees."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import struct

import detspec
from detspec.state import NO_DRAFT_STATE, DraftState
from detspec.struct import Struct


class Counts(Struct):
    """Counts on the device, of a kind that belongs to the program."""

    first: jax.Array
    second: jax.Array
    kind: str = struct.field(pytree_node=False, default="a")


def test_fields_are_children_of_the_pytree_and_static_ones_are_of_its_structure():
    counts = Counts(jnp.arange(2), jnp.arange(3))
    leaves, structure = jax.tree.flatten(counts)
    assert [leaf.shape for leaf in leaves] == [(2,), (3,)]
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(counts)] == [".first", ".second"]
    assert jax.tree.unflatten(structure, [1, 2]) == Counts(1, 2)
    assert structure != jax.tree.structure(counts.replace(kind="b"))


def test_another_static_value_makes_another_program():
    traced = []

    @jax.jit
    def add(counts: Counts) -> Counts:
        traced.append(counts.kind)
        return counts.replace(first=counts.first + 1)

    counts = Counts(jnp.arange(2), jnp.arange(3))
    assert add(add(counts)).first.tolist() == [2, 3]
    assert add(counts.replace(kind="b")).kind == "b"
    assert traced == ["a", "b"]


def test_every_pytree_of_the_package_has_this_base():
    for path in Path(detspec.__file__).parent.rglob("*.py"):
        named = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert path.name == "struct.py" or not named & {"PyTreeNode", "register_dataclass", "register_pytree_node_class"}, path


@pytest.mark.parametrize("base", [Struct, Counts])
def test_classes_keep_the_fast_replace(base):
    class More(base):
        state: int = 0

    assert More.replace is Counts.replace
    assert More.replace(More(1, 2) if base is Counts else More(), state=3).state == 3  # a name that `replace` has, too
    assert Counts.replace is not Struct.replace  # which is flax's, and slow


def test_replace_copies_as_dataclasses_do_and_refuses_other_fields():
    state = DraftState(sequences=3)  # no array: since Python 3.13 dataclasses compare field by field
    changed = state.replace(shared=(1, 2))
    assert changed == dataclasses.replace(state, shared=(1, 2)) != state
    assert (state.shared, changed.shared) == (NO_DRAFT_STATE.shared, (1, 2))
    assert jax.tree.structure(changed) == jax.tree.structure(DraftState(0, (1, 2)))
    with pytest.raises(TypeError, match="DraftState has no field share"):
        state.replace(share=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.shared = ()
