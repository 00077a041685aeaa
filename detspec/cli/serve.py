"""`detspec serve`: OpenAI's HTTP interface in front of an engine."""

import argparse
import contextlib
import dataclasses
import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from detspec.cli.options import add_cache_dtype, add_engine, add_model, add_weights, engine_config_of, load_drafters, load_model
from detspec.errors import InputError
from detspec.say import INTERRUPTED, say

if TYPE_CHECKING:
    from detspec.engine.engine import Engine

SUMMARY = "an OpenAI-compatible server: equal requests, equal answers"
USAGE = "[options]"
DESCRIPTION = """Serves /v1/completions, /v1/chat/completions (whole or as streams), /v1/models, /tokenize, /detokenize,
/inference/v1/generate (token ids in and out), /health, /metrics and /fingerprint. Equal `system_fingerprint` and equal
request mean equal choices, to the bit, at any load. `"is_deterministic": false` makes a request ordinary. Needs the extra
`serve`."""
DETAILS = """The port opens at once, and /health answers 503 until one program is compiled and certified that can run any
request. The others, which make requests faster, are compiled while it answers; /health and the standard error name those
that are left.

A client that leaves ends its requests; calls beyond --max-waiting are answered with 429, and those for which there is never
room with 400. SIGTERM stops admitting, finishes what is in flight within --grace seconds, aborts the rest, and ends with the
exit code of the signal, 143. Other exit codes: 1 the engine failed; 2 bad options; 3 the disk of --log is full."""
LOCALHOST = "127.0.0.1"
KEY = "DETSPEC_API_KEY"
SECONDS_BETWEEN_LINES = 60.0
LAST_S = 10  # seconds after --grace until connections are cut whose clients do not read
SHORT_STEPS = ("none", "ngram")  # drafts whose steps are short, because what arrives waits for the step that runs


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add = parser.add_argument
    add("--host", default=LOCALHOST, help="address to listen at; 0.0.0.0 is reached from other machines")
    add("--port", type=int, default=8000, help="0 takes a free one, and says which")
    add("--served-model-name", metavar="NAME", help="the model's name in requests (default: that of its folder)")
    add("--default-seed", type=int, metavar="N", help="seed of requests that give none (default: one is drawn, and answered)")
    add("--max-waiting", type=int, default=1024, metavar="N", help="most samples that wait for a place")
    add("--max-body-mb", type=int, default=16, metavar="MB", help="largest body of a call")
    add("--grace", type=int, default=60, metavar="SECONDS", help="how long SIGTERM waits for what is in flight")
    add(
        "--segment-steps",
        type=int,
        default=16,
        metavar="N",
        help="most tokens between two looks at new requests; 1 for streams",
    )
    add("--lazy", action="store_true", help="compile nothing ahead, but what requests need when they first need it")
    add("--log", metavar="FILE", help="append what was answered to FILE, for `detspec audit --responses`")
    add(
        "--weights-dir",
        metavar="DIR",
        help="let clients pause the server and load weights from folders in DIR: /pause, /resume, /update_weights",
    )
    add_model(parser)
    add_weights(parser)
    add_cache_dtype(parser)
    add_engine(parser, method=SHORT_STEPS)
    parser.epilog = f"Clients must send the key in the environment variable {KEY} as their bearer token, if it is set."


def run(args: argparse.Namespace) -> NoReturn:
    """Serves until a signal ends the process; with 1 if the engine fails, and with 3 if the log's disk is full."""
    try:
        import uvicorn

        from detspec.serve.app import make_app
        from detspec.serve.service import Options, Service
    except ModuleNotFoundError as error:
        from detspec.extras import install_command

        raise InputError(f"the server needs {error.name}: {install_command('serve')}") from error
    from detspec.engine.engine import Engine

    if args.weights_dir is not None and not Path(args.weights_dir).is_dir():
        raise InputError(f"--weights-dir {args.weights_dir}: there is no such folder")
    if args.default_seed is not None and not -(2**63) <= args.default_seed < 2**63:
        raise InputError(f"--default-seed must be in -2**63 .. 2**63-1, got {args.default_seed}")
    if os.environ.get(KEY) == "":
        raise InputError(f"{KEY} is empty: unset it, or set it to the key that clients must send")
    model = load_model(args)
    config = dataclasses.replace(engine_config_of(args, model), max_prefill_passes=1, segment_steps=args.segment_steps)
    options = Options(
        name=args.served_model_name or Path(args.model or "tiny_python").name,
        default_seed=args.default_seed,
        max_waiting=args.max_waiting,
        max_body_bytes=args.max_body_mb << 20,
        api_key=os.environ.get(KEY),
        weights_dir=None if args.weights_dir is None else Path(args.weights_dir),
        log=None if args.log is None else Path(args.log),
        grace_s=args.grace,
        prepares=not args.lazy,
    )
    service = Service(Engine(model, config, drafters=load_drafters(args, model)), options)
    settings = uvicorn.Config(
        make_app(service),
        host=args.host,
        port=args.port,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # the client's address is not used
        timeout_graceful_shutdown=args.grace + LAST_S,
        lifespan="on",
    )
    server = uvicorn.Server(settings)
    tells = Tells(service.engine)
    service.thread.on_ready = tells.ready
    service.thread.on_made = tells.made
    service.thread.on_failure = lambda: setattr(server, "should_exit", True)
    service.is_leaving = lambda: server.should_exit
    try:
        sock = settings.bind_socket()
        sock.listen(settings.backlog)
    except SystemExit as error:
        raise InputError(f"--host {args.host} --port {args.port}: the address cannot be listened at") from error
    say(f"serving {options.name} at http://{args.host}:{sock.getsockname()[1]}")
    if options.prepares:
        say("compiling and certifying the first program; /health answers 503 until then")
    with contextlib.suppress(KeyboardInterrupt):  # SIGTERM ends the process there
        server.run(sockets=[sock])
    if service.thread.failure is not None:
        end_now(f"error: {service.thread.failure}", service.thread.failure.exit_code)
    end_now("interrupted", INTERRUPTED)


def end_now(why: str, exit_code: int) -> NoReturn:
    """Ends the process; an ordinary exit would wait for programs that are being compiled."""
    say(why)
    sys.stdout.flush()
    os._exit(exit_code)


class Tells:
    """Says what is compiled while the server answers, and what is left from time to time."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._said = 0.0
        self._not_made: tuple[str, ...] = ()  # programs that were said to be missing

    def ready(self) -> None:
        """Requests are answered from now on."""
        keep_out_of_collections()
        say("ready")
        self._left()

    def made(self) -> None:
        """A program was made, or put aside."""
        not_made = self._engine.not_made
        if new := [label for label in not_made if label not in self._not_made]:
            say(f"cannot be compiled or certified, requests go on without: {', '.join(new)}")
        self._not_made = not_made
        if self._engine.is_prepared:
            keep_out_of_collections()
            say(f"all {'other ' if not_made else ''}programs are compiled and certified")
        elif time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._left()

    def _left(self) -> None:
        if labels := self._engine.compiling:
            self._said = time.monotonic()
            say(f"{len(labels)} programs are compiled behind, which make requests faster: {', '.join(labels)}")


def keep_out_of_collections() -> None:
    """Hides all that there is from the garbage collector: a look at half a million objects holds up all answers for 0.3 s."""
    gc.collect()
    gc.freeze()
