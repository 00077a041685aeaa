"""Replays recorded completions, many at a time, through the canonical pass that decides their bits.

1. Texts are taken `max_requests` at a time, of a few times as many that are put in order first; a batch is put together
   while the device works on the one before.
2. `prefill_rows` writes the keys and values of the prompts, once where they begin alike; `replay_rows` reads the recorded
   tokens after them.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.engine.policy import NEVER
from detspec.engine.programs import prefill_rows, read_rows, replay_rows
from detspec.engine.request import Request
from detspec.engine.sequence import first_sample
from detspec.environment import chosen_schedule
from detspec.errors import InputError
from detspec.generate.insert import check_prompt, commit_like, init_state, insert, pack_requests, thinks
from detspec.generate.score import Replayed
from detspec.sampling_params import MAX_LOGPROBS, SamplingParams
from detspec.schedule import Schedule
from detspec.state import PAD_ID, GenState
from detspec.thinking.blocks import thinking_of
from detspec.thinking.thoughts import thought_lists

LARGE_ROWS = 512  # more token rows a pass make larger products
PROBE_TOKENS = 48
LOOKAHEAD = 4  # batches that are put in order together
Batch = Sequence[tuple[Request, Sequence[int]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """What the canonical pass says of one recorded completion of `n` tokens, and of the token that would follow them.

    Attributes:
        targets: int32 `[n + 1]`, what the request gets there, given the recorded tokens before; `[n]` if the text fills
            `max_len`.
        logprobs: float32, log-probabilities of the targets, raw or processed as the request asks.
        likeliest: of the whole text, as in `SequenceState.replayed`; None if the request asks for no such log-probabilities.
        thoughts: token ids of what is thought after each chunk of a prompt that is read thinking.
    """

    targets: np.ndarray
    logprobs: np.ndarray
    likeliest: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    thoughts: list[list[int]] = dataclasses.field(default_factory=list)


class Replayer:
    """Replays any number of completions; one program for texts of all lengths.

    Attributes:
        schedule: of its passes: large ones if this device certifies that their bits are those of the schedule asked for.
    """

    def __init__(
        self,
        model: Model,
        *,
        schedule: Schedule | None = None,
        max_requests: int = 32,
        max_len: int = 1024,
        max_stop_ids: int = 16,
        max_logit_bias: int = 64,
    ) -> None:
        """Allocates a cache of `max_requests` rows of `max_len` positions, prompt and new tokens together.

        The last two are the room for stop tokens and biased tokens of one request, as in `EngineConfig`.

        Raises:
            InputError: `max_requests` or `max_len` is not positive, or `max_len` is more than the model was made for.
        """
        if max_requests < 1 or not 1 <= max_len <= model.cfg.max_position:
            raise InputError(
                f"max_requests must be at least 1, got {max_requests}, and max_len in 1 .. {model.cfg.max_position} (positions "
                f"that the model was made for), got {max_len}"
            )
        self._model, self._max_rows, self._max_len = model, max_requests, max_len
        self.schedule = self._asked = chosen_schedule(schedule, model.cfg)
        state = init_state(
            model.cfg,
            max_requests=max_requests,
            max_len=max_len,
            max_stop_ids=max_stop_ids,
            max_logit_bias=max_logit_bias,
            schedule=self.schedule,
        )
        self._state = commit_like(model.params, state)
        self._page_table = np.array(self._state.cache.page_table)
        self._prepared = False

    def prepare(self) -> None:
        """Compiles, and tries larger passes on made-up texts; `run` does it by itself."""
        if self._prepared:
            return
        asked, large = self._asked, large_passes(self._asked, self._max_len)
        if large != asked:
            probes = _probes(self._model.cfg.vocab_size, self._max_rows, self._max_len)
            found = []
            for self.schedule in (asked, large):
                replayed, thoughts = self._dispatch(probes)
                answers = (replayed.targets, replayed.target_logprobs, *(() if thoughts is None else (thoughts,)))
                found.append([np.asarray(answer).view(np.uint32) for answer in answers])
            if not all(np.array_equal(*pair) for pair in zip(*found, strict=True)):
                self.schedule = asked
        self._prepared = True

    def run(self, records: Iterable[tuple[Request, Sequence[int]]]) -> Iterator[Replay]:
        """Yields what each request and its recorded tokens give, in their order; looks a few batches ahead.

        Requests are of one sample each.

        Raises:
            InputError: a text does not fit `max_len`, or holds ids outside the vocabulary.
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
        for numbers, batch in _batches(records, self._max_rows):
            dispatched = numbers, batch, *self._dispatch(batch)
            if running is not None:
                yield from _unpack(self._model.cfg, *running)
            running = dispatched
        if running is not None:
            yield from _unpack(self._model.cfg, *running)

    def _dispatch(self, batch: Batch) -> tuple[Replayed, jax.Array | None]:
        """Starts the passes over one batch; returns what will be known of its texts and thoughts `[max_requests, X, M]`."""
        tokens = np.full((self._max_rows, self._max_len), PAD_ID, np.int32)
        length = np.ones(self._max_rows, np.int32)
        for row, (request, token_ids) in enumerate(batch):
            text = (*request.prompt_token_ids, *token_ids)
            self._check(request, text)
            tokens[row, : len(text)] = text
            length[row] = len(text)
        prompts = [request.prompt_token_ids for request, _ in batch]
        sampling = [request.sampling for request, _ in batch]
        likeliest = any(_wants_likeliest(request) for request, _ in batch)
        page, table = self._asked.numerics.page, self._page_table.copy()
        # Prompts are read in the order of rows, so what a row shares with the one before is in the cache when it is needed.
        thinking = any(thinks(self._model.cfg, request.sampling) for request, _ in batch)
        shared = [0] * len(batch) if likeliest or thinking else shared_pages(prompts, page)
        for row, number in enumerate(shared):
            table[row, :number] = table[row - 1, :number]
        idle = self._state.replace(
            live=jnp.zeros(self._max_rows, bool), cache=self._state.cache.replace(page_table=jnp.asarray(table))
        )
        lengths = [number * page for number in shared]
        params, cfg = self._model.params, self._model.cfg
        requests = pack_requests(idle, range(len(batch)), prompts, sampling, self._model.eos_ids, lengths=lengths)
        if likeliest:
            # As the engine reads them: prompts too, in passes that need no certificate.
            top_k = min(MAX_LOGPROBS, cfg.vocab_size)
            if cfg.thinking is None:
                state = insert(idle, requests)
            else:
                state = read_rows(params, cfg, idle, requests, schedule=self._asked)
            replayed, self._state = replay_rows(params, cfg, state, tokens, length, schedule=self._asked, top_k=top_k)
            return replayed, _thoughts_of(self._state)
        in_use, passes = np.arange(self._max_rows) < len(batch), np.int32(NEVER)
        state = prefill_rows(params, cfg, idle, requests, in_use, table, passes, schedule=self.schedule, guesses="trivial")
        replayed, self._state = replay_rows(params, cfg, state, tokens, length, schedule=self.schedule)
        return replayed, _thoughts_of(self._state)

    def _check(self, request: Request, text: tuple[int, ...]) -> None:
        if len(text) > self._max_len:
            raise InputError(
                f"{request.id!r} has {len(text)} tokens with its prompt, more than the replayer's max_len of {self._max_len}"
            )
        try:
            check_prompt(text, SamplingParams(max_tokens=1), self._model.cfg, max_len=self._max_len + 1)
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
    for row in range(1, len(prompts)):
        before, prompt = prompts[row - 1], prompts[row]
        most = (min(len(before), len(prompt)) - 1) // page
        while shared[row] < most and all(before[p] == prompt[p] for p in range(shared[row] * page, shared[row] * page + page)):
            shared[row] += 1
    return shared


def _batches(records: Iterable[tuple[Request, Sequence[int]]], max_requests: int) -> Iterator[tuple[list[int], Batch]]:
    """Numbers and texts, `max_requests` at a time: greedy ones, which need no noise, apart; like prompts together."""

    def likeness(numbered: tuple[int, tuple[Request, Sequence[int]]]) -> tuple[bool, tuple[int, ...]]:
        request, _ = numbered[1]
        return request.sampling.temperature > 0, request.prompt_token_ids

    waiting = enumerate(records)
    while ahead := sorted(itertools.islice(waiting, LOOKAHEAD * max_requests), key=likeness):
        for first in range(0, len(ahead), max_requests):
            numbers, batch = zip(*ahead[first : first + max_requests], strict=True)
            yield list(numbers), batch


def _probes(vocab_size: int, number: int, max_len: int) -> Batch:
    """Made-up texts of mixed lengths, greedy and sampled."""
    rng = np.random.default_rng(0)
    probes = []
    for b in range(number):
        text = rng.integers(0, vocab_size, 2 + (11 * b + max_len // 2) % max(1, min(max_len - 1, 2 * PROBE_TOKENS))).tolist()
        sampling = SamplingParams(temperature=float(b % 2), seed=b)
        cut = max(1, len(text) // 3)
        probes.append((Request(f"probe {b}", tuple(text[:cut]), sampling), text[cut:]))
    return probes


def _thoughts_of(state: GenState) -> jax.Array | None:
    """A copy, so that the state can go on."""
    return None if state.reading is None else jnp.copy(state.reading.thoughts)


def _unpack(
    cfg: ModelConfig, numbers: Sequence[int], batch: Batch, replayed: Replayed, thoughts: jax.Array | None
) -> Iterator[tuple[int, Replay]]:
    """The part of each row that is about its new tokens, and what was thought before them."""
    found = jax.device_get(replayed)
    for row, (number, (request, token_ids)) in enumerate(zip(numbers, batch, strict=True)):
        prompt_len = len(request.prompt_token_ids)
        new = slice(prompt_len, prompt_len + len(token_ids) + 1)
        likeliest = found.logprobs[row], found.top_ids[row], found.top_logprobs[row]
        wanted = likeliest if _wants_likeliest(request) else None
        thought: list[list[int]] = []
        if thinks(cfg, request.sampling):
            thought = thought_lists(np.asarray(thoughts)[row, : (prompt_len - 1) // thinking_of(cfg).chunk])
        yield number, Replay(found.targets[row, new], found.target_logprobs[row, new], wanted, thought)


def _wants_likeliest(request: Request) -> bool:
    return first_sample(request).wants_replay
