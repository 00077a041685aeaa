"""A text ends where its tokens say, whenever the host looks: whole, streamed, in segments, in jobs, resumed, in audits.

The device says tokens at random, parts of characters among them. The end is worked out from the definition: the first `n`
tokens whose settled text holds a stop string, where the settled text is what an incremental decoder gives for their bytes. The
controls look for stop strings once in all new tokens, or by bisection in the text of a library, and not after each token.
"""

import codecs
import dataclasses
import json
import random
import zlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Replay, Request
from detspec.engine.sequence import GrowingText, text_of
from detspec.jobs.difference import difference_of
from detspec.jobs.job import run_job
from detspec.jobs.prompts import UNSHARDED, JobSpec, Prompts
from detspec.jobs.records import Recorded, parse_record
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.decoders import TOKENS, bytes_after, small_library, small_tokenizer
from tests.engine.fake_device import FakeDevice
from tests.fakes import TABLE_CFG

SCHEDULE = Schedule(Numerics(page=4), Budget(16, 4))
KINDS = sorted(TOKENS)
NUM_REQUESTS = 40


def said(tokens: list[int], size: int) -> int:
    """The token after `tokens`, by the last two and their place: any, but the special one seldom."""
    number = zlib.crc32(repr((len(tokens), *map(int, tokens[-2:]))).encode())
    return number % size or number // size % size


class Saying(FakeDevice):
    """Says tokens at random, the same after the same tokens."""

    def next_token(self, tokens):
        return said(tokens, self.model.cfg.vocab_size)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory) -> Model:
    cfg = dataclasses.replace(TABLE_CFG, vocab_size=len(TOKENS[kind]) + 1, max_position=4096)
    return Model(cfg, {}, small_tokenizer(kind, tmp_path_factory.mktemp("tokenizer")), (), f"says anything, {kind}")


@pytest.fixture(scope="module")
def requests(kind, model) -> list[Request]:
    """Prompts and samplings at random; stop strings are parts of what is said, or of what could be."""
    rng = random.Random(zlib.crc32(kind.encode()))
    made = []
    for number in range(NUM_REQUESTS):
        prompt = tuple(rng.randrange(1, model.cfg.vocab_size) for _ in range(rng.randrange(1, 6)))
        text = bytes_after(kind, prompt, all_said(prompt, 16, model)).decode(errors="ignore")
        starts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(3))]
        stop = tuple(text[start : start + rng.randrange(1, 5)] or rng.choice("\né€") for start in starts)
        max_tokens = rng.randrange(1, 17)
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=rng.choice((0, 0, 2)) % max_tokens, stop=stop)
        made.append(Request(f"r{number}", prompt, sampling))
    return made


def all_said(prompt, number: int, model: Model) -> list[int]:
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(said(tokens, model.cfg.vocab_size))
    return tokens[len(prompt) :]


def settled(raw: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def expected(request: Request, kind: str, model: Model) -> tuple[tuple[int, ...], str, str]:
    """Tokens, text and reason to end, from the definition."""
    sampling = request.sampling
    prompt = request.prompt_token_ids
    ids = all_said(prompt, sampling.max_tokens, model)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes_after(kind, [], prompt))
    pending = decoder.getstate()[0]  # bytes of a character that the prompt does not end
    texts = [settled(pending + bytes_after(kind, prompt, ids[:n])) for n in range(len(ids) + 1)]
    ignored = len(texts[sampling.min_tokens])
    for n, text in enumerate(texts):
        found = [(at, at + len(s)) for s in sampling.stop for at in range(len(text)) if text.startswith(s, at)]
        counted = [begin for begin, end in found if end > ignored]
        if counted:
            return tuple(ids[:n]), text[: min(counted)], "stop"
    whole = (pending + bytes_after(kind, prompt, ids)).decode(errors="replace")
    return tuple(ids), whole, "length"


def make(model: Model, max_requests: int, steps: int | None) -> Engine:
    config = EngineConfig(max_requests=max_requests, max_len=64, method="none", segment_steps=steps, schedule=SCHEDULE)
    return Engine.over(Saying(SCHEDULE, config, model=model))


def facts(completion) -> tuple:
    return completion.token_ids, completion.text, completion.finish_reason


def ended(engine: Engine, requests, streamed) -> tuple[dict, dict]:
    """For each request, its completion and the pieces of its text; those whose id is in `streamed` come piece by piece."""
    for request in requests:
        engine.add(request, stream=request.id in streamed)
    completions, pieces = {}, {request.id: [] for request in requests}
    while engine.has_work:
        for update in engine.step():
            pieces[update.request.id].append(update.text)
            if update.completion is not None:
                completions[update.request.id] = update.completion
    return completions, pieces


@pytest.fixture(scope="module")
def alone(requests, model) -> dict:
    """Completions one after the other, looked at after each step."""
    return ended(make(model, 1, 1), requests, ())[0]


def test_text_ends_where_the_definition_says(requests, alone, kind, model):
    want = {request.id: expected(request, kind, model) for request in requests}
    assert {id: facts(completion) for id, completion in alone.items()} == want
    assert 5 < sum(reason == "stop" for _, _, reason in want.values()) < NUM_REQUESTS - 5


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 16, None])
@pytest.mark.parametrize("max_requests", [1, 3, 8])
def test_text_ends_there_whenever_the_host_looks(requests, alone, model, steps, max_requests):
    everything = {request.id for request in requests}
    for streamed in ((), everything, {request.id for request in requests[::3]}):
        completions, pieces = ended(make(model, max_requests, steps), requests, streamed)
        assert {id: (*facts(c), c.digest) for id, c in completions.items()} == {
            id: (*facts(c), c.digest) for id, c in alone.items()
        }
        assert {id: "".join(texts) for id, texts in pieces.items()} == {id: c.text for id, c in alone.items()}


def test_control_stop_strings_that_are_looked_for_once_a_segment_end_texts_elsewhere(requests, model, monkeypatch):
    def read(text: GrowingText, tokens: Sequence[int]) -> None:
        known = len(text.text)
        text.text += text._detokenizer.read(tokens)
        text.num_tokens += len(tokens)
        text._look(known)

    monkeypatch.setattr(GrowingText, "read", read)
    found = [ended(make(model, 3, steps), requests, ())[0] for steps in (1, 7)]
    assert {id: facts(c) for id, c in found[0].items()} != {id: facts(c) for id, c in found[1].items()}


def write_job(requests, path) -> None:
    lines = []
    for request in requests:
        sampling = {"max_tokens": request.sampling.max_tokens, "min_tokens": request.sampling.min_tokens}
        sampling["stop"] = list(request.sampling.stop)
        lines.append(json.dumps({"id": request.id, "prompt_token_ids": request.prompt_token_ids, "sampling": sampling}))
    path.write_text("\n".join(lines))


def test_jobs_write_the_same_bytes_and_resume_to_them(requests, alone, model, tmp_path):
    source = tmp_path / "in.jsonl"
    write_job(requests, source)
    outputs = []
    for max_requests, steps, lives in ((1, 1, 1), (8, None, 1), (3, 4, 4)):
        out = tmp_path / f"out{max_requests}.jsonl"
        for life in range(lives):
            engine = make(model, max_requests, steps)
            if life < lives - 1:  # killed in the middle
                engine.step = partial(_dies, engine, engine.step, [4])
            with Prompts(str(source)) as prompts:
                try:
                    run_job(engine, JobSpec(prompts, SamplingParams(), UNSHARDED, "stop"), out)
                except Killed:
                    assert not out.exists()
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1] == outputs[2]
    records = [json.loads(line) for line in outputs[0].splitlines()]
    assert [(tuple(r["token_ids"]), r["text"], r["finish_reason"]) for r in records] == [
        facts(alone[request.id]) for request in requests
    ]


class Killed(Exception):
    """Ends a job."""


def _dies(engine, step, left, outbox=None):
    left[0] -= 1
    if not left[0]:
        raise Killed
    return step(outbox)


def replay_of(request: Request, ids, model: Model) -> Replay:
    """Replays `ids` and one token more."""
    prompt = list(request.prompt_token_ids)
    targets = [said([*prompt, *ids[:n]], model.cfg.vocab_size) for n in range(len(ids) + 1)]
    logprobs = -(len(prompt) + np.arange(len(targets), dtype=np.float32)) / 64
    return Replay(np.asarray(targets, np.int32), logprobs, logprobs[:-1])


def test_audit_finds_a_text_that_should_have_ended_elsewhere(requests, alone, model):
    num_moved = 0
    context = make(model, 1, None)._digest
    for request in requests:
        completion = alone[request.id]
        ids = list(completion.token_ids)
        line = {
            "id": request.id,
            "token_ids": ids,
            "logprobs": completion.logprobs,
            "prompt_len": len(request.prompt_token_ids),
        }
        line |= {"text": completion.text, "finish_reason": completion.finish_reason, "digest": completion.digest}

        def differs(line=line, request=request, **changes):
            record = parse_record(json.dumps({**line, **changes}).encode(), model.cfg.vocab_size)
            return difference_of(Recorded(record, request), replay_of(request, record.token_ids, model), model, context)

        assert differs() is None
        assert "text" in str(differs(text=completion.text + "x"))
        if completion.finish_reason == "stop" and len(ids) < request.sampling.max_tokens:
            more = all_said(request.prompt_token_ids, len(ids) + 1, model)
            assert "ends before it" in str(differs(token_ids=more, logprobs=[*completion.logprobs, -0.5]))
            num_moved += 1
        if len(ids) > 1:
            assert "goes on" in str(differs(token_ids=ids[:-1], logprobs=completion.logprobs[:-1]))
    assert num_moved > 3


def bisected(decode, ids, stop) -> int | None:
    """The fewest of `ids` that hold a string of `stop`, by bisection, as if more tokens only added to a text."""
    holds = [any(string in decode(ids[:n]) for string in stop) for n in range(len(ids) + 1)]
    if not holds[-1]:
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds[middle] else (middle + 1, high)
    return low


def looked_at(find, ids, every: int) -> int | None:
    """Finds where a text of `ids` ends if it is looked at after `every` tokens."""
    found = (find(ids[:seen]) for seen in [*range(every, len(ids), every), len(ids)])
    return next((n for n in found if n is not None), None)


def ends(find, ids) -> set[int | None]:
    """The places where a text of `ids` ends that is looked at more and less often."""
    return {looked_at(find, ids, every) for every in (1, 2, 3, 5, 16)}


def test_control_bisection_in_the_library_s_text_depends_on_when_it_looks(kind, model):
    """Broken characters take whole ones along, and give them back. Our own text ends at one place, however often it is seen."""
    decode = small_library(kind).decode
    stop = ("\n", "é")
    num_different = 0
    for first in range(1, model.cfg.vocab_size):
        ids = all_said([first, first], 16, model)
        request = Request("r", (first, first), SamplingParams(stop=stop))

        def ours(ids, request=request) -> int | None:
            text = text_of(request, model.token_bytes)
            text.read(ids)
            return text.num_tokens if text.is_stopped else None

        assert len(ends(ours, ids)) == 1
        num_different += len(ends(partial(bisected, decode, stop=stop), ids)) > 1
    assert bool(num_different) == kind.startswith("byte_fallback")
