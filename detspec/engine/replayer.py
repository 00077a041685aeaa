"""Replays recorded completions, many at a time, through the canonical pass that decides their bits.

1. Texts are taken a batch at a time, of a few batches that are put in order first; a batch is put together while the device
   works on the one before.
2. A prefill writes the keys and values of the prompts, once where they begin alike; a replay reads the recorded tokens after
   them.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.engine.bits import same_bits
from detspec.engine.certify_mesh import mesh_of_bits
from detspec.engine.device import Device, GivenText
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import NEVER
from detspec.engine.programs import Placement
from detspec.engine.request import Request
from detspec.engine.sequence import asked_from, wants_replay
from detspec.errors import InputError
from detspec.generation.checks import check_prompt, thinks
from detspec.generation.insert import Entry
from detspec.generation.score import Asked, Replayed
from detspec.sampling_params import MAX_LOGPROBS, SamplingParams
from detspec.schedule import Schedule
from detspec.thinking.blocks import thinking_of
from detspec.thinking.thoughts import thought_lists

LARGE_ROWS = 512  # more token rows a pass make larger products
PROBE_TOKENS = 48
LOOKAHEAD = 4  # batches that are put in order together
Batch = Sequence[tuple[Request, Sequence[int]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """What the canonical pass says of one recorded completion of `n` tokens, and of the token that would follow them."""

    # int32 `[n + 1]`, what the request gets there, given the recorded tokens before; `[n]` if the text fills `max_len`.
    # A scored request has its given tokens here, `[n]`.
    targets: np.ndarray
    logprobs: np.ndarray  # float32, log-probabilities of the targets, raw or processed as the request asks
    # what is found of the whole text, as in `SequenceState.replayed`; None if the request does not ask for it
    likeliest: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    # token ids of the thought after each chunk of a prompt that is read with thoughts
    thoughts: list[list[int]] = dataclasses.field(default_factory=list)


class Replayer:
    """Replays any number of completions; one program for texts of all lengths.

    `schedule` is that of its passes: large ones if this device certifies that their bits are those of the config's. `mesh` says
    on which chips bits depend, see `mesh_of_bits`.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        """Allocates a cache of `config.max_requests` sequences of `config.max_len` positions.

        Raises `InputError` if `max_len` is more than the model was made for, or the device does not run the schedule.
        """
        self._device = Device(model, dataclasses.replace(config, thoughts="none", num_pages=None))
        self.schedule = self._device.schedule
        self.mesh = mesh_of_bits(self._device)[0]
        self._page_table = 1 + np.arange(self._device.num_pages, dtype=np.int32).reshape(config.max_requests, -1)
        self._prepared = False

    def prepare(self) -> None:
        """Compiles, and tries larger passes on made-up texts; `run` does it by itself."""
        if self._prepared:
            return
        config = self._device.config
        asked = self._device.schedule
        large = large_passes(asked, config.max_len)
        if large != asked:
            texts = _made_up_texts(self._device.model.cfg.vocab_size, config.max_requests, config.max_len)
            found = []
            for schedule in (asked, large):
                self.schedule = schedule
                replayed, thoughts = self._dispatch(texts)
                found.append(jax.tree.leaves(jax.device_get((replayed.targets, replayed.target_logprobs, thoughts))))
            if not all(same_bits(a, b).all() for a, b in zip(*found, strict=True)):
                self.schedule = asked
        self._prepared = True

    def run(self, records: Iterable[tuple[Request, Sequence[int]]]) -> Iterator[Replay]:
        """Yields what each request and its recorded tokens give, in their order; looks a few batches ahead.

        Requests are of one sample each.

        Raises `InputError` if a text does not fit `max_len`, or holds ids outside the vocabulary.
        """
        self.prepare()
        found: dict[int, Replay] = {}
        following = 0
        for number, replay in self._replays(records):
            found[number] = replay
            while following in found:
                yield found.pop(following)
                following += 1

    def _replays(self, records: Iterable[tuple[Request, Sequence[int]]]) -> Iterator[tuple[int, Replay]]:
        """Replays with the numbers of their records; the device has a batch to work on while one is handed out."""
        running: tuple[list[int], Batch, Replayed, jax.Array | None] | None = None
        for numbers, batch in _batches(records, self._device.config.max_requests):
            self._make_room(batch)
            dispatched = numbers, batch, *self._dispatch(batch)
            if running is not None:
                yield from _unpack(self._device.model.cfg, *running)
            running = dispatched
        if running is not None:
            yield from _unpack(self._device.model.cfg, *running)

    def _make_room(self, batch: Batch) -> None:
        """Gives programs the room that the requests of `batch` need."""
        room = self._device.room
        for request, _ in batch:
            room = room.with_room_for(request.sampling, self._device.model.eos_ids)
        if room != self._device.room:
            self._device.widen(room)
            self._prepared = False  # larger passes have to be tried again
            self.prepare()

    def _dispatch(self, batch: Batch) -> tuple[Replayed, jax.Array | None]:
        """Starts the passes over one batch; returns what will be known of its texts and thoughts `[max_requests, X, M]`."""
        device = self._device
        cfg = device.model.cfg
        texts = [(*request.prompt_token_ids, *token_ids) for request, token_ids in batch]
        for (request, _), text in zip(batch, texts, strict=True):
            self._check(request, text)
        likeliest = any(wants_replay(request) or request.given_token_ids for request, _ in batch)
        thinking = [thinks(cfg, request.sampling) for request, _ in batch]
        prompts = [request.prompt_token_ids for request, _ in batch]
        # Prompts are read in the order of places, so what a place shares with the one before is there when it is needed.
        page = device.schedule.numerics.page
        shared = [0] * len(batch) if likeliest or any(thinking) else shared_pages(prompts, page)
        placement = self._placement(shared)
        entries = [
            Entry(place=place, tokens=request.prompt_token_ids, sampling=request.sampling, length=number * page)
            for place, ((request, _), number) in enumerate(zip(batch, shared, strict=True))
        ]
        # Where the likeliest tokens are asked for, prompts are replayed too, by passes that need no certificate.
        schedule = device.schedule if likeliest else self.schedule
        start = [0 if likeliest and not thought else len(prompt) - 1 for prompt, thought in zip(prompts, thinking, strict=True)]
        device.clear()
        device.put(entries)
        device.prefill(placement, 0 if likeliest and cfg.thinking is None else NEVER, schedule=schedule)
        processing = any(request.sampling.needs_processing for request, _ in batch)
        asked = Asked(processing, choose=True, top_k=min(MAX_LOGPROBS, cfg.vocab_size) if likeliest else 0)
        wanted_from = [asked_from(request) for request, _ in batch]
        given = {place: GivenText(*text) for place, text in enumerate(zip(texts, start, wanted_from, strict=True))}
        replayed = device.replay(placement, given, asked, schedule=schedule)
        reading = device.thoughts()
        return replayed, None if reading is None else reading.thoughts

    def _placement(self, shared: Sequence[int]) -> Placement:
        """Places of a batch; each shares so many pages with the one before it."""
        table = self._page_table.copy()
        for place, number in enumerate(shared):
            table[place, :number] = table[place - 1, :number]
        return Placement(table, np.arange(len(table)) < len(shared), np.arange(len(shared), dtype=np.int32))

    def _check(self, request: Request, text: tuple[int, ...]) -> None:
        max_len = self._device.config.max_len
        if len(text) > max_len:
            raise InputError(f"{request.id!r} has {len(text)} tokens with its prompt, more than the max_len of {max_len}")
        try:
            check_prompt(text, SamplingParams(max_tokens=1), self._device.model.cfg, max_len=max_len + 1)
        except InputError as error:
            raise InputError(f"{request.id!r}: {error}") from error


def large_passes(schedule: Schedule, max_len: int) -> Schedule:
    """The same schedule with passes of more rows and windows of a query tile at least; aligned windows keep their length."""
    window = schedule.budget.window
    if schedule.numerics.alignment == "free":
        window = max(window, schedule.numerics.query_tile)
    return schedule.with_budget(max(schedule.budget.rows, LARGE_ROWS, window), window) if window <= max_len else schedule


def shared_pages(prompts: Sequence[Sequence[int]], page: int) -> list[int]:
    """Whole pages that each prompt has in common with the one before it, of those that both fill before their last tokens.

    Pages of 2: `abcde, abcdx, abcx, xb` share 0, 2, 1 and 0.
    """
    shared = [0] * len(prompts)
    for i in range(1, len(prompts)):
        before = prompts[i - 1]
        prompt = prompts[i]
        most = (min(len(before), len(prompt)) - 1) // page
        while shared[i] < most and all(before[p] == prompt[p] for p in range(shared[i] * page, shared[i] * page + page)):
            shared[i] += 1
    return shared


def _batches(records: Iterable[tuple[Request, Sequence[int]]], max_requests: int) -> Iterator[tuple[list[int], Batch]]:
    """Numbers and texts, `max_requests` at a time: apart what needs no processing or no noise; like prompts together."""

    def likeness(numbered: tuple[int, tuple[Request, Sequence[int]]]) -> tuple[bool, bool, tuple[int, ...]]:
        request, _ = numbered[1]
        return request.sampling.needs_processing, request.sampling.temperature > 0, request.prompt_token_ids

    waiting = enumerate(records)
    while ahead := sorted(itertools.islice(waiting, LOOKAHEAD * max_requests), key=likeness):
        for first in range(0, len(ahead), max_requests):
            numbers, batch = zip(*ahead[first : first + max_requests], strict=True)
            yield list(numbers), batch


def _made_up_texts(vocab_size: int, number: int, max_len: int) -> Batch:
    """Made-up texts of mixed lengths, greedy and sampled."""
    rng = np.random.default_rng(0)
    texts = []
    for b in range(number):
        text = rng.integers(0, vocab_size, 2 + (11 * b + max_len // 2) % max(1, min(max_len - 1, 2 * PROBE_TOKENS))).tolist()
        sampling = SamplingParams(temperature=float(b % 2), seed=b)
        cut = max(1, len(text) // 3)
        texts.append((Request(f"made up {b}", tuple(text[:cut]), sampling), text[cut:]))
    return texts


def _unpack(
    cfg: ModelConfig, numbers: Sequence[int], batch: Batch, replayed: Replayed, thoughts: jax.Array | None
) -> Iterator[tuple[int, Replay]]:
    """The part of each text that is about its new tokens, and what was thought before them."""
    found = jax.device_get(replayed)
    for place, (number, (request, token_ids)) in enumerate(zip(numbers, batch, strict=True)):
        prompt_len = len(request.prompt_token_ids)
        new = slice(prompt_len, prompt_len + len(token_ids) + 1)
        likeliest = found.logprobs[place], found.top_ids[place], found.top_logprobs[place]
        wanted = likeliest if wants_replay(request) else None
        thought: list[list[int]] = []
        if thinks(cfg, request.sampling):
            thought = thought_lists(np.asarray(thoughts)[place, : (prompt_len - 1) // thinking_of(cfg).chunk])
        if request.given_token_ids:
            given = slice(prompt_len, prompt_len + len(token_ids))
            yield number, Replay(np.asarray(token_ids, np.int32), found.logprobs[place, given], wanted)
            continue
        yield number, Replay(found.targets[place, new], found.target_logprobs[place, new], wanted, thought)
