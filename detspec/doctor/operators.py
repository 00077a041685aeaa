"""Which operations give a row the same bits whatever runs with it, on the device at hand: a table as LLM-42's of operators.

Each operation is compiled alone, at the model's shapes, as a canonical pass runs it and as the library does by itself. Then one
thing is varied at a time:

    rows     how many rows there are, 1 to 256: batch-invariant, in the words of arXiv 2601.17768
    slot     the row's place and what the other rows hold, at one shape: position-invariant
    offset   for attention alone: the place of a query in its window, and how many queries the window has

A canonical pass has a fixed number of rows, so it needs the last two. What holds of an operation alone may not hold inside a
program, where XLA fuses: `detspec doctor` without this option examines whole programs.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import init_cache, numbers
from detspec.config import ModelConfig
from detspec.engine.bits import first_difference
from detspec.environment import chosen_schedule, fingerprint
from detspec.held import compiler_options
from detspec.model.experts import MixtureOfExperts
from detspec.model.rows import NORM_FNS, canonical_ops
from detspec.ops.attention.api import append_fn, paged_attention
from detspec.ops.attention.scores import Scores
from detspec.ops.linear.api import gate_fn, linear_fn
from detspec.ops.rope import apply_rope, rope_frequencies, rope_rotation
from detspec.ops.row_sum import sum_fn
from detspec.sampler import logprobs_at
from detspec.schedule import Numerics, Schedule

ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
MOST_VOCAB = 4096  # columns of log-probabilities; 256 rows of a whole vocabulary would take much memory
LENGTH = 150  # positions of attention's text
WINDOWS = (1, 2, 4, 8, 16)
OFFSETS = (1, 5, 11)
NORM_NAMES = {"rms": "RMS norm", "layer": "LayerNorm"}

RowsFn = Callable[[np.ndarray], np.ndarray]  # rows in, rows out
Found = str | None  # "" if no bit differs, else where; None if it does not apply


@dataclasses.dataclass(frozen=True)
class Operator:
    """Findings about an operation."""

    name: str
    how: str  # the program that runs it
    canonical: bool  # canonical passes run it so
    rows: Found
    slot: Found
    offset: Found = None

    @property
    def holds(self) -> bool:
        """Whether a canonical pass, whose number of rows is fixed, may rely on it."""
        return not self.slot and not self.offset


@dataclasses.dataclass(frozen=True)
class OperatorReport:
    """The operations of a model on this device."""

    fingerprint: dict[str, str]
    rows: tuple[int, ...]  # numbers of rows that were tried
    operators: tuple[Operator, ...]

    @property
    def holds(self) -> bool:
        """Whether all operations of canonical passes are invariant to slot and offset."""
        return all(operator.holds for operator in self.operators if operator.canonical)

    def table(self) -> str:
        """The report for people."""
        lines = [f"{name:12} {value}" for name, value in self.fingerprint.items()]
        lines += ["", f"  {'operation':20} {'run by':24} {'canonical':9} {'rows':5} {'slot':5} {'offset':7} first difference"]
        for each in self.operators:
            found = (each.rows, each.slot, each.offset)
            ticks = ["-" if why is None else "NO" if why else "yes" for why in found]
            first = next((why for why in found if why), "")
            line = f"  {each.name:20} {each.how:24} {'yes' if each.canonical else '':9} "
            lines.append(f"{line}{ticks[0]:5} {ticks[1]:5} {ticks[2]:7} {first}".rstrip())
        lines += ["", f"yes: the same bits for {', '.join(map(str, self.rows))} rows, in any place, at any offset."]
        verdict = "hold at a fixed number of rows" if self.holds else "DO NOT HOLD, not even at a fixed number of rows"
        lines.append(f"the operations of canonical passes, each alone, {verdict}")
        return "\n".join(lines)


def examine_operators(
    cfg: ModelConfig,
    *,
    schedule: Schedule | None = None,
    rows: Sequence[int] = ROWS,
    on_progress: Callable[[str], None] = lambda step: None,
) -> OperatorReport:
    """Examines the operations of models of this `cfg`, by the numerics of `schedule` and by the library.

    The schedule is by default the device's; `rows` ascend.
    """
    numerics = chosen_schedule(schedule, cfg).numerics
    library = dataclasses.replace(numerics, reductions="native", linear="xla")
    found = []
    for name, how, canonical, fn, width in _row_operators(cfg, numerics, library):
        on_progress(name)
        x = np.random.default_rng(width).standard_normal((rows[-1], width), np.float32)
        found.append(Operator(name, how, canonical, rows_difference(fn, x, rows), slot_difference(fn, x)))
    for how, canonical, each in _attentions(numerics):
        on_progress(f"attention, {how}")
        found.append(examine_attention(cfg, each, how, canonical))
    return OperatorReport(fingerprint(), tuple(rows), tuple(found))


def _row_operators(cfg: ModelConfig, numerics: Numerics, library: Numerics) -> Iterator[tuple[str, str, bool, RowsFn, int]]:
    """Yields name, what runs it, whether canonical passes do, the function, and the width of its rows."""
    rng = np.random.default_rng(0)
    dtype = cfg.jax_dtype
    D = cfg.d_model
    F = cfg.layer(0).ff.d_ff
    H = cfg.layer(0).mixer.head_dim
    up, down = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in ((F, D), (D, F)))
    scale = jnp.ones(D, dtype)
    frequencies = rope_frequencies(H, 10000.0)

    def product(x: jax.Array, weight: jax.Array, numerics: Numerics) -> jax.Array:
        return linear_fn(numerics)(x.astype(dtype), weight)

    def norm(x: jax.Array, numerics: Numerics) -> jax.Array:
        return NORM_FNS[cfg.norm](x.astype(dtype), scale, eps=1e-6, sum_fn=sum_fn(numerics))

    def logprobs(x: jax.Array, numerics: Numerics) -> jax.Array:
        return logprobs_at(x, jnp.zeros(len(x), jnp.int32), sum_fn(numerics))[:, None]

    def total(x: jax.Array, numerics: Numerics) -> jax.Array:
        return sum_fn(numerics)(x)[:, None]

    def rotate(x: jax.Array) -> jax.Array:
        position = (jnp.abs(x[:, 0]) * 100).astype(jnp.int32)
        return apply_rope(x.astype(dtype)[:, None, :], rope_rotation(position, frequencies))[:, 0]

    def gated(x: jax.Array) -> jax.Array:
        return gate_fn(numerics)(x, x, activation="silu", dtype=dtype)

    pinned = numerics.linear == "pinned"
    own = f"{numerics.linear}, {numerics.implementation}" if pinned else "XLA, held still" if _options(numerics) else "XLA"
    for how, each in [(own, numerics), ("XLA", library)] if pinned else [(own, numerics)]:
        for name, weight in (("product D to F", up), ("product F to D", down)):
            yield name, how, each is numerics, _compiled(partial(product, weight=weight, numerics=each), each), weight.shape[1]
        if experts := next((layer.ff for layer in cfg.layers if isinstance(layer.ff, MixtureOfExperts)), None):
            by = each if each is numerics else dataclasses.replace(each, implementation="reference", interpret=False)
            for name, of_rows in _of_experts(cfg, experts, by):
                yield name, how, each is numerics, _compiled(of_rows, each), D
    columns = min(cfg.vocab_size, MOST_VOCAB)
    summing = {"sum": (total, D), NORM_NAMES[cfg.norm]: (norm, D), "log-probability": (logprobs, columns)}
    for name, (fn, width) in summing.items():
        for how, each in ((f"{numerics.reductions} sum", numerics), ("XLA's sum", library)):
            yield name, how, each is numerics, _compiled(partial(fn, numerics=each), each), width
    yield "rotary position", "elementwise", True, _compiled(rotate, numerics), H
    yield "SiLU and product", "elementwise", True, _compiled(gated, numerics), D


def _of_experts(
    cfg: ModelConfig, experts: MixtureOfExperts, numerics: Numerics
) -> Iterator[tuple[str, Callable[[jax.Array], jax.Array]]]:
    """Yields what a router says of rows, numbers of experts and their weights, and what the chosen experts make of them."""
    ops = canonical_ops(cfg, numerics)
    declared = experts.weights(cfg)
    keys = jax.random.split(jax.random.key(0), len(declared))
    params = {
        name: leaf.init(key, leaf.shape, cfg).astype(leaf.dtype(cfg))
        for key, (name, leaf) in zip(keys, declared.items(), strict=True)
    }

    def route(x: jax.Array) -> jax.Array:
        ids, weights_f32 = experts.route(params, x.astype(cfg.jax_dtype), ops)
        return jnp.concatenate([ids.astype(jnp.float32), weights_f32], axis=-1)

    yield "router", route
    yield "experts", lambda x: experts.rows(params, x.astype(cfg.jax_dtype), ops)


def _options(numerics: Numerics) -> dict[str, Any]:
    return compiler_options(numerics, jax.default_backend())


def _compiled(fn: Callable[[jax.Array], jax.Array], numerics: Numerics) -> RowsFn:
    """`fn` as a program with these numerics has it."""
    compiled = jax.jit(fn, compiler_options=_options(numerics))
    return lambda x: np.asarray(compiled(x))


def rows_difference(fn: RowsFn, x: np.ndarray, rows: Sequence[int]) -> str:
    """The first of the numbers of `rows` among which a row has other bits than among all, in words; "" if there is none."""
    together = fn(x)
    for number in rows[:-1]:
        if found := first_difference([(fn(x[:number]), together[:number])]):
            return f"row {found[0]} among {number} rows and {len(x)}"
    return ""


def slot_difference(fn: RowsFn, x: np.ndarray) -> str:
    """The first row that has other bits in another place among others, in words; "" if there is none."""
    together = fn(x)
    rng = np.random.default_rng(1)
    for order in (np.arange(len(x))[::-1], rng.permutation(len(x))):
        if found := first_difference([(fn(x[order]), together[order])]):
            return f"row {order[found[0]]} in place {found[0]}"
    others = rng.standard_normal(x.shape, np.float32)
    others[::2] = x[::2]
    if found := first_difference([(fn(others)[::2], together[::2])]):
        return f"row {2 * found[0]} with other neighbours"
    return ""


def _attentions(numerics: Numerics) -> list[tuple[str, bool, Numerics]]:
    """Lists what runs attention: canonical passes, and four parts of a sequence cut by the longest one, as in fast kernels."""
    small = dataclasses.replace(numerics, page=min(numerics.page, 16))
    cut = dataclasses.replace(small, num_splits=4, reductions="native", implementation="reference", interpret=False)
    return [(f"{numerics.implementation}, page by page", True, numerics), ("reference, 4 parts", False, cut)]


def examine_attention(cfg: ModelConfig, numerics: Numerics, how: str, canonical: bool) -> Operator:
    """Compares a text's queries in windows of one length, then alone, in other places, with other windows and neighbours."""
    attend = _attend_fn(cfg, numerics)
    whole = range(0, LENGTH - WINDOWS[-1] + 1, WINDOWS[-1])
    base = attend(whole, WINDOWS[-1])
    rows = slot = offset = ""
    for number in (1, 2, 3):
        rows = rows or _first(base, attend(whole[:number], WINDOWS[-1]), f"among {number} windows and {len(whole)}")
    slot = _first(base, attend(whole[::-1], WINDOWS[-1]), "with the windows in reverse")
    nearer = [*whole[:3], *[0] * (len(whole) - 3)]
    slot = slot or _first(base, attend(nearer, WINDOWS[-1]), "with other windows further back")
    for window in WINDOWS[:-1]:
        offset = offset or _first(base, attend(range(0, LENGTH - window + 1, window), window), f"in windows of {window}")
    for first in OFFSETS:
        starts = range(first, LENGTH - WINDOWS[-1] + 1, WINDOWS[-1])
        offset = offset or _first(base, attend(starts, WINDOWS[-1]), f"in windows that start at {first}")
    return Operator("attention", how, canonical, rows, slot, offset)


def _first(base: dict[int, np.ndarray], other: dict[int, np.ndarray], what: str) -> str:
    """The first position whose result has other bits, in words; "" if there is none."""
    for position in sorted(base.keys() & other.keys()):
        if first_difference([(base[position], other[position])]):
            return f"query {position} {what}"
    return ""


def _attend_fn(cfg: ModelConfig, numerics: Numerics) -> Callable[[Sequence[int], int], dict[int, np.ndarray]]:
    """Attention of windows that start at some positions of one text: results `[N, H]` by position."""
    mixer = cfg.layer(0).mixer
    cache = init_cache(cfg.with_layers(1), max_requests=1, max_len=LENGTH, numerics=numerics)
    rng = np.random.default_rng(2)
    place = np.arange(LENGTH)
    table = np.asarray(cache.page_table)[0]
    width = (LENGTH, mixer.num_kv_heads, numbers(cache.pools[0].v).shape[3])
    keys, values = (jnp.asarray(rng.standard_normal(width, np.float32), cfg.jax_dtype) for _ in range(2))
    where = (jnp.asarray(table[place // numerics.page]), jnp.asarray(place % numerics.page, jnp.int32))
    k_pages, v_pages = append_fn(numerics)(cache.pools[0], keys, values, *where)
    queries = rng.standard_normal((LENGTH, mixer.num_heads, mixer.head_dim), np.float32)
    scores = Scores(scale=mixer.head_dim**-0.5)
    call = jax.jit(partial(paged_attention, scores=scores, numerics=numerics), compiler_options=_options(numerics))

    def attend(starts: Sequence[int], window: int) -> dict[int, np.ndarray]:
        positions = np.asarray([np.arange(start, start + window) for start in starts], np.int32)
        q = jnp.asarray(queries[positions], cfg.jax_dtype)
        tables = jnp.asarray(np.tile(table, (len(positions), 1)))
        out = np.asarray(call(q, k_pages, v_pages, tables, jnp.asarray(positions)))
        return dict(zip(positions.ravel().tolist(), out.reshape(-1, *out.shape[2:]), strict=True))

    return attend
