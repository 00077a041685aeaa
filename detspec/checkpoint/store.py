"""Orbax checkpoints of a training run: the whole state, and what it was made with."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class Store:
    """Checkpoints in one folder, named by step; each is complete or absent, and the newest `max_to_keep` are kept."""

    def __init__(self, folder: str | Path, *, max_to_keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, enable_async_checkpointing=False)
        self.folder = Path(folder).resolve()
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self.manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, the oldest first."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Writes the pytree `state` and the JSON-like `record`; returns when both are on disk."""
        self.manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)))

    def record(self, step: int) -> dict[str, Any]:
        """The record saved with checkpoint `step`."""
        return dict(self.manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record)

    def restore(self, step: int, like: Any) -> Any:
        """The state of checkpoint `step`; `like` is a pytree of arrays or `jax.ShapeDtypeStruct` with its structure."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=local_sharding()), like)
        return self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes))).state


def local_sharding() -> jax.sharding.SingleDeviceSharding:
    """Puts restored arrays on the first device of this process."""
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
