"""Whether several chips give the bits of one: the same passes over both, compared bit for bit.

A model that needs many chips does not fit on one. So its first layers and its head run on both, on the shapes that they have
in the whole model. What chips exchange is the same in every layer.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from detspec.checkpoint.load import Model
from detspec.engine.bits import differing_copies, first_difference
from detspec.engine.device import PLAIN, Device, GivenText
from detspec.engine.probes import Probes
from detspec.mesh import COPIES

NUM_LAYERS = 2
NUM_PAGES = 4  # pages of each probe's text
MAX_PROBES = 8
ANY_MESH = "any"
ONE_CHIP = "1"


def mesh_of_bits(device: Device) -> tuple[str, str]:
    """Names the mesh in fingerprints, and says where its bits part from those of one chip, "" if nowhere.

    "any": bits do not depend on the number of chips. "1": they are those of one chip, but products of a shape of XLA's choice
    may differ on others. "kv=4,query=2": they are this mesh's own.
    """
    numerics = device.schedule.numerics
    name = ANY_MESH if numerics.linear == "pinned" and numerics.reductions == "fixed" else ONE_CHIP
    if not isinstance(device.place, Mesh):
        return name, ""
    differs = certify_mesh(device)
    return (",".join(f"{axis}={size}" for axis, size in device.place.shape.items()), differs) if differs else (name, "")


def certify_mesh(device: Device) -> str:
    """Says where the anchor of `device`, which lies on a mesh, has other bits than on one chip; "" if nowhere.

    Both read the same made-up texts: greedy and sampled targets, their log-probabilities, and those of the given tokens.
    """
    model = _first_layers(device.model)
    page = device.schedule.numerics.page
    config = dataclasses.replace(
        device.config,
        max_requests=min(MAX_PROBES, device.config.max_requests),
        max_len=min(max(NUM_PAGES * page, device.schedule.budget.window), device.config.max_len),
        num_pages=None,
        method="none",
        num_speculative_tokens=1,
        schedule=device.schedule,
    )
    one_chip = dataclasses.replace(model, params=on_one_chip(model.params))
    found = [_read(Device(each, config)) for each in (model, one_chip)]
    for copies in found[0]:
        if differs := differing_copies(copies):
            return differs
    pairs = [tuple(np.asarray(array) for array in both) for both in zip(*found, strict=True)]
    place = first_difference(pairs)  # type: ignore[arg-type]
    if place is None:
        return ""
    targets, logprobs, given = pairs
    return (
        f"text {place[0]} at position {place[1]}: the mesh has token {targets[0][place]}, log-probability "
        f"{logprobs[0][place]!r} and {given[0][place]!r} for the given token, one chip has {targets[1][place]}, "
        f"{logprobs[1][place]!r} and {given[1][place]!r}"
    )


def _read(device: Device) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Targets, their log-probabilities and those of the given tokens, each `[B, T]`, of made-up texts."""
    device.prefills_apart = False  # replays need their program anyway
    probes = Probes(device, device.config.max_requests)
    probes.start()
    rng = np.random.default_rng(0)
    lengths = [max(1, device.config.max_len - 1 - place) for place in range(device.config.max_requests)]
    vocab_size = device.model.cfg.vocab_size
    texts = {place: GivenText(rng.integers(0, vocab_size, length), 0, 0) for place, length in enumerate(lengths)}
    found = device.replay(probes.placement, texts, PLAIN)
    assert found.targets is not None
    assert found.target_logprobs is not None
    return found.targets, found.target_logprobs, found.logprobs


def _first_layers(model: Model) -> Model:
    """The model cut off after its first layers, its head behind them; it does not think."""
    kept = min(NUM_LAYERS, model.cfg.num_layers)
    cfg = dataclasses.replace(model.cfg.with_layers(kept), thinking=None)
    params = {name: part for name, part in model.params.items() if name != "thinking"}
    return dataclasses.replace(model, cfg=cfg, params={**params, "layers": model.params["layers"][:kept]})


def on_one_chip(params: Any) -> Any:
    """Copies of weights that lie on a mesh, on this process's first chip of it."""

    def gathered(leaf: jax.Array) -> jax.Array:
        assert isinstance(leaf.sharding, NamedSharding)
        whole = jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, COPIES))
        return whole.addressable_shards[0].data

    return jax.tree.map(gathered, params)
