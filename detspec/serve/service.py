"""What the server serves: a model behind an engine thread, under a name, with what it answers and logs."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detspec.checkpoint.load import Model, load
from detspec.engine.engine import Engine
from detspec.engine.request import ABORTED, Completion, Request
from detspec.errors import InputError
from detspec.openai.bodies import Parsed, parse_chat, parse_completion, requests_of
from detspec.openai.fields import BodyError
from detspec.openai.responses import Answerer, make_answerer
from detspec.serve.engine_thread import Call, EngineThread
from detspec.serve.log import ResponseLog
from detspec.serve.metrics import Metrics

LONG_BODY = 1 << 16  # bytes of text from which on it is split into tokens in another thread
PARSERS = {"completion": parse_completion, "chat": parse_chat, "token_ids": parse_completion}


@dataclasses.dataclass(frozen=True)
class Options:
    """How the server behaves.

    Attributes:
        name: the model's name in requests and answers.
        default_seed: seed of requests that give none; None draws one for each, and answers with it.
        max_waiting: most samples that may wait for a place; further calls are answered with 429.
        max_body_bytes: largest body of a call.
        api_key: what clients must send as their bearer token; None asks for none.
        weights_dir: folder whose subfolders may be loaded as new weights; None refuses that, and to pause.
        log: file that gets a line for each sample that has ended; None keeps none.
        prepares: all programs are compiled and certified before `/health` says ready; else when requests first need them.
    """

    name: str
    default_seed: int | None = None
    max_waiting: int = 1024
    max_body_bytes: int = 16 << 20
    api_key: str | None = None
    weights_dir: Path | None = None
    log: Path | None = None
    prepares: bool = True


class Service:
    """One model, one engine, and what clients may ask of them.

    Attributes:
        options: how it behaves.
        thread: steps the engine.
        metrics: what it counted.
        answerer: what bodies say besides the completions.
    """

    def __init__(self, engine: Engine, options: Options) -> None:
        """Starts nothing; `InputError` if the log cannot be opened."""
        self.options = options
        self.metrics = Metrics()
        self.thread = EngineThread(engine, max_waiting=options.max_waiting, metrics=self.metrics, prepares=options.prepares)
        self._log = None if options.log is None else ResponseLog(options.log, engine)
        self._made = int(time.time())
        self._name_weights()

    @property
    def engine(self) -> Engine:
        """What generates."""
        return self.thread.engine

    @property
    def model(self) -> Model:
        """What it runs."""
        return self.engine.model

    async def parse(self, kind: str, body: Any, num_bytes: int) -> Parsed:
        """A body of that kind, checked and with its seed; `BodyError` if it is refused."""
        parser: Any = PARSERS[kind]
        max_len = self.engine.config.max_len
        if num_bytes < LONG_BODY:
            parsed = parser(body, self.model, max_len=max_len)
        else:
            parsed = await asyncio.to_thread(parser, body, self.model, max_len=max_len)
        if parsed.model is not None and parsed.model != self.options.name:
            raise BodyError(
                f"the model {parsed.model!r} is not served here, but {self.options.name!r}", "model", "model_not_found"
            )
        return parsed if parsed.seed is not None else parsed.with_seed(self._seed(parsed))

    def begin(self, parsed: Parsed) -> Call:
        """Submits what `parsed` asks for; raises `BodyError` if it does not fit, and as `EngineThread.submit`."""
        requests = requests_of(parsed, self.model, self.engine.config, id=self.thread.next_id())
        if parsed.is_score:
            requests = [_scoring(request) for request in requests]
        return self.thread.submit(requests, stream=parsed.stream and not in_one_piece(parsed))

    def ended(self, parsed: Parsed, place: int, completion: Completion) -> Completion:
        """`completion` of prompt number `place` as answers show it; it is logged unless it was aborted."""
        if parsed.is_score:
            return _scored(completion, parsed.prompts[place])
        if self._log is not None and completion.finish_reason != ABORTED:
            self._log.write(response_of=parsed, place=place, completion=completion)
        return completion

    async def update_weights(self, name: str, weight_version: str | None) -> None:
        """Goes on with the weights in folder `name` of `weights_dir`.

        Raises `InputError` if there is no such folder, if shapes differ, or if requests are in flight.
        """
        assert self.options.weights_dir is not None
        if not name or name in (".", "..") or "/" in name or "\\" in name or not (self.options.weights_dir / name).is_dir():
            raise InputError(f"there is no folder of weights {name!r}; give the name of one in the folder of --weights-dir")
        loaded = await asyncio.to_thread(load, self.options.weights_dir / name)
        if loaded.cfg != self.model.cfg:
            raise InputError(f"the folder {name!r} holds a model of another shape or dtype than the one that is served")
        await self.thread.run_idle(lambda: self.engine.update_params(loaded.params, weight_version))
        self._name_weights()
        if self._log is not None:
            self._log.begin(self.engine)

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()

    def _name_weights(self) -> None:
        fingerprint = self.engine.fingerprint()
        self.answerer: Answerer = make_answerer(self.model, fingerprint, name=self.options.name, created=self._made)

    def answerer_now(self) -> Answerer:
        """What bodies say that are made now."""
        return dataclasses.replace(self.answerer, created=int(time.time()))

    def _seed(self, parsed: Parsed) -> int:
        """The seed of a request that gives none; greedy ones need no noise."""
        if parsed.sampling[0].temperature == 0:
            return 0
        return secrets.randbits(32) if self.options.default_seed is None else self.options.default_seed


def in_one_piece(parsed: Parsed) -> bool:
    """Whether a stream has to wait for its end: the likeliest tokens, and those of the prompt, are read after it."""
    of_prompt = parsed.prompt_logprobs is not None or (parsed.echo and parsed.logprobs is not None)
    return bool(parsed.logprobs) or of_prompt or parsed.is_score


def _scoring(request: Request) -> Request:
    """`request` for log-probabilities of its prompt as one that scores all tokens after the first."""
    first, *rest = request.prompt_token_ids
    if not rest:
        return request  # there is nothing to score: one token is generated, and not shown
    sampling = dataclasses.replace(
        request.sampling, prompt_logprobs=None, logprobs=request.sampling.prompt_logprobs or 0, thinking=None
    )
    return dataclasses.replace(request, prompt_token_ids=(first,), sampling=sampling, given_token_ids=tuple(rest))


def _scored(completion: Completion, prompt: Sequence[int]) -> Completion:
    """What was found of a scored text as a completion without new tokens after the whole text as its prompt."""
    given = completion.finish_reason == "given"
    return dataclasses.replace(
        completion,
        prompt_token_ids=tuple(prompt),
        token_ids=(),
        logprobs=(),
        text="",
        top_logprobs=(),
        finish_reason="length" if given or len(prompt) == 1 else completion.finish_reason,
        prompt_logprobs=(None, *(completion.logprobs if given else ())),
        prompt_top_logprobs=((), *(completion.top_logprobs if given else ())) if completion.top_logprobs or not given else (),
    )
