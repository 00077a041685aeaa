"""The files that a finished job leaves: its output, statistics and manifest, from all lines of output."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from detspec.jobs.files import new_files, pretty_json, sibling
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


class Kept(Protocol):
    """All lines of output of a job: a complete journal, or several."""

    @property
    def num_tokens(self) -> int:
        """Tokens in them."""

    @property
    def failed(self) -> set[int]:
        """Output indices of completions with finish reason "error"."""

    def lines(self) -> Iterator[bytes]:
        """All lines of output, in the order of the input."""


def put_together(kept: Kept, out: Path, manifest: Mapping[str, Any], found: Scan, stats: Mapping[str, Any]) -> JobResult:
    """Writes `out`, statistics and manifest; of OpenAI's lines, those that failed into a file of errors.

    `manifest` lacks facts about the output, `stats` the counts of the whole job.
    """
    places = kept.failed
    failed: list[str] = []
    digest = hashlib.sha256()
    errors_digest = hashlib.sha256()
    splits = "openai" in manifest and bool(places)
    names = (out, *([sibling(out, "errors")] if splits else []), sibling(out, "stats"), sibling(out, "manifest"))
    with new_files(*names) as (out_file, *errors_file, stats_file, manifest_file):
        for place, line in enumerate(kept.lines()):
            is_apart = splits and place in places
            (errors_file[0] if is_apart else out_file).write(line)
            (errors_digest if is_apart else digest).update(line)
            if place in places and len(failed) < MOST_NAMED:
                failed.append(line_id(line))
        counts = {
            "num_requests": found.num_requests,
            "num_rejected": found.num_rejected,
            "num_prompt_tokens": found.num_prompt_tokens,
            "num_tokens": kept.num_tokens,
            "num_failed": len(places),
        }
        whole = {**counts, **stats}
        stats_file.write(pretty_json(whole))
        output = {"sha256": digest.hexdigest(), "bytes": out_file.tell(), "num_failed": len(places)}
        output |= {"errors_sha256": errors_digest.hexdigest()} if splits else {}
        manifest_file.write(pretty_json({**manifest, "output": output}))
    if not found.num_rejected:
        sibling(out, "rejects").unlink(missing_ok=True)  # empty, or left by an earlier job
    if "openai" in manifest and not splits:
        sibling(out, "errors").unlink(missing_ok=True)
    return JobResult(whole, len(places), tuple(failed), found.num_rejected)


def line_id(line: bytes) -> str:
    """The user's id in a line of output."""
    found = json.loads(line)
    return str(found["custom_id"] if "custom_id" in found else found["id"])
