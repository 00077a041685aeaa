"""Workers without fixed shards: one output whatever happens to them, and hardly more time than the work takes."""

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import ClassVar

import pytest

from detspec.errors import InputError
from detspec.jobs.chunk_folder import ChunkFolder, ChunkTask, Claim, View, chunk_folder, host_of, worker_name
from detspec.jobs.chunks import choose, choose_to_help, cut, is_to_check, left_to, load, may_check
from detspec.jobs.files import sibling
from detspec.jobs.generation import StopSignals
from detspec.jobs.job import Unfinished, run_job
from detspec.jobs.merge import merge
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.jobs.worker import WorkerOptions, run_worker
from detspec.progress import Progress
from detspec.sampling_params import SamplingParams
from tests.jobs.paced import PacedEngine, World, WorldClock, ideal_seconds

DEFAULTS = SamplingParams(max_tokens=8)
HORIZON = 1e6
NUM_LINES = 400


def write_prompts(folder: Path, number: int = NUM_LINES) -> tuple[Path, int]:
    """A file of requests of 1 to 16 tokens, some of three samples; and all tokens together."""
    rng = random.Random(number)
    num_tokens = 0
    lines = []
    for i in range(number):
        sampling = {"max_tokens": rng.randint(1, 16), "n": 3 if i % 50 == 7 else 1}
        num_tokens += sampling["max_tokens"] * sampling["n"]
        lines.append(json.dumps({"id": f"r{i}", "prompt_token_ids": [i % 97], "sampling": sampling}))
    path = folder / "in.jsonl"
    path.write_text("\n\n".join(lines) + "\n")
    return path, num_tokens


def whole(prompts: Path, **changes) -> dict[str, bytes]:
    """The files of one job without workers."""
    out = prompts.parent / "whole.jsonl"
    with Prompts(str(prompts)) as opened:
        run_job(PacedEngine(lambda seconds: None), JobSpec(opened, DEFAULTS, **changes), out)
    return files_of(out)


def files_of(out: Path) -> dict[str, bytes]:
    paths = {"out": out, "rejects": sibling(out, "rejects"), "manifest": sibling(out, "manifest")}
    return {name: path.read_bytes() for name, path in paths.items() if path.exists()}


class Job:
    """A job in a world."""

    def __init__(self, prompts: Path) -> None:
        self.prompts = prompts
        self.out = prompts.parent / "out.jsonl"
        self.folder = chunk_folder(self.out)
        self.world = World(self.folder)
        self.engines: dict[str, PacedEngine] = {}

    def worker(
        self, name: str, speed: float = 1.0, *, at: float = 0.0, wrong: str = "", spec=(), signals=None, **options
    ) -> None:
        engine = PacedEngine(lambda seconds: self.world.sleep(name, seconds), speed=speed, wrong=wrong)
        self.engines[name] = engine
        chosen = WorkerOptions(name=name, clock=WorldClock(self.world, name), has_heartbeat=False, **options)

        def work() -> None:
            with Prompts(str(self.prompts)) as opened:
                run_worker(engine, JobSpec(opened, DEFAULTS, **dict(spec)), self.out, chosen, signals=signals)

        self.world.add(name, work, at=at)

    def merged(self) -> dict:
        """Statistics of the merged output."""
        return merge(self.out)

    @property
    def num_added(self) -> int:
        return sum(engine.num_added for engine in self.engines.values())


# One output, in hardly more time than the work takes -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 6))])
def test_eight_unequal_workers_three_killed_one_frozen_take_no_more_than_115_percent_of_ideal(seed, tmp_path):
    """Speeds 1 to 4, killed and frozen at random moments; twelve such jobs took 1.02 to 1.05 of ideal."""
    prompts, num_tokens = write_prompts(tmp_path, 1500)
    job = Job(prompts)
    rng = random.Random(seed)
    speeds = {f"host{i}-1-a": 1 + 3 * i / 7 for i in range(8)}
    for name, speed in speeds.items():
        job.worker(name, speed)
    *victims, frozen = rng.sample(list(speeds), 4)
    about = num_tokens / 4 / sum(speeds.values())
    killed = {name: rng.uniform(0, about) for name in victims}
    for name, moment in killed.items():
        job.world.kill(name, moment)
    begin = rng.uniform(0, about)
    end = begin + rng.uniform(0, about / 2)
    job.world.freeze(frozen, begin, end)
    ended = job.world.run()
    spans = [(speed, 0.0, killed.get(name, HORIZON)) for name, speed in speeds.items() if name != frozen]
    spans += [(speeds[frozen], 0.0, begin), (speeds[frozen], end, HORIZON)]
    assert set(ended) == set(speeds) - set(killed)
    assert max(ended.values()) <= 1.15 * ideal_seconds(num_tokens, 4, spans)
    stats = job.merged()
    assert (stats["num_tokens"], stats["num_requests"]) == (num_tokens, 1500)
    assert files_of(job.out) == whole(prompts)
    assert sum(engine.num_tokens for engine in job.engines.values()) <= 1.05 * num_tokens
    job.world.bury()
    assert files_of(job.out) == whole(prompts)


def test_ideal_time_is_that_of_the_worked_example():
    assert ideal_seconds(1600, 4, [(1, 0, HORIZON), (3, 0, HORIZON)]) == 100
    assert ideal_seconds(1600, 4, [(1, 0, HORIZON), (3, 0, 50)]) == 250


def test_one_worker_alone_gives_the_files_of_a_job(tmp_path):
    prompts, num_tokens = write_prompts(tmp_path, 40)
    job = Job(prompts)
    job.worker("a-1-a")
    job.world.run()
    job.merged()
    assert files_of(job.out) == whole(prompts)
    assert job.num_added == 40
    assert job.engines["a-1-a"].num_tokens == num_tokens


def test_engine_stays_full_from_chunk_to_chunk(tmp_path):
    """With chunks of one line, a worker that waited for each would take four times as long."""
    prompts, num_tokens = write_prompts(tmp_path, 150)
    job = Job(prompts)
    job.worker("a-1-a", chunk_lines=1)
    (ended,) = job.world.run().values()
    assert ended <= num_tokens / 4 + 16


def test_idle_workers_help_a_straggler(tmp_path):
    """Without help the slow worker needs 16 s for each token of the first eight requests it takes."""
    prompts, num_tokens = write_prompts(tmp_path, 100)
    job = Job(prompts)
    job.worker("slow-1-a", speed=1 / 16)
    job.worker("fast-1-a", speed=4)
    ended = job.world.run()
    assert ended["fast-1-a"] <= 1.3 * num_tokens / 16
    job.merged()
    assert files_of(job.out) == whole(prompts)


def test_chunks_of_a_killed_worker_are_taken_together(tmp_path):
    """Eight requests of 60 tokens are left, for four places at 20 tokens a second: 6 s, not 2 s for each."""
    lines = [json.dumps({"id": f"r{i}", "prompt_token_ids": [i], "sampling": {"max_tokens": 60}}) for i in range(16)]
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    job = Job(prompts)
    for name in ("a-1-a", "b-1-a"):
        job.worker(name, speed=20)
    job.world.kill("b-1-a", 1.0)
    ended = job.world.run()
    assert ended["a-1-a"] <= 6 + 6 + 2
    job.merged()
    assert files_of(job.out) == whole(prompts)
    job.world.bury()


def test_worker_that_is_told_to_stop_hands_its_chunks_over_at_once(tmp_path):
    prompts, num_tokens = write_prompts(tmp_path)
    job = Job(prompts)
    signals = StopSignals()

    def stopped() -> None:
        engine = PacedEngine(lambda seconds: job.world.sleep("a-1-a", seconds))
        options = WorkerOptions(name="a-1-a", clock=WorldClock(job.world, "a-1-a"))
        with Prompts(str(prompts)) as opened:
            spec = JobSpec(opened, DEFAULTS)
            with pytest.raises(Unfinished, match=r"stopped by SIGTERM.*other workers go on") as caught:
                run_worker(engine, spec, job.out, options, signals=signals)
        assert caught.value.exit_code == 143

    job.world.add("a-1-a", stopped)
    job.world.at(100.0, lambda: signals.take(15))
    job.worker("b-1-a", at=101.0)
    ended = job.world.run()
    assert not (job.folder / "a-1-a.alive").exists()
    assert ended["b-1-a"] <= 101 + (num_tokens - 380) / 4 + 16  # about 400 tokens were kept
    job.merged()
    assert files_of(job.out) == whole(prompts)


def test_all_killed_and_started_again_loses_nothing_that_was_finished(tmp_path):
    prompts, num_tokens = write_prompts(tmp_path)
    job = Job(prompts)
    for start in range(4):
        for host in "ab":
            job.worker(f"{host}-{start}-x", at=start * 200.0)
            if start < 3:
                job.world.kill(f"{host}-{start}-x", start * 200.0 + 100)
    job.world.run()
    done = sum(engine.num_tokens for engine in job.engines.values())
    assert num_tokens < done <= num_tokens + 3 * 2 * 4 * 16  # at most what was in flight six times
    job.merged()
    assert files_of(job.out) == whole(prompts)
    job.world.bury()


def test_woken_worker_after_the_end_changes_nothing(tmp_path):
    prompts, _ = write_prompts(tmp_path, 100)
    job = Job(prompts)
    job.worker("a-1-a")
    job.worker("b-1-a", speed=2)
    job.world.freeze("a-1-a", 20.0, 5000.0)
    merged = {}
    job.world.at(4000.0, lambda: merged.update(files_of(job.out) if job.merged() else {}))
    ended = job.world.run()
    assert ended["b-1-a"] < 4000 < 5000 <= ended["a-1-a"]
    assert merged == files_of(job.out) == whole(prompts)
    job.merged()
    assert files_of(job.out) == merged


def test_rejected_lines_are_those_of_a_job(tmp_path):
    prompts, _ = write_prompts(tmp_path, 60)
    lines = prompts.read_text().splitlines()
    prompts.write_text("\n".join([*lines[:9], "{", *lines[9:], '{"id": "r3", "prompt_token_ids": [1]}']))
    job = Job(prompts)
    for name in ("a-1-a", "b-1-a"):
        job.worker(name, spec={"on_error": "reject"})
    job.world.run()
    assert job.merged()["num_rejected"] == 2
    assert files_of(job.out) == whole(prompts, on_error="reject")


# What is done twice ---------------------------------------------------------------------------------------------------------


def test_double_check_does_a_share_of_the_chunks_at_another_worker(tmp_path):
    prompts, _ = write_prompts(tmp_path, 200)
    job = Job(prompts)
    for name in ("a-1-a", "b-1-a"):
        job.worker(name, double_check=0.25, chunk_lines=2)
    job.world.run()
    with Prompts(str(prompts)) as opened:
        chosen = {chunk for chunk in range(100) if is_to_check(chunk, 0.25, opened.sha256)}
    assert 10 < len(chosen) < 40
    assert {int(path.name[:7]) for path in job.folder.glob("*.checked")} == chosen
    for chunk in chosen:
        first, second = (json.loads((job.folder / f"{chunk:07}.{kind}").read_bytes()) for kind in ("done", "checked"))
        assert len(second) == 1
        assert first != second
    stats = job.merged()
    counts = load(job.folder, 2)
    assert stats["num_compared"] >= sum(counts.num_outputs(chunk) for chunk in chosen)
    assert files_of(job.out) == whole(prompts)


@pytest.mark.parametrize("lost", ["kill", "freeze", ""])
def test_checks_are_done_whatever_becomes_of_the_other_host(lost, tmp_path):
    """Three workers share a host; the other host is lost, or frozen for a while, or much slower."""
    prompts, num_tokens = write_prompts(tmp_path, 200)
    job = Job(prompts)
    for name in ("a-1-x", "a-2-y", "a-3-z"):
        job.worker(name, double_check=1.0, chunk_lines=4)
    job.worker("b-1-x", 1.0 if lost else 0.1, double_check=1.0, chunk_lines=4)
    middle = num_tokens / 6
    if lost == "kill":
        job.world.kill("b-1-x", middle)
    elif lost == "freeze":
        job.world.freeze("b-1-x", middle, middle + 200)
    job.world.run()
    if lost == "kill":
        job.world.bury()
    assert len(list(job.folder.glob("*.checked"))) == 50
    for path in job.folder.glob("*.checked"):
        assert set(json.loads(path.read_bytes())).isdisjoint(json.loads(path.with_suffix(".done").read_bytes()))
    job.merged()
    assert files_of(job.out) == whole(prompts)


class Waiting(Progress):
    """Notes what each worker says that it waits for."""

    said: ClassVar[dict[str, list[str]]] = {}

    def waits(self, for_what: str) -> None:
        super().waits(for_what)
        self.said.setdefault(self._worker, []).append(for_what)


def test_worker_that_waits_says_who_has_the_chunks(tmp_path, monkeypatch):
    """All is checked on another host. The fast worker does what it may, and waits for the checks of the slow one."""
    monkeypatch.setattr("detspec.jobs.worker.Progress", Waiting)
    monkeypatch.setattr(Waiting, "said", {})
    prompts, _ = write_prompts(tmp_path, 12)
    job = Job(prompts)
    for name, speed in (("a-1-a", 0.05), ("b-1-a", 4.0)):
        job.worker(name, speed, double_check=1.0, chunk_lines=3)
    job.world.run()
    assert any(" at a-1-a" in text for text in Waiting.said["b-1-a"])
    assert not any("b-1-a" in text for text in Waiting.said["b-1-a"])


def test_what_is_left_to_others_is_counted_by_worker():
    """Chunk 0 is done; of the others two live workers have 1, one of them 2; a dead one has 3, none has the check of 0."""
    claims = {1: ("b", "c"), 2: ("b",), 3: ("dead",), 4: ("a", "c")}
    live = frozenset("abc")
    claimed = {ChunkTask(n): tuple(Claim(name, 0, name in live) for name in names) for n, names in claims.items()}
    view = View({ChunkTask(0)}, claimed, live)
    tasks = [*map(ChunkTask, range(5)), ChunkTask(0, is_check=True)]
    assert left_to(view, tasks, "a") == "5 chunks: 2 at b, 2 at c, 2 to be taken"
    assert left_to(view, tasks[:3], "c") == "2 chunks: 2 at b"
    assert left_to(view, tasks[2:3], "a") == "1 chunk: 1 at b"


class Counting(Progress):
    """Notes how far each worker's bar came, and that it never shows more than there is."""

    furthest: ClassVar[list[tuple[int, int]]] = []

    def finished(self, number: int = 1) -> None:
        super().finished(number)
        assert 0 <= self._done <= self.total
        assert number >= 0

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.furthest.append((self._done, self.total))


def test_lines_that_are_done_twice_are_counted_once(tmp_path, monkeypatch):
    """Fast workers help a slow one with what it has in flight, and all chunks are checked."""
    monkeypatch.setattr("detspec.jobs.worker.Progress", Counting)
    monkeypatch.setattr(Counting, "furthest", [])
    prompts, _ = write_prompts(tmp_path, 60)
    job = Job(prompts)
    for name, speed in (("a-1-a", 0.1), ("b-1-a", 4.0), ("c-1-a", 5.0)):
        job.worker(name, speed, double_check=1.0, chunk_lines=6)
    job.world.run()
    num_outputs = job.merged()["num_requests"] + 2 * 2  # two lines have three samples
    assert job.num_added > 2 * 60  # done and checked, and helped with
    assert Counting.furthest == [(num_outputs, num_outputs)] * 3


def test_worker_alone_checks_itself(tmp_path):
    prompts, _ = write_prompts(tmp_path, 50)
    job = Job(prompts)
    job.worker("a-1-a", double_check=1.0)
    job.world.run()
    assert job.num_added == 100
    assert job.merged()["num_compared"] == 50 + 2  # one line has three samples


@pytest.mark.parametrize("wrong", ["", "r30"])
def test_merge_names_host_chunk_and_line_that_differ(wrong, tmp_path):
    """Without the fault, the same job is merged."""
    prompts, _ = write_prompts(tmp_path, 100)
    job = Job(prompts)
    job.worker("good-1-a", double_check=1.0, chunk_lines=4)
    job.worker("bad-2-b", double_check=1.0, chunk_lines=4, wrong=wrong)
    job.world.run()
    if not wrong:
        job.merged()
        assert files_of(job.out) == whole(prompts)
        return
    with pytest.raises(
        InputError, match=r"1 lines were done twice.*id 'r30' \(line 30, chunk 7\): .*(good and bad|bad and good)"
    ):
        job.merged()
    assert not job.out.exists()
    (job.folder / "bad-2-b.journal").unlink()
    again = Job(prompts)
    again.worker("third-3-c", at=0.0)
    again.world.run()
    again.merged()
    assert files_of(again.out) == whole(prompts)


# What is refused ------------------------------------------------------------------------------------------------------------


def test_merge_of_an_unfinished_job_is_refused_and_lost_journals_are_done_again(tmp_path):
    prompts, _ = write_prompts(tmp_path, 100)
    job = Job(prompts)
    with pytest.raises(InputError, match=r"has no job\.json"):
        job.folder.mkdir() or job.merged()
    job.worker("a-1-a")
    job.worker("b-1-a")
    job.world.kill("a-1-a", 30.0)
    job.world.kill("b-1-a", 30.0)
    job.world.run()
    with pytest.raises(InputError, match=r"\d+ of 104 completions are missing .*: start a worker again"):
        job.merged()
    job.world.bury()
    (job.folder / "b-1-a.journal").unlink()
    again = Job(prompts)
    again.worker("c-1-a")
    again.world.run()
    again.merged()
    assert files_of(again.out) == whole(prompts)


def test_worker_of_another_job_is_refused(tmp_path):
    prompts, _ = write_prompts(tmp_path, 20)
    job = Job(prompts)
    job.worker("a-1-a")
    job.world.run()

    def start(defaults=DEFAULTS, **options) -> None:
        with Prompts(str(prompts)) as opened:
            engine = PacedEngine(lambda seconds: None)
            engine.config = dataclasses.replace(engine.config, max_len=options.pop("max_len", engine.config.max_len))
            run_worker(engine, JobSpec(opened, defaults), job.out, WorkerOptions(**options, has_heartbeat=False))

    with pytest.raises(InputError, match=r"another job: sampling\.seed: its job has 0, this worker has 1"):
        start(dataclasses.replace(DEFAULTS, seed=1))
    with pytest.raises(InputError, match=r"another job: max_len: its job has 64, this worker has 32"):
        start(max_len=32)
    with pytest.raises(InputError, match="has chunks of 1 lines, this worker was told 5"):
        start(chunk_lines=5)
    start()
    assert len(list(job.folder.glob("*.journal"))) == 1  # nothing was left to do


def test_output_of_another_job_is_left_as_it_is_by_workers_and_merge(tmp_path):
    prompts, _ = write_prompts(tmp_path, 20)
    job = Job(prompts)
    with Prompts(str(prompts)) as opened:
        other = JobSpec(opened, dataclasses.replace(DEFAULTS, seed=1))
        run_job(PacedEngine(lambda seconds: None), other, job.out)
    kept = files_of(job.out)
    refusal = r"is the output of another job: sampling\.seed: it has 1, this job has 0: name another --out, or"
    job.worker("a-1-a")
    with pytest.raises(InputError, match=f"{refusal} remove it"):
        job.world.run()
    assert not job.folder.exists()
    for path in tmp_path.glob("out.*"):  # the manifest and the statistics, too
        path.unlink()
    again = Job(prompts)  # meanwhile its name is free
    again.worker("b-1-a")
    again.world.run()
    for name, content in (("out.jsonl", kept["out"]), ("out.manifest.json", kept["manifest"])):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{refusal} write over it with --fresh"):
        again.merged()
    assert files_of(job.out) == kept
    merge(job.out, fresh=True)
    assert files_of(job.out) == whole(prompts) != kept
    assert again.merged()["num_requests"] == 20  # its own may be written again


def test_malformed_line_stops_every_worker(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"id": "a", "prompt_token_ids": [1]}\n{')
    job = Job(prompts)
    job.worker("a-1-a")
    with pytest.raises(InputError, match="line 2: is not JSON"):
        job.world.run()


# The folder, and the choice -------------------------------------------------------------------------------------------------


def test_claims_are_made_once_and_heartbeats_follow_the_file_system(tmp_path):
    a, b = (ChunkFolder(tmp_path / "chunks", name, stale_s=60) for name in ("a-1-a", "b-1-a"))
    a.beat()
    b.beat()
    assert a.claim(ChunkTask(3), 0, 17)
    assert not b.claim(ChunkTask(3), 0, 0)
    assert b.look().claims == {ChunkTask(3): (Claim("a-1-a", 17, is_live=True),)}
    clock = b.file("alive").stat().st_mtime
    os.utime(b.file("alive"), (clock + 3600, clock + 3600))  # the file system's clock is an hour ahead of this host's
    b._stamped = clock + 3600
    assert b.look().claims[ChunkTask(3)][0].is_live is False
    assert b.look().live == {"b-1-a"}
    a.finish(ChunkTask(3), ["a-1-a"])
    assert b.look().done == {ChunkTask(3)}
    assert b.authors(ChunkTask(3)) == ["a-1-a"]


def test_claim_that_cannot_be_read_counts_by_its_own_age(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks", "a-1-a")
    folder.beat()
    (folder.path / "0000001.0").write_bytes(b"")
    (folder.path / "0000002.0").write_bytes(b"{")
    os.utime(folder.path / "0000002.0", (1, 1))
    claims = folder.look().claims
    assert [claims[ChunkTask(chunk)][0] for chunk in (1, 2)] == [Claim("", 0, is_live=True), Claim("", 0, is_live=False)]


def test_heartbeat_is_there_while_the_worker_is(tmp_path, monkeypatch):
    monkeypatch.setattr("detspec.jobs.chunk_folder.BEAT_S", 0.001)
    folder = ChunkFolder(tmp_path / "chunks", "a-1-a")
    beats = []
    monkeypatch.setattr(folder, "beat", lambda: beats.append(ChunkFolder.beat(folder)))
    with folder.alive():
        while len(beats) < 3:
            pass
        assert folder.look().live == {"a-1-a"}
    assert folder.look().live == frozenset()


def test_folder_that_was_removed_is_one_error(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks", "a-1-a")
    folder.path.rmdir()
    with pytest.raises(InputError, match="was removed while workers used it"):
        folder.look()


def test_choice_takes_free_then_abandoned_then_checks_and_helps_the_least_helped():
    def claims(*names: str) -> tuple[Claim, ...]:
        return tuple(Claim(name.rstrip("!"), 0, not name.endswith("!")) for name in names)

    def seen(done: set[int], live: str = "me x y", **claimed: tuple[Claim, ...]) -> View:
        return View(
            set(map(ChunkTask, done)),
            {ChunkTask(int(name[1:])): those for name, those in claimed.items()},
            frozenset(live.split()),
        )

    check = ChunkTask(0, is_check=True)
    view = seen({0}, _1=claims("x"), _2=claims("y!"), _3=claims("me"))
    assert choose(view, "me", 5, first=1) == ChunkTask(4)
    assert choose(view, "me", 4, first=4) == ChunkTask(2)
    held = seen({0}, _1=claims("x"), _3=claims("me"))
    assert choose(held, "me", 4, first=4) is None
    assert choose(held, "me", 4, first=4, to_check=[0]) == check
    assert choose(held, "me", 4, first=4, to_check=[0], authors=lambda task: ["me"]) is None
    alone = seen({0}, "me", _1=claims("x"), _3=claims("me"))
    assert choose(alone, "me", 4, first=4, to_check=[0], authors=lambda task: ["me"]) == check
    left = dataclasses.replace(held, claims={**held.claims, check: claims("y!")})
    assert choose(left, "me", 4, first=4, to_check=[0]) == check
    assert choose_to_help(dataclasses.replace(held, claims={check: claims("x")}), "me") is None
    busy = seen(set(), _1=claims("x", "y"), _2=claims("x"), _5=claims("y"), _3=claims("me", "x"))
    assert choose_to_help(busy, "me") == ChunkTask(5)
    full = seen(set(), _1=claims("a", "b", "c"))
    assert choose_to_help(full, "me") is None


@pytest.mark.parametrize(
    ("authors", "live", "busy", "those"),
    [
        (["a-1-x"], ["a-1-x", "a-2-y", "b-1-z"], [], ["b-1-z"]),  # on another host
        (["a-1-x"], ["a-1-x", "a-2-y", "b-1-z"], ["b-1-z"], ["a-2-y", "b-1-z"]),  # else another worker
        (["a-1-x"], ["a-1-x", "a-2-y"], [], ["a-2-y"]),
        (["a-1-x"], ["a-1-x", "a-2-y"], ["a-2-y"], ["a-2-y"]),  # which may be busy for a while
        (["a-1-x", "a-2-y"], ["a-1-x", "a-2-y"], [], ["a-1-x", "a-2-y"]),  # else any
        (["a-1-x", "b-1-z"], ["a-1-x", "a-2-y", "b-1-z"], [], ["a-2-y"]),  # both hosts did a part
        (["gone-1-x"], ["a-1-x", "a-2-y"], [], ["a-1-x", "a-2-y"]),
    ],
)
def test_those_check_who_are_far_from_the_authors(authors, live, busy, those):
    view = View(set(), {ChunkTask(7, is_check=True): tuple(Claim(name, 0, True) for name in busy)}, frozenset(live))
    assert [name for name in live if may_check(name, authors, view)] == those


def test_check_whose_journal_is_gone_is_taken_back(tmp_path):
    folder = ChunkFolder(tmp_path / "job", "new-1-x")
    for worker in ("a-1-x", "b-1-z"):
        folder.file("journal", worker).touch()
    for chunk in (0, 1, 2):
        folder.finish(ChunkTask(chunk), ["a-1-x"])
        folder.finish(ChunkTask(chunk, is_check=True), ["b-1-z" if chunk else "lost-1-y"])
    folder.finish(ChunkTask(2), ["lost-1-y"])
    folder.forget_lost()
    assert folder.look().done == {ChunkTask(0), ChunkTask(1), ChunkTask(1, is_check=True)}


def test_shares_to_check_grow_into_each_other():
    shares = [{chunk for chunk in range(2000) if is_to_check(chunk, share, "job")} for share in (0.0, 0.01, 0.1, 1.0)]
    assert [len(share) for share in (shares[0], shares[3])] == [0, 2000]
    assert shares[0] < shares[1] < shares[2] < shares[3]
    assert 5 < len(shares[1]) < 50


def test_name_of_a_worker_holds_its_host(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node-7.cluster/x")
    assert host_of(worker_name()) == "node_7.cluster_x"
    assert worker_name() != worker_name()


@pytest.mark.parametrize(("num_lines", "size"), [(1, 1), (256, 1), (600, 2), (5000, 16), (100_000, 25)])
def test_chunks_are_small_but_not_too_many(num_lines, size, tmp_path):
    (tmp_path / "in.jsonl").write_text("1\n" * num_lines)
    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        found = dataclasses.make_dataclass("Found", ["num_lines"])(num_lines)
        chunks = cut(prompts, found, None)
        assert (chunks.size, len(chunks.marks)) == (size, -(-num_lines // size))
        assert next(prompts.lines(chunks.marks[-1])) == (chunks.marks[-1], b"1")
