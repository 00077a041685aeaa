"""Certification of a plan on the device at hand, on its whole compiled program.

A plan is certified if the tokens and log-probability bits that it commits, for a batch of made-up requests, are those of the
anchor: canonical passes of the schedule's own budget, which replay what the plan committed. At the first token that the anchor
would not have chosen, its target differs. The made-up requests cross the borders of pages and reach the end of the cache.
Plans that differ from the anchor are not used; only the anchor itself failing is an error.
"""

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import Pool, map_pools
from detspec.config import ModelConfig
from detspec.engine.bits import first_difference, same_bits
from detspec.engine.conformance import check_conformance
from detspec.engine.device import PLAIN, Device, GivenText
from detspec.engine.policy import Plan
from detspec.engine.probes import NUM_PROBES, Probes, most_far
from detspec.engine.programs import Report
from detspec.riders.counters import COUNTED
from detspec.riders.riding import reader_of
from detspec.schedule import Numerics, Schedule
from detspec.state import GenState

ORDINARY = "ordinary"
CERTIFIED = "certified"
DIFFERS = "differs"
NOT_TRIED = "not tried"
TIMING_ROUNDS = 2
TIMING_RUNS = 2  # in each round
UNREAD = 1 << 20  # probes from this number on have prompts that no other trial reads
WIDE_STARTS = 5  # in each round: only the first wide step of probes reads as many drafts as fit


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Facts about one plan."""

    plan: Plan  # the program
    # "ordinary": it promises nothing. "certified": its committed bits are the anchor's. "differs": they are not.
    # "not tried": it cannot win.
    status: str
    why: str = ""  # first difference of bits, or why it was not tried; "" if it holds
    step_s: float = float("inf")  # seconds of one step with the batch full, when it was last timed; inf if it never was

    @property
    def is_certified(self) -> bool:
        """Whether deterministic requests may use the plan."""
        return self.status == CERTIFIED


def certify(device: Device, plan: Plan) -> Certificate:
    """Compiles `plan`, runs it on probes, and replays the result through the anchor; ordinary plans are only compiled.

    Small batches step several groups of probes, because one probe does not reach everywhere. Drafts that are searched for in
    texts are found there in a second run, whose passes read them: its bits must be those of the first. Plans of integer models
    need no trial: their bits are a function of integers, if the device conforms. Raises `InputError` if it does not.
    """
    check_conformance(device)
    if device.model.cfg.is_integer and not plan.ordinary:
        return Certificate(plan, CERTIFIED)
    if plan.ordinary:
        probes = Probes(device, plan.batch, deterministic=False)
        probes.start()
        jax.block_until_ready(probes.step(plan, device.config.max_len))
        return Certificate(plan, ORDINARY)
    num_probes = -(-NUM_PROBES // plan.batch) * plan.batch
    at_once = min(num_probes, max(1, most_far(device) // plan.batch) * plan.batch)
    searches = device.drafters[plan.draft].source.searches
    num_found = 0
    for first in range(0, num_probes, at_once):
        probes = Probes(device, at_once, far=True, first=first)
        generated = _generated(probes, plan, wide_cost=float("inf"))
        if differs := _differs_from_anchor(probes, generated):
            return Certificate(plan, DIFFERS, differs)
        if searches:
            probes.plant(_texts(probes, generated.reports))
            again = _generated(probes, plan, wide_cost=0.0)
            if differs := _difference(probes, again, generated.tokens, generated.logprobs, "without guesses it is"):
                return Certificate(plan, DIFFERS, differs)
            num_found += again.num_accepted
    if searches and not num_found:
        return Certificate(plan, NOT_TRIED, "the cache has no room for probes whose texts hold what is drafted")
    return Certificate(plan, CERTIFIED)


class _Generated(NamedTuple):
    """Tokens and bits that a plan committed for `N` probes."""

    tokens: np.ndarray  # [N, max_len] int32
    logprobs: np.ndarray  # [N, max_len] float32
    committed: np.ndarray  # [N] int32, positions in use
    num_accepted: int  # drafted tokens that agreed
    reports: Sequence[Report]  # reports that this is taken from


def _generated(probes: Probes, plan: Plan, *, wide_cost: float) -> _Generated:
    """Runs `plan` on the probes to their ends."""
    probes.start()
    reports = probes.step(plan, probes.device.config.max_len, wide_cost=wide_cost)
    progress = [report.progress for report in reports]
    return _Generated(
        tokens=np.concatenate([report.tokens for report in reports]),
        logprobs=np.concatenate([report.logprobs for report in reports]),
        committed=np.concatenate([each.committed for each in progress]),
        num_accepted=sum(int(each.counts[:, COUNTED.index("num_accepted_draft_tokens")].sum()) for each in progress),
        reports=reports,
    )


def _differs_from_anchor(probes: Probes, generated: _Generated) -> str:
    """The first place and new position where the anchor's tokens or log-probability bits differ, in words; "" if nowhere."""
    texts = [tokens[:end] for tokens, end in zip(generated.tokens, generated.committed, strict=True)]
    anchor = probes.device.replay(probes.placement, probes.given(texts), PLAIN)
    assert anchor.targets is not None
    assert anchor.target_logprobs is not None
    num = len(generated.tokens)
    return _difference(
        probes, generated, np.asarray(anchor.targets)[:num], np.asarray(anchor.target_logprobs)[:num], "the anchor has"
    )


def _difference(probes: Probes, generated: _Generated, targets: np.ndarray, target_logprobs: np.ndarray, whose: str) -> str:
    """The first place and new position where `generated` has other bits than the targets `[N, max_len]`, in words."""
    tokens = generated.tokens
    logprobs = generated.logprobs
    position = np.arange(tokens.shape[1])[None, :]
    prompt_len = np.asarray([len(probe.tokens) for probe in probes.each])
    new = (position >= prompt_len[:, None]) & (position < generated.committed[:, None])
    found = first_difference([(tokens, targets), (logprobs, target_logprobs)], new)
    if found is None:
        return ""
    place, at = found
    return (
        f"sequence {place} at position {at} ({at - prompt_len[place]} tokens after the prompt): token {tokens[place, at]} and "
        f"log-probability {logprobs[place, at]!r}, {whose} {targets[place, at]} and {target_logprobs[place, at]!r}"
    )


def certify_reader(device: Device, batch: int) -> str:
    """Says where a rider's reading of made-up prompts depends on their places or drafts; "" if nowhere.

    The prompts are read twice by the program that the engine reads with: with no drafts, and then in reversed places with what
    was found, spoilt here and there. What is found must be the same.
    """
    rider = reader_of(device.riders)
    if rider is None or rider.reader is None:
        return ""
    probes = Probes(device, batch)
    probes.start()
    first = jax.device_get(device.read())
    cfg = device.model.cfg
    probes.start(reverse=True, brings=[{rider.name: rider.reader.spoilt(cfg, first, b)} for b in range(batch)])
    again = jax.device_get(device.read())
    differences = (rider.reader.difference(first, b, again, batch - 1 - b) for b in range(batch))
    return next(filter(None, differences), "")


def certifies_answers(device: Device) -> bool:
    """Whether passes over made-up prompts give the tokens and log-probability bits after them that the anchor does."""
    if device.model.cfg.is_integer:
        return True
    at_once = min(NUM_PROBES, max(1, most_far(device)))
    pairs: list[tuple[Any, Any]] = []
    for first in range(0, NUM_PROBES, at_once):
        probes = Probes(device, at_once, far=True, first=first)
        report = probes.start(answers=True)
        assert report is not None
        anchor = device.replay(probes.placement, probes.given([probe.tokens for probe in probes.each]), PLAIN)
        ends = [len(probe.tokens) for probe in probes.each]
        answered = [place for place, end in enumerate(ends) if report.progress.committed[place] > end]
        at = answered, [ends[place] for place in answered]
        of_both = (report.tokens, anchor.targets), (report.logprobs, anchor.target_logprobs)
        pairs += [(np.asarray(own)[at], np.asarray(other)[at]) for own, other in of_both if answered]
    return bool(pairs) and all(same_bits(own, other).all() for own, other in pairs)


def certifies_large_prefill(device: Device) -> bool:
    """Whether large passes over made-up prompts leave the bits in the cache, and commit those, that the schedule's do."""
    if device.model.cfg.is_integer:
        return True
    num_probes = min(NUM_PROBES, max(1, most_far(device)))
    probes = Probes(device, num_probes, far=True, first=UNREAD)  # else the bits could be there already
    pages = np.unique([page for probe in probes.each for page in probe.pages])
    seats = device.state.cache.seat
    numbers = {"pages": pages, "seats": None if seats is None else seats[:num_probes]}
    found = []
    for schedule in (device.large, device.schedule):
        probes.start(schedule=schedule, answers=device.answers)
        found.append(_bits_of(device.state, device.model.cfg, numerics=device.schedule.numerics, **numbers))
    return bool(_are_equal(*found))


@partial(jax.jit, static_argnames=("cfg", "numerics"))
def _bits_of(state: GenState, cfg: ModelConfig, pages: jax.Array, seats: jax.Array | None, *, numerics: Numerics) -> Any:
    """Contents of `pages [n]`, and of `seats [m]` where layers have them, and what is committed, as whole numbers."""

    def bits(array: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")

    def held(declared: Pool, array: jax.Array) -> jax.Array:
        return bits(array)[seats if declared.by_seat else pages]

    return map_pools(held, cfg, numerics, state.cache.pools), state.committed, state.tokens, bits(state.logprobs)


@jax.jit
def _are_equal(a: Any, b: Any) -> jax.Array:
    """Whether all numbers of two trees are, a bool."""
    return jnp.all(jnp.stack([jnp.all(x == y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]))


def certified_passes(device: Device) -> Schedule:
    """The schedule of large passes over given texts, if they find the bits of the anchor's; else the anchor.

    Both read the same made-up texts, for log-probabilities, targets and what riders find.
    """
    large = device.large
    if large == device.schedule or device.model.cfg.is_integer:
        return large
    anchor, other = (jax.tree.leaves(_replayed(device, schedule)) for schedule in (device.schedule, large))
    return large if all(same_bits(a, b).all() for a, b in zip(anchor, other, strict=True)) else device.schedule


def _replayed(device: Device, schedule: Schedule) -> Any:
    """Log-probabilities, targets and what riders find in made-up texts, in numpy, as passes of `schedule` find them."""
    probes = Probes(device, device.config.max_requests)
    rng = np.random.default_rng(0)
    new = [rng.integers(0, device.model.cfg.vocab_size, probes.num_new).tolist() for _ in probes.each]
    texts = {
        place: GivenText([*probe.tokens, *tokens], len(probe.tokens) - 1, len(probe.tokens))
        for place, (probe, tokens) in enumerate(zip(probes.each, new, strict=True))
    }
    probes.start(schedule=schedule)
    found = device.replay(probes.placement, texts, PLAIN, schedule=schedule)
    told = device.told()
    device.clear()
    return jax.tree.map(np.asarray, (found, told))


class Times(NamedTuple):
    """Seconds of a step."""

    step_s: float  # if the plan skips, with a pass that reads no drafts
    wide_s: float  # with a pass that reads drafts


def time_plans(device: Device, plans: Sequence[Plan]) -> dict[Plan, Times]:
    """How long a step of each compiled plan takes, the least of a few runs: plans take turns, and noise only ever adds."""
    least = dict.fromkeys(plans, float("inf"))
    least_wide = dict.fromkeys(plans, (float("inf"), float("inf")))
    for _ in range(TIMING_ROUNDS):
        for plan in plans:
            probes = Probes(device, plan.batch, deterministic=not plan.ordinary, far=plan.skips)
            probes.start()  # prompts take longer than the steps, so they are read once
            steps = max(1, probes.num_new // TIMING_RUNS // (1 if plan.skips else plan.most_tokens))
            for _ in range(TIMING_RUNS):
                seconds, reports = _timed(probes, plan, steps, wide_cost=float("inf"))
                least[plan] = min(least[plan], seconds)
            if plan.skips:  # drafts are rows with contexts, so they must be found
                probes.plant(_texts(probes, reports))
                found = [_timed_wide(probes, plan) for _ in range(WIDE_STARTS)]
                least_wide[plan] = tuple(map(min, zip(least_wide[plan], *found, strict=True)))
    # The time to start a segment is in both single steps, and cancels.
    more = {plan: max(0.0, wide - narrow) if plan.skips else 0.0 for plan, (wide, narrow) in least_wide.items()}
    return {plan: Times(least[plan], least[plan] + more[plan]) for plan in plans}


def _timed_wide(probes: Probes, plan: Plan) -> tuple[float, float]:
    """Seconds of a step whose pass reads drafts, and of one whose pass reads none."""
    probes.start()
    _, narrow, wide = (_timed(probes, plan, 1, wide_cost=cost)[0] for cost in (float("inf"), float("inf"), 0.0))
    return wide, narrow  # a step that follows on reading prompts is slower than others


def _timed(probes: Probes, plan: Plan, steps: int, *, wide_cost: float) -> tuple[float, list[Report]]:
    """Seconds of a step, of at most `steps`, inf once all probes have ended; and what was reported."""
    probes.device.wait()
    began = time.perf_counter()
    reports = jax.block_until_ready(probes.step(plan, steps, wide_cost=wide_cost))
    probes.device.wait()
    seconds = time.perf_counter() - began
    num_steps = sum(int(report.progress.steps[0]) for report in reports)
    return seconds / num_steps if num_steps else float("inf"), reports


def _texts(probes: Probes, reports: Sequence[Report]) -> list[list[int]]:
    """Lists the tokens that each probe generated."""
    each = [(tokens, end) for report in reports for tokens, end in zip(report.tokens, report.progress.committed, strict=True)]
    return [
        np.asarray(tokens)[len(probe.tokens) : end].tolist() for probe, (tokens, end) in zip(probes.each, each, strict=True)
    ]
