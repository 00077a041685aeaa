"""Loads one model onto 1, 2, 4 and 8 devices in every way and prints what came of it as JSON; `test_shards.py` judges it.

The number of devices is that of the process, so this runs in a process of its own: `JAX_NUM_CPU_DEVICES=8`.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from detspec.checkpoint import shards
from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.families.family import TensorNames
from detspec.checkpoint.files import Problems, read_headers, write_tensors
from detspec.checkpoint.hf import load_hf, read_params, save_hf
from detspec.checkpoint.layout import in_layer
from detspec.checkpoint.orbax_folder import load_orbax, save_orbax
from detspec.checkpoint.tensors import named_tensors, stored_tensors
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.dense import dense_config, with_fields
from detspec.model.params import Params, init_params, param_shapes
from tests.checkpoint.quantizers import make_quantized
from tests.checkpoint.test_stacked_tensors import NAMES, with_experts, write

CFG = dense_config(
    vocab_size=64,
    d_model=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    d_ff=24,
    qkv_bias=True,
    rope_theta=5000.0,
    max_position=64,
    dtype="float32",
)
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
IN_OUR_FOLDERS = ("none", "rows 2", "rows 4", "rows 8", "replicas", "tiles")  # orbax takes a second for each
QUANTIZED_LAYOUTS = ("rows 8", "columns 8", "tiles")  # fp8's blocks and awq's words lie across several devices
DOWN = "model.layers.1.mlp.down_proj.weight"


def make_params(cfg: ModelConfig) -> Params:
    """Random numbers everywhere: norms and biases of `init_params` are all alike, so rows could change places unseen."""
    leaves, treedef = jax.tree.flatten(init_params(cfg, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    new = [jax.random.normal(key, leaf.shape).astype(leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, new)


def mesh_of(*shape: int) -> Mesh:
    names = ("x", "y")[: len(shape)]
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)


def matrices(cfg: ModelConfig, mesh: Mesh, spec: PartitionSpec) -> Any:
    """`spec` for matrices; norms and biases are whole on every device."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, spec if len(leaf.shape) > 1 else PartitionSpec()), param_shapes(cfg))


def shardings(cfg: ModelConfig) -> dict[str, Any]:
    """Name -> sharding of the parameters; the devices of "replicas" hold each row twice."""
    rows = PartitionSpec("x")
    columns = PartitionSpec(None, "x")
    return {
        "none": None,
        "second device": jax.sharding.SingleDeviceSharding(jax.devices()[1]),
        **{f"rows {n}": matrices(cfg, mesh_of(n), rows) for n in (1, 2, 4, 8)},
        **{f"columns {n}": matrices(cfg, mesh_of(n), columns) for n in (2, 8)},
        "replicas": matrices(cfg, mesh_of(4, 2), rows),
        "tiles": matrices(cfg, mesh_of(4, 2), PartitionSpec("x", "y")),
        "norms too": NamedSharding(mesh_of(8), rows),
        "whole": NamedSharding(mesh_of(8), PartitionSpec()),
    }


def bits(params: Params) -> str:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)).hex()


def bytes_read(load: Callable[..., Any], folder: Path, sharding: Any) -> tuple[int, tuple[Any, ...]]:
    """How many bytes of weights `load` reads from the files, and what it returns."""
    sizes = []

    def counting(file: Any, begin: int, target: memoryview) -> None:
        sizes.append(len(target))
        read(file, begin, target)

    read, shards.read_bytes = shards.read_bytes, counting
    try:
        result = load(folder, sharding=sharding)
    finally:
        shards.read_bytes = read
    return sum(sizes), result


def loaded(load: Callable[..., Any], folder: Path, sharding: Any) -> dict[str, Any]:
    """Loads, and describes what came of it: bits, digest, bytes read, and whether every array lies where it should."""
    num_read, (cfg, params, *_) = bytes_read(load, folder, sharding)
    wanted = jax.tree.map(lambda shape: shape.sharding, param_shapes(cfg, sharding=sharding))
    placed = jax.tree.map(lambda leaf, place: place is None or leaf.sharding == place, params, wanted)
    return {
        "bits": bits(params),
        "digest": digest_model(cfg, params),
        "read": num_read,
        "placed": all(jax.tree.leaves(placed)),
        "embedding": list(params["embed"].addressable_shards[0].data.shape),
        "devices": len(params["embed"].sharding.device_set),
    }


def exchanged(params: Params) -> Params:
    """Parameters of the same shards, but the first two of the embedding have changed places."""
    embed = params["embed"]
    first, second, *rest = [shard.data for shard in embed.addressable_shards]
    devices = [shard.device for shard in embed.addressable_shards]
    swapped = [jax.device_put(part, device) for part, device in zip([second, first, *rest], devices, strict=True)]
    return {**params, "embed": jax.make_array_from_single_device_arrays(embed.shape, embed.sharding, swapped)}


def edited(folder: Path, target: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A copy of the folder with other tensors."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def error_of(load: Callable[..., Any], folder: Path, sharding: Any) -> str:
    try:
        load(folder, sharding=sharding)
    except InputError as error:
        return str(error)
    return ""


def put_nan(tensors: dict[str, np.ndarray]) -> None:
    """In rows of different shards of one tensor, and in a norm, which every device holds."""
    tensors[DOWN][[0, 15], 3] = np.nan
    tensors["model.norm.weight"][5] = np.inf


def faults(root: Path, folder: Path, ours: Path) -> dict[str, str]:
    """Errors about folders and shardings that are wrong; "" without one."""
    tied_cfg = dataclasses.replace(CFG, tie_embeddings=True)
    save_hf(root / "tied", tied_cfg, make_params(tied_cfg))
    rows = matrices(tied_cfg, mesh_of(8), PartitionSpec("x"))

    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors[HEAD] = tensors[EMBED].copy()

    def add_other_head(tensors: dict[str, np.ndarray]) -> None:
        add_head(tensors)
        tensors[HEAD][63, 15] += 1  # the last number of the last shard

    nan = edited(folder, root / "nan", put_nan)
    uneven = NamedSharding(mesh_of(3), PartitionSpec("x"))
    return {
        "nan": error_of(load_hf, nan, matrices(CFG, mesh_of(8), PartitionSpec("x"))),
        "same head": error_of(load_hf, edited(root / "tied", root / "same", add_head), rows),
        "other head": error_of(load_hf, edited(root / "tied", root / "other", add_other_head), rows),
        "uneven hf": error_of(load_hf, folder, uneven),
        "uneven ours": error_of(load_orbax, ours, uneven),
    }


def experts(root: Path) -> dict[str, bool]:
    """Whether a weight of stacked tensors has its bits when it is cut along experts (2 of 4), along rows, and along both."""
    four = with_experts(4)
    cfg = dataclasses.replace(four, dtype="bfloat16")
    params = init_params(four, jax.random.key(0))
    folder = write(root / "experts", params)
    expected = bits(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params))
    specs = {
        "experts": PartitionSpec("x"),
        "rows": PartitionSpec(None, ("x", "y")),
        "columns": PartitionSpec(None, None, "y"),
        "both": PartitionSpec("x", "y"),
    }
    same = {}
    for name, spec in specs.items():
        whole = NamedSharding(mesh_of(2, 4), PartitionSpec())
        shapes = param_shapes(cfg, sharding=whole)
        down = shapes["layers"][1]["experts"]["down"]
        shapes["layers"][1]["experts"]["down"] = down.update(sharding=NamedSharding(whole.mesh, spec))
        headers = read_headers(folder, Problems(folder))
        found = read_params(folder, stored_tensors(NAMES, shapes), shapes, headers, Problems(folder))
        is_cut = found["layers"][1]["experts"]["down"].addressable_shards[0].data.shape != down.shape
        same[name] = is_cut and bits(found) == expected and digest_model(cfg, found) == digest_model(cfg, jax.device_get(found))
    return same


def layouts(root: Path) -> dict[str, dict[str, Any]]:
    """How weights that share a tensor are read when all are cut along an axis, or the first one alone is.

    For each: whether they have their bits, and how many bytes are read for each byte of theirs.
    """
    numbers = np.arange(3 * 16 * 8, dtype=np.float32)
    heads = dict(zip("qkv", numbers.reshape(3, 16, 8), strict=True))
    of_experts = dict(zip(("gate", "up"), numbers[:256].reshape(2, 2, 8, 8), strict=True))
    forms = {
        "rows": (heads, in_layer("q", "k", "v")),
        "turned rows": (heads, in_layer("q", "k", "v", turned=True)),
        "heads in turns": (heads, in_layer("q", "k", "v", turn=4)),  # eight devices cut each head in two
        "turned experts in turns": (of_experts, in_layer("gate", "up", axis=1, turn=1, turned=True)),
    }
    read: dict[str, dict[str, Any]] = {}
    for form, (weights, layout) in forms.items():
        names: TensorNames = {"h.{}.fused": layout}
        folder = root / form
        folder.mkdir()
        write_tensors(folder, named_tensors(names, {"layers": (weights,)}), None)
        first = next(iter(weights))
        last = weights[first].ndim - 1
        read[form] = {}
        for cut, axis in {"outputs": last - 1, "inputs": last, "first alone": last - 1}.items():
            spec = PartitionSpec(*(None,) * axis, "x")
            places = {
                name: NamedSharding(mesh_of(8), PartitionSpec() if cut == "first alone" and name != first else spec)
                for name in weights
            }
            like = {
                name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=places[name]) for name, array in weights.items()
            }
            num_read, (found,) = bytes_read(read_layout, folder, (names, {"layers": (like,)}))
            is_cut = found["layers"][0][first].addressable_shards[0].data.size == weights[first].size // 8
            is_same = is_cut and bits(found) == bits({"layers": (weights,)})
            read[form][cut] = [is_same, num_read / sum(array.nbytes for array in weights.values())]
    return read


def read_layout(folder: Path, *, sharding: tuple[TensorNames, Params]) -> tuple[Params]:
    """The weights of a table of names and of shapes that say where they go."""
    names, shapes = sharding
    problems = Problems(folder)
    return (read_params(folder, stored_tensors(names, shapes), shapes, read_headers(folder, problems), problems),)


def of_quantized(folder: Path, name: str) -> dict[str, Any]:
    """Loads a quantized folder onto one device, and cut along outputs, inputs and both."""
    cfg = with_fields(CFG, d_model=32, d_ff=64, dtype="bfloat16")
    make_quantized(name, folder, cfg)
    on_each = shardings(cfg)
    return {layout: loaded(load_hf, folder, on_each[layout]) for layout in ("none", *QUANTIZED_LAYOUTS)}


def main(root: Path) -> None:
    params = make_params(CFG)
    folder = root / "hf"
    ours = root / "ours"
    save_hf(folder, CFG, params)
    save_orbax(ours, CFG, params).result()
    half = edited(folder, root / "half", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    half_cfg = dataclasses.replace(CFG, dtype="bfloat16")
    half_params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    on_each = shardings(CFG)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    found: dict[str, Any] = {
        "expected": {"bits": bits(params), "digest": digest_model(CFG, params), "bytes": num_bytes},
        "half expected": {"bits": bits(half_params), "digest": digest_model(half_cfg, half_params)},
        "hf": {name: loaded(load_hf, folder, sharding) for name, sharding in on_each.items()},
        "half": {name: loaded(load_hf, half, sharding) for name, sharding in on_each.items()},
        "ours": {name: loaded(load_orbax, ours, on_each[name]) for name in IN_OUR_FOLDERS},
    }
    sharded = load_hf(folder, sharding=matrices(CFG, mesh_of(8), PartitionSpec("x")))[1]
    save_orbax(root / "from shards", CFG, sharded).result()
    found["from shards"] = loaded(load_orbax, root / "from shards", None)
    found["quantized"] = {name: of_quantized(root / name, name) for name in ("fp8", "awq")}
    found["exchanged"] = {"bits": bits(exchanged(sharded)), "digest": digest_model(CFG, exchanged(sharded))}
    with jax.default_device(jax.devices()[1]):
        leaves = jax.tree.leaves(load_hf(folder)[1])
    found["default device"] = sorted({device.id for leaf in leaves for device in leaf.devices()})
    found["faults"] = faults(root, folder, ours)
    found["experts"] = experts(root)
    found["layouts"] = layouts(root)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
