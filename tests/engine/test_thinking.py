"""Requests that are read with thoughts, among others in engines of all shapes: the same thoughts and bits as each one alone."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.engine import planner
from detspec.engine.certify import certify_reader
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.probes import Probes
from detspec.engine.request import Completion, Request
from detspec.errors import InputError
from detspec.jobs.audit import run_audit
from detspec.jobs.job import run_job
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.thinking.fakes import THINKER_CFG, random_thinker

pytestmark = pytest.mark.slow

# Pages of 16: prompts take several, and few are enough to preempt.
SCHEDULE = Schedule(Numerics(page=16), Budget(16, 4))
CFG = THINKER_CFG
PROMPT_LENS = (3, 17, 40, 61, 9, 52, 5, 33)
IN_ORDER = range(8)
DETERMINISTIC = [0, 1, 2, 3, 4, 5, 7]
SHUFFLED = [5, 2, 7, 0, 4, 1, 6, 3]


def make(max_requests: int, **changes) -> Engine:
    params = random_thinker(CFG)
    model = Model(CFG, params, tokenizer=None, eos_ids=(), digest=digest_model(CFG, params))
    config = EngineConfig(max_requests=max_requests, max_len=96, schedule=SCHEDULE, num_speculative_tokens=3, **changes)
    return Engine(model, config)


@pytest.fixture(scope="module")
def alone() -> Engine:
    return make(1, method="none")


def make_crowded() -> Engine:
    """Three rows, and pages for little more than one and a half of the longest requests."""
    return make(3, method="none", thoughts="self", num_pages=8)


@pytest.fixture(scope="module")
def crowded() -> Engine:
    return make_crowded()


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled answers; two requests are read without thoughts, one of them ordinary."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(CFG.vocab_size, size=length).tolist() for length in PROMPT_LENS]
    greedy = SamplingParams(max_tokens=20)
    sampling = [dataclasses.replace(greedy, temperature=1.5 * (i % 3 == 0), seed=i) for i in IN_ORDER]
    sampling[2] = dataclasses.replace(sampling[2], thinking=False)
    sampling[6] = dataclasses.replace(sampling[6], deterministic=False, thinking=False)
    return list(zip(prompts, sampling, strict=True))


def run(engine: Engine, order=IN_ORDER, change=lambda sampling: sampling) -> dict[str, Completion]:
    made = [engine.request(requests()[i][0], change(requests()[i][1]), id=str(i)) for i in order]
    return {completion.id: completion for completion in engine.run(iter(made))}


def facts(completions: dict[str, Completion]) -> dict[str, tuple]:
    """All that is promised of each; nothing is of the ordinary request."""
    return {
        str(i): (c.token_ids, np.float32(c.logprobs).tobytes(), c.top_logprobs, c.thoughts, c.digest)
        for i, c in ((i, completions[str(i)]) for i in DETERMINISTIC)
    }


def test_thoughts_are_of_all_kinds_and_none_after_the_last_chunk(alone):
    """Chunks of 4 that end before the last token of the prompt; trivial, whole and cut thoughts, or the rest shows little."""
    completions, kinds = run(alone, DETERMINISTIC), set()
    for i in DETERMINISTIC:
        prompt, sampling = requests()[i]
        thoughts = completions[str(i)].thoughts
        assert len(thoughts) == (0 if sampling.thinking is False else (len(prompt) - 1) // 4)
        for thought in thoughts:
            assert thought.is_cut == (thought.token_ids[-1] != 0)
            assert 0 not in thought.token_ids[:-1]
            kinds.add("trivial" if thought.token_ids == (0,) else "cut" if thought.is_cut else "whole")
    assert kinds == {"trivial", "whole", "cut"}


def test_neighbours_orders_guesses_and_preemption_change_no_thought_and_no_bit(alone, crowded):
    expected = facts(run(alone, DETERMINISTIC))
    before = crowded.num_preemptions
    assert facts(run(crowded)) == expected
    assert facts(run(crowded, SHUFFLED)) == expected
    assert crowded.num_preemptions > before
    assert crowded.num_pages_held == 0


def test_likeliest_tokens_of_what_was_thought_about_are_the_same_in_a_crowd(alone, crowded):
    """They are read from replays after the thoughts, which are a program more for each engine."""

    def ask(sampling: SamplingParams) -> SamplingParams:
        return dataclasses.replace(sampling, logprobs=3)

    expected = facts(run(alone, DETERMINISTIC, change=ask))
    assert facts(run(crowded, change=ask)) == expected
    assert all(len(top) == 3 for id in expected for top in expected[id][2])


def test_ordinary_answers_have_other_bits_somewhere(crowded):
    """The inverse control. Prompts are read by the canonical pass all the same, so thoughts stay."""
    verified = run(crowded)
    ordinary = run(crowded, change=lambda sampling: dataclasses.replace(sampling, deterministic=False))
    assert {id: c.thoughts for id, c in verified.items()} == {id: c.thoughts for id, c in ordinary.items()}
    assert any(verified[id].logprobs != ordinary[id].logprobs for id in verified)


def test_reading_without_thoughts_is_another_request(alone):
    prompt, sampling = requests()[1]
    thinking, plain = (alone.generate([prompt], dataclasses.replace(sampling, thinking=t))[0] for t in (True, False))
    assert (bool(thinking.thoughts), bool(plain.thoughts)) == (True, False)
    assert thinking.logprobs != plain.logprobs
    assert thinking.digest != plain.digest
    assert thinking.digest == alone.generate([prompt], sampling)[0].digest  # what the model does by itself


def test_rounds_are_one_more_than_thoughts_with_trivial_guesses(alone, crowded):
    for completion in run(alone, DETERMINISTIC).values():
        num_thoughts = sum(thought.token_ids != (0,) for thought in completion.thoughts)
        assert completion.stats.num_rejected_thoughts == num_thoughts
    ahead = run(crowded).values()  # a cheap pass that reads ahead drafts nearly all of them
    assert sum(c.stats.num_accepted_thoughts for c in ahead) > 0.9 * sum(c.stats.num_draft_thoughts for c in ahead)


def test_stream_of_a_thinking_request_brings_the_same_tokens(alone):
    prompt, sampling = requests()[0]
    pieces = list(alone.stream(prompt, sampling))
    (completion,) = alone.generate([prompt], sampling)
    assert sum((piece.token_ids for piece in pieces), ()) == completion.token_ids
    assert sum((piece.logprobs for piece in pieces), ()) == completion.logprobs


def test_job_writes_thoughts_and_its_audit_finds_a_changed_one(alone, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("detspec.engine.replica.certified_passes", lambda device: device.schedule)  # one program
    prompts = [prompt for prompt, _ in requests()[1:4]]
    lines = [{"id": str(i), "prompt_token_ids": p, "sampling": {"temperature": 0.5 * i}} for i, p in enumerate(prompts)]
    lines[2]["sampling"] = {"thinking": False}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Prompts(str(tmp_path / "in.jsonl")) as file:
        run_job(alone, JobSpec(file, SamplingParams(max_tokens=5)), tmp_path / "out.jsonl", fresh=True)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [bool(record.get("thoughts")) for record in records] == [True, True, False]
    assert run_audit(alone.model, tmp_path / "out.jsonl", max_requests=1).reproduced

    records[1]["thoughts"][-1]["token_ids"][0] += 1
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (found,) = run_audit(alone.model, tmp_path / "out.jsonl", max_requests=1).differences
    assert (found.record, found.what[:20]) == ("1", "thought after chunk ")


def test_prompt_logprobs_of_a_thinking_request_are_refused(alone):
    with pytest.raises(InputError, match="prompt_logprobs is not reported of prompts that are read thinking"):
        alone.request([1, 2], SamplingParams(prompt_logprobs=0))
    alone.request([1, 2], SamplingParams(prompt_logprobs=0, thinking=False))


def test_device_that_thinks_differently_in_other_places_is_refused(monkeypatch):
    monkeypatch.setattr(planner, "certify_reader", lambda device, batch: "sequence 0 differs")
    prompt, sampling = requests()[0]
    with pytest.raises(InputError, match=r"does not certify thoughts, so determinism .*: sequence 0 differs"):
        make_crowded().generate([prompt], sampling)


@pytest.mark.parametrize("part", ["thoughts", "states", "nothing"])
def test_certification_of_thoughts_sees_what_depends_on_the_place(part, crowded, monkeypatch):
    """A thinker that says another word, or states that have another bit, in the first place of a batch."""
    read = crowded.device.read

    def tampered():
        reading = read()
        if part == "thoughts":
            return reading.replace(thoughts=reading.thoughts.at[0, 0, 0].add(1))
        if part == "states":
            return reading.replace(states=reading.states.at[0, 0, 0].add(1.0))
        return reading

    monkeypatch.setattr(crowded.device, "read", tampered)
    differs = certify_reader(crowded.device, 3)
    crowded.device.clear()
    crowded.replicas[0].pool.clear()
    assert bool(differs) == (part != "nothing")


@pytest.mark.parametrize(("max_requests", "chunk"), [(1, 4), (2, 8), (1, 16)])
def test_certification_of_thoughts_has_something_to_think_about_in_engines_of_few_sequences(max_requests, chunk):
    cfg = dataclasses.replace(CFG, thinking=dataclasses.replace(CFG.thinking, chunk=chunk, max_thought=1))
    model = Model(cfg, random_thinker(cfg), tokenizer=None, eos_ids=(), digest="")
    engine = Engine(model, EngineConfig(max_requests=max_requests, max_len=96, schedule=SCHEDULE, num_speculative_tokens=3))
    assert max((len(probe.tokens) - 1) // chunk for probe in Probes(engine.device, max_requests).each) >= 3


def test_request_that_leaves_thinking_to_the_model_is_read_as_the_engine_would_make_it(crowded):
    """It follows one of the same tokens that is read without thoughts, whose pages hold other keys and values."""
    prompt, sampling = requests()[3]
    (expected,) = crowded.run([crowded.request(prompt, sampling, id="a")])
    list(crowded.run([crowded.request(prompt, dataclasses.replace(sampling, thinking=False), id="b")]))
    (found,) = crowded.run([Request("a", tuple(prompt), sampling)])
    assert (found.token_ids, found.logprobs, found.thoughts, found.digest) == (
        *(expected.token_ids, expected.logprobs, expected.thoughts, expected.digest),
    )


def test_aborted_request_has_no_thoughts_even_if_it_waits_with_those_it_had(crowded):
    """Both end with six pages, and there are eight, so one of them is preempted."""
    prompt, sampling = requests()[4][0] * 4, SamplingParams(max_tokens=54)
    for id in "ab":
        crowded.add(crowded.request(prompt, sampling, id=id))
    preempted: list[str] = []
    completions = {}
    while crowded.has_work:
        completions |= {update.request.id: update.completion for update in crowded.step()}
        waiting = [sequence.request.id for sequence in crowded.replicas[0].scheduler.queue if sequence.told]
        if waiting and not preempted:
            preempted.append(waiting[0])
            crowded.abort(waiting[0])
    assert len(preempted) == 1
    aborted = completions[preempted[0]]
    assert (aborted.finish_reason, aborted.thoughts) == ("abort", ())
