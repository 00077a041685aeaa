"""Comparing two outputs: forks, bits of log-probabilities, requests of one side, and files that are no outputs."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import detspec as ds
from detspec.cli.commands import main
from detspec.generation.init import start_state
from detspec.jobs.comparison import Comparison, compare, first_differing
from detspec.jobs.convert_output import convert_output
from detspec.riders.counters import Stats
from tests.shelf import TABLE

NEXT = float(np.nextafter(np.float32(-0.5), np.float32(0.0)))  # the float32 after -0.5; 2 ** -25 above it


def completion(id: str, tokens: tuple[int, ...], logprobs: tuple[float, ...], text: str = "") -> ds.Completion:
    return ds.Completion(id, (5, 7), tokens, logprobs, text, "length", "", Stats())


A = completion("a", (1, 2, 3, 4), (-0.5, -0.5, -1.0, -2.0), "if x:")
B = completion("b", (7, 8), (-0.25, -0.125), "yes")
OTHER_A = replace(A, token_ids=(1, 2, 9, 4), logprobs=(-0.5, NEXT, -1.5, -2.0), text="if y:")


def line(found: ds.Completion, **changes: object) -> dict[str, object]:
    facts = {"id": found.id, "token_ids": found.token_ids, "text": found.text, "logprobs": found.logprobs, "prompt_len": 2}
    return {**facts, "finish_reason": "length", "digest": "", **changes}


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_fork_has_its_place_tokens_and_texts_and_log_probabilities_count_before_it():
    found = ds.compare([A, B], [B, OTHER_A])
    assert (found.equal, found.num_forks, found.num_logprobs, found.num_logprobs_differ) == (False, 1, 4, 1)
    text, unchanged = found.texts
    assert (text.name, text.num_tokens, unchanged.name, unchanged.fork) == ("a", (4, 4), "b", None)
    assert (text.fork.place, text.fork.token_ids, text.fork.texts) == (2, (3, 9), ("x:", "y:"))
    assert text.differs.tolist() == [False, True]
    assert text.differences.tolist() == [0.0, 2.0**-25]
    assert found.largest_difference == 2.0**-25


def test_outputs_of_the_same_bits_are_equal_and_one_bit_is_seen():
    assert compare([A, B], [B, A]).equal
    found = compare([A], [replace(A, logprobs=(-0.5, -0.5, -1.0, np.nextafter(np.float32(-2.0), np.float32(0.0))))])
    assert (found.equal, found.num_forks, found.num_logprobs_differ) == (False, 0, 1)


def test_signs_of_zero_and_what_is_no_number_count_as_bits():
    zeros = completion("z", (1, 2, 3), (0.0, float("nan"), float("nan")))
    found = compare([zeros], [replace(zeros, logprobs=(-0.0, float("nan"), -1.0))])
    assert found.texts[0].differs.tolist() == [True, False, True]
    assert found.texts[0].differences.tolist() == [0.0, 0.0, float("inf")]


def test_text_that_ends_earlier_forks_there():
    found = compare([A], [replace(A, token_ids=(1, 2), logprobs=(-0.5, -0.5), text="if")])
    assert found.texts[0].fork.token_ids == (3, None)
    assert str(found).splitlines()[-1] == "a        2              3 ' x:'         ends"


def test_requests_of_one_side_and_other_prompts_are_named_and_make_outputs_differ():
    found = compare([A, B], [A, completion("c", (1,), (-0.5,))])
    assert (found.only_a, found.only_b, found.equal) == (("b",), ("c",), False)
    asked_else = compare([A, B], [replace(A, prompt_token_ids=(5, 8)), replace(B, logprobs_mode="processed")])
    assert (asked_else.differing_prompts, asked_else.texts, asked_else.equal) == (("a", "b"), (), False)
    assert "other prompts, not compared    2: a, b" in str(asked_else)


def test_samples_are_told_apart_and_repeated_ids_are_matched_by_place(tmp_path: Path):
    samples = [A, replace(OTHER_A, index=1)]
    assert [text.name for text in compare(samples, samples[::-1]).texts] == ["a", "a[1]"]
    lines = write(tmp_path / "a.jsonl", line(samples[1], index=1), line(A, index=0))
    assert compare(samples, lines).equal
    found = compare([A, OTHER_A], [replace(A, id="0"), replace(OTHER_A, id="1"), B])
    assert ([text.name for text in found.texts], found.num_forks, found.only_b) == (["0", "1"], 0, ("2",))


def test_state_of_generate_is_compared_by_place():
    prompts = [(5, 4, 3), (5, 7)]
    sampling = [ds.SamplingParams(max_tokens=2)] * 2
    state = start_state(TABLE.cfg, prompts, sampling, eos_ids=(), max_len=TABLE.length, schedule=TABLE.schedule)
    ended = state.replace(
        tokens=state.tokens.at[1, 2:6].set(jnp.asarray(A.token_ids, jnp.int32)),
        logprobs=state.logprobs.at[1, 2:6].set(jnp.asarray(A.logprobs, jnp.float32)),
        committed=jnp.asarray([3, 6], jnp.int32),
    )
    others = [replace(completion("0", (), ()), prompt_token_ids=prompts[0]), replace(A, id="1")]
    assert compare(ended, others).equal
    assert compare(ended, [others[0], replace(OTHER_A, id="1")]).texts[1].fork.place == 2


def test_files_of_lines_and_parquet_files_have_the_bits_of_completions(tmp_path: Path):
    lines = write(tmp_path / "a.jsonl", line(A), line(B))
    convert_output(lines, tmp_path / "a.parquet")
    for path in (lines, str(tmp_path / "a.parquet")):
        assert compare(path, [A, B]).equal
        assert compare(path, [OTHER_A, B]).texts[0].fork.place == 2
    assert compare(lines, [A, B]).sides == (str(lines), "")


def test_command_prints_the_table_draws_and_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = write(tmp_path / "a.jsonl", line(A), line(B))
    second = write(tmp_path / "b.jsonl", line(OTHER_A), line(B, id="c"))
    assert main(["compare", str(first), str(first)]) == 0
    assert "log-probabilities that differ  0 of 6\n" in capsys.readouterr().out
    assert main(["compare", str(first), str(second), "--plot", str(tmp_path / "forks.png")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"a                              {first}",
        f"b                              {second}",
        "requests in both               1",
        "texts that differ              1",
        "log-probabilities that differ  1 of 2 before the forks",
        "largest |difference|           2.98e-08",
        "only in a                      1: b",
        "only in b                      1: c",
        "",
        "request  fork at token  a: token, text  b: token, text",
        "a        2              3 'x:'          9 'y:'",
    ]
    assert (tmp_path / "forks.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("def f", "out.jsonl line 1 is not JSON"),
        ('{"id": "a", "token_ids": [1]}', "record 1: lacks logprobs: lines that `detspec generate` wrote have them"),
        ('{"id": "a", "token_ids": [1], "logprobs": []}', "has 1 token_ids and 0 logprobs"),
        ('{"id": "a", "token_ids": [1], "logprobs": ["x"]}', "must be lists of numbers"),
    ],
)
def test_file_that_is_no_output_is_one_clear_error(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "out.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ds.InputError, match=message):
        compare(path, [A])


def test_missing_parquet_file_and_other_values_are_refused(tmp_path: Path):
    with pytest.raises(ds.InputError, match="there is no such file"):
        compare([A], tmp_path / "out.parquet")
    for bad in (A, None, [1], 5):
        with pytest.raises(ds.InputError, match="an output must be a list of completions"):
            compare(bad, [A])


def test_only_the_first_forks_are_shown():
    ours = [completion(str(i), (i,), (-0.5,)) for i in range(12)]
    lines = str(compare(ours, [replace(one, token_ids=(99,)) for one in ours])).splitlines()
    assert lines[-1] == "and 2 more"
    assert sum(row.endswith(" 99") for row in lines) == 10


def test_largest_difference_of_nothing_is_zero():
    assert Comparison(("", ""), (), (), (), ()).equal
    assert Comparison(("", ""), (), (), (), ()).largest_difference == 0.0


@pytest.mark.parametrize(("a", "b", "place"), [("", "", None), ("ab", "ab", None), ("ab", "ac", 1), ("a", "ab", 1)])
def test_first_differing_is_a_place_or_none(a: str, b: str, place: int | None):
    assert first_differing(a, b) == place
