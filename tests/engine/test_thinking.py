"""Requests that are read thinking, beside others in engines of all shapes: the same thoughts and bits as each one by itself."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import detspec as ds
from detspec.config import Schedule
from detspec.engine import certify, planner
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.replayer import Replayer
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.jobs.audit import run_audit
from detspec.jobs.job import run_job
from detspec.jobs.prompts import Prompts
from detspec.sampling import SamplingParams
from detspec.train.problems.parity import Parity
from tests.engine.byte_model import BYTE_CFG

# Pages of 16: prompts take several, and few are enough to preempt.
SCHEDULE = Schedule(rows=32, window=4, page=16)
NUM_OPS = (1, 3, 8, 14, 5, 11, 2, 9)
IN_ORDER = range(8)
SHUFFLED = [5, 2, 7, 0, 4, 1, 6, 3]


def make(max_rows: int, **changes) -> Engine:
    config = EngineConfig(max_rows=max_rows, max_len=96, schedule=SCHEDULE, num_speculative_tokens=3, **changes)
    return Engine(ds.load("thinking_parity"), config)


@pytest.fixture(scope="module")
def alone() -> Engine:
    return make(1, method="none")


@pytest.fixture(scope="module")
def crowded() -> Engine:
    """Three rows, and pages for little more than one and a half of the longest requests."""
    return make(3, method="none", guesses="sequential", num_pages=8)


def requests() -> list[tuple[str, SamplingParams]]:
    """Dense and sparse problems, greedy and sampled answers; two requests are read without thoughts, one of them ordinary."""
    rng = np.random.default_rng(0)
    problems = [Parity(filler=0.7 * (i % 2)).draw(rng, n) for i, n in enumerate(NUM_OPS)]
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    sampling = [dataclasses.replace(greedy, temperature=1.5 * (i % 3 == 0), seed=i) for i in IN_ORDER]
    sampling[2] = dataclasses.replace(sampling[2], thinking=False, logprobs=3)
    sampling[3] = dataclasses.replace(sampling[3], logprobs=2)
    sampling[6] = dataclasses.replace(sampling[6], deterministic=False, thinking=False)
    return [(f"{problem.question} A:", params) for problem, params in zip(problems, sampling, strict=True)]


def run(engine: Engine, order=IN_ORDER, change=lambda sampling: sampling) -> dict[str, Completion]:
    made = [engine.request(requests()[i][0], change(requests()[i][1]), id=str(i)) for i in order]
    return {completion.id: completion for completion in engine.run(iter(made))}


def facts(completions: dict[str, Completion], *, but: tuple[str, ...] = ("6",)) -> dict[str, tuple]:
    """All that is promised of each, except of the ordinary request."""
    return {
        id: (c.token_ids, np.float32(c.logprobs).tobytes(), c.top_logprobs, c.thoughts, c.digest)
        for id, c in sorted(completions.items())
        if id not in but
    }


def test_thoughts_are_those_of_the_task_and_answers_follow(alone):
    for i, (prompt, sampling) in enumerate(requests()):
        if sampling.thinking is None:
            greedy = dataclasses.replace(sampling, temperature=0.0, max_tokens=2, logprobs=0)
            (completion,) = alone.generate([prompt], greedy)
            said = [word for thought in completion.thoughts for word in thought.text.split()]
            side, truth = prompt.split(".")[0].split()[-1], []
            for word in prompt.split(".")[1].replace(",", "").split():
                if word in ("flips", "waits"):
                    side = {"heads": "tails", "tails": "heads"}[side] if word == "flips" else side
                    truth.append(side)
            assert (said, completion.text, completion.finish_reason) == (truth, side, "length"), i
            assert not any(thought.is_cut for thought in completion.thoughts)
            assert all(thought.token_ids[-1] == 0 for thought in completion.thoughts)


def test_neighbours_orders_guesses_and_preemption_change_no_thought_and_no_bit(alone, crowded):
    expected = facts(run(alone))
    before = crowded.num_preemptions
    assert facts(run(crowded)) == expected
    assert facts(run(crowded, SHUFFLED)) == expected
    assert crowded.num_preemptions > before
    assert crowded.num_pages_held == 0


def test_ordinary_answers_have_other_bits_somewhere(alone):
    """The inverse control. Prompts are read by the canonical pass all the same, so thoughts stay."""
    verified = run(alone)
    ordinary = run(alone, change=lambda sampling: dataclasses.replace(sampling, deterministic=False))
    assert {id: c.thoughts for id, c in verified.items()} == {id: c.thoughts for id, c in ordinary.items()}
    assert any(verified[id].logprobs != ordinary[id].logprobs for id in verified)


def test_reading_without_thoughts_is_another_request(alone):
    prompt, sampling = requests()[1]
    thinking, plain = (alone.generate([prompt], dataclasses.replace(sampling, thinking=t))[0] for t in (True, False))
    assert (bool(thinking.thoughts), bool(plain.thoughts)) == (True, False)
    assert thinking.logprobs != plain.logprobs
    assert thinking.digest != plain.digest
    assert thinking.digest == alone.generate([prompt], sampling)[0].digest  # what the model does by itself


def test_rounds_are_one_more_than_thoughts_with_trivial_guesses_and_one_with_right_ones(alone, crowded):
    for id, completion in run(alone).items():
        num_thoughts = sum(bool(thought.text) for thought in completion.thoughts)
        assert completion.stats.num_refused_thoughts == num_thoughts, id
    assert all(c.stats.num_refused_thoughts == 0 for c in run(crowded).values())


def test_stream_of_a_thinking_request_brings_the_same_tokens(alone):
    prompt, sampling = requests()[0]
    pieces = list(alone.stream(prompt, sampling))
    (completion,) = alone.generate([prompt], sampling)
    assert sum((piece.token_ids for piece in pieces), ()) == completion.token_ids
    assert sum((piece.logprobs for piece in pieces), ()) == completion.logprobs


def test_job_writes_thoughts_and_its_audit_finds_a_changed_one(alone, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Replayer, "prepare", lambda self: None)  # one program
    prompts = [prompt for prompt, _ in requests()[:3]]
    lines = [{"id": str(i), "prompt": prompt, "sampling": {"temperature": 0.5 * i}} for i, prompt in enumerate(prompts)]
    lines[2]["sampling"] = {"thinking": False}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Prompts(str(tmp_path / "in.jsonl")) as file:
        run_job(alone, file, tmp_path / "out.jsonl", defaults=SamplingParams(max_tokens=5), fresh=True)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [bool(record.get("thoughts")) for record in records] == [True, True, False]
    assert run_audit(alone.model, tmp_path / "out.jsonl", max_rows=2).reproduced

    records[1]["thoughts"][-1]["text"] += " heads"
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (found,) = run_audit(alone.model, tmp_path / "out.jsonl", max_rows=2).differences
    assert (found.record, found.what[:20]) == ("1", "thought after chunk ")


def test_prompt_logprobs_of_a_thinking_request_are_refused(alone):
    with pytest.raises(InputError, match="prompt_logprobs are not reported of prompts that are read thinking"):
        alone.request("A coin's state is heads. A:", SamplingParams(prompt_logprobs=0))
    alone.request("A coin's state is heads. A:", SamplingParams(prompt_logprobs=0, thinking=False))


def test_words_that_the_model_does_not_know_are_named(alone):
    with pytest.raises(InputError, match="zebra"):
        alone.request("A zebra flips. A:", SamplingParams())


def test_model_without_thinker_refuses_to_think():
    from detspec.generate.insert import check_prompt

    with pytest.raises(InputError, match="no thinker and no compressor"):
        check_prompt([1], SamplingParams(thinking=True), BYTE_CFG, max_len=96)


def test_device_that_thinks_differently_in_other_rows_is_refused(crowded, monkeypatch):
    monkeypatch.setattr(planner, "certify_reading", lambda state, trial: ("row 0 differs", state))
    with pytest.raises(InputError, match=r"does not certify reading with thoughts, so determinism .*: row 0 differs"):
        crowded.planner._certify_reading(crowded._runner.state)


@pytest.mark.parametrize("part", ["thoughts", "states", "nothing"])
def test_certification_of_reading_sees_what_depends_on_the_row(part, crowded):
    """A thinker that says another word, or states that have another bit, in the first row of a pass."""
    trial = crowded.planner._trial(crowded._runner.state, planner.fast_plan(3))
    start = trial.start

    def tampered(state, **how):
        state = start(state, **how)
        reading = state.reading
        if part == "thoughts":
            reading = reading.replace(thoughts=reading.thoughts.at[0, 0, 0].add(1))
        elif part == "states":
            reading = reading.replace(states=reading.states.at[0, 0, 0].add(1.0))
        return state.replace(reading=reading)

    trial.start = tampered
    differs, state = certify.certify_reading(crowded._runner.state, trial)
    crowded._runner.state = planner._free(state)
    crowded._pool.clear()
    assert bool(differs) == (part != "nothing")
