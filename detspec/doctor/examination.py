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
from typing import NamedTuple, TypeVar

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
from detspec.sampler import sample
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.schedule import Budget, Schedule
from detspec.state import NO_SEQUENCE, SamplingArrays, Windows

POISON = 1e30  # finite: what a masked slot may hold
TEXT = 0  # the sequence that holds the text under examination
NUM_SEQUENCES = 4  # the others are neighbours

T = TypeVar("T")
Variants = Sequence[tuple[str, Callable[[], T]]]  # by name
Axis = tuple[str, str, Variants[T]]  # its name, what varies, and the variants
SayFn = Callable[[str], None]  # told what comes next


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What a pass says of the text, position by position."""

    held: dict[str, np.ndarray]  # by pool, `[positions, ...]` as stored
    logits: np.ndarray  # [positions, V] float32
    tokens: np.ndarray  # [positions] int32, sampled
    logprobs: np.ndarray  # [positions] float32


@dataclasses.dataclass(frozen=True)
class Check:
    """One axis of variation: how many variants were run, and the first difference in words, "" if there is none."""

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
    examination = _Examination(model, schedule)
    say("anchor")
    anchor = examination.read(schedule)
    checks = compare(anchor, examination.axes(), _difference, say)
    (control,) = compare(anchor, examination.control(), _difference, say)
    return checks, control


def examine_budgets(
    model: Model, schedule: Schedule, budgets: Sequence[Budget], say: SayFn = lambda step: None
) -> tuple[PassResult, dict[Budget, str]]:
    """What the pass of `schedule` says, and where passes of other budgets first differ from it, in words; "" if nowhere."""
    examination = _Examination(model, schedule)
    say("anchor")
    anchor = examination.read(schedule)
    differences = {}
    for budget in budgets:
        say(f"{budget.rows} rows in windows of {budget.window}")
        differences[budget] = _difference(anchor, examination.read(schedule.with_budget(budget.rows, budget.window)))
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
    """Positions of the text: more than two passes, a whole number of neither windows nor pages."""
    return min(2 * schedule.budget.rows + 23, 200, cfg.max_position)


class _Examination:
    """One text, its neighbours, and the ways to run them through a pass."""

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self.params = model.params
        self.cfg = model.cfg
        self.schedule = schedule
        rng = np.random.default_rng(0)
        self.length = text_length(model.cfg, schedule)
        self.texts = rng.integers(0, self.cfg.vocab_size, size=(NUM_SEQUENCES, self.length)).astype(np.int32)
        self.sampling = sampling_arrays([SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=7)])

    def axes(self) -> Iterator[Axis[PassResult]]:
        """The ways to vary a reading."""
        s = self.schedule
        yield "run", "the same pass again", [("again", partial(self.read, s))]
        if groups := sorted({1, s.budget.groups // 2, s.budget.groups - 1} - {0}):
            variants = [(f"window {g} of {s.budget.groups}", partial(self.read, s, group=g)) for g in groups]
            yield "group index", "place of the text's window in the pass", variants
        if s.budget.groups > 1:
            variants = [(f"set {n}", partial(self.read, s, group=s.budget.groups // 2, neighbours=n)) for n in (1, 2, 3)]
            yield "neighbours", "what the other windows hold, and how far along they are", variants
        variants = [(f"sequence {b}", partial(self.read, s, sequence=b)) for b in (1, NUM_SEQUENCES - 1)]
        yield "sequence", "which sequence of the cache the text is", variants
        variants = [("reversed", partial(self.read, s, disturbance=Disturbance(is_reversed=True)))]
        yield "page placement", "which pages of the pool the text got", variants
        variants = [("poisoned", partial(self.read, s, disturbance=Disturbance(is_poisoned=True)))]
        yield "stale slots", f"unused slots filled with +-{POISON:g}", variants
        if s.numerics.alignment == "free":
            firsts = [n for n in (1, s.budget.window // 2 + 1, s.budget.window - 1) if n > 0]
            variants = [(f"first window of {n}", partial(self.read, s, first=n)) for n in firsts]
            yield "window offset", "where windows start", variants
            splits = [2**i for i in range(s.budget.rows.bit_length()) if 2**i != s.budget.window]
            variants = [(f"{s.budget.rows // w}x{w}", partial(self.read, s.with_budget(s.budget.rows, w))) for w in splits]
            yield "split", f"how the budget of {s.budget.rows} rows is cut into windows", variants
            variants = [("one token a pass", partial(self.read, s.with_budget(s.budget.rows, 1), per_pass=1))]
            yield "prefix rebuild", "prefix decoded token by token, not prefilled", variants

    def control(self) -> Iterator[Axis[PassResult]]:
        """The text decoded on the fast path at several batch sizes: log-probabilities must differ somewhere."""
        variants = [(f"batch {n}", partial(self.read, self.schedule.fast(n), per_pass=1)) for n in (1, 2, 4, 16)]
        yield "inverse control", "the fast path, other batch sizes", variants

    def read(
        self,
        schedule: Schedule,
        *,
        sequence: int = TEXT,  # which sequence of the cache the text is
        group: int = 0,  # window of each pass that the text starts at; 0 lets it fill the pass
        neighbours: int = 0,  # which set of other texts runs in the same passes; 0 is none
        first: int = 0,  # tokens of the first window, 0 for a whole one
        per_pass: int = 0,  # windows of the text in one pass; 0 for as many as fit
        disturbance: "Disturbance | None" = None,  # what page pools are like before the first pass; as allocated if None
    ) -> PassResult:
        """Runs the text through passes of `schedule` and reads off what they say."""
        W = schedule.budget.window
        G = schedule.budget.groups
        cache = init_cache(self.cfg, max_requests=NUM_SEQUENCES, max_len=self.length, numerics=self.schedule.numerics)
        cache = disturbed(cache, self.cfg, self.schedule, disturbance or Disturbance())
        starts = [0, *range(first, self.length, W)] if first else list(range(0, self.length, W))
        ends = [*starts[1:], self.length]
        windows = list(zip(starts, ends, strict=True))
        room = min(per_pass or G, G - group)
        parts: list[list[np.ndarray]] = []  # logits, tokens and log-probabilities of each window
        for index in range(0, len(windows), room):
            mine = windows[index : index + room]
            batch = {name: np.zeros(G, np.int32) for name in ("start", "count")}
            batch |= {"tokens": np.zeros((G, W), np.int32), "sequence": np.full(G, NO_SEQUENCE, np.int32)}  # padding
            for place, (start, end) in enumerate(mine, group):
                _put(batch, place, sequence, self.texts[TEXT], start, end)
            if neighbours:
                taken = range(group, group + len(mine))
                others = [g for g in range(G) if g not in taken]
                for n, g in enumerate(others[: NUM_SEQUENCES - 1]):
                    other = (sequence + 1 + n) % NUM_SEQUENCES
                    start = (index // room * W * neighbours + 3 * n * (neighbours - 1)) % max(1, self.length - W)
                    _put(batch, g, other, self.texts[other], start, min(start + max(1, W - n), self.length))
            packed = Windows(**jax.tree.map(jnp.asarray, batch))
            *said, cache = run_pass(self.params, self.cfg, packed, cache, self.sampling, schedule=schedule)
            for place, (start, end) in enumerate(mine, group):
                parts.append([np.asarray(x)[place, : end - start] for x in said])
        held = held_by(cache, self.cfg, sequence, self.length, self.schedule)
        return PassResult(held, *map(np.concatenate, zip(*parts, strict=True)))


POOL_NAMES = {
    "k": "keys",
    "v": "values",
    "k.values": "keys",
    "v.values": "values",
    "k.scale": "key scales",
    "v.scale": "value scales",
}


class Disturbance(NamedTuple):
    """What must not matter about page pools: pages handed out from the other end, large values in every slot."""

    is_reversed: bool = False
    is_poisoned: bool = False


def disturbed(cache: KVCache, cfg: ModelConfig, schedule: Schedule, disturbance: Disturbance) -> KVCache:
    """`cache`, just allocated, with pages as `disturbance` says."""
    if disturbance.is_reversed:
        cache = cache.replace(page_table=cache.page_table[::-1, ::-1])
    if disturbance.is_poisoned:
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
    """What the pages of each layer hold for the first positions of `sequence`: for each pool `[length, ...]` as stored."""
    position = np.arange(length)
    pages = np.asarray(cache.page_table)[sequence, position // schedule.numerics.page]
    slots = position % schedule.numerics.page

    def held(declared: Pool, pool: jax.Array) -> np.ndarray | None:
        return None if declared.by_seat else np.moveaxis(np.asarray(pool), declared.slot_axis, 2)[pages, :, slots]

    found = map_pools(held, cfg, schedule.numerics, cache.pools)
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="."), array) for path, array in jax.tree.leaves_with_path(found)
    ]
    return {f"{POOL_NAMES.get(name.partition('.')[2], name)} of layer {name.partition('.')[0]}": array for name, array in named}


@partial(Jitted, static_argnames=("cfg", "schedule"), donate_argnames=("cache",))
def run_pass(
    params: Params, cfg: ModelConfig, windows: Windows, cache: KVCache, sampling: SamplingArrays, *, schedule: Schedule
) -> tuple[jax.Array, jax.Array, jax.Array, KVCache]:
    """One pass: logits `[G, W, V]`, sampled tokens and log-probabilities `[G, W]`, and the cache."""
    G, W = windows.tokens.shape
    logits_f32, cache, _ = forward(params, cfg, windows, cache, numerics=schedule.numerics)
    rows = jax.tree.map(lambda x: jnp.repeat(x, G * W, axis=0), sampling)
    position = windows.positions.reshape(-1) + 1
    without_penalties = lambda: windows.tokens  # noqa: E731  # no row reads its text
    tokens, logprobs = sample(logits_f32, position, rows, without_penalties, numerics=schedule.numerics)
    return logits_f32.reshape(G, W, -1), tokens.reshape(G, W), logprobs.reshape(G, W), cache


def _put(batch: dict[str, np.ndarray], group: int, sequence: int, text: np.ndarray, start: int, end: int) -> None:
    """Makes window `group` hold `text[start:end]` of `sequence`."""
    batch["tokens"][group, : end - start] = text[start:end]
    batch["sequence"][group] = sequence
    batch["start"][group] = start
    batch["count"][group] = end - start


def _difference(anchor: PassResult, other: PassResult) -> str:
    """Where `other` first parts from `anchor`, layer by layer, in words; "" if nowhere."""
    if differs := different_pages(anchor.held, other.held):
        return differs
    for name in ("logits", "tokens", "logprobs"):
        if found := first_difference([(getattr(anchor, name), getattr(other, name))]):
            return f"{name} at position {found[0]}, with the keys and values of all layers equal"
    return ""


def different_pages(anchor: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str:
    """The first pool and position where pages hold other bits, see `held_by`, in words; "" if nowhere."""
    for name, array in anchor.items():
        if found := first_difference([(array, other[name])]):
            return f"{name} at position {found[0]}"
    return ""
