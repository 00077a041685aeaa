"""The files that a finished job leaves, from all lines of output; and what keeps a job from writing over files of others."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detspec.errors import InputError
from detspec.jobs.files import journal_path, new_files, pretty_json, sibling
from detspec.jobs.journal import read_journal
from detspec.jobs.lines import Output
from detspec.jobs.manifest import complete_manifest, differences, header_of, read_manifest
from detspec.jobs.scan import Scan
from detspec.read_json import parse_json
from detspec.riders.counters import COUNTED, Stats

MOST_NAMED = 10
WRITTEN = ("manifest", "stats", "errors", "rejects")  # next to the output
FRESH = "name another --out, or write over it with --fresh"
REJECT_KEYS = {"line", "error", "raw"}


@dataclasses.dataclass(frozen=True)
class JobResult:
    """The result of a job."""

    # content of `*.stats.json`: counts of the whole job, completions kept from earlier starts (`num_resumed`), and times and
    # counters of the start that finished it (`last_start`). Empty if there was nothing to do.
    stats: dict[str, Any]
    num_failed: int  # completions with finish reason "error"
    failed: tuple[str, ...]  # ids of the first failed completions, where the results are written
    num_rejected: int  # malformed lines


def put_together(
    out: Path,
    outputs: Iterable[Output],
    manifest: Mapping[str, Any],
    stats: Mapping[str, Any],
    *,
    splits: bool,
    rejects: Iterable[bytes] = (),
) -> JobResult:
    """Writes `out`, statistics and manifest, and `rejects` if there are any; they get their names together, `out` last.

    Args:
        out: the output.
        outputs: all lines of output, in the order of the input.
        manifest: that of the job, without facts about the output.
        stats: statistics, with `num_failed` and `num_rejected`.
        splits: lines that have failed go into a file of errors.
        rejects: malformed lines, if they are not written yet.
    """
    num_failed = stats["num_failed"]
    failed: list[str] = []
    digest = hashlib.sha256()
    errors_digest = hashlib.sha256()
    rejects = iter(rejects)
    first_reject = list(itertools.islice(rejects, 1))
    kinds = [kind for kind, there in (("errors", splits), ("rejects", first_reject)) if there]
    with new_files(out, *(sibling(out, kind) for kind in (*kinds, "stats", "manifest"))) as (out_file, *others):
        files = dict(zip((*kinds, "stats", "manifest"), others, strict=True))
        for output in outputs:
            line = output.line + b"\n"
            has_failed = output.finish_reason == "error"
            (files["errors"] if splits and has_failed else out_file).write(line)
            (errors_digest if splits and has_failed else digest).update(line)
            if has_failed and len(failed) < MOST_NAMED:
                failed.append(line_id(line))
        if first_reject:
            files["rejects"].writelines(itertools.chain(first_reject, rejects))
        files["stats"].write(pretty_json(stats))
        facts = {"sha256": digest.hexdigest(), "bytes": out_file.tell(), "num_failed": num_failed}
        facts |= {"errors_sha256": errors_digest.hexdigest()} if splits else {}
        files["manifest"].write(pretty_json({**manifest, "output": facts}))
    if not stats["num_rejected"]:
        sibling(out, "rejects").unlink(missing_ok=True)  # empty, or left by an earlier job
    if "openai" in manifest and not splits:
        sibling(out, "errors").unlink(missing_ok=True)
    return JobResult(dict(stats), num_failed, tuple(failed), stats["num_rejected"])


def counts_of(found: Scan, *, num_tokens: int, num_failed: int) -> dict[str, int]:
    """The counts of a whole job, as its statistics begin."""
    return {
        "num_requests": found.num_requests,
        "num_rejected": found.num_rejected,
        "num_prompt_tokens": found.num_prompt_tokens,
        "num_tokens": num_tokens,
        "num_failed": num_failed,
    }


def add_starts(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of several starts: counts and seconds are summed; speed and acceptance follow."""
    last_start = sums(each)
    counters = Stats(**{key: last_start[key] for key in COUNTED})
    speed = last_start["num_tokens"] / last_start["generate_s"] if last_start["generate_s"] else 0.0
    return last_start | {
        "tok_per_s": round(speed, 1),
        "mean_acceptance_length": counters.mean_acceptance_length,
        "draft_acceptance_rate": counters.draft_acceptance_rate,
    }


def sums(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over all statistics of the entries that are counts or seconds."""
    counted = [key for key in each[0] if key.startswith("num_") or (key.endswith("_s") and key != "tok_per_s")]
    return {key: sum(stats[key] for stats in each) for key in counted}


def line_id(line: bytes) -> str:
    """The user's id in a line of output."""
    found = json.loads(line)
    return str(found["custom_id"] if "custom_id" in found else found["id"])


def check_free(out: Path, header: Mapping[str, Any], instead: str = FRESH) -> None:
    """Raises `InputError` if the job with `header` would write over what is not its own; `instead` says what else to do.

    Its own are an empty file, its whole output, and all that lies next to its journal: the job began when they were free.
    """
    if read_journal(journal_path(out), header) is not None or complete_manifest(out, header) is not None:
        return
    manifest = read_manifest(out)
    if manifest is None:
        rejects = sibling(out, "rejects")
        for path in (out, *(sibling(out, what) for what in WRITTEN)):
            if path.exists() and path.stat().st_size and not (path == rejects and _holds_rejects(path)):
                raise InputError(f"{path} is there already, and no manifest says that a job wrote it: {instead}")
        return
    if parts := "; ".join(differences(header_of(manifest), header, them="it")):
        manifest_of = f"{out} is gone, but {sibling(out, 'manifest')} is there, the manifest"
        what = f"{out} is the output" if out.exists() else manifest_of
        raise InputError(f"{what} of another job: {parts}: {instead}")
    if out.exists():
        raise InputError(f"{out} was changed since its job wrote it: {instead}")


def _holds_rejects(path: Path) -> bool:
    """Whether it holds rejected lines, as a job leaves that ended before its first completion."""
    with path.open("rb") as file:
        try:
            first = parse_json(file.readline())
        except InputError:
            return False
    return isinstance(first, dict) and first.keys() == REJECT_KEYS
