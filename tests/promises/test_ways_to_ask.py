"""Bits of a request do not depend on the way to ask: generated, streamed, scored, audited.

The controls ask for ordinary generation, which no pass verifies: scores of its texts have other bits, and an audit does not
reproduce its records.
"""

import pytest

from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import SCHEDULE, ordinary
from tests.engine.scored import PROMPTS, SAMPLING, bits, texts_of
from tests.jobs.audited import audit, make_job, prompt_lines, read_lines, rename_prompts, write_lines


@pytest.mark.optimised
@pytest.mark.parametrize("engine_name", ["one_row", "three_rows"])
def test_stream_pieces_join_to_the_completion(engine_name, one_row, request):
    """At temperature 1.2 most tokens are no text, so there is much U+FFFD in it."""
    sampling = SamplingParams(max_tokens=29, temperature=1.2, seed=5)
    completion = one_row.generate(["def "], sampling)[0]
    pieces = list(request.getfixturevalue(engine_name).stream("def ", sampling))
    assert len(pieces) > 3
    assert sum((piece.token_ids for piece in pieces), ()) == completion.token_ids
    assert sum((piece.logprobs for piece in pieces), ()) == completion.logprobs
    assert "".join(piece.text for piece in pieces) == completion.text


def test_scores_have_the_bits_of_generation_in_any_batch_and_order(written, one_row, three_rows, eight_rows):
    texts, starts = texts_of(written)
    for engine in (one_row, three_rows, eight_rows):
        scored = engine.score(texts, starts)
        assert bits(scored) == bits(written)
        assert bits(engine.score(texts[::-1], starts[::-1]))[::-1] == bits(written)
        assert {c.finish_reason for c in scored} == {"given"}
        assert [c.index for c in scored] == [0] * len(texts)
        assert engine.num_pages_held == 0
        assert not engine.has_work


def test_control_scores_differ_from_ordinary_generation_somewhere(one_row, eight_rows):
    unverified = [ordinary(sampling) for sampling in SAMPLING]
    differs = []
    for engine in (one_row, eight_rows):
        completions = engine.generate(PROMPTS, unverified)
        differs.append(bits(engine.score(*texts_of(completions))) != bits(completions))
    assert any(differs)


@pytest.mark.usefixtures("one_program")
def test_sound_records_reproduce(model, three_rows, tmp_path):
    out = make_job(three_rows, tmp_path, prompt_lines())
    report = audit(model, tmp_path)
    assert report.reproduced
    assert (report.num_records, report.num_ordinary, report.differences, report.machine) == (7, 0, [], [])
    assert report.num_tokens == sum(len(line["token_ids"]) for line in read_lines(out))


@pytest.mark.usefixtures("one_program")
def test_control_ordinary_records_are_counted_apart_and_caught_when_they_claim_to_be_deterministic(model, one_row, tmp_path):
    """Which batches differ depends on the device."""
    lines = prompt_lines(8)
    for line in lines:
        line.setdefault("sampling", {})["deterministic"] = False
    config = EngineConfig(max_requests=3, max_len=64, method="none", schedule=SCHEDULE)
    for engine in (one_row, Engine(model, config)):
        make_job(engine, tmp_path, lines)
        report = audit(model, tmp_path)
        assert report.reproduced
        assert (report.num_records, report.num_ordinary) == (0, 9)
        write_lines(tmp_path / "in.jsonl", [{**x, "sampling": {**x["sampling"], "deterministic": True}} for x in lines])
        rename_prompts(tmp_path)
        claimed = audit(model, tmp_path)
        assert len(claimed.differences) == 9
        # The others' bits are canonical by chance; their digest is of another request.
        with_other_bits = [found for found in claimed.differences if found.position is not None]
        assert len(with_other_bits) == 9 - report.num_ordinary_reproduced
        if with_other_bits:
            return
    pytest.fail("ordinary generation gave the canonical bits in every batch: the comparisons of this file show nothing")
