"""The JSONL job: its files, how it ends early and goes on, what it refuses and never overwrites."""

import contextlib
import dataclasses
import io
import json
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from detspec.checkpoint.chat import ChatTemplate
from detspec.engine.agreement import Alone
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.jobs import job as jobs
from detspec.jobs import output
from detspec.jobs.dry_run import plan_job
from detspec.jobs.files import journal_path, shard_path, sibling
from detspec.jobs.generation import StopSignals
from detspec.jobs.job import Unfinished, stream_job
from detspec.jobs.journal import open_journal
from detspec.jobs.lines import completion_line, parse_line, parse_request, reject_line
from detspec.jobs.manifest import job_header
from detspec.jobs.merge import merge
from detspec.jobs.prompts import UNSHARDED, JobSpec, Prompts
from detspec.progress import Progress
from tests.engine.byte_model import SCHEDULE, broken_params, some_sampling, without_tokenizer
from tests.jobs.small_job import (
    DEFAULTS,
    WHOLE,
    Crash,
    by_id,
    crash_after,
    job,
    line,
    names,
    some_lines,
    some_lines_and_bad_ones,
    start,
)


def test_output_has_the_order_and_the_keys_it_promises(job_alone):
    found = [json.loads(text) for text in job_alone]
    assert [entry["id"] for entry in found] == [json.loads(text)["id"] for text in some_lines()]
    keys = ["id", "token_ids", "text", "logprobs", "finish_reason", "prompt_len", "digest"]
    assert all(list(entry) == keys for entry in found)
    assert found[0]["prompt_len"] == len("def f(x):\n    return 'é'".encode())
    assert [len(entry["token_ids"]) for entry in found[:2]] == [8, 8]


def test_conversation_is_rendered_and_continued(one_row, monkeypatch):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}", {})
    monkeypatch.setattr(one_row.device, "model", dataclasses.replace(one_row.model, chat_template=template))
    talk = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "    return 'é'"}]
    chat = line(id="text", messages=talk, chat_template_kwargs={"mark": "\n"})
    text = line(id="text", prompt="def f(x):\n    return 'é'\n")

    def read(raw):
        return parse_request(parse_line(0, raw), one_row.model, one_row.config, DEFAULTS)

    assert read(chat) == read(text)
    with pytest.raises(InputError, match=r"the conversation is empty.*\(id 'text'\)"):
        read(line(id="text", messages=[]))


def test_ids_are_integers_or_numbers_of_lines_where_there_are_none(three_rows, tmp_path):
    prompts = ["def f", "x = 1", "for", "while"]
    asked = [{"id": 7, "prompt": prompts[0]}, {"prompt": prompts[1]}, {"id": None, "prompt": prompts[2]}]
    named = [{"id": id, "prompt": prompt} for id, prompt in zip("712", prompts, strict=False)]
    found = job(three_rows, [line(**each) for each in asked], tmp_path / "out.jsonl")
    assert found == job(three_rows, [line(**each) for each in named], tmp_path / "named.jsonl")
    with pytest.raises(InputError, match="line 3: id '7' was already used on line 1"):
        job(three_rows, [line(**each) for each in (*asked[:2], {"id": "7", "prompt": "x"})], tmp_path / "again.jsonl")
    with pytest.raises(InputError, match="line 3: id '1' was already used on line 2"):
        job(three_rows, [line(**each) for each in (*asked[:2], {"id": 1, "prompt": "x"})], tmp_path / "again.jsonl")


def test_job_of_ordinary_requests_certifies_nothing_until_one_is_not(one_row, tmp_path):
    engine = Engine(one_row.model, one_row.config)
    lines = [line(id=str(i), prompt_token_ids=[i], sampling={"deterministic": False}) for i in range(3)]
    job(engine, lines, tmp_path / "out.jsonl")
    assert [plan.label for plan in engine.certificates] == ["ordinary[1]"]
    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        assert "1 to compile at most: ordinary[1]" in plan_job(engine, JobSpec(prompts, DEFAULTS), None)
    job(engine, [*lines, line(id="strict", prompt_token_ids=[1])], tmp_path / "out.jsonl")
    assert len(engine.certificates) > 1


def test_logprobs_in_the_output_keep_every_bit(one_row, job_alone):
    completions = one_row.generate([[1, 2, 3]], DEFAULTS)
    written = json.loads(job_alone[1])["logprobs"]
    assert np.asarray(written, np.float32).tobytes() == np.asarray(completions[0].logprobs, np.float32).tobytes()
    assert json.loads(completion_line(completions[0], 1))["logprobs"] == written


def test_statistics_and_manifest_lie_beside_the_output(three_rows, tmp_path):
    job(three_rows, some_lines(), tmp_path / "out.jsonl")
    assert names(tmp_path) == WHOLE
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    assert stats["num_requests"] == 8
    assert stats["num_tokens"] == 16 + sum(sampling.max_tokens for sampling in some_sampling(6))
    last = stats["last_start"]
    assert last["num_draft_tokens"] >= last["num_accepted_draft_tokens"] > 0
    assert last["tok_per_s"] > 0
    speculation = (
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "num_verify_passes",
        "num_rollbacks",
        "num_recomputed_tokens",
    )
    assert set(speculation) < set(last)
    assert last["num_tokens"] == stats["num_tokens"]
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["fingerprint"] == three_rows.fingerprint()
    assert manifest["sampling"]["max_tokens"] == 8
    assert manifest["engine"]["schedule"]["rows"] == SCHEDULE.budget.rows
    assert manifest["prompts"]["source"] == str(tmp_path / "in.jsonl")
    assert (manifest["prompts"]["num_requests"], manifest["shard"]) == (8, [0, 1])
    assert manifest["output"]["bytes"] == (tmp_path / "out.jsonl").stat().st_size


def test_statistics_count_this_job_alone(three_rows, tmp_path):
    counts = []
    for name in ("a.jsonl", "b.jsonl"):
        job(three_rows, some_lines()[:2], tmp_path / name)
        counts.append(json.loads(sibling(tmp_path / name, "stats").read_text())["last_start"]["num_verify_passes"])
    assert counts[0] == counts[1]


def test_request_with_logits_that_are_no_numbers_ends_in_error_and_spares_the_others(tmp_path):
    config = EngineConfig(max_requests=3, max_len=64, method="none", schedule=SCHEDULE)
    engine = Engine(without_tokenizer(broken_params(200)), config)
    prompts = {"a": [1, 2], "broken": [1, 2, 200], "b": [7], "c": [3] * 20, "broken too": [200], "d": [9]}

    def run(ids: list[str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
        result = start(engine, [line(id=id, prompt_token_ids=prompts[id]) for id in ids], tmp_path / "out.jsonl", fresh=True)
        return by_id((tmp_path / "out.jsonl").read_bytes().splitlines()), result.failed

    sound, failed = run([id for id in prompts if "broken" not in id])
    assert failed == ()
    beside_broken, failed = run(list(prompts))
    assert failed == ("broken", "broken too")
    assert {id: text for id, text in beside_broken.items() if id in sound} == sound
    errors = [json.loads(beside_broken[id]) for id in failed]
    assert [(entry["finish_reason"], entry["token_ids"], entry["logprobs"]) for entry in errors] == [("error", [], [])] * 2
    result = start(engine, [line(id=id, prompt_token_ids=prompts[id]) for id in prompts], tmp_path / "out.jsonl")
    assert (result.stats, result.num_failed) == ({}, 2)  # complete already, and still not a success


def test_stream_gives_the_same_bytes_and_leaves_nothing(three_rows, job_alone, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(some_lines()))
    file = io.BytesIO()
    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        stream_job(three_rows, JobSpec(prompts, DEFAULTS), file)
    assert file.getvalue().splitlines() == job_alone
    assert names(tmp_path) == ["in.jsonl"]


# Ended early, and started again ---------------------------------------------------------------------------------------------


def test_resumed_job_counts_its_tokens_apart_and_no_sample_twice(one_row, tmp_path, monkeypatch):
    """A sample of three is kept, so all three are generated again: of the bar's three, none was done before."""
    lines = [line(id="a", prompt_token_ids=[1], sampling={"n": 3, "temperature": 1.0})]
    crash_after(monkeypatch, 1)
    with pytest.raises(Crash):
        start(one_row, lines, tmp_path / "out.jsonl")
    monkeypatch.undo()
    shown = []
    leave = Progress.__exit__
    monkeypatch.setattr(Progress, "__exit__", lambda self, *how: shown.append((self._done, self.total)) or leave(self, *how))
    stats = start(one_row, lines, tmp_path / "out.jsonl").stats
    assert shown == [(3, 3)]
    assert 0 < stats["num_resumed"] < 3
    assert stats["num_tokens"] == stats["last_start"]["num_tokens"] == 24
    more = [*lines, line(id="b", prompt_token_ids=[2]), line(id="c", prompt_token_ids=[3])]
    crash_after(monkeypatch, 3)
    with pytest.raises(Crash):
        start(one_row, more, tmp_path / "more.jsonl")
    monkeypatch.undo()
    stats = start(one_row, more, tmp_path / "more.jsonl").stats
    assert 3 <= stats["num_resumed"] < 5
    assert stats["num_tokens"] == 40
    assert stats["last_start"]["num_tokens"] == stats["last_start"]["num_verify_passes"] == 8 * (5 - stats["num_resumed"])


def test_job_that_goes_on_with_other_sampling_or_other_prompts_is_refused(one_row, three_rows, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    crash_after(monkeypatch, 3)
    with pytest.raises(Crash):
        start(one_row, some_lines(), out)
    monkeypatch.undo()
    other = dataclasses.replace(DEFAULTS, seed=1)
    with pytest.raises(InputError, match=r"another job: sampling\.seed: journal has 0, this job has 1"):
        start(three_rows, some_lines(), out, defaults=other)
    with pytest.raises(InputError, match="another job: prompts: journal has"):
        start(three_rows, some_lines()[:4], out)
    sampled = dataclasses.replace(DEFAULTS, temperature=1.0)
    found = [job(three_rows, some_lines()[:2], out, defaults=dataclasses.replace(sampled, seed=seed)) for seed in (0, 1)]
    assert found[0] != found[1]  # other sampling is another job


def test_job_that_is_complete_is_left_as_it_is(three_rows, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    expected = job(three_rows, some_lines()[:2], out)
    before = out.stat().st_mtime_ns
    monkeypatch.setattr(Engine, "prepare", None)  # nothing is compiled
    assert start(three_rows, some_lines()[:2], out).stats == {}
    assert out.stat().st_mtime_ns == before
    monkeypatch.undo()
    changed = out.read_bytes()[:-2] + b"!\n"
    out.write_bytes(changed)
    with pytest.raises(InputError, match=r"out\.jsonl was changed since its job wrote it: .* --fresh"):
        start(three_rows, some_lines()[:2], out)
    assert out.read_bytes() == changed
    assert start(three_rows, some_lines()[:2], out, fresh=True).stats["num_resumed"] == 0
    assert out.read_bytes().splitlines() == expected


OTHER_JOBS = {
    r"sampling\.seed: it has 0, this job has 1": {"defaults": dataclasses.replace(DEFAULTS, seed=1)},
    "prompts: it has": {"lines": some_lines()[1:3]},
    "on_error: it has": {"on_error": "reject"},
    "created: it has null, this job has 5": {"created": 5},
}


@pytest.mark.parametrize("difference", OTHER_JOBS)
def test_output_of_another_job_is_left_as_it_is_unless_all_is_to_be_fresh(difference, three_rows, tmp_path):
    out = tmp_path / "out.jsonl"
    expected = job(three_rows, some_lines()[:2], out)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = {"lines": some_lines()[:2], "out": out, **OTHER_JOBS[difference]}
    with pytest.raises(InputError, match=rf"is the output of another job: .*{difference}.* --fresh"):
        start(three_rows, **other)
    with pytest.raises(InputError, match="is the output of another job"):
        planned(three_rows, other, out)
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {**found, "in.jsonl": b""} == {**kept, "in.jsonl": b""}
    start(three_rows, fresh=True, **other)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} != kept
    assert job(three_rows, some_lines()[:2], out) == expected


def planned(engine: Engine, job: dict, out: Path) -> str:
    with Prompts(str(out.parent / "in.jsonl")) as prompts:
        spec = JobSpec(
            prompts, job.get("defaults", DEFAULTS), UNSHARDED, job.get("on_error", "stop"), False, job.get("created")
        )
        return plan_job(engine, spec, out)


def test_start_that_may_write_over_another_output_is_resumed_without_saying_so_again(three_rows, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    other = dataclasses.replace(DEFAULTS, temperature=1.0, seed=1)
    expected = job(three_rows, some_lines(), out, defaults=other)
    job(three_rows, some_lines(), out)
    crash_after(monkeypatch, 3)
    with pytest.raises(Crash):
        start(three_rows, some_lines(), out, defaults=other, fresh=True)
    monkeypatch.undo()
    assert start(three_rows, some_lines(), out, defaults=other).stats["num_resumed"] > 0
    assert out.read_bytes().splitlines() == expected


@pytest.mark.parametrize("name", ["out.jsonl", "out.manifest.json", "out.stats.json", "out.errors.jsonl", "out.rejects.jsonl"])
def test_file_that_no_job_wrote_is_left_as_it_is_unless_all_is_to_be_fresh(name, three_rows, tmp_path):
    path = tmp_path / name
    path.write_text('{"id": "mine"}\n')
    with pytest.raises(InputError, match=rf"{name} is there already, and no manifest says that a job wrote it: .* --fresh"):
        start(three_rows, some_lines()[:2], tmp_path / "out.jsonl")
    assert path.read_text() == '{"id": "mine"}\n'
    assert start(three_rows, some_lines()[:2], tmp_path / "out.jsonl", fresh=True).stats["num_requests"] == 2
    assert not path.exists() or path.read_text() != '{"id": "mine"}\n' or "errors" in name


def test_file_that_looks_like_rejects_is_left_as_it_is_in_the_place_of_the_output(three_rows, tmp_path):
    out = tmp_path / "out.jsonl"
    mine = reject_line(1, "is not JSON", b"{")
    out.write_bytes(mine)
    with pytest.raises(InputError, match=r"out\.jsonl is there already, and no manifest says that a job wrote it"):
        start(three_rows, some_lines()[:2], out)
    assert out.read_bytes() == mine


def test_files_of_an_output_that_was_moved_away_are_left_as_they_are_but_by_its_own_job(three_rows, tmp_path):
    out = tmp_path / "out.jsonl"
    expected = job(three_rows, some_lines()[:2], out)
    out.rename(tmp_path / "final.jsonl")
    kept = {what: sibling(out, what).read_bytes() for what in ("manifest", "stats")}
    with pytest.raises(InputError, match=r"out\.jsonl is gone, but .*manifest\.json is there, .*seed: it has 0, .* --fresh"):
        start(three_rows, some_lines()[:2], out, defaults=dataclasses.replace(DEFAULTS, seed=1))
    assert {what: sibling(out, what).read_bytes() for what in kept} == kept
    assert job(three_rows, some_lines()[:2], out) == expected


class First(Alone):
    """The first of several processes, and what it says."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def exchange(self, content: bytes) -> list[bytes]:
        self.said.append(content)
        return [content]


class Other(Alone):
    """Another process, which hears what the first has said."""

    is_first = False

    def __init__(self, said: list[bytes]) -> None:
        self._said = iter(said)

    def exchange(self, content: bytes) -> list[bytes]:
        return [next(self._said), content]


@pytest.mark.parametrize("refusal", ["is there already", "is the journal of another job|is in use"])
def test_refusal_of_the_first_process_ends_the_others_with_its_words(refusal, three_rows, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    lines = some_lines()[:2]
    with contextlib.ExitStack() as stack:
        if refusal == "is there already":
            out.write_text("mine")
        else:
            stack.enter_context(journal_in_use(three_rows, lines, out))
        first = First()
        errors = []
        for agreement in (first, Other(first.said)):
            monkeypatch.setattr(three_rows, "agreement", agreement)
            with pytest.raises(InputError, match=refusal) as caught:
                start(three_rows, lines, out)
            errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert len(first.said) == 2


@contextlib.contextmanager
def journal_in_use(engine: Engine, lines: list[bytes], out: Path):
    """The journal of the job of `lines`, held by another start of it."""
    source = out.parent / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    with Prompts(str(source)) as prompts, open_journal(journal_path(out), job_header(engine, JobSpec(prompts, DEFAULTS))):
        yield


def test_empty_file_and_rejects_of_a_start_that_ended_early_hold_up_nothing(three_rows, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.touch()
    with monkeypatch.context() as killed:
        killed.setattr(jobs, "fill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(three_rows, some_lines_and_bad_ones(), out, on_error="reject")
    assert sibling(out, "rejects").stat().st_size
    assert not journal_path(out).exists()
    assert start(three_rows, some_lines_and_bad_ones(), out, on_error="reject").num_rejected == 3


def test_job_killed_before_its_last_act_removes_the_journal_when_started_again(three_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("detspec.jobs.journal.Journal.remove", lambda journal: None)
    job(three_rows, some_lines()[:2], tmp_path / "out.jsonl")
    assert "out.jsonl.journal" in names(tmp_path)
    monkeypatch.undo()
    assert start(three_rows, some_lines()[:2], tmp_path / "out.jsonl").stats == {}
    assert names(tmp_path) == WHOLE


def test_signal_ends_the_job_after_its_segment_and_the_same_command_resumes(three_rows, job_alone, tmp_path, monkeypatch):
    shown = Progress.segment

    def send(self, *args, **keywords):
        shown(self, *args, **keywords)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Progress, "segment", send)
    with StopSignals() as signals, pytest.raises(Unfinished) as caught:
        start(three_rows, some_lines(), tmp_path / "out.jsonl", signals=signals)
    monkeypatch.undo()
    assert caught.value.exit_code == 143
    kept = journal_path(tmp_path / "out.jsonl").read_bytes().count(b"\n") - 1
    assert f"stopped by SIGTERM: {kept} of 8 completions are kept in {tmp_path}/out.jsonl.journal" in str(caught.value)
    assert start(three_rows, some_lines(), tmp_path / "out.jsonl").stats["num_resumed"] == kept > 0
    assert (tmp_path / "out.jsonl").read_bytes().splitlines() == job_alone


@contextlib.contextmanager
def full_disk(num_bytes: int):
    """No file may be larger than that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_ends_the_job_and_nothing_finished_is_lost(three_rows, job_alone, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    with full_disk(4000), pytest.raises(Unfinished) as caught:
        start(three_rows, some_lines(), out)
    kept = sum(entry.endswith(b"}\n") for entry in journal_path(out).read_bytes().splitlines(keepends=True)) - 1
    assert 0 < kept < 8
    assert f"cannot write {out}: File too large: {kept} of 8 completions are kept in {out}.journal" in str(caught.value)
    assert caught.value.exit_code == 3

    put_together = jobs.put_together

    def put_together_on_a_full_disk(*args, **keywords):
        with full_disk(1000):
            return put_together(*args, **keywords)

    monkeypatch.setattr(jobs, "put_together", put_together_on_a_full_disk)
    with pytest.raises(Unfinished, match="8 of 8 completions are kept"):
        start(three_rows, some_lines(), out)
    assert names(tmp_path) == ["in.jsonl", "out.jsonl.journal"]
    monkeypatch.undo()
    assert start(three_rows, some_lines(), out).stats["num_resumed"] == 8
    assert out.read_bytes().splitlines() == job_alone


def test_what_a_kill_left_of_new_files_is_gone_after_the_next_start(three_rows, job_alone, tmp_path, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda *_, **__: None)  # a process that is killed deletes nothing
        killed.setattr(output, "pretty_json", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(three_rows, some_lines(), tmp_path / "out.jsonl")
    theirs = tmp_path / ".other.jsonl.01234567.tmp"
    theirs.touch()
    assert len(names(tmp_path)) == len(["in.jsonl", "out.jsonl.journal", theirs.name]) + 3
    start(three_rows, some_lines(), tmp_path / "out.jsonl")
    assert names(tmp_path) == sorted([*WHOLE, theirs.name])
    assert (tmp_path / "out.jsonl").read_bytes().splitlines() == job_alone


# Lines that are rejected, shards, plans -------------------------------------------------------------------------------------


def test_rejected_lines_lie_beside_the_output_and_change_nothing_else(three_rows, job_alone, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(InputError, match="line 2: is not JSON"):
        start(three_rows, some_lines_and_bad_ones(), out)
    assert "out.jsonl" not in names(tmp_path)
    result = start(three_rows, some_lines_and_bad_ones(), out, on_error="reject", fresh=True)
    assert result.num_rejected == result.stats["num_rejected"] == 3
    assert out.read_bytes().splitlines() == job_alone
    rejected = [json.loads(text) for text in sibling(out, "rejects").read_bytes().splitlines()]
    assert [entry["line"] for entry in rejected] == [2, 8, 10]
    again = start(three_rows, some_lines_and_bad_ones(), out, on_error="reject")
    assert (again.stats, again.num_rejected) == ({}, 3)
    job(three_rows, some_lines(), out)
    assert not sibling(out, "rejects").exists()


def test_shards_that_do_not_belong_together_are_not_merged(three_rows, tmp_path):
    out, single = tmp_path / "out.jsonl", tmp_path / "single.jsonl"
    start(three_rows, some_lines_and_bad_ones(), single, on_error="reject")
    paths = [shard_path(out, index, 4) for index in range(4)]
    for index, path in enumerate(paths):
        start(three_rows, some_lines_and_bad_ones(), path, on_error="reject", shard=(index, 4))
    merge(out)
    out.write_text("mine")
    with pytest.raises(InputError, match=r"out\.jsonl was changed since its job wrote it"):
        merge(out)
    merge(out, fresh=True)
    assert out.read_bytes() == single.read_bytes()

    # What is wrong with shards: each of these is put right before the next.
    def refused(message: str, shards: tuple[Path, ...] = ()) -> None:
        with pytest.raises(InputError, match=message):
            merge(out, shards)
        assert out.read_bytes() == single.read_bytes()

    content = paths[1].read_bytes()
    paths[1].write_bytes(content.replace(b"length", b"lengty", 1))
    refused("00001-of-00004.jsonl was changed since")
    paths[1].unlink()
    refused(r"shards 1 of 4 are missing: run them with --shard 1/4")
    refused("is not a finished shard", (paths[0], paths[1]))
    paths[1].write_bytes(content)
    refused("two of the files are the same shard", (*paths, paths[0]))
    journal_path(paths[3]).touch()
    refused("00003-of-00004.jsonl is not finished, ")
    journal_path(paths[3]).unlink()
    shard_path(out, 0, 2).touch()
    refused("has shards of 2 and of 4: remove")
    refused("00000-of-00002.jsonl is not a finished shard", (shard_path(out, 0, 2),))
    start(three_rows, some_lines(), shard_path(out, 0, 2), shard=(0, 2), defaults=dataclasses.replace(DEFAULTS, seed=1))
    refused(
        "not of one job: sampling.seed: .*4.jsonl has 0, .*2.jsonl has 1; on_error: .*; prompts: .*; shard: .* has 4, .* has 2",
        (paths[0], shard_path(out, 0, 2)),
    )
    with pytest.raises(
        InputError, match=r"there are no shards of .*: expected files like .*none.00000-of-00004.jsonl, or .*none.jsonl.chunks"
    ):
        merge(tmp_path / "none.jsonl")


def test_shard_without_lines_is_an_empty_output(three_rows, tmp_path):
    paths = [shard_path(tmp_path / "out.jsonl", index, 3) for index in range(3)]
    for index, path in enumerate(paths):
        assert start(three_rows, some_lines()[:2], path, shard=(index, 3)).num_failed == 0
    assert [path.read_bytes().count(b"\n") for path in paths] == [0, 1, 1]
    assert merge(tmp_path / "out.jsonl")["num_requests"] == 2


def test_plan_of_a_job_says_what_it_takes_and_writes_nothing(three_rows, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    crash_after(monkeypatch, 1)
    with pytest.raises(Crash):
        start(three_rows, some_lines(), out)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    kept = before[journal_path(out)].count(b"\n") - 1
    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        spec = JobSpec(prompts, DEFAULTS)
        plan = dict(text.split("  ", 1) for text in plan_job(three_rows, spec, out).splitlines())
        plan = {name.strip(): value.strip() for name, value in plan.items()}
        fresh = plan_job(three_rows, spec, None)
        with pytest.raises(InputError, match="another job: on_error"):
            plan_job(three_rows, dataclasses.replace(spec, on_error="reject"), out)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert plan["kept"] == f"{kept} of 8 completions"
    assert "0 of 8 completions" in fresh
    assert plan["requests"] == "8 of 8 lines (shard 0/1)"
    num_bytes = 2 * 1 * (1 + 12) * 16 * 2 * 16 * 4  # keys and values, layers, pages, slots, heads, head dimension, float32
    assert plan["cache"].startswith(f"{num_bytes:,} bytes, 12 pages of 16 slots")
    num_new = 16 + sum(sampling.max_tokens for sampling in some_sampling(6))
    assert plan["new tokens"] == f"at most {num_new}, at most 29 each"
