"""The service behind the routes: a model behind an engine thread, under a name, with what it answers and logs."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from detspec.checkpoint.load import Model, load
from detspec.engine.engine import Engine
from detspec.engine.request import ABORTED, Request, Update
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.openai.bodies import Parsed, requests_of
from detspec.openai.fields import BodyError
from detspec.openai.responses import Answerer, make_answerer, response_id, scored
from detspec.serve.calls import CallFailed, EngineStopped, HttpCall
from detspec.serve.engine_thread import EngineThread
from detspec.serve.http import off_loop
from detspec.serve.log import ResponseLog
from detspec.serve.metrics import Metrics

LOOK_S = 0.1  # between two looks whether the server is leaving
ABORT_S = 5.0  # for samples that are aborted to be answered; they may wait for a program that is being compiled
IN_FLIGHT = "requests are in flight: POST /pause?mode=abort or mode=wait first"
ParseFn = Callable[..., Parsed]


@dataclasses.dataclass(frozen=True)
class Options:
    """How the server behaves.

    Attributes:
        name: the model's name in requests and answers.
        default_seed: seed of requests that give none; None draws one for each, and answers with it.
        max_waiting: most samples that may wait for a place; calls beyond are answered with 429.
        max_body_bytes: largest body of a call.
        api_key: bearer token that clients must send; None asks for none.
        weights_dir: folder whose subfolders may be loaded as new weights; None refuses that, and to pause.
        log: file that gets a line for each sample that has ended; None keeps none.
        grace_s: seconds that what is in flight has to end by itself once the server is leaving.
        prepares: a program is made that can run any request before `/health` says ready, and all others while requests run;
            else those that requests need are made when they first need them, and what is faster for them while they run.
    """

    name: str
    default_seed: int | None = None
    max_waiting: int = 1024
    max_body_bytes: int = 16 << 20
    api_key: str | None = None
    weights_dir: Path | None = None
    log: Path | None = None
    grace_s: float = 60.0
    prepares: bool = True


class Arrived(NamedTuple):
    """News of one sample.

    Attributes:
        place: the number of its prompt.
        update: new tokens and text; the completion as answers show it.
        answerer: further facts of bodies, such as the name of the weights that it comes from.
    """

    place: int
    update: Update
    answerer: Answerer


class Service:
    """A model, its engine, and all that clients may ask of them.

    Attributes:
        options: how the server behaves.
        thread: steps the engine.
        metrics: counts of calls and tokens.
        answerer: facts of bodies besides the completions.
        is_leaving: whether the server takes no further calls, and ends when those that it has are answered.
    """

    def __init__(self, engine: Engine, options: Options) -> None:
        """Starts nothing; `InputError` if the log cannot be opened."""
        self.options = options
        self.metrics = Metrics()
        self.thread = EngineThread(engine, max_waiting=options.max_waiting, metrics=self.metrics, prepares=options.prepares)
        self._log = None if options.log is None else ResponseLog(options.log, engine)
        self._one_update = asyncio.Lock()
        self.is_leaving: Callable[[], bool] = lambda: False
        self._made = int(time.time())
        self.answerer: Answerer = self._make_answerer()

    @property
    def engine(self) -> Engine:
        """The engine that generates."""
        return self.thread.engine

    @property
    def model(self) -> Model:
        """The model that is served."""
        return self.engine.model

    @property
    def card(self) -> dict[str, Any]:
        """The model as `/v1/models` shows it."""
        card = {"id": self.options.name, "object": "model", "created": self._made, "owned_by": "detspec"}
        return {**card, "max_model_len": self.engine.config.max_len}

    def check_name(self, name: str) -> None:
        """Raises `BodyError` unless the model `name` is the one that is served."""
        if name != self.options.name:
            raise BodyError(f"the model {name!r} is not served here, but {self.options.name!r}", "model", "model_not_found")

    async def parse(self, parser: ParseFn, body: Any, num_bytes: int) -> Parsed:
        """A body of so many bytes, checked by `parser` and with its seed; `BodyError` if it is refused."""
        max_len = self.engine.config.max_len
        parsed = await off_loop(num_bytes, lambda: parser(body, self.model, max_len=max_len))
        if parsed.body.model is not None:
            self.check_name(parsed.body.model)
        return parsed if parsed.seed is not None else parsed.with_seed(self._seed(parsed))

    def begin(self, parsed: Parsed) -> HttpCall:
        """Submits what `parsed` asks for; raises `BodyError` if it does not fit, and as `EngineThread.submit`."""
        requests = requests_of(parsed, self.model, self.engine.config, id=self.thread.next_id())
        stream = parsed.body.stream and not in_one_piece(parsed)
        return self.thread.submit(requests, stream=stream, arrive=lambda update: self._arrived(parsed, requests, update))

    async def update_weights(self, name: str, weight_version: str | None) -> None:
        """Goes on with the weights in folder `name` of `weights_dir`.

        Raises `InputError` if there is no such folder, or if shapes differ, and `HTTPException` 409 if requests are in
        flight.
        """
        if self.thread.num_open and not (self.thread.is_paused and self.thread.is_quiet):
            raise HTTPException(409, IN_FLIGHT)
        assert self.options.weights_dir is not None
        if not name or name in (".", "..") or "/" in name or "\\" in name or not _is_folder(self.options.weights_dir / name):
            raise InputError(f"there is no folder of weights {name!r}; give the name of one in the folder of --weights-dir")
        loading = dataclasses.replace(self.model.loading, weights=self.model.cfg.weights)
        loaded = await asyncio.to_thread(load, self.options.weights_dir / name, **loading.keywords)
        if loaded.cfg != self.model.cfg:
            raise InputError(f"the folder {name!r} holds a model of another shape or dtype than the one that is served")
        async with self._one_update:  # the log names one's weights before the next change them
            await self.thread.run_idle(lambda: self._use(loaded.params, weight_version))
        if self.thread.failure is not None:  # the log could not be written
            raise self.thread.failure

    async def abort_late(self) -> None:
        """Once the server is leaving, aborts what has not ended in time; ends calls with an error that are open even then."""
        while not self.is_leaving():
            await asyncio.sleep(LOOK_S)
        self.thread.is_leaving = True
        await asyncio.sleep(self.options.grace_s)
        self.thread.abort_all()
        await asyncio.sleep(ABORT_S)
        self.thread.end_calls(EngineStopped("the server has ended"))

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()

    def _logged(self, write: Callable[[ResponseLog], None]) -> None:
        """Lets `write` add to the log, if there is one."""
        if self._log is None:
            return
        try:
            write(self._log)
        except EngineStopped as failed:
            self.thread.fail(failed)
            raise

    def _arrived(self, parsed: Parsed, requests: Sequence[Request], update: Update) -> Arrived:
        """An update with what answers say of it; a completion is logged unless it was aborted.

        Raises `CallFailed` if it failed, and `EngineStopped` if it cannot be logged: nothing is answered then, and the server
        ends.
        """
        place = int(update.request.id.rpartition("/")[2])
        completion = update.completion
        if completion is not None and completion.error:
            raise CallFailed(f"request {completion.id} failed in the server, whose log says more under this id")
        if completion is not None:
            if self._log is not None and completion.finish_reason != ABORTED:
                named = dataclasses.replace(completion, id=f"{response_id(parsed)}/{place}")
                self._logged(lambda log: log.write(requests[place], named))
            if parsed.is_score:
                update = update._replace(completion=scored(completion, parsed.prompts[place]))
        return Arrived(place, update, dataclasses.replace(self.answerer, created=int(time.time())))

    def _use(self, params: Params, weight_version: str | None) -> None:
        """Goes on with `params`; in the engine's thread. Updates before and after are named by their own weights."""
        if self.engine.has_work:
            raise HTTPException(409, IN_FLIGHT)
        self.engine.update_params(params, weight_version)
        self.thread.later(self._name, self._make_answerer())

    def _name(self, answerer: Answerer) -> None:
        self.answerer = answerer
        with contextlib.suppress(EngineStopped):  # the thread has failed then
            self._logged(lambda log: log.begin(self.engine))

    def _make_answerer(self) -> Answerer:
        max_len = self.engine.config.max_len
        return make_answerer(self.model, self.engine.fingerprint(), max_len=max_len, name=self.options.name, created=self._made)

    def _seed(self, parsed: Parsed) -> int:
        """The seed of a request that gives none; greedy ones need no noise."""
        if parsed.sampling[0].temperature == 0:
            return 0
        return secrets.randbits(32) if self.options.default_seed is None else self.options.default_seed


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no name that a file can have
        return False


def in_one_piece(parsed: Parsed) -> bool:
    """Whether a stream has to wait for its end: the likeliest tokens, and those of the prompt, are read after it."""
    of_prompt = parsed.body.prompt_logprobs is not None or (parsed.echo and parsed.logprobs is not None)
    return bool(parsed.logprobs) or of_prompt or parsed.is_score
