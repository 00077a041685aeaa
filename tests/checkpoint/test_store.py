"""Checkpoints of a training run."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.store import Store


def test_store_returns_the_newest_state_bit_for_bit(tmp_path: Path):
    def state_at(step: int) -> dict[str, jax.Array]:
        return {"step": jnp.int32(step), "w": jax.random.normal(jax.random.key(step), (4, 3)), "h": jnp.ones(3, jnp.bfloat16)}

    with Store(tmp_path / "checkpoints", max_to_keep=2) as store:
        assert store.latest_step() is None
        for step in (1, 2, 3):
            store.save(step, state_at(step), {"config": {"steps": step}})
    with Store(tmp_path / "checkpoints") as store:
        assert store.latest_step() == 3
        assert store.record(3) == {"config": {"steps": 3}}
        restored = store.restore(3, jax.eval_shape(lambda: state_at(0)))
        older = store.restore(2, jax.eval_shape(lambda: state_at(0)))
    expected = state_at(3)
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for name in expected:
        assert restored[name].dtype == expected[name].dtype
        assert np.asarray(restored[name]).tobytes() == np.asarray(expected[name]).tobytes()
    assert np.asarray(older["w"]).tobytes() != np.asarray(expected["w"]).tobytes()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == ["2", "3"]
