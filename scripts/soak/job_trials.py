"""Trials of batch jobs, killed and on full disks, with clocks that jump, in shards, in any order: their bytes are known."""

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detspec.jobs.files import shard_path
from detspec.jobs.scan import block
from scripts.soak.disk import empty_folder
from scripts.soak.jobs import Job, text_of
from scripts.soak.killing import ORDINARY, Killed, Options, Pace, Tally
from scripts.soak.processes import Process, Start, UnexpectedError
from scripts.soak.tampering import one_record_altered

# Shares of trials.
IN_SHARDS = 0.2
ON_OWN_DISK = 0.3
AUDITED = 0.2
ON_CHIPS = 0.25  # of the audits
ARE_ORDINARY = 0.05
AUDITED_ON = ("--chips", "4")
SHARDS = 3


class JobTrials:
    """Trials of some jobs in a work folder; `kills_per_job` is the most that one of them gets, `options` are those of starts.

    Attributes:
        fingerprint: what the bits depend on.
    """

    def __init__(self, workdir: Path, jobs: list[Job], kills_per_job: int, options: Sequence[Options]) -> None:
        self._folder = workdir / "trial"
        self._cache = workdir / "cache"
        self._jobs = jobs
        self._kills = kills_per_job
        self._options = options
        self._pace = Pace()
        self.fingerprint = jobs[0].fingerprint()

    def run(self, rng: random.Random) -> dict[str, Any]:
        """Runs a trial: returns what it drew, what happened, and what differs."""
        try:
            return self._ordinary(rng) if rng.random() < ARE_ORDINARY else self._deterministic(rng)
        except UnexpectedError as error:
            return {"kind": "job", **Tally().facts(), "tokens": 0, "error": str(error), "as_expected": False}

    def _deterministic(self, rng: random.Random) -> dict[str, Any]:
        job = rng.choice(self._jobs)
        order = rng.choice(("file", "reversed", "shuffled"))
        orders = {"file": list(job.lines), "reversed": job.lines[::-1], "shuffled": rng.sample(job.lines, len(job.lines))}
        lines = orders[order]
        shards = SHARDS if rng.random() < IN_SHARDS else 1
        with empty_folder(self._folder, mounts=rng.random() < ON_OWN_DISK) as disk:
            out = disk.folder / "out.jsonl"
            prompts = disk.folder / "in.jsonl"
            prompts.write_text(text_of(lines))
            tallies = []
            for index in range(shards):
                cut = ("--shard", f"{index}/{shards}") if shards > 1 else ()
                its_out = shard_path(out, index, shards) if cut else out
                total = job.num_completions(lines[slice(*block(len(lines), index, shards))])
                killed = Killed(job.generate(prompts, out, *cut), its_out, total, disk, self._cache, self._pace)
                killed.to_the_end(rng, max(1, self._kills // shards), self._options)
                tallies.append(killed.tally)
            if shards > 1:
                self._run("merge", "--out", str(out)).succeed()
            tally = added(tallies)
            found = out.read_bytes()
            debris = sum(1 for path in disk.folder.iterdir() if path.suffix == ".tmp")
            audited = rng.random() < AUDITED
            if audited:
                audit = (*job.audit(out), *(AUDITED_ON if rng.random() < ON_CHIPS else ()))
                tally.control("unaltered output is sound", found=self._run(*audit).wait() == 0)
                out.write_bytes(one_record_altered(found, rng))
                tally.control("altered record in an audit", found=self._run(*audit).wait() == 1)
            disk_is_own = disk.is_mounted
        drawn = {"job": job.name, "order": order, "shards": shards, "own_disk": disk_is_own, "audited": audited}
        facts = compared(found, job.bytes_of(lines))
        is_sound = not (facts["differ"] or tally.lost or debris) and all(n == tried for n, tried in tally.controls.values())
        return {"kind": "job", **drawn, **facts, **tally.facts(), "debris": debris, "as_expected": is_sound}

    def _ordinary(self, rng: random.Random) -> dict[str, Any]:
        """The inverse control: an ordinary job with eight requests at once, killed, against one request at a time."""
        job = rng.choice(self._jobs)
        with empty_folder(self._folder, mounts=False) as disk:
            prompts = disk.folder / "in.jsonl"
            prompts.write_text(text_of(job.lines))
            alone = disk.folder / "alone.jsonl"
            self._run(*job.generate(prompts, alone, "--max-requests", "1", "--ordinary")).succeed()
            out = disk.folder / "out.jsonl"
            killed = Killed(job.generate(prompts, out), out, job.num_completions(job.lines), disk, self._cache, self._pace)
            killed.to_the_end(rng, 2, ORDINARY)
            facts = compared(out.read_bytes(), alone.read_bytes())
        tally = killed.tally
        tally.control("ordinary job among others", found=facts["differ"] > 0)
        facts = {"lines": facts["lines"], "tokens": 0, "differ": 0, "ordinary_differ": facts["differ"]}
        is_sound = facts["ordinary_differ"] > 0 and not tally.lost
        return {"kind": "ordinary job", "job": job.name, **facts, **tally.facts(), "as_expected": is_sound}

    def _run(self, *arguments: str) -> Process:
        """A process of `detspec` that shares the compiled programs."""
        return Process.of(Start(arguments, self._cache))


def added(tallies: list[Tally]) -> Tally:
    """All of it together."""
    total = Tally()
    for tally in tallies:
        for field in dataclasses.fields(Tally):
            mine = getattr(total, field.name)
            other = getattr(tally, field.name)
            if isinstance(mine, int | Counter):
                setattr(total, field.name, mine + other)
        for name, (found, tried) in tally.controls.items():
            before = total.controls.get(name, [0, 0])
            total.controls[name] = [before[0] + found, before[1] + tried]
    return total


def compared(found: bytes, expected: bytes) -> dict[str, int]:
    """How many lines and tokens were compared, and how many lines differ, are missing or are too many."""
    ours = found.splitlines(keepends=True)
    theirs = expected.splitlines(keepends=True)
    differ = sum(one != other for one, other in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
    tokens = sum(len(json.loads(line)["token_ids"]) for line in theirs)
    return {"lines": len(theirs), "tokens": tokens, "differ": differ}
