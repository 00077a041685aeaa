"""The engine: the life of a request.

1. `admit` puts waiting requests into free rows; `prefill_rows` writes their prompts' keys and values canonically.
2. `_step` lets the policy choose a plan for the live rows and runs a segment of steps on the device.
3. `_collect` takes finished rows out as completions, and their rows are free again.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.load import Model
from detspec.engine.certify import Certificate
from detspec.engine.engine_config import EngineConfig
from detspec.engine.planner import Planner
from detspec.engine.policy import Plan
from detspec.engine.programs import prefill_rows, run_segment
from detspec.engine.request import FINISH_REASONS, Completion, Piece, Request, Stats, completion_digest
from detspec.environment import default_schedule, fingerprint
from detspec.errors import InputError
from detspec.generate.insert import check_prompt, init_state, insert
from detspec.sampling import SamplingParams, all_stop_ids


class Engine:
    """Generates for many requests at once, rows refilled as they finish.

    Example::

        engine = ds.Engine(ds.load(), ds.EngineConfig(max_rows=8))
        completions = engine.generate(["def fib(n):"], ds.SamplingParams(max_tokens=64))
    """

    def __init__(self, model: Model, config: EngineConfig | None = None) -> None:
        """Allocates the cache. Programs are compiled and certified when a run first needs them."""
        self.model = model
        self.config = config or EngineConfig()
        self.schedule = self.config.schedule or default_schedule()
        if self.config.max_len > model.cfg.max_position:
            raise InputError(
                f"max_len {self.config.max_len} exceeds the {model.cfg.max_position} positions that the model was made for"
            )
        self.planner = Planner(model, self.schedule, self.config)
        self.stats = Stats()
        self._state = init_state(
            model.cfg,
            max_rows=self.config.max_rows,
            max_len=self.config.max_len,
            max_stop_ids=self.config.max_stop_ids,
            max_logit_bias=self.config.max_logit_bias,
            schedule=self.schedule,
        )
        self._requests: list[Request | None] = [None] * self.config.max_rows
        self._emitted = np.zeros(self.config.max_rows, np.int32)  # tokens of each row already handed out by `stream`
        self._context = hashlib.sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()

    def fingerprint(self) -> dict[str, object]:
        """Everything but the request that committed bits may depend on."""
        return {**fingerprint(), "model": self.model.digest, "schedule": dataclasses.asdict(self.schedule)}

    @property
    def certificates(self) -> dict[Plan, Certificate]:
        """What is known of each program so far."""
        return self.planner.certificates

    def prepare(self, num_requests: int) -> tuple[Certificate, ...]:
        """Compiles, certifies and times the programs that a run of `num_requests` needs; runs do it by themselves.

        Raises:
            InputError: the engine is in the middle of a run.
        """
        self._check_idle()
        self._state = self.planner.prepare(self._state, num_requests)
        return tuple(self.certificates.values())

    def request(self, prompt: str | Sequence[int], sampling: SamplingParams, *, id: str = "0") -> Request:
        """Tokenizes and checks one prompt.

        Raises:
            InputError: the prompt is empty, too long, or holds ids outside the vocabulary; text without a tokenizer; more stop
                tokens or biased tokens than the engine has room for.
        """
        if isinstance(prompt, str):
            if self.model.tokenizer is None:
                raise InputError("the checkpoint has no tokenizer.json, so prompts must be token ids, not text")
            ids = tuple(self.model.tokenizer.encode(prompt))
        else:
            ids = tuple(prompt)
        check_prompt(ids, sampling, self.model.cfg, max_len=self.config.max_len)
        if len(all_stop_ids(sampling, self.model.eos_ids)) > self.config.max_stop_ids:
            raise InputError(f"more stop tokens than EngineConfig.max_stop_ids ({self.config.max_stop_ids}) has room for")
        if len(sampling.logit_bias) > self.config.max_logit_bias:
            raise InputError(f"more biased tokens than EngineConfig.max_logit_bias ({self.config.max_logit_bias}) has room for")
        return Request(id, ids, sampling)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Completes all `prompts` (texts or token ids); `sampling` for all of them or one each. Results in input order."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise InputError(f"{len(prompts)} prompts but {len(each)} sampling parameters: give one for all, or one each")
        requests = [self.request(p, s, id=str(i)) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
        done = {completion.id: completion for completion in self.run(requests)}
        return [done[request.id] for request in requests]

    def stream(self, prompt: str | Sequence[int], sampling: SamplingParams) -> Iterator[Piece]:
        """Yields pieces of one completion as they are committed; only final tokens ever leave."""
        request = self.request(prompt, sampling)
        ids: list[int] = []
        shown = ""
        for _ in self._rounds(iter([request]), num_requests=1, segment_steps=1):
            for row, token_ids, logprobs, last in self._new_tokens():
                ids.extend(token_ids)
                text = self._decode(ids)
                whole = text if last else text.rstrip("\ufffd")
                piece = whole[len(shown) :] if whole.startswith(shown) else ""
                shown += piece
                if last:
                    self._retire(row)
                yield Piece(token_ids, logprobs, piece)

    def run(self, requests: Iterable[Request], *, on_segment: Callable[[int, int], None] | None = None) -> Iterator[Completion]:
        """Yields completions as they finish; asks `requests` for more only when a row is free.

        Args:
            requests: checked requests, their ids all different.
            on_segment: called after each segment with tokens committed since the last call and live rows, for progress bars.
        """
        num_requests = len(requests) if isinstance(requests, Sequence) else self.config.max_rows + 1
        committed = 0
        for tokens, num_live in self._rounds(iter(requests), num_requests, self.config.segment_steps):
            if on_segment is not None:
                on_segment(tokens - committed, num_live)
            committed = tokens
            yield from self._collect()

    def _rounds(self, waiting: Iterator[Request], num_requests: int, segment_steps: int) -> Iterator[tuple[int, int]]:
        """Admit, step, let the caller collect; until nothing waits and no row is in use."""
        self._check_idle()
        try:
            self.prepare(num_requests)
            more, total = True, 0
            while True:
                more = self._admit(waiting) if more else False
                rows = [row for row, request in enumerate(self._requests) if request is not None]
                if not rows:
                    return
                total += self._step(rows, more, segment_steps)
                yield total, len(rows)
        finally:
            self._requests = [None] * self.config.max_rows
            self._state = self._state.replace(live=jnp.zeros_like(self._state.live))

    def _admit(self, waiting: Iterator[Request]) -> bool:
        """Fills free rows; False once `waiting` is exhausted."""
        free = [row for row, request in enumerate(self._requests) if request is None]
        admitted: list[tuple[int, Request]] = []
        for row in free:
            request = next(waiting, None)
            if request is None:
                break
            admitted.append((row, request))
        if not admitted:
            return not free
        for row, request in admitted:
            self._requests[row] = request
            self._emitted[row] = len(request.prompt_token_ids)
        rows, requests = zip(*admitted, strict=True)
        prompts = [request.prompt_token_ids for request in requests]
        self._state = insert(self._state, rows, prompts, [request.sampling for request in requests], self.model.eos_ids)
        self._state = prefill_rows(self.model.params, self.model.cfg, self._state, schedule=self.schedule)
        return len(admitted) == len(free)

    def _step(self, rows: list[int], more: bool, segment_steps: int) -> int:
        """Runs one segment over the live `rows`; returns how many tokens it committed.

        It ends early as soon as a row can be refilled, or as soon as the live rows fit a smaller batch.
        """
        requests = [self._requests[row] for row in rows]
        num_deterministic = sum(request.sampling.deterministic for request in requests if request is not None)
        plan = self.planner.choose(num_deterministic, len(rows) - num_deterministic, self.stats)
        min_live = len(rows) if more else self.planner.smaller_batch(plan) + 1
        free = [row for row in range(self.config.max_rows) if self._requests[row] is None]
        taken = jnp.asarray(rows + free[: plan.batch - len(rows)], jnp.int32)
        steps = jnp.int32(max(1, segment_steps // plan.window))
        before = self._committed()
        self._state = run_segment(
            *(self.model.params, self.model.cfg, self._state, taken, steps, jnp.int32(min_live)),
            schedule=self.schedule,
            plan=plan,
        )
        return int((self._committed() - before)[rows].sum())

    def _check_idle(self) -> None:
        if any(request is not None for request in self._requests):
            raise InputError("this engine is in the middle of another run: finish it first, or make a second engine")

    def _committed(self) -> np.ndarray:
        return np.asarray(self._state.committed)

    def _new_tokens(self) -> Iterator[tuple[int, tuple[int, ...], tuple[float, ...], bool]]:
        """Row, tokens committed since the last call, their log-probabilities, and whether they are the last."""
        committed, live = jax.device_get((self._state.committed, self._state.live))
        for row, request in enumerate(self._requests):
            if request is not None and (committed[row] > self._emitted[row] or not live[row]):
                new = slice(int(self._emitted[row]), int(committed[row]))
                tokens, logprobs = jax.device_get((self._state.tokens[row], self._state.logprobs[row]))
                self._emitted[row] = committed[row]
                yield row, tuple(tokens[new].tolist()), tuple(logprobs[new].tolist()), not live[row]

    def _collect(self) -> Iterator[Completion]:
        """Takes finished rows out."""
        live = np.asarray(self._state.live)
        finished = [row for row, request in enumerate(self._requests) if request is not None and not live[row]]
        if not finished:
            return
        tokens, logprobs, committed, finish = jax.device_get(
            (self._state.tokens, self._state.logprobs, self._state.committed, self._state.finish)
        )
        for row in finished:
            request = self._requests[row]
            assert request is not None
            new = slice(len(request.prompt_token_ids), int(committed[row]))
            token_ids = tuple(tokens[row, new].tolist())
            stats = self._retire(row)
            yield Completion(
                id=request.id,
                prompt_token_ids=request.prompt_token_ids,
                token_ids=token_ids,
                logprobs=tuple(logprobs[row, new].tolist()),
                text=self._decode(token_ids),
                finish_reason=FINISH_REASONS[int(finish[row])],
                digest=completion_digest(request, token_ids, logprobs[row, new], self._context),
                stats=stats,
            )

    def _retire(self, row: int) -> Stats:
        """Frees `row` and adds what its request did to the engine's counters."""
        counters = jax.device_get(self._state.counters)
        stats = Stats(**{field.name: int(getattr(counters, field.name)[row]) for field in dataclasses.fields(Stats)})
        self.stats += stats
        self._requests[row] = None
        return stats

    def _decode(self, ids: Sequence[int]) -> str:
        return "" if self.model.tokenizer is None else self.model.tokenizer.decode(ids)
