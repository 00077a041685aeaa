"""An integer model in streams and behind HTTP has the bits of the definition, next to other requests and in a log, too."""

import concurrent.futures
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import detspec as ds
from detspec.checkpoint.digest import digest_model
from detspec.engine.engine import Engine
from detspec.integer.audit import AuditedText, audited_by_spec
from detspec.integer.spec import LIMIT
from detspec.jobs.audit import run_audit_responses
from detspec.jobs.oracle import as_floats
from detspec.model.to_integer import spec_model
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import MAX_LEN, write_folder
from tests.serve.running import Running, chatting, chunks_of, serving

pytestmark = pytest.mark.slow  # an engine's programs are compiled
BROKEN = 95  # a token whose embedding has left its range
BY = [None, "numpy", "c"]
BODIES: list[dict[str, Any]] = [
    {"prompt": [5, 17, 9], "temperature": 0.9, "seed": 1},
    {"prompt": [5, 17, 9, 30], "temperature": 1.2, "seed": 2, "top_p": 0.8, "logprobs_mode": "processed"},
    {"prompt": "def f", "temperature": 0.7, "seed": 3, "logit_bias": {"40": 5, "41": -100}, "logprobs_mode": "tempered"},
    {"prompt": list(range(20)), "min_tokens": 5, "stop_token_ids": list(range(1000)), "n": 2, "temperature": 1.0, "seed": 4},
    {"prompt": [7], "temperature": 0.5, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
]
SCORES: list[dict[str, Any]] = [
    {"prompt": list(range(20)), "max_tokens": 0, "echo": True, "logprobs": 3},
    {"prompt": [1, 2, BROKEN, 4], "max_tokens": 0, "echo": True, "logprobs": 1},
]


class Served(NamedTuple):
    """Answers of a server, and its log."""

    alone: list[str]
    together: list[str]
    streamed: list[str]
    log: Path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ds.Model:
    found = ds.load(write_folder(tmp_path_factory.mktemp("bytes") / "bytes"), weights="integer")
    params = {**found.params, "embed": found.params["embed"].at[BROKEN, 3].set(LIMIT)}
    return chatting(dataclasses.replace(found, params=params, digest=digest_model(found.cfg, params)))


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine(model, ds.EngineConfig(max_requests=4, max_len=MAX_LEN, method="none", segment_steps=2))


@pytest.fixture(scope="module")
def served(engine, tmp_path_factory) -> Served:
    log = tmp_path_factory.mktemp("served") / "log.jsonl"
    with serving(engine, log=log) as server, concurrent.futures.ThreadPoolExecutor(len(BODIES)) as threads:
        asked = [{"max_tokens": 12, "logprobs": 2, "return_token_ids": True, **body} for body in BODIES]
        alone = [answer(server, body) for body in asked]
        together = list(threads.map(lambda body: answer(server, body), asked))
        streamed = list(threads.map(lambda body: answer(server, body, stream=True), asked))
        for body in SCORES:
            server.ask(**body)
    return Served(alone, together, streamed, log)


def answer(server: Running, body: dict[str, Any], *, stream: bool = False) -> str:
    """Tokens, log-probabilities and ends of the choices of an answer."""
    parts = (
        [choice for chunk in chunks_of(server, body) for choice in chunk["choices"]]
        if stream
        else server.ask(**body)["choices"]
    )
    joined: dict[int, Any] = {}
    for part in parts:
        tokens, logprobs, ends = joined.setdefault(part["index"], ([], [], []))
        tokens += part["token_ids"] or []
        logprobs += (part["logprobs"] or {}).get("token_logprobs") or []
        ends += [part["finish_reason"]] if part["finish_reason"] else []
    return json.dumps(joined, sort_keys=True)


def defined(model: ds.Model, prompt: list[int], tokens: list[int], sampling: SamplingParams) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a text by the definition."""
    text = AuditedText([*prompt, *tokens], len(prompt), sampling.temperature, seed=sampling.seed)
    found = audited_by_spec(*spec_model(model.cfg, model.params), text)
    return found.chosen[len(prompt) - 1 :].tolist(), as_floats(found.logprobs[len(prompt) - 1 :]).tolist()


def test_stream_pieces_join_to_the_text_of_the_definition(model, engine):
    sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=5)
    prompt = [5, 17, 9]
    pieces = list(engine.stream(prompt, sampling))
    assert len(pieces) > 3
    tokens = [token for piece in pieces for token in piece.token_ids]
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    assert (tokens, logprobs) == defined(model, prompt, tokens, sampling)
    assert "".join(piece.text for piece in pieces) == pieces[-1].completion.text


def test_stream_ends_with_an_error_where_the_text_left_its_range(model, engine):
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=6, logit_bias={BROKEN: 5.5})
    pieces = list(engine.stream([5, 17, 9], sampling))
    completion = pieces[-1].completion
    assert completion.finish_reason == "error"
    assert completion.token_ids[-1] == BROKEN
    assert BROKEN not in completion.token_ids[:-1]
    assert sum((piece.token_ids for piece in pieces), ()) == completion.token_ids


def test_answers_of_a_server_have_the_bits_of_the_engine_alone_together_and_streamed(engine, served):
    assert served.alone == served.together == served.streamed
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=1)
    (completion,) = engine.generate([[5, 17, 9]], sampling)
    expected = [list(completion.token_ids), list(completion.logprobs), [completion.finish_reason]]
    assert json.loads(served.alone[0]) == {"0": expected}
    assert len(set(served.alone)) == len(BODIES)


@pytest.mark.parametrize("by", BY)
def test_log_of_a_server_is_audited_and_a_changed_bit_is_named(model, served, tmp_path, cpu_kernels, by):
    report = run_audit_responses(model, served.log, max_requests=4, by=by)
    assert report.differences == []
    assert report.num_records == 3 * (len(BODIES) + 1) + len(SCORES)  # one body has two samples
    lines = [json.loads(line) for line in served.log.read_text().splitlines()]
    record = next(line["record"] for line in lines[1:] if line["sampling"]["logprobs_mode"] == "tempered")
    record["logprobs"][3] = float(np.nextafter(np.float32(record["logprobs"][3]), np.float32(0)))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = run_audit_responses(model, tmp_path / "log.jsonl", max_requests=4, by=by).differences
    assert (found.record, found.position) == (record["id"], 3)
