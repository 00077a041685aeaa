"""Replays recorded completions, many at a time, through the canonical pass that decides their bits."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.programs import prefill_rows, replay_rows
from detspec.engine.request import Request
from detspec.environment import default_schedule
from detspec.config import Schedule
from detspec.errors import InputError
from detspec.generate.insert import check_prompt, init_state, insert
from detspec.generate.score import Replayed
from detspec.state import PAD_ID, GenState


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """What the canonical pass says of one completion: of each token, and of the one that would follow the last.

    Attributes:
        targets: int32 `[n + 1]`, the token that the request gets there, given the recorded ones before; `[n]` if the text
            fills `max_len`.
        logprobs: float32, of the targets.
    """

    targets: np.ndarray
    logprobs: np.ndarray


class Replayer:
    """Replays completions `max_rows` at a time; one program for texts of all lengths."""

    def __init__(self, model: Model, *, schedule: Schedule | None = None, max_rows: int = 32, max_len: int = 1024) -> None:
        """Allocates a cache of `max_rows` rows of `max_len` positions, prompt and new tokens together."""
        self._model = model
        self._schedule = schedule or default_schedule()
        self._max_rows, self._max_len = max_rows, max_len
        self._state = init_state(model.cfg, max_rows=max_rows, max_len=max_len, max_stop_ids=1, schedule=self._schedule)

    def run(self, records: Iterable[tuple[Request, Sequence[int]]]) -> Iterator[Replay]:
        """Yields a replay for each request and its recorded tokens, in their order; asks for no more than two batches ahead.

        Raises:
            InputError: a text does not fit `max_len`, or holds ids outside the vocabulary.
        """
        waiting = iter(records)
        pending: tuple[list[slice], Replayed] | None = None
        while batch := list(itertools.islice(waiting, self._max_rows)):
            dispatched = self._dispatch(batch)  # the device works on this batch while the last one is unpacked
            if pending is not None:
                yield from _unpack(*pending)
            pending = dispatched
        if pending is not None:
            yield from _unpack(*pending)

    def _dispatch(self, batch: Sequence[tuple[Request, Sequence[int]]]) -> tuple[list[slice], Replayed]:
        """Starts the passes over one batch; returns where each row's new tokens lie, and the arrays to be."""
        tokens = np.full((self._max_rows, self._max_len), PAD_ID, np.int32)
        length = np.ones(self._max_rows, np.int32)
        places = []
        for row, (request, token_ids) in enumerate(batch):
            text = (*request.prompt_token_ids, *token_ids)
            check_text(text, self._model, self._max_len)
            tokens[row, : len(text)] = text
            length[row] = len(text)
            places.append(slice(len(request.prompt_token_ids), len(text) + 1))
        prompts = [request.prompt_token_ids for request, _ in batch]
        # Stop tokens play no part: how a recorded text ends is for the caller to judge.
        sampling = [dataclasses.replace(request.sampling, stop_token_ids=()) for request, _ in batch]
        state = self._state.replace(live=jnp.zeros(self._max_rows, bool))
        state = insert(state, range(len(batch)), prompts, sampling, ())
        params, cfg = self._model.params, self._model.cfg
        state = prefill_rows(params, cfg, state, schedule=self._schedule)
        replayed, self._state = replay_rows(params, cfg, state, tokens, length, schedule=self._schedule)
        return places, replayed


def _unpack(places: list[slice], replayed: Replayed) -> Iterator[Replay]:
    targets, logprobs = jax.device_get((replayed.targets, replayed.target_logprobs))
    for row, place in enumerate(places):
        yield Replay(targets[row, place], logprobs[row, place])
