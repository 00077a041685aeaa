"""Examination of the canonical pass, one way of varying it at a time.

One text is run through the pass again and again, each time with something changed that must not matter, and everything the
pass says of it is compared bit for bit: the keys and values of every layer at every position, the logits, and tokens and
log-probabilities sampled from them. The keys and values of layer `l` are a function of what layer `l - 1` put out, so the
first layer whose entries differ names the place. The inverse control runs the same text on the fast path at several batch
sizes: if nothing differs there, the comparison has no power on this device and says so.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import KVCache, Pool, init_cache, map_pools
from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.engine.bits import first_difference
from detspec.held import Jitted
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.riders.rider import Rows
from detspec.sampler import process_if_asked, sample
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.schedule import Budget, Schedule
from detspec.state import NO_SEQUENCE, SamplingArrays, Windows

POISON = 1e30  # finite: what a masked slot may hold
POOL_NAMES = {"k": "keys", "v": "values", "k.values": "keys", "v.values": "values", "k.scale": "key scales"}
POOL_NAMES["v.scale"] = "value scales"
SAMPLING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=7)
NUM_SEQUENCES = 4  # the text under examination and three neighbours

T = TypeVar("T")
NamedCalls = Sequence[tuple[str, Callable[[], T]]]  # by name
Axis = tuple[str, str, NamedCalls[T]]  # name, what varies, and the variants
SayFn = Callable[[str], None]  # told what comes next


@dataclasses.dataclass(frozen=True)
class PassResult:
    """Results of a pass over the text, position by position."""

    held: dict[str, np.ndarray]  # by pool, `[positions, ...]` as stored
    logits: np.ndarray  # [positions, V] float32
    tokens: np.ndarray  # [positions] int32, sampled
    logprobs: np.ndarray  # [positions] float32


@dataclasses.dataclass(frozen=True)
class Check:
    """An axis of variation: the number of variants that were run, and the first difference in words, "" if there is none."""

    axis: str
    meaning: str
    num_variants: int
    differs: str

    @property
    def equal(self) -> bool:
        """True if all variants gave the same bits."""
        return not self.differs


def examine(model: Model, schedule: Schedule, say: SayFn = lambda step: None) -> tuple[tuple[Check, ...], Check]:
    """Varies the canonical pass of `schedule` along each axis; returns the checks and the inverse control."""
    read = partial(read_text, model, schedule)
    say("anchor")
    anchor = read(schedule)
    checks = compare(anchor, axes(read, schedule), _difference, say)
    (control,) = compare(anchor, [inverse_control(read, schedule)], _difference, say)
    return checks, control


def examine_budgets(
    model: Model, schedule: Schedule, budgets: Sequence[Budget], say: SayFn = lambda step: None
) -> tuple[PassResult, dict[Budget, str]]:
    """Reads the text in passes of `schedule` and of other budgets: the first result, and where others differ, "" if nowhere."""
    read = partial(read_text, model, schedule)
    say("anchor")
    anchor = read(schedule)
    differences = {}
    for budget in budgets:
        say(f"{budget.rows} rows in windows of {budget.window}")
        differences[budget] = _difference(anchor, read(schedule.with_budget(budget.rows, budget.window)))
    return anchor, differences


def compare(anchor: T, axes: Iterable[Axis[T]], difference_fn: Callable[[T, T], str], say: SayFn) -> tuple[Check, ...]:
    """Runs all variants of each axis and says where the first that differs from `anchor` does."""
    checks = []
    for axis, meaning, variants in axes:
        differs = ""
        for name, run in variants:
            say(f"{axis}: {name}")
            found = difference_fn(anchor, run())
            if found and not differs:
                differs = f"{name}: {found}"
        checks.append(Check(axis, meaning, len(variants), differs))
    return tuple(checks)


def text_length(cfg: ModelConfig, schedule: Schedule) -> int:
    """Number of positions of the text: more than two passes, a whole number of neither windows nor pages."""
    return min(2 * schedule.budget.rows + 23, 200, cfg.max_position)


class Disturbance(NamedTuple):
    """Properties of page pools that must not matter: pages handed out from the other end, large values in every slot."""

    is_reversed: bool = False
    is_poisoned: bool = False


class Variation(NamedTuple):
    """A way to read the text; none may change a bit."""

    sequence: int = 0  # which sequence of the cache the text is
    group: int = 0  # window of each pass that the text starts at; 0 lets it fill the pass
    neighbours: int = 0  # which set of other texts runs in the same passes; 0 is none
    first: int = 0  # tokens of the first window, 0 for a whole one
    per_pass: int = 0  # windows of the text in one pass; 0 for as many as fit
    pools: Disturbance = Disturbance()  # the page pools before the first pass


USUAL = Variation()


def axes(read_fn: Callable[[Schedule, Variation], PassResult], schedule: Schedule) -> Iterator[Axis[PassResult]]:
    """Yields the ways to vary a reading by passes of `schedule`."""
    rows, window = dataclasses.astuple(schedule.budget)
    groups = schedule.budget.groups

    def read(of: Schedule = schedule, **how: Any) -> Callable[[], PassResult]:
        return partial(read_fn, of, Variation(**how))

    yield "run", "the same pass again", [("again", read())]
    if places := sorted({1, groups // 2, groups - 1} - {0}):
        variants = [(f"window {g} of {groups}", read(group=g)) for g in places]
        yield "group index", "place of the text's window in the pass", variants
    if groups > 1:
        variants = [(f"set {n}", read(group=groups // 2, neighbours=n)) for n in (1, 2, 3)]
        yield "neighbours", "what the other windows hold, and how far along they are", variants
    variants = [(f"sequence {b}", read(sequence=b)) for b in (1, NUM_SEQUENCES - 1)]
    yield "sequence", "which sequence of the cache the text is", variants
    yield "page placement", "which pages of the pool the text got", [("reversed", read(pools=Disturbance(is_reversed=True)))]
    yield "stale slots", f"unused slots filled with +-{POISON:g}", [("poisoned", read(pools=Disturbance(is_poisoned=True)))]
    if schedule.numerics.alignment == "free":
        firsts = [n for n in (1, window // 2 + 1, window - 1) if n > 0]
        yield "window offset", "where windows start", [(f"first window of {n}", read(first=n)) for n in firsts]
        splits = [2**i for i in range(rows.bit_length()) if 2**i != window]
        variants = [(f"{rows // w}x{w}", read(schedule.with_budget(rows, w))) for w in splits]
        yield "split", f"how the budget of {rows} rows is cut into windows", variants
        variants = [("one token a pass", read(schedule.with_budget(rows, 1), per_pass=1))]
        yield "prefix rebuild", "prefix decoded token by token, not prefilled", variants


def inverse_control(read_fn: Callable[[Schedule, Variation], PassResult], schedule: Schedule) -> Axis[PassResult]:
    """The text decoded on the fast path at several batch sizes: log-probabilities must differ somewhere."""
    variants = [(f"batch {n}", partial(read_fn, schedule.fast(n), Variation(per_pass=1))) for n in (1, 2, 4, 16)]
    return "inverse control", "the fast path, other batch sizes", variants


def read_text(model: Model, examined: Schedule, schedule: Schedule, how: Variation = USUAL) -> PassResult:
    """Runs the made-up text that belongs to `examined` through passes of `schedule`, and collects their results."""
    sequence, group, neighbours, first, per_pass, pools = how
    length = text_length(model.cfg, examined)
    texts = np.random.default_rng(0).integers(0, model.cfg.vocab_size, size=(NUM_SEQUENCES, length)).astype(np.int32)
    sampling = sampling_arrays([SAMPLING])
    W = schedule.budget.window
    G = schedule.budget.groups
    cache = init_cache(model.cfg, max_requests=NUM_SEQUENCES, max_len=length, numerics=examined.numerics)
    cache = disturbed(cache, model.cfg, examined, pools)
    starts = [0, *range(first, length, W)] if first else list(range(0, length, W))
    windows = list(zip(starts, [*starts[1:], length], strict=True))
    room = min(per_pass or G, G - group)
    parts: list[list[np.ndarray]] = []  # logits, tokens and log-probabilities of each window
    for index in range(0, len(windows), room):
        mine = dict(enumerate(windows[index : index + room], group))
        batch = {name: np.zeros(G, np.int32) for name in ("start", "count")}
        batch |= {"tokens": np.zeros((G, W), np.int32), "sequence": np.full(G, NO_SEQUENCE, np.int32)}  # padding
        for window, (start, end) in mine.items():
            _put(batch, window, sequence, texts[0], start, end)
        others = [window for window in range(G) if window not in mine] if neighbours else []
        for n, window in enumerate(others[: NUM_SEQUENCES - 1]):
            other = (sequence + 1 + n) % NUM_SEQUENCES
            start = (index // room * W * neighbours + 3 * n * (neighbours - 1)) % max(1, length - W)
            _put(batch, window, other, texts[other], start, min(start + max(1, W - n), length))
        packed = Windows(**jax.tree.map(jnp.asarray, batch))
        *said, cache = run_pass(model.params, model.cfg, packed, cache, sampling, schedule=schedule)
        for window, (start, end) in mine.items():
            parts.append([np.asarray(x)[window, : end - start] for x in said])
    held = held_by(cache, model.cfg, sequence, length, examined)
    return PassResult(held, *map(np.concatenate, zip(*parts, strict=True)))


def _put(batch: dict[str, np.ndarray], window: int, sequence: int, text: np.ndarray, start: int, end: int) -> None:
    """Makes a window of the pass hold `text[start:end]` of `sequence`."""
    batch["tokens"][window, : end - start] = text[start:end]
    batch["sequence"][window] = sequence
    batch["start"][window] = start
    batch["count"][window] = end - start


def disturbed(cache: KVCache, cfg: ModelConfig, schedule: Schedule, pools: Disturbance) -> KVCache:
    """`cache`, just allocated, with pages as `pools` says."""
    if pools.is_reversed:
        cache = cache.replace(page_table=cache.page_table[::-1, ::-1])
    if pools.is_poisoned:
        cache = cache.replace(pools=map_pools(_poisoned, cfg, schedule.numerics, cache.pools))
    return cache


def _poisoned(declared: Pool, pages: jax.Array) -> jax.Array:
    """Empty pages with +-POISON in their slots by turns, +-1 in int8, POISON as scales."""
    slot = jnp.arange(pages.shape[declared.slot_axis])
    sign = jnp.where(slot % 2 == 0, 1, -1).reshape([-1 if axis == declared.slot_axis else 1 for axis in range(pages.ndim)])
    if pages.dtype == jnp.int8:
        return pages + sign.astype(jnp.int8)
    if pages.ndim == 3:
        return jnp.full_like(pages, POISON)
    return pages + (POISON * sign.astype(jnp.float32)).astype(pages.dtype)


def held_by(cache: KVCache, cfg: ModelConfig, sequence: int, length: int, schedule: Schedule) -> dict[str, np.ndarray]:
    """Reads what pages hold for the first positions of `sequence`: for each pool of each layer `[length, ...]` as stored."""
    position = np.arange(length)
    pages = np.asarray(cache.page_table)[sequence, position // schedule.numerics.page]
    slots = position % schedule.numerics.page

    def held(declared: Pool, pool: jax.Array) -> np.ndarray | None:
        return None if declared.by_seat else np.moveaxis(np.asarray(pool), declared.slot_axis, 2)[pages, :, slots]

    named = {}
    for path, array in jax.tree.leaves_with_path(map_pools(held, cfg, schedule.numerics, cache.pools)):
        layer, _, name = jax.tree_util.keystr(path, simple=True, separator=".").partition(".")
        named[f"{POOL_NAMES.get(name, name)} of layer {layer}"] = array
    return named


@partial(Jitted, static_argnames=("cfg", "schedule"), donate_argnames=("cache",))
def run_pass(
    params: Params, cfg: ModelConfig, windows: Windows, cache: KVCache, sampling: SamplingArrays, *, schedule: Schedule
) -> tuple[jax.Array, jax.Array, jax.Array, KVCache]:
    """Runs a pass: logits `[G, W, V]`, sampled tokens and log-probabilities `[G, W]`, and the cache."""
    G, W = windows.tokens.shape
    logits_f32, cache, _ = forward(params, cfg, windows, cache, numerics=schedule.numerics)
    rows = jax.tree.map(lambda x: jnp.repeat(x, G * W, axis=0), sampling)
    position = windows.positions.reshape(-1) + 1
    process_fn = partial(process_if_asked, (), Rows(rows, position, lambda: windows.tokens))  # no row reads its text
    tokens, logprobs = sample(logits_f32, position, rows, process_fn, numerics=schedule.numerics)
    return logits_f32.reshape(G, W, -1), tokens.reshape(G, W), logprobs.reshape(G, W), cache


def _difference(anchor: PassResult, other: PassResult) -> str:
    """Says where `other` first parts from `anchor`, layer by layer; "" if nowhere."""
    if differs := different_pages(anchor.held, other.held):
        return differs
    for name in ("logits", "tokens", "logprobs"):
        if found := first_difference([(getattr(anchor, name), getattr(other, name))]):
            return f"{name} at position {found[0]}, with the keys and values of all layers equal"
    return ""


def different_pages(anchor: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str:
    """Names the first pool and position where pages hold other bits, see `held_by`; "" if nowhere."""
    for name, array in anchor.items():
        if found := first_difference([(array, other[name])]):
            return f"{name} at position {found[0]}"
    return ""
