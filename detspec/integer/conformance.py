"""Hashes of the operations of "integer/1" for made-up numbers: a device that gives the same is equal to all others.

The numbers come from the arithmetic's own Threefry. `expected.json` holds the hashes that `spec.py` gives. The operations that
"integer8/1" has in the place of others have theirs in `expected_8_bits.json`. Operations of further families came later, and
have theirs in `expected_families.json` and `expected_soft_caps.json`, so the hash of all operations of an arithmetic stays.
"""

import hashlib
import json
from collections.abc import Callable, Container, Mapping
from functools import partial
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from detspec.integer import spec

ROWS = 64
WIDTH = 96
OUTPUTS = 80
VOCABULARY = 1000
EPSILON = 42_950  # of norms, 32 fraction bits
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
LENGTH = 48  # keys that attention looks at
SIZES = spec.Sizes(HEADS, KV_HEADS, 16_713, -16, 1, (), ())  # scores times log2(e) / sqrt(32)
CAP = spec.SoftCap(30 << 16, 25_213, -18)  # at 30
SCORE_CAP = spec.SoftCap(4_727_423, 20_972, -19)  # at 50, times log2(e)
FILES = {15: "expected.json", 8: "expected_8_bits.json"}  # by the bits of activations
OF_BITS = ("product", "gate")  # the operations that these change
FAMILIES = "expected_families.json"
SOFT_CAPS = "expected_soft_caps.json"
GELU = "GELU"
NORM_AFTER = "norm after"
TEXTS = "texts"  # the name of what the shipped model generates


class Trial(NamedTuple):
    """An operation with made-up arguments."""

    name: str
    arguments: tuple[Any, ...]  # pytrees of integers, and float32 for what requests give
    run: Callable[..., Any]  # (the functions of the arithmetic by name, *arguments) -> integers


def made_up(name: str, *shape: int, bits: int = 30, signed: bool = True) -> np.ndarray:
    """Integers of up to `bits` bits, small ones as often as large ones."""
    count = np.arange(int(np.prod(shape)), dtype=np.int64)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    first, second = spec.threefry((np.int64(seed), np.int64(0)), (count, np.zeros_like(count)))
    found = (first >> (32 - bits)) >> (second % bits)
    return np.where((second >> 16) & 1, -found, found).reshape(shape) if signed else found.reshape(shape)


def _activations(name: str) -> spec.Activations:
    x = made_up(name, ROWS, WIDTH)
    x[0] = 0
    x[1, 0] = spec.LIMIT
    return spec.row_of(x, -spec.FRACTION)


def _kept(name: str) -> spec.Cached:
    x = made_up(name, LENGTH, KV_HEADS, HEAD_DIM, bits=20)
    return spec.cached(x, spec.row_of(x, -spec.FRACTION))


def _attention() -> tuple[Any, ...]:
    """Queries, keys, values, and which of them a query sees."""
    queries = spec.row_of(made_up("queries", ROWS, HEADS, HEAD_DIM), -spec.FRACTION)
    keys, values = (_kept(name) for name in ("keys", "values"))
    looking_from = made_up("looking from", ROWS, bits=6, signed=False) % LENGTH
    return queries, keys, values, np.arange(LENGTH) <= looking_from[:, None]


def cases(bits: int = 15) -> tuple[Trial, ...]:
    """All operations in the order in which a model runs them; with activations of 8 bits those that differ."""
    wide = made_up("wide", ROWS, WIDTH)
    shifts = made_up("shifts", ROWS, WIDTH, bits=6, signed=False)
    mantissas = made_up("mantissas", ROWS, WIDTH, bits=16, signed=False)
    stream = made_up("stream", ROWS, WIDTH)
    stream[0] = 0
    stream[1, 3] = spec.LIMIT
    scale = spec.Scale(made_up("scale", WIDTH, bits=14), np.asarray(-9))
    matrix = spec.IntMatrix(
        (made_up("matrix", OUTPUTS, WIDTH, bits=7)).astype(np.int8),
        2**14 + made_up("row mantissas", OUTPUTS, bits=14, signed=False),
        -20 + made_up("row exponents", OUTPUTS, bits=3),
    )
    of_head = spec.row_of(made_up("heads", ROWS, WIDTH), -spec.FRACTION)
    turns = made_up("turns", ROWS, WIDTH, bits=32, signed=False).astype(np.uint32)
    seeds = made_up("seeds", ROWS, bits=32, signed=False)
    positions = made_up("positions", ROWS, bits=17, signed=False)
    steps = tuple(int(step) << 16 for step in made_up("steps", WIDTH // 2, bits=31, signed=False))
    logits = made_up("logits", ROWS, VOCABULARY, bits=20)
    tokens = made_up("tokens", ROWS, bits=30, signed=False) % VOCABULARY
    asked = spec.Wishes(
        temperature=np.resize(np.asarray([0, 1, 0.8, 0.3, 1.7, 1e-6], np.float32), ROWS),
        top_k=np.resize(np.asarray([0, 1, 40, 2000]), ROWS),
        top_p=np.resize(np.asarray([1, 0.95, 0.5, 0.01, 1e-7], np.float32), ROWS),
        min_p=np.resize(np.asarray([0, 0.05, 0.5], np.float32), ROWS),
        seed=seeds,
    )
    seen = made_up("seen", ROWS, VOCABULARY) > 0
    count = np.where(seen, made_up("count", ROWS, VOCABULARY, bits=12, signed=False), 0)
    penalties = tuple(np.resize(np.asarray(each, np.float32), ROWS) for each in ([1, 1.3, 0.7], [0, 0.5, -2], [0, 1.5, -0.25]))
    trials = (
        Trial("rounded shift", (wide, shifts), lambda f, x, r: f.rounded_shift(x, r)),
        Trial("scaled", (wide, mantissas, shifts), lambda f, x, m, r: f.scaled(x, m, r - 10)),
        Trial("sum with limits", (stream, wide), lambda f, x, y: f.added(x, y)),
        Trial("norm", (stream, scale), lambda f, x, scale: f.normed(x, scale, EPSILON)),
        Trial("product", (_activations("activations"), matrix), lambda f, row, matrix: f.product(row, matrix)),
        Trial("turns", (positions,), lambda f, positions: f.turned_by(positions, steps)),
        Trial("sine", (turns,), lambda f, turns: f.sine(turns)),
        Trial("keys and values", (stream, of_head), lambda f, x, row: f.cached(x, row)),
        Trial("attention", _attention(), lambda f, *given: f.attended(*given, SIZES)),
        Trial("power of two", (np.abs(wide),), lambda f, d: f.power(d)),
        Trial("gate", (stream, wide), lambda f, gate, up: f.gated(gate, up)),
        Trial("log-probabilities", (logits, tokens), lambda f, logits, tokens: f.logprobs(logits, tokens)),
        Trial("noise", (seeds.astype(np.uint32), positions), lambda f, *given: f.gumbel(*given, VOCABULARY)),
        Trial("temperature", (logits, asked.temperature), lambda f, logits, temperature: f.tempered(logits, temperature)),
        Trial("filters", (logits, asked), lambda f, logits, asked: f.kept(f.tempered(logits, asked.temperature), asked)),
        Trial("penalties", (logits, seen, count, *penalties), lambda f, *given: f.penalised(*given)),
    )
    return trials if bits == 15 else tuple(trial for trial in trials if trial.name in OF_BITS)


def family_cases(bits: int) -> tuple[Trial, ...]:
    """The operations of further families, with activations of so many bits."""
    stream = made_up("stream", ROWS, WIDTH)
    stream[0] = 0
    stream[1, 3] = spec.LIMIT
    gate = made_up("gelu", ROWS, WIDTH, bits=20)
    gate[2, 5] = spec.LIMIT
    scale = spec.Scale(made_up("scale after a part", WIDTH, bits=14), np.asarray(-9))
    return (
        Trial(of_bits(GELU, bits), (gate, made_up("wide", ROWS, WIDTH)), lambda f, gate, up: f.gelu_gated(gate, up)),
        Trial(of_bits(NORM_AFTER, bits), (stream, scale), lambda f, x, scale: f.normed_after(x, scale)),
    )


def soft_cap_cases() -> tuple[Trial, ...]:
    """The operations of models with soft caps."""
    x = made_up("capped", ROWS, WIDTH, bits=24)
    x[0, 3] = spec.LIMIT
    x[1, 5] = -spec.LIMIT
    sizes = SIZES._replace(score_cap=SCORE_CAP)
    return (
        Trial("soft cap", (x,), lambda f, x: f.soft_capped(x, CAP)),
        Trial("attention, soft cap", _attention(), lambda f, *given: f.attended(*given, sizes)),
    )


def of_bits(name: str, bits: int) -> str:
    """The name of an operation of further families with activations of so many bits."""
    return f"{name}, {bits} bits"


def definition(bits: int) -> Any:
    """The functions of `spec.py` for activations of so many bits."""
    last = spec.spread if bits == 8 else lambda row: row
    own = {
        "gelu_gated": lambda gate, up: last(spec.gated(gate, up, "gelu_tanh")),
        "normed_after": lambda x, scale: spec.as_fixed(last(spec.normed(x, scale, EPSILON))),
    }
    if bits == 8:
        own |= {"product": partial(spec.product, bits=bits), "gated": lambda gate, up: spec.spread(spec.gated(gate, up))}
    return SimpleNamespace(**{**vars(spec), **own})


def digest(found: Any) -> str:
    """SHA-256 in hex over integers, as little-endian words of 64 bits, in the order of a pytree of tuples."""
    hashed = hashlib.sha256()

    def add(node: Any) -> None:
        if isinstance(node, tuple):
            for part in node:
                add(part)
        else:
            hashed.update(np.asarray(node).astype("<i8").tobytes())

    add(found)
    return hashed.hexdigest()


def digests(functions: Any = None, bits: int = 15) -> dict[str, str]:
    """The hash of each case, by functions of the arithmetic that take and give numpy's arrays; None are those of `spec.py`."""
    functions = definition(bits) if functions is None else functions
    return {case.name: digest(case.run(functions, *case.arguments)) for case in cases(bits)}


def family_digests(functions: Callable[[int], Any] = definition) -> dict[str, str]:
    """The hash of each operation of further families, by `functions` for bits of activations."""
    return {case.name: digest(case.run(functions(bits), *case.arguments)) for bits in FILES for case in family_cases(bits)}


def soft_cap_digests(functions: Any = spec) -> dict[str, str]:
    """The hash of each operation of models with soft caps, by `functions` of the arithmetic."""
    return {case.name: digest(case.run(functions, *case.arguments)) for case in soft_cap_cases()}


def digests_of(functions: Any, bits: int, names: Container[str]) -> dict[str, str]:
    """The hashes of the operations `names` of models with activations of so many bits, by `functions` for these bits."""
    every = {trial.name: trial for trial in (*cases(), *family_cases(bits), *soft_cap_cases())}
    return {name: digest(trial.run(functions, *trial.arguments)) for name, trial in every.items() if name in names}


def of_all(found: Mapping[str, str]) -> str:
    """Joins all hashes to one, of 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(dict(found), sort_keys=True).encode()).hexdigest()[:16]


def expected(bits: int = 15) -> dict[str, str]:
    """The hashes that the package comes with."""
    return _read(FILES[bits])


def family_expected() -> dict[str, str]:
    """The hashes of the operations of further families."""
    return _read(FAMILIES)


def soft_cap_expected() -> dict[str, str]:
    """The hashes of the operations of models with soft caps."""
    return _read(SOFT_CAPS)


def _read(name: str) -> dict[str, str]:
    return dict(json.loads(files("detspec.integer").joinpath(name).read_text(encoding="utf-8")))
