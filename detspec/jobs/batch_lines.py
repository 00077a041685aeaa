"""OpenAI's batch lines: a request body in, a response body out, each with the user's own id.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f", "max_tokens": 8}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

Ids are digests of what was asked, so equal jobs have equal bytes. A line that cannot be answered becomes a line of that format
with the error, and the job goes on.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from detspec.engine.engine import Engine
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.jobs.lines import CheckedLine, Output, check_size, pass_over
from detspec.jobs.prompts import JobSpec
from detspec.openai.bodies import DEFAULTS, Parsed, parse_chat, parse_completion
from detspec.openai.bodies import requests_of as requests_of_body
from detspec.openai.fields import UNKNOWN, UNSUPPORTED, BodyError
from detspec.openai.responses import HEX, answer_body, error_body, make_answerer, response_id, scored
from detspec.read_json import parse_json
from detspec.sampling_params import SamplingParams

KEY = "custom_id"
LINE_KEYS = (KEY, "method", "url", "body")
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODEL_NAME = "detspec"  # in answers to bodies that name no model
TAKEN = ("seed", "deterministic", "thinking", "logprobs_mode")  # options that bodies have as defaults, too
NOT_FINITE = "logits_not_finite"
FAILED = "request_failed"
BAD_LINE = "invalid_line"
OK = 200
BAD_REQUEST = 400


class BatchReader:
    """The format of OpenAI's lines: requests of a body, and a line of output when all samples are there."""

    def __init__(
        self, engine: Engine, spec: JobSpec, repeated: Mapping[int, str], fingerprint: Mapping[str, Any] | None = None
    ) -> None:
        """`repeated` are errors for lines whose id was used before. Answers name `fingerprint`, by default the engine's.

        Raises `InputError` for options that bodies would ignore.
        """
        plain = dataclasses.asdict(SamplingParams())
        changed = [
            name for name, value in dataclasses.asdict(spec.defaults).items() if value != plain[name] and name not in TAKEN
        ]
        if changed:
            raise InputError(
                f"{spec.prompts.name} holds OpenAI's batch lines, whose bodies say how they are sampled: leave out the options "
                f"for {', '.join(changed)}"
            )
        if spec.on_error != "stop":
            raise InputError("bad lines of OpenAI's format are answered in OUT.errors.jsonl: leave --on-error out")
        self._engine = engine
        self._repeated = repeated
        self._seed = spec.defaults.seed
        self._defaults = dataclasses.replace(DEFAULTS, **{name: getattr(spec.defaults, name) for name in TAKEN})
        self._now = spec.now
        fingerprint = engine.fingerprint() if fingerprint is None else fingerprint
        self._answerer = make_answerer(
            engine.model, fingerprint, max_len=engine.config.max_len, name=MODEL_NAME, created=spec.created or 0
        )

    def id_of(self, number: int, raw: bytes) -> str:
        """The user's id of a line. Raises `InputError` if it has none."""
        return str(parse_id(raw)[KEY])

    def asked(self, number: int, raw: bytes, note_id: Callable[[str], object] = pass_over) -> CheckedLine:
        """Line `number` of the input; its `facts` are id and body, or the answer that says what is wrong with it."""
        custom_id: str | None = None
        try:
            line = parse_id(raw)
            custom_id = line[KEY]
            note_id(line[KEY])
            check_frame(line)
            if number in self._repeated:
                raise InputError(self._repeated[number])
            parsed = self._parse(line)
            requests = requests_of_body(parsed, self._engine.model, self._engine.config, id=str(number))
        except BodyError as error:
            return CheckedLine(number, (), 1, bad_request_line(custom_id, error, raw))
        except InputError as error:
            return CheckedLine(number, (), 1, failure_line(custom_id, BAD_LINE, str(error), raw))
        return CheckedLine(number, tuple(requests), 1, (custom_id, parsed))

    def outputs(self, asked: CheckedLine, completions: Sequence[Completion]) -> Sequence[Output]:
        """The line, with the last of the completions; at once if it is an error."""
        if not asked.requests:
            return (Output(0, 0, "error", asked.facts),)
        custom_id, parsed = asked.facts
        if len(completions) < parsed.num_choices:
            return ()
        places = {request.id: place for place, request in enumerate(asked.requests)}
        ordered = sorted(completions, key=lambda one: (places[one.id], one.index))
        if parsed.is_score:
            ordered = [scored(one, parsed.prompts[places[one.id]]) for one in ordered]
        num_tokens = sum(len(one.token_ids) for one in ordered)
        if bad := [one for one in ordered if one.finish_reason == "error"]:
            code = FAILED if bad[0].error else NOT_FINITE
            why = bad[0].error or "the model gave logits that are not finite"
            return (Output(0, num_tokens, "error", failure_line(custom_id, code, why, parsed.digest.encode())),)
        body = answer_body(parsed, ordered, self._answerer)
        facts = custom_id.encode() + parsed.digest.encode()
        response = {"status_code": OK, "request_id": parsed.body.request_id or response_id(parsed), "body": body}
        return (Output(0, num_tokens, "stop", _line(custom_id, facts, response, None)),)

    def _parse(self, line: Mapping[str, Any]) -> Parsed:
        """The body of a line; `BodyError` for what a batch does not do."""
        model = self._engine.model
        max_len = self._engine.config.max_len
        if line["url"] == COMPLETIONS:
            parsed = parse_completion(line["body"], model, max_len=max_len, defaults=self._defaults)
        else:
            parsed = parse_chat(line["body"], model, max_len=max_len, defaults=self._defaults, now=self._now)
        if parsed.body.stream:
            raise BodyError("stream is true, but the lines of a batch are answered whole: omit it", "stream", UNSUPPORTED)
        return parsed if parsed.seed is not None else parsed.with_seed(seed_of(self._seed, line[KEY]))


def check_frame(line: Mapping[str, Any]) -> None:
    """Raises `BodyError` unless all is sound but for the body."""
    if unknown := sorted(set(line) - set(LINE_KEYS)):
        raise BodyError(f"unknown key {unknown[0]!r}; accepted: {', '.join(LINE_KEYS)}", unknown[0], UNKNOWN)
    if line.get("method", "POST") != "POST":
        raise BodyError(f'"method" must be "POST", got {line["method"]!r}', "method")
    if line.get("url") not in (COMPLETIONS, CHAT):
        raise BodyError(f'"url" must be "{COMPLETIONS}" or "{CHAT}", got {line.get("url")!r}', "url")
    if "body" not in line:
        raise BodyError('the line needs a "body"', "body")


def parse_id(raw: bytes) -> dict[str, Any]:
    """A line as a JSON object with an id; nothing else is checked."""
    check_size(raw)
    line = parse_json(raw)
    if not isinstance(line, dict):
        raise InputError(f"must be a JSON object, got {type(line).__name__}")
    if not isinstance(line.get(KEY), str) or not line[KEY]:
        raise InputError(f'needs a "{KEY}", a string that is not empty, got {line.get(KEY)!r}')
    return line


def seed_of(seed: int, custom_id: str) -> int:
    """The seed of a line whose body gives none: a hash of the job's seed and the line's id, 0 .. 2**32-1."""
    return int.from_bytes(hashlib.sha256(json.dumps([seed, custom_id]).encode()).digest()[:4], "big")


def bad_request_line(custom_id: str | None, error: BodyError, raw: bytes) -> bytes:
    """The answer to a body that is refused, as a server would give it."""
    response = {"status_code": BAD_REQUEST, "request_id": f"req-{_digest(raw)}", "body": error_body(error)}
    return _line(custom_id, raw, response, None)


def failure_line(custom_id: str | None, code: str, message: str, facts: bytes) -> bytes:
    """The answer to a line that no server would see, or that failed."""
    return _line(custom_id, facts, None, {"code": code, "message": message})


def _line(custom_id: str | None, facts: bytes, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    line = {"id": f"batch_req_{_digest(facts)}", KEY: custom_id, "response": response, "error": error}
    return json.dumps(line, allow_nan=False).encode()


def _digest(facts: bytes) -> str:
    return hashlib.sha256(facts).hexdigest()[:HEX]
