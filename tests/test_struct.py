"""Immutable dataclasses that are pytrees."""

import dataclasses

import jax
import numpy as np
import pytest

from detspec.state import NO_DRAFT_STATE, DraftState


def test_replace_copies_as_dataclasses_do_and_refuses_other_fields():
    state = DraftState(sequences=np.arange(3))
    changed = state.replace(shared=(1, 2))
    assert changed == dataclasses.replace(state, shared=(1, 2)) != state
    assert (state.shared, changed.shared) == (NO_DRAFT_STATE.shared, (1, 2))
    assert jax.tree.structure(changed) == jax.tree.structure(DraftState(0, (1, 2)))
    with pytest.raises(TypeError, match="DraftState has no field share"):
        state.replace(share=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.shared = ()
