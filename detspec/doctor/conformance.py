"""Conformance of a device with an arithmetic of integers: each operation by its hash, then texts of the shipped model."""

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import KV, Int8Pages
from detspec.checkpoint.load import Model, load
from detspec.choices import ACTIVATION_BITS
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.environment import chosen_schedule
from detspec.integer import conformance, spec
from detspec.integer.conformance import TEXTS
from detspec.model.integer_rows import IntegerOps
from detspec.ops import integer, integer_choices
from detspec.ops.integer_functions import IntegerFunctions, integer_functions
from detspec.sampling_params import SamplingParams

PROMPTS = ("def add(a, b):\n", "class Stack:\n    def push(", "import numpy as np\n", "for i in range(10):\n    ")
NEW_TOKENS = 24
SHIPPED = "tiny_python"
PAGE = 16


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """Hashes of this device, and those that the package comes with."""

    device: str
    found: dict[str, str]
    expected: dict[str, str]
    arithmetic: str = spec.VERSION

    @property
    def differing(self) -> list[str]:
        """The names of what has other bits here, in the order in which a model runs them."""
        return [name for name, digest in self.expected.items() if self.found.get(name) != digest]

    def table(self) -> str:
        """The report for people."""
        lines = [f"{self.arithmetic} on {self.device}", ""]
        for name, digest in self.expected.items():
            here = self.found.get(name, "")
            lines.append(f"  {name:20} {here[:16]}  {'OK' if here == digest else f'DIFFERS, expected {digest[:16]}'}")
        if self.differing:
            first = self.differing[0]
            lines += ["", f"the operation {first!r} has other bits here: integer models would not have those of other devices"]
        else:
            lines += ["", f"OK {conformance.of_all(self.found)}: this device gives the bits of every device that says so"]
        return "\n".join(lines)


def run_conformance(on_progress: Callable[[str], None] = lambda step: None, weights: str = "integer") -> ConformanceReport:
    """Runs all operations of models with such `weights` on this device, then generates texts of the shipped model."""
    bits = ACTIVATION_BITS[weights]
    on_progress("operations")
    found = conformance.digests(device_functions(bits), bits)
    on_progress("texts of the shipped model")
    found[TEXTS] = digest_of_texts(generated_texts(load(SHIPPED, weights=weights)))
    return ConformanceReport(jax.devices()[0].device_kind, found, conformance.expected(bits), spec.VERSIONS[bits])


def run_family_conformance(on_progress: Callable[[str], None] = lambda step: None) -> ConformanceReport:
    """Runs the operations that models of further families have besides on this device."""
    on_progress("operations of further families")
    found = conformance.family_digests(device_functions)
    return ConformanceReport(jax.devices()[0].device_kind, found, conformance.family_expected(), "further families")


def device_functions(bits: int = 15, **others: Callable[..., Any]) -> Any:
    """The functions of the arithmetic as this device runs them, compiled; they take and give numpy's arrays.

    Activations have so many `bits`. `others` stand in the place of functions of the same names.
    """

    def kept(below: jax.Array, asked: Any) -> jax.Array:
        return below >= integer_choices.kept_from(below, asked)[:, None]

    def penalised(logits: jax.Array, seen: jax.Array, count: jax.Array, *penalties: jax.Array) -> jax.Array:
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        return integer_choices.penalised(logits, seen, count, SimpleNamespace(**dict(zip(names, penalties, strict=True))))

    functions = integer_functions(chosen_schedule(None, load(SHIPPED, weights="integer").cfg).numerics, bits)
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
    score = (sizes.score_mantissa, sizes.score_exponent)
    pools = KV(pool(keys), pool(values, functions.layout.value_slot_axis))
    return functions.attended(q, pools, tables, positions, score=score, window=None)


def _run(fn: Callable[..., Any], *given: Any) -> Any:
    """Calls a compiled function with int32 and smaller types in place of numpy's int64."""

    def on_device(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return jnp.asarray(x.astype(np.int32) if x.dtype == np.int64 else x)

    return jax.tree.map(np.asarray, fn(*jax.tree.map(on_device, given)))


def generated_texts(model: Model) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Tokens and log-probabilities, fixed, of a few texts that an engine on this device generates all at once."""
    engine = Engine(model, EngineConfig(max_requests=len(PROMPTS), max_len=64, method="none"))
    completions = engine.generate(list(PROMPTS), sampling())
    return [(each.token_ids, np.rint(np.asarray(each.logprobs) * 2**spec.FRACTION).astype(np.int64)) for each in completions]


def sampling() -> list[SamplingParams]:
    """Sampling parameters of the texts: greedy, at two temperatures, and with a filter."""
    asked: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2}, {"top_p": 0.9})
    return [SamplingParams(max_tokens=NEW_TOKENS, seed=seed, ignore_eos=True, **each) for seed, each in enumerate(asked)]


def oracle_texts(model: Model) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Texts of the oracle alone, token by token."""
    from detspec.model.to_integer import spec_model

    weights, sizes = spec_model(model.cfg, model.params)
    assert model.tokenizer is not None
    found = []
    for prompt, asked in zip(PROMPTS, sampling(), strict=True):
        text = spec.Text(weights, sizes)
        read = model.tokenizer.encode(prompt)
        tokens: list[int] = []
        logprobs = []
        for _ in range(NEW_TOKENS):
            logits = text.read(read)[-1:]
            position = np.asarray([text.length])
            read = spec.chosen(logits, position, wishes(asked, 1)).tolist()
            tokens += read
            logprobs.append(spec.logprobs(logits, np.asarray(read))[0])
        found.append((tuple(tokens), np.asarray(logprobs)))
    return found


def wishes(asked: SamplingParams, rows: int) -> spec.Wishes:
    """Wishes of `rows` choices of one request, as the oracle takes them."""
    return spec.Wishes(
        temperature=np.full(rows, asked.temperature, np.float32),
        top_k=np.full(rows, max(asked.top_k, 0)),
        top_p=np.full(rows, asked.top_p, np.float32),
        min_p=np.full(rows, asked.min_p, np.float32),
        seed=np.full(rows, asked.seed % 2**32),
    )


def digest_of_texts(texts: list[tuple[tuple[int, ...], np.ndarray]]) -> str:
    """SHA-256 in hex over tokens and log-probabilities."""
    hashed = hashlib.sha256()
    for tokens, logprobs in texts:
        hashed.update(np.asarray(tokens, "<i8").tobytes() + logprobs.astype("<i8").tobytes())
    return hashed.hexdigest()
