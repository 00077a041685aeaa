"""Trial runs of a plan on made-up requests, in the rows and pages of an engine's own state."""

import time
from collections.abc import Sequence

import jax
import numpy as np

from detspec.cache import SCRATCH_PAGE, identity_table
from detspec.config import ModelConfig
from detspec.engine.policy import NEVER, Plan
from detspec.engine.programs import prefill_rows, run_segment
from detspec.generate.insert import pack_requests
from detspec.model.params import Params
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.state import GenState

PROBE_TOKENS = 24
PROBE_PROMPT = 40
PROBE_CHUNKS = 3  # of the longest prompt, if the model thinks
TIMING_ROUNDS = 5


class Trial:
    """`plan` with its batch full of requests of mixed lengths, greedy and sampled.

    All rows of the states that it is given must be free, and all pages are written over.

    Attributes:
        rows: the rows that it takes, `[batch]`.
        prompts: what is in them.
        vocab_size: their tokens lie below it.
    """

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        state: GenState,
        plan: Plan,
        *,
        num_pages: int,
        schedule: Schedule,
        guesses: str,
    ) -> None:
        """Makes the requests up so that they fit the rows and the `num_pages` pages of `state`."""
        self.plan = plan
        self.vocab_size = cfg.vocab_size
        self._params, self._cfg, self._schedule, self._guesses = params, cfg, schedule, guesses
        max_requests, max_len = state.tokens.shape
        pages_each = min(num_pages // plan.batch, state.cache.page_table.shape[1])
        self.rows = np.arange(plan.batch, dtype=np.int32)
        self._in_use = np.arange(max_requests) < plan.batch
        self._table = np.full(state.cache.page_table.shape, SCRATCH_PAGE, np.int32)
        self._table[: plan.batch, :pages_each] = identity_table(plan.batch, pages_each)
        room = min(max_len, pages_each * schedule.numerics.page)
        self._num_new = max(1, min(PROBE_TOKENS, room // 2))
        wanted = PROBE_PROMPT if cfg.thinking is None else max(PROBE_PROMPT, PROBE_CHUNKS * cfg.thinking.chunk + 1)
        longest = max(1, min(wanted, room - self._num_new))
        rng = np.random.default_rng(0)
        # The longest first: one row alone has something to read, and to think about.
        self.prompts = [rng.integers(0, cfg.vocab_size, size=longest - (7 * b) % longest).tolist() for b in range(plan.batch)]

    def start(
        self,
        state: GenState,
        *,
        deterministic: bool,
        reverse: bool = False,
        thoughts: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> GenState:
        """`state` with the requests in its rows, prefilled; with `reverse` the last one comes first.

        `thoughts` are guesses of what each request's prompt makes a model think.
        """
        sampling = [
            SamplingParams(
                max_tokens=self._num_new, temperature=float(b % 2), seed=b, ignore_eos=True, deterministic=deterministic
            )
            for b in range(self.plan.batch)
        ]
        rows = range(self.plan.batch)
        requests = pack_requests(state, rows[::-1] if reverse else rows, self.prompts, sampling, (), thoughts=thoughts)
        passes = np.int32(NEVER)
        return prefill_rows(
            *(self._params, self._cfg, state, requests, self._in_use, self._table, passes),
            schedule=self._schedule,
            guesses=self._guesses,
        )

    def step(self, state: GenState, steps: int) -> GenState:
        """At most `steps` steps of the plan."""
        limits = np.int32(steps), np.int32(1), np.int32(NEVER)
        return run_segment(
            *(self._params, self._cfg, state, self._in_use, self._table, self.rows, *limits),
            schedule=self._schedule,
            plan=self.plan,
        )[0]

    def time(self, state: GenState) -> tuple[float, GenState]:
        """Seconds of one step, averaged over a segment of a few; the program must be compiled."""
        steps = max(1, self._num_new // 2 // self.plan.window)
        state = jax.block_until_ready(self.start(state, deterministic=not self.plan.fast))
        began = time.perf_counter()
        state = jax.block_until_ready(self.step(state, steps))
        return (time.perf_counter() - began) / steps, state


def time_plans(trials: Sequence[Trial], state: GenState) -> tuple[dict[Plan, float], GenState]:
    """Seconds of a step of each plan, the least of a few rounds: they take turns, and noise only ever adds."""
    seconds = {trial.plan: float("inf") for trial in trials}
    for _ in range(TIMING_ROUNDS):
        for trial in trials:
            step_s, state = trial.time(state)
            seconds[trial.plan] = min(seconds[trial.plan], step_s)
    return seconds, state
