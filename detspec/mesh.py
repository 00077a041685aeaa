"""How a model lies on several chips: each weight cut along its outputs, finished values gathered, floats never added.

    Llama shapes, 4 chips, 8 KV heads          each chip holds
    q [NH, D]   gate, up [F, D]                a quarter of the rows, so it has whole sums of a quarter of the outputs
    o [D, NH]   down [D, F]   embed [V, D]     the same; their inputs are gathered before
    cache       [num_pages, K, page, H]        pages of 2 KV heads, and the query heads that read these
    page table, tokens, lengths, norms         copies

A program runs on the chips that its arguments lie on: all of it is the body of one `jax.shard_map`. On one chip it is the
function itself.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from detspec.cache import KVCache
from detspec.config import ModelConfig, is_count
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.model.weights import Weight, weights
from detspec.ops.collectives import CHIPS
from detspec.state import GenState

Tree = TypeVar("Tree")
CUT_NAMES = {"N": "query heads", "K": "KV heads", "D": "width", "F": "MLP width", "V": "vocabulary"}
P = PartitionSpec
COPIES = P()  # the spec of arrays that all chips hold
PAGES = P(None, "kv")  # the spec of pools, whose second axis counts heads
# The specs of a state: chips hold copies of all but the page pools.
_CACHE = KVCache(pools=PAGES, page_table=COPIES, length=COPIES, seat=COPIES)  # type: ignore[arg-type]
STATE: GenState = GenState(**{field.name: COPIES for field in dataclasses.fields(GenState)} | {"cache": _CACHE})  # type: ignore[arg-type]


def make_mesh(cfg: ModelConfig, num_chips: int, devices: list[Any] | None = None) -> Mesh:
    """A mesh of `num_chips` of `devices`, by default of this process's first ones, with the axes ("kv", "query").

    KV heads are cut over "kv". Where there are fewer KV heads than chips, each is copied to the chips of its row of "query",
    which share its query heads:

        K 8, 4 chips    4 x 1, 2 KV heads a chip        K 2, 4 chips    2 x 2, one KV head a chip, twice

    Raises `InputError` as `check_fits` and `first_devices` do.
    """
    check_fits(cfg, num_chips)
    devices = first_devices(num_chips, jax.devices() if devices is None else devices)
    kv = kv_parts(cfg, num_chips)
    chips = np.asarray(devices).reshape(kv, num_chips // kv)
    return Mesh(chips, CHIPS, axis_types=(AxisType.Auto,) * 2)


def check_fits(cfg: ModelConfig, num_chips: int) -> None:
    """Raises `InputError` if a model of this `cfg` cannot be cut over `num_chips`."""
    if num_chips not in (fitting := fitting_chips(cfg)):
        sizes = ", ".join(
            f"{CUT_NAMES.get(letter, letter)} {', '.join(map(str, found))}" for letter, found in _cut_sizes(cfg).items()
        )
        accepted = ", ".join(map(str, fitting))
        raise InputError(f"the model cannot be cut over {num_chips} chips: numbers that divide its {sizes} are {accepted}")


def first_devices(num_chips: int, devices: list[Any]) -> list[Any]:
    """The first `num_chips` of `devices`; `InputError` if there are fewer, or `num_chips` is no positive integer."""
    if not is_count(num_chips):
        raise InputError(f"chips must be a positive integer, got {num_chips!r}")
    if num_chips > len(devices):
        platform = devices[0].platform
        there = f"{len(devices)} {platform} device{'s' * (len(devices) > 1)}"
        more = f"; JAX_NUM_CPU_DEVICES={num_chips} in the environment simulates as many" * (platform == "cpu")
        raise InputError(f"{num_chips} chips were asked for, but jax has {there}{more}")
    return devices[:num_chips]


def fitting_chips(cfg: ModelConfig) -> list[int]:
    """All numbers of chips that a model of this `cfg` can be cut over, ascending."""
    sizes = _cut_sizes(cfg)
    kv_heads = sizes.pop("K", [])
    divided = math.gcd(*(size for found in sizes.values() for size in found))

    def fits(n: int) -> bool:
        """Whether in every layer each of `n` chips holds KV heads of its own, or in every layer shares a single one."""
        return all(kv_parts(cfg, n) == min(n, K) for K in kv_heads)

    return [n for n in range(1, divided + 1) if divided % n == 0 and fits(n)]


def kv_parts(cfg: ModelConfig, num_chips: int) -> int:
    """Among how many parts `num_chips` chips share the KV heads."""
    return math.gcd(num_chips, *_cut_sizes(cfg).get("K", ()))


def _cut_sizes(cfg: ModelConfig) -> dict[str, list[int]]:
    """By the letters of what is cut, whole heads for example, the sizes that weights have there."""
    found: dict[str, set[int]] = {}
    for leaf in jax.tree.leaves(weights(cfg)):
        if _spec(leaf) != COPIES:
            found.setdefault(leaf.axes[leaf.output_axis][0], set()).add(leaf.lengths[leaf.output_axis][0])
    return {letter: sorted(found[letter]) for letter in sorted(found, key=[*CUT_NAMES, *found].index)}


def param_specs(cfg: ModelConfig) -> Params:
    """For each weight its `PartitionSpec`, which the values and the scale of a rounded one share.

    Scales of an integer model's norms have an exponent for all their numbers, so each chip has all of them.
    """
    return jax.tree.map(lambda weight: COPIES if cfg.is_integer and weight.is_scale else _spec(weight), weights(cfg))


def param_shardings(cfg: ModelConfig, mesh: Mesh) -> Params:
    """For each weight its place on `mesh`, as `detspec.load` and `param_shapes` take them."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(cfg))


def _spec(weight: Weight) -> PartitionSpec:
    """Matrices and the biases of heads are cut along their outputs, their first axis after that of experts."""
    axis = weight.axes[weight.output_axis]
    if len(weight.axes) == weight.output_axis + 1 and axis not in ("NH", "KH"):
        return COPIES  # norms, and biases of outputs that are gathered
    return P(*[None] * weight.output_axis, "kv" if axis == "KH" else CHIPS)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of `tree` lie on; None if that is one device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            assert isinstance(sharding.mesh, Mesh), f"{sharding} names no devices"
            return sharding.mesh
    return None


Place = Mesh | SingleDeviceSharding | None


def place_of(cfg: ModelConfig, params: Params) -> Place:
    """Finds where `params` lie: a mesh, or the device of the first array; jax's own device where all are numpy's.

    Shapes alone lie nowhere: None.

    Raises `InputError` if they lie on several devices in another way than `param_shardings` says.
    """
    mesh = mesh_of(params)
    leaves = jax.tree.leaves_with_path(params)
    if mesh is None:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for _, leaf in leaves):
            return None
        first = next((leaf for _, leaf in leaves if isinstance(leaf, jax.Array)), None)
        return SingleDeviceSharding(next(iter((jax.device_put(0) if first is None else first).devices())))
    wanted_places = jax.tree.leaves(jax.tree.broadcast(param_shardings(cfg, mesh), params))
    for (path, leaf), wanted in zip(leaves, wanted_places, strict=True):
        if not leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
            raise InputError(
                f"weight {jax.tree_util.keystr(path)} lies as {leaf.sharding}, but must lie as {wanted}: load the model with "
                "chips=..., or place its weights by detspec.mesh.param_shardings"
            )
    return mesh


def places_of(cfg: ModelConfig, params: Params, number: int) -> list[Place]:
    """Places for `number` copies of `params`: their own, then further devices of this process, as many for each copy.

    Raises `InputError` if there are too few devices, if several processes share them, or if `number` is no positive integer.
    """
    if not is_count(number):
        raise InputError(f"the number of replicas must be a positive integer, got {number!r}")
    if jax.process_count() > 1:
        raise InputError(
            "replicas side by side need a process of their own: run one process, or one replica over all processes"
        )
    mesh = mesh_of(params)
    own = [next(iter(jax.tree.leaves(params)[0].devices()))] if mesh is None else list(mesh.devices.flat)
    others = [device for device in jax.local_devices() if device not in own]
    devices = first_devices(number * len(own), [*own, *others])
    each = [devices[first : first + len(own)] for first in range(0, len(devices), len(own))]
    return [make_mesh(cfg, len(own), some) if len(own) > 1 else SingleDeviceSharding(some[0]) for some in each]


def put(tree: Tree, place: Place, specs: Any = COPIES) -> Tree:
    """`tree` committed to `place`, on a mesh by `specs`. What lies there already is not copied: both share the memory.

    Without a place it stays as it is.
    """
    if place is None:
        return tree
    if not isinstance(place, Mesh):
        return jax.device_put(tree, place)
    shardings = jax.tree.broadcast(_shardings(place, specs), tree, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding))
    return jax.tree.map(_put_array, tree, shardings)


def _put_array(array: Any, sharding: Any) -> jax.Array:
    """`array` placed by `sharding`; where that names other processes' devices, each process takes its parts of its own copy.

    `jax.device_put` would compare the copies of all processes, which waits for them.
    """
    if sharding.is_fully_addressable or not getattr(array, "is_fully_addressable", True):
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)


def made(init_fn: Callable[[], Tree], place: Place, specs: Any = COPIES) -> Tree:
    """Calls `init_fn` and commits its arrays as `put` does; on a mesh each chip makes its own part of them."""
    if isinstance(place, Mesh):
        return jax.jit(init_fn, out_shardings=_shardings(place, specs))()
    return put(init_fn(), place)


def _shardings(place: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(place, spec), specs)


def check_one_chip(params: Params, what: str) -> None:
    """Raises `InputError` if `params` lie on several chips, over which `what` does not run."""
    if (mesh := mesh_of(params)) is not None:
        raise InputError(f"{what} runs on one chip, but the weights lie on {mesh.size}: use detspec.Engine, which runs on all")


def over_chips(fn: Callable[..., Any], mesh: Mesh, args: Any, results: Any) -> Callable[..., Any]:
    """`fn` as one `jax.shard_map` for arguments that lie as `args`; `results` has the specs of what it returns.

    What lies on no mesh, as numpy arrays do, is copied to all chips. Specs may stand for whole subtrees.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=jax.tree.map(_spec_of, args), out_specs=results, check_vma=False)


def _spec_of(leaf: Any) -> PartitionSpec:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else COPIES
