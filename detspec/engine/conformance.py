"""Conformance of a device with the arithmetic of integer models: its operations by hashes, before an engine commits there.

An integer model promises the bits of all devices, so there is nothing that an engine could compare on one device, as it does to
certify programs in floats. It compares the operations that the model has with hashes that come with the package instead, for
made-up numbers, by the functions that its programs are made of. What passes is kept with the compiled programs.
"""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from detspec.cache import KV, Int8Pages
from detspec.config import ModelConfig
from detspec.engine.device import Device
from detspec.errors import InputError
from detspec.integer import conformance
from detspec.integer.spec import VERSIONS
from detspec.mesh import Place
from detspec.model.integer_rows import IntegerOps
from detspec.ops import integer, integer_choices
from detspec.ops.integer_functions import IntegerFunctions, integer_functions
from detspec.ops.integer_pages import ScoreScale
from detspec.schedule import Numerics

PAGE = 16


def check_conformance(device: Device, functions: Any = None) -> None:
    """Compares the operations of the integer model of `device` with the hashes of the package, unless it `conforms`.

    That is once for each fingerprint, device's settings and numerics where compiled programs are kept, else once for each
    engine. `functions` are `device_functions` of the device's numerics if None.

    Raises `InputError` that names the first operation with other bits, in the order in which a model runs them.
    """
    if device.conforms:
        return
    cfg = device.model.cfg
    numerics = device.schedule.numerics
    expected = expected_of(cfg)
    cache = device.cache
    name = "" if cache is None else cache.name("conformance", json.dumps(expected), repr(numerics))
    if cache is None or cache.read(name) is None:
        assert cfg.activation_bits is not None
        with jax.default_device(_chip_of(device.place)):
            functions = device_functions(numerics, cfg.activation_bits) if functions is None else functions
            found = conformance.digests_of(functions, cfg.activation_bits, expected)
        differing = [operation for operation, digest in expected.items() if found[operation] != digest]
        if differing:
            raise InputError(
                f"the operation {differing[0]!r} of {VERSIONS[cfg.activation_bits]} has other bits on this device "
                f"({jax.devices()[0].device_kind}) than on all others, so an integer model would break its promise here, and "
                "nothing was committed. `detspec doctor --integer` lists all operations: try other versions of jax and of the "
                'drivers, or Schedule(Numerics(implementation="reference", linear="xla", cache_dtype="int8")), and report it'
            )
        if cache is not None:
            cache.write(name, json.dumps(found).encode())
    device.conforms = True


def expected_of(cfg: ModelConfig) -> dict[str, str]:
    """The hashes of the operations that an integer model of `cfg` has, by their names."""
    bits = cfg.activation_bits
    assert bits is not None
    own = conformance.expected(15) | conformance.expected(bits)
    del own[conformance.TEXTS]
    has = {
        conformance.GELU: any(getattr(kind.ff, "activation", "") == "gelu_tanh" for kind in cfg.kinds),
        conformance.NORM_AFTER: any(kind.post_norms for kind in cfg.kinds),
    }
    of_families = conformance.family_expected()
    own |= {name: of_families[name] for name in (conformance.of_bits(each, bits) for each in has if has[each])}
    is_capped = cfg.logit_softcap is not None or any(getattr(kind.mixer, "softcap", None) is not None for kind in cfg.kinds)
    return own | (conformance.soft_cap_expected() if is_capped else {})


def _chip_of(place: Place) -> jax.Device | None:
    """A chip of this process at `place`; None if it is jax's own device."""
    if place is None:
        return None
    return place.local_devices[0] if isinstance(place, Mesh) else next(iter(place.device_set))


def device_functions(numerics: Numerics, bits: int = 15, **others: Callable[..., Any]) -> Any:
    """The functions of the arithmetic as this device runs them with `numerics`, compiled; they take and give numpy's arrays.

    Activations have so many `bits`. `others` stand in the place of functions of the same names.
    """

    def kept(below: jax.Array, asked: Any) -> jax.Array:
        return below >= integer_choices.kept_from(below, asked)[:, None]

    def penalised(logits: jax.Array, seen: jax.Array, count: jax.Array, *penalties: jax.Array) -> jax.Array:
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        return integer_choices.penalised(logits, seen, count, SimpleNamespace(**dict(zip(names, penalties, strict=True))))

    functions = integer_functions(numerics, bits)
    ops = IntegerOps(conformance.EPSILON, functions, bits)
    own: dict[str, Callable[..., Any]] = {
        name: getattr(integer, name) for name in ("rounded_shift", "scaled", "added", "sine", "cached", "power")
    }
    own |= {"product": lambda row, matrix: functions.products(row, matrix)[0], "gated": functions.gated}
    own |= {name: getattr(integer_choices, name) for name in ("logprobs", "tempered")}
    own |= {"gelu_gated": lambda gate, up: functions.gated(gate, up, "gelu_tanh"), "normed_after": ops.after}
    own |= {"kept": kept, "penalised": penalised, **others}
    compiled = {name: partial(_run, jax.jit(fn)) for name, fn in own.items()}
    # The last argument of these is one that a program knows.
    sized: dict[str, tuple[Callable[..., Any], int]] = {
        "attended": (partial(_attended, functions), 4),
        "gumbel": (functions.gumbel, 2),
        "normed": (functions.normed, 2),
        "turned_by": (integer.turned_by, 1),
        "soft_capped": (integer.soft_capped, 1),
    }
    compiled |= {
        name: partial(_run, jax.jit(others.get(name, fn), static_argnums=number)) for name, (fn, number) in sized.items()
    }
    return SimpleNamespace(**compiled)


def _attended(functions: IntegerFunctions, q: Any, keys: Any, values: Any, visible: jax.Array, sizes: Any) -> jax.Array:
    """Runs `spec.attended` by pages, which lie in another order than the positions."""
    num_pages = len(keys.values) // PAGE
    order = np.arange(num_pages)[::-1].copy()

    def paged(x: jax.Array) -> jax.Array:  # [S, K, ...] -> [num_pages, K, PAGE, ...]
        return jnp.moveaxis(x.reshape(num_pages, PAGE, *x.shape[1:]), 1, 2)[order]

    def pool(kept: Any, slot_axis: int = 2) -> Int8Pages:
        numbers = jnp.moveaxis(paged(kept.values.astype(jnp.int8)), 2, slot_axis)
        return Int8Pages(numbers, paged((kept.exponent << 16) | kept.mantissa))

    positions = visible.sum(-1, dtype=jnp.int32)[:, None] - 1
    tables = jnp.broadcast_to(jnp.asarray(order, jnp.int32), (len(positions), num_pages))
    score = ScoreScale(sizes.score_mantissa, sizes.score_exponent, sizes.score_cap)
    pools = KV(pool(keys), pool(values, functions.layout.value_slot_axis))
    return functions.attended(q, pools, tables, positions, score=score, window=None)


def _run(fn: Callable[..., Any], *given: Any) -> Any:
    """Calls a compiled function with int32 and smaller types in place of numpy's int64."""

    def on_device(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return jnp.asarray(x.astype(np.int32) if x.dtype == np.int64 else x)

    return jax.tree.map(np.asarray, fn(*jax.tree.map(on_device, given)))
