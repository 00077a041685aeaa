"""Every task draws problems that its tokenizer reads and gives back."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import detspec
from detspec.config import ThinkingConfig
from detspec.errors import InputError
from detspec.train.problems.chunks import encode, make_batch
from detspec.train.problems.problem import ARMS, read_answer, texts
from detspec.train.problems.tasks import Parity, Task, Variables, tokenizer_of
from detspec.train.problems.traces import Traces
from detspec.train.problems.two_hop import TwoHop

TINY_PYTHON = Path(detspec.__file__).parent / "assets" / "tiny_python"


@pytest.fixture(params=[Parity(0.5), Variables(0.5), TwoHop(), "traces"], ids=["parity", "variables", "two_hop", "traces"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    if request.param != "traces":
        return request.param
    line = {"question": "x = 2; y = 3; x + y?", "steps": [{"text": "2 + 3", "mark": 12}], "answer": "5"}
    (tmp_path / "traces.jsonl").write_text(json.dumps(line))
    return Traces(str(tmp_path / "traces.jsonl"), str(TINY_PYTHON))


@pytest.mark.parametrize("arm", ARMS)
def test_tokens_of_every_task_decode_to_its_texts(task: Task, arm: str):
    tokenizer, rng = tokenizer_of(task), np.random.default_rng(0)
    problems = [task.draw(rng, 2) for _ in range(20)]
    for problem, encoded in zip(problems, encode(problems, tokenizer, arm), strict=True):
        prompt, continuation = texts(problem, arm)
        assert tokenizer.decode(encoded.prompt) == prompt
        assert tokenizer.decode(encoded.prompt + encoded.continuation[:-1]) == prompt + continuation
        assert read_answer(tokenizer.decode(encoded.continuation), arm) == problem.answer


def test_batches_of_every_task_hold_its_thoughts(task: Task):
    tokenizer, rng = tokenizer_of(task), np.random.default_rng(0)
    encoded = encode([task.draw(rng, 2) for _ in range(20)], tokenizer, "thinking")
    thinking = ThinkingConfig(chunk=4, in_layer=1, out_layer=2, max_thought=10, end_id=0)
    batch = make_batch(encoded, 64, thinking, rng.integers(4, size=20))
    assert (batch.thoughts == 0).any(2).sum(1).tolist() == [
        (int(np.flatnonzero(weights)[0])) // 4 for weights in batch.weights
    ]  # one end for each chunk before the last prompt token, whose index is that of the first target
    first = [token for token in batch.thoughts[0].ravel().tolist() if token > 0]
    assert first == [token for step in encoded[0].steps for token in step]


def test_tasks_are_frozen_and_equal_by_their_parameters():
    assert Parity(0.5) == Parity(0.5) != Parity(0.4)
    assert hash(TwoHop(seed=1)) == hash(TwoHop(seed=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Parity(0.5).filler = 0.1


def test_traces_without_their_tokenizer_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"tokenizer\.json: no such tokenizer file"):
        tokenizer_of(Traces("unread", str(tmp_path)))


def test_fillers_are_a_share_of_the_operations_and_never_all():
    rng = np.random.default_rng(0)
    assert [sum(Parity(0.8).draw_fillers(rng, n)) for n in (1, 2, 3, 5, 10)] == [0, 1, 2, 4, 8]
    assert Parity(0.0).draw_fillers(rng, 4) == [False] * 4


def test_every_operation_may_be_the_filler():
    rng = np.random.default_rng(0)
    assert {Parity(0.3).draw_fillers(rng, 3).index(True) for _ in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("n", [0, -1, 2.0])
def test_number_of_operations_that_is_none_is_refused(n: object):
    with pytest.raises(InputError, match="a positive number of operations, got"):
        Parity(0.5).draw_fillers(np.random.default_rng(0), n)


@pytest.mark.parametrize("share", [-0.1, 1.0, "0.5", True, float("nan")])
def test_share_outside_its_range_is_refused(share: object):
    for task in (Parity, Variables):
        with pytest.raises(InputError, match=rf"{task.__name__}\.filler must be a number in \[0, 1\), got"):
            task(filler=share)


def test_share_given_where_a_switch_is_asked_for_is_refused():
    for task in (Parity, Variables):
        with pytest.raises(InputError, match=rf"{task.__name__}\.up_to must be True or False, got 3: the share itself"):
            task(up_to=3)
