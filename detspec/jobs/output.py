"""The files that a finished job leaves: its output, statistics and manifest, from all lines of output."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from detspec.jobs.files import new_files, pretty_json, sibling
from detspec.jobs.lines import Output
from detspec.jobs.scan import Scan

MOST_NAMED = 10


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


def line_id(line: bytes) -> str:
    """The user's id in a line of output."""
    found = json.loads(line)
    return str(found["custom_id"] if "custom_id" in found else found["id"])
