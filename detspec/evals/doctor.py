"""The doctor: certifies the compiled canonical pass on the device at hand, one way of varying it at a time.

One text is run through the pass again and again, each time with something changed that must not matter, and everything the
pass says of it is compared bit for bit: the keys and values of every layer at every position, the logits, and tokens and
log-probabilities sampled from them. The keys and values of layer `l` are a function of what layer `l - 1` put out, so the
first layer whose entries differ names the place. The inverse control runs the same text on the fast path at several batch
sizes: if nothing differs there, the comparison has no power on this device and says so.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import KVCache, init_cache
from detspec.checkpoint.load import Model
from detspec.config import ModelConfig, Schedule
from detspec.engine.certify import Certificate
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.environment import chosen_schedule, fingerprint
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.sampler import sample
from detspec.sampling import SamplingParams, row_sampling
from detspec.state import NO_ROW, RowSampling, Windows

POISON = 1e30  # finite: what a masked slot may hold
TEXT_ROW = 0  # the cache row of the text under examination
NUM_ROWS = 4  # cache rows, the others are for neighbours


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a pass says of the text, position by position."""

    keys_values: np.ndarray  # [L, 2, positions, K, H] as stored
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


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """Everything found out; `certified` is what determinism may be promised by."""

    fingerprint: dict[str, str]
    schedule: Schedule
    num_positions: int
    checks: tuple[Check, ...]
    control: Check  # the inverse control: equal means that the comparison has no power
    plans: tuple[Certificate, ...]  # the engine's own programs, against the anchor

    @property
    def certified(self) -> bool:
        """All axes hold and the inverse control found differences."""
        return all(check.equal for check in self.checks) and not self.control.equal

    def table(self) -> str:
        """The report for people."""
        lines = [f"{name:12} {value}" for name, value in self.fingerprint.items()]
        s = self.schedule
        lines.append(
            f"{'schedule':12} rows {s.rows}, window {s.window}, page {s.page}, query tile {s.query_tile}, "
            f"{s.cache_dtype} cache, {s.implementation} attention, {s.linear} products"
        )
        lines += ["", f"  {'axis':16} {'what varies':58} {'runs':>4}  same bits at {self.num_positions} positions"]
        for check in self.checks:
            verdict = "yes" if check.equal else f"NO: {check.differs}"
            lines.append(f"  {check.axis:16} {check.meaning:58} {check.num_variants:4}  {verdict}")
        c = self.control
        verdict = f"differs, as it must: {c.differs}" if c.differs else "NO DIFFERENCE: the comparison has no power here"
        lines.append(f"  {c.axis:16} {c.meaning:58} {c.num_variants:4}  {verdict}")
        lines += ["", "  the engine's programs (windows x rows a window [batch]) against the anchor:"]
        for certificate in self.plans:
            verdict = (
                "ordinary"
                if certificate.plan.fast
                else "same bits"
                if certificate.equal
                else f"not used: {certificate.differs}"
            )
            timing = f"{certificate.step_s * 1e3:8.2f} ms a step" if math.isfinite(certificate.step_s) else " " * 18
            lines.append(f"  {certificate.plan.label:16} {timing}  {verdict}")
        lines += ["", "certified" if self.certified else "NOT CERTIFIED: determinism is not promised on this device"]
        return "\n".join(lines)


def run_doctor(
    model: Model, *, schedule: Schedule | None = None, max_rows: int = 8, on_progress: Callable[[str], None] | None = None
) -> DoctorReport:
    """Examines the canonical pass of `schedule` (the device's default if None), and the engine's programs for `max_rows`."""
    schedule = chosen_schedule(schedule, model.cfg)
    say = on_progress or (lambda step: None)
    checks, control = examine(model, schedule, on_progress=say)
    say("engine programs")
    config = EngineConfig(max_rows=max_rows, max_len=min(256, model.cfg.max_position), schedule=schedule)
    plans = Engine(model, config).prepare(max_rows + 1)
    return DoctorReport(fingerprint(), schedule, text_length(model.cfg, schedule), checks, control, plans)


def examine(
    model: Model, schedule: Schedule, *, on_progress: Callable[[str], None] | None = None
) -> tuple[tuple[Check, ...], Check]:
    """Varies the canonical pass of `schedule` along each axis; returns the checks and the inverse control."""
    say = on_progress or (lambda step: None)
    examination = _Examination(model, schedule)
    say("anchor")
    anchor = examination.read(schedule)
    checks = []
    for axis, meaning, variants in examination.axes():
        differs = ""
        for name, read in variants:
            say(f"{axis}: {name}")
            found = _first_difference(anchor, read())
            if found and not differs:
                differs = f"{name}: {found}"
        checks.append(Check(axis, meaning, len(variants), differs))
    return tuple(checks), examination.control(anchor, say)


def text_length(cfg: ModelConfig, schedule: Schedule) -> int:
    """Positions of the text: more than two passes, a whole number of neither windows nor pages."""
    return min(2 * schedule.rows + 23, 200, cfg.max_position)


Variants = Sequence[tuple[str, Callable[[], Reading]]]  # by name


class _Examination:
    """One text, its neighbours, and the ways to run them through a pass."""

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self.params, self.cfg, self.schedule = model.params, model.cfg, schedule
        rng = np.random.default_rng(0)
        self.length = text_length(model.cfg, schedule)
        self.texts = rng.integers(0, self.cfg.vocab_size, size=(NUM_ROWS, self.length)).astype(np.int32)
        self.sampling = row_sampling([SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=7)])
        self.free = schedule.alignment == "free"

    def axes(self) -> Iterator[tuple[str, str, Variants]]:
        """Axis, what varies, and named variants of the reading."""
        s = self.schedule
        yield "run", "the same pass again", [("again", partial(self.read, s))]
        groups = sorted({1, s.groups // 2, s.groups - 1} - {0})
        if groups:
            variants = [(f"window {g} of {s.groups}", partial(self.read, s, group=g)) for g in groups]
            yield "group index", "place of the text's window in the pass", variants
        if s.groups > 1:
            variants = [(f"set {n}", partial(self.read, s, group=s.groups // 2, neighbours=n)) for n in (1, 2, 3)]
            yield "neighbours", "what the other windows hold, and how far along they are", variants
        variants = [(f"row {row}", partial(self.read, s, row=row)) for row in (1, NUM_ROWS - 1)]
        yield "cache row", "the text's row of the cache", variants
        yield (
            "page placement",
            "which pages of the pool the text got",
            [("reversed", partial(self.read, s, reverse_pages=True))],
        )
        yield "stale slots", f"unused slots filled with +-{POISON:g}", [("poisoned", partial(self.read, s, poison=True))]
        if self.free:
            variants = [
                (f"first window of {n}", partial(self.read, s, first=n)) for n in (1, s.window // 2 + 1, s.window - 1) if n > 0
            ]
            yield "window offset", "where windows start", variants
            splits = [2**i for i in range(s.rows.bit_length()) if 2**i != s.window]
            variants = [(f"{s.rows // w}x{w}", partial(self.read, s.budget(s.rows, w))) for w in splits]
            yield "split", f"how the budget of {s.rows} rows is cut into windows", variants
            variants = [("one token a pass", partial(self.read, s.budget(s.rows, 1), per_pass=1))]
            yield "prefix rebuild", "prefix decoded token by token, not prefilled", variants

    def control(self, anchor: Reading, say: Callable[[str], None]) -> Check:
        """The text decoded on the fast path at several batch sizes: log-probabilities must differ somewhere."""
        differs, batches = "", (1, 2, 4, 16)
        for batch in batches:
            say(f"inverse control: fast path at batch {batch}")
            fast = self.schedule.fast(batch)
            found = _first_difference(anchor, self.read(fast, per_pass=1))
            if found and not differs:
                differs = f"batch {batch}: {found}"
        return Check("inverse control", "the fast path, other batch sizes", len(batches), differs)

    def read(
        self,
        schedule: Schedule,
        *,
        row: int = TEXT_ROW,
        group: int = 0,
        neighbours: int = 0,
        first: int = 0,
        per_pass: int = 0,
        reverse_pages: bool = False,
        poison: bool = False,
    ) -> Reading:
        """Runs the text through passes of `schedule` and reads off what they say.

        Args:
            row: cache row of the text.
            group: window of each pass that the text starts at; 0 lets it fill the pass.
            neighbours: which set of other texts runs beside it; 0 is nobody.
            first: tokens of the first window, 0 for a whole one.
            per_pass: windows of the text in one pass; 0 for as many as fit.
            reverse_pages: hand out the pool's pages from the other end.
            poison: fill the pool with large values first.
        """
        W, G = schedule.window, schedule.groups
        cache = self._cache(reverse_pages, poison)
        starts = [0, *range(first, self.length, W)] if first else list(range(0, self.length, W))
        ends = [*starts[1:], self.length]
        windows = list(zip(starts, ends, strict=True))
        room = min(per_pass or G, G - group)
        logits = np.zeros((self.length, self.cfg.vocab_size), np.float32)
        tokens, logprobs = np.zeros(self.length, np.int32), np.zeros(self.length, np.float32)
        for index in range(0, len(windows), room):
            mine = windows[index : index + room]
            batch = _empty_windows(G, W)
            for place, (start, end) in enumerate(mine):
                _put(batch, group + place, row, self.texts[TEXT_ROW], start, end)
            if neighbours:
                taken = range(group, group + len(mine))
                others = [g for g in range(G) if g not in taken]
                for n, g in enumerate(others[: NUM_ROWS - 1]):
                    other = (row + 1 + n) % NUM_ROWS
                    start = (index // room * W * neighbours + 3 * n * (neighbours - 1)) % max(1, self.length - W)
                    _put(batch, g, other, self.texts[other], start, min(start + max(1, W - n), self.length))
            out, chosen, logprob, cache = _pass(
                self.params, self.cfg, Windows(**{k: jnp.asarray(v) for k, v in batch.items()}), cache, self.sampling, schedule
            )
            for place, (start, end) in enumerate(mine):
                logits[start:end] = np.asarray(out[group + place, : end - start])
                tokens[start:end] = np.asarray(chosen[group + place, : end - start])
                logprobs[start:end] = np.asarray(logprob[group + place, : end - start])
        return Reading(self._keys_values(cache, row), logits, tokens, logprobs)

    def _cache(self, reverse_pages: bool, poison: bool) -> KVCache:
        s = self.schedule
        cache = init_cache(self.cfg, max_rows=NUM_ROWS, max_len=self.length, schedule=s)
        if reverse_pages:
            table = cache.page_table
            cache = cache.replace(page_table=table[::-1, ::-1])
        if poison:
            sign = jnp.where(jnp.arange(s.page) % 2 == 0, POISON, -POISON).astype(s.cache_dtype)[None, None, :, None]
            cache = cache.replace(
                k=tuple(x + jnp.moveaxis(sign, 2, s.key_slot_axis) for x in cache.k), v=tuple(x + sign for x in cache.v)
            )
        return cache

    def _keys_values(self, cache: KVCache, row: int) -> np.ndarray:
        """`[L, 2, positions, K, H]` of the text."""
        position = np.arange(self.length)
        pages = np.asarray(cache.page_table)[row, position // cache.page]
        slots = position % cache.page
        keys = [np.moveaxis(np.asarray(x), self.schedule.key_slot_axis, 2)[pages, :, slots] for x in cache.k]
        values = [np.asarray(x)[pages, :, slots] for x in cache.v]
        return np.stack([keys, values], axis=1)


@partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames=("cache",))
def _pass(
    params: Params, cfg: ModelConfig, windows: Windows, cache: KVCache, sampling: RowSampling, schedule: Schedule
) -> tuple[jax.Array, jax.Array, jax.Array, KVCache]:
    """One pass: logits `[G, W, V]`, sampled tokens and log-probabilities `[G, W]`, and the cache."""
    G, W = windows.tokens.shape
    logits_f32, cache, _ = forward(params, cfg, windows, cache, schedule=schedule)
    rows = jax.tree.map(lambda x: jnp.repeat(x, G * W, axis=0), sampling)
    flat = logits_f32.reshape(G * W, -1)
    position = windows.positions.reshape(-1) + 1
    tokens, logprobs = sample(flat, position, rows, lambda: windows.tokens, schedule=schedule)  # no row has penalties
    return logits_f32, tokens.reshape(G, W), logprobs.reshape(G, W), cache


def _empty_windows(G: int, W: int) -> dict[str, np.ndarray]:
    """A pass of padding."""
    zeros = np.zeros(G, np.int32)
    return {"tokens": np.zeros((G, W), np.int32), "row": np.full(G, NO_ROW, np.int32), "start": zeros, "count": zeros.copy()}


def _put(batch: dict[str, np.ndarray], group: int, row: int, text: Sequence[int] | np.ndarray, start: int, end: int) -> None:
    """Makes window `group` hold `text[start:end]` for cache row `row`."""
    batch["tokens"][group, : end - start] = text[start:end]
    batch["row"][group], batch["start"][group], batch["count"][group] = row, start, end - start


def _first_difference(anchor: Reading, other: Reading) -> str:
    """Where `other` first parts from `anchor`, layer by layer, in words; "" if nowhere."""
    for layer in range(anchor.keys_values.shape[0]):
        for which, name in enumerate(("keys", "values")):
            position = _first_position(anchor.keys_values[layer, which], other.keys_values[layer, which])
            if position is not None:
                return f"{name} of layer {layer} at position {position}"
    for name in ("logits", "tokens", "logprobs"):
        position = _first_position(getattr(anchor, name), getattr(other, name))
        if position is not None:
            return f"{name} at position {position}, with the keys and values of all layers equal"
    return ""


def _first_position(a: np.ndarray, b: np.ndarray) -> int | None:
    """The first index of the first axis at which the bits of `a` and `b` differ."""
    bits = [np.ascontiguousarray(x).view(np.uint8).reshape(x.shape[0], -1) for x in (a, b)]
    differs = (bits[0] != bits[1]).any(1)
    return int(np.argmax(differs)) if differs.any() else None
