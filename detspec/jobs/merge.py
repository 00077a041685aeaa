"""Merges the parts of a job into its output, byte for byte: outputs of fixed shards, or journals of workers.

Shards are whole files, and follow each other. Journals of workers hold lines in any order; what is there twice is compared.
"""

import hashlib
import itertools
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from detspec.errors import InputError
from detspec.jobs.chunk_folder import chunk_folder, host_of
from detspec.jobs.chunks import ChunkedLines, load
from detspec.jobs.files import find_shards, journal_path, shard_path, sibling
from detspec.jobs.journal import NOWHERE, line_of, read_journal, sound_lines
from detspec.jobs.lines import Output
from detspec.jobs.manifest import differences, header_of, read_manifest
from detspec.jobs.output import MOST_NAMED, add_starts, check_free, counts_of, line_id, put_together, sums
from detspec.jobs.scan import hash_id, repeated_hashes
from detspec.jobs.worker import JOB, REJECTS, read_job
from detspec.read_json import parse_json, read_json_object

PROMPT_COUNTS = ("num_requests", "num_rejected")
OUTPUT_COUNTS = ("bytes", "num_failed")
MOST_OPEN = 64  # journals


def merge(out: Path, shards: Sequence[Path] = (), *, fresh: bool = False) -> dict[str, Any]:
    """Writes output, statistics, manifest and rejected lines of the whole job as `out`; returns the statistics.

    `out` is what a job without parts would write. The parts are `shards`, in any order; by default what workers left next to
    `out`, or the shards in its folder.

    Raises `InputError` if a part is missing, unfinished or was changed, the parts belong to different jobs, or workers gave
    different bytes for the same line, or `out` is of another job and is not to be `fresh`.
    """
    chunks = chunk_folder(out)
    if shards or not chunks.is_dir():
        return _merge_shards(out, list(shards) or _shards_of(out), fresh=fresh)
    if find_shards(out):
        raise InputError(f"there are both {chunks} and shards of {out}: remove those of one job, or name the shards to merge")
    return _merge_workers(out, chunks, fresh=fresh)


# Fixed shards ---------------------------------------------------------------------------------------------------------------


def _merge_shards(out: Path, paths: Sequence[Path], *, fresh: bool) -> dict[str, Any]:
    ordered = _in_order(paths, [_finished_manifest(path) for path in paths])
    manifests = list(ordered.values())
    counts = {key: sum(manifest["prompts"][key] for manifest in manifests) for key in PROMPT_COUNTS}
    merged = {**manifests[0], "shard": [0, 1], "prompts": {**manifests[0]["prompts"], **counts}}
    if not fresh:
        check_free(out, header_of(merged))
    each = [read_json_object(sibling(path, "stats")) or {} for path in ordered]
    try:
        last_start = add_starts([stats["last_start"] for stats in each])
        stats = {"num_shards": len(each), **sums(each), "last_start": last_start}
        stats |= {"num_failed": sum(manifest["output"]["num_failed"] for manifest in manifests)}
        stats |= {"num_rejected": counts["num_rejected"]}
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(f"the shards' statistics are none of this version: {error!r}") from error
    splits = any("errors_sha256" in manifest["output"] for manifest in manifests)
    rejects = [sibling(path, "rejects") for path, manifest in ordered.items() if manifest["prompts"]["num_rejected"]]
    put_together(out, _outputs_of(ordered), merged, stats, splits=splits, rejects=_lines_of(rejects))
    return stats


def _shards_of(out: Path) -> list[Path]:
    """The shards of `out` in its folder, which must all belong to one number of shards."""
    found = find_shards(out)
    counts = sorted({count for _, count in found})
    if not counts:
        raise InputError(
            f"there are no shards of {out}: expected files like {shard_path(out, 0, 4)}, or the folder {chunk_folder(out)}"
        )
    if len(counts) > 1:
        raise InputError(
            f"{out} has shards of {' and of '.join(map(str, counts))}: remove the shards of one job, or name those to merge"
        )
    return list(found.values())


def _finished_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a shard; `InputError` if the shard is not finished."""
    if journal_path(path).exists():
        raise InputError(f"{path} is not finished, since {journal_path(path)} exists: start its job again")
    manifest = read_manifest(path)
    needed = [path, sibling(path, "stats")]
    if manifest is not None and manifest["prompts"].get("num_rejected"):
        needed.append(sibling(path, "rejects"))
    if manifest is not None and "errors_sha256" in manifest["output"]:
        needed.append(sibling(path, "errors"))
    if manifest is None or not all(file.is_file() for file in needed):
        names = ", ".join(map(str, (sibling(path, "manifest"), *needed)))
        raise InputError(f"{path} is not a finished shard: it needs {names}, as the job wrote them")
    shard = manifest.get("shard")
    counts = [manifest["prompts"].get(key) for key in PROMPT_COUNTS]
    counts += [manifest["output"].get(key) for key in OUTPUT_COUNTS]
    if not isinstance(shard, list) or len(shard) != 2 or not all(type(n) is int and n >= 0 for n in (*shard, *counts)):
        raise InputError(f"{sibling(path, 'manifest')} was changed: its shard must be [index, count], its counts integers")
    if shard[0] >= shard[1]:
        raise InputError(f"{sibling(path, 'manifest')} was changed: there is no shard {shard[0]} of {shard[1]}")
    return manifest


def _in_order(paths: Sequence[Path], manifests: Sequence[dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """Shards by index; `InputError` unless each shard of one job is given exactly once."""
    first = manifests[0]
    for path, manifest in zip(paths, manifests, strict=True):
        here, there = ({**header_of(m), "shard": m["shard"][1]} for m in (manifest, first))
        if parts := differences(there, here, them=str(paths[0]), us=str(path)):
            raise InputError(f"the shards are not of one job: {'; '.join(parts)}")
    count = first["shard"][1]
    by_index = {manifest["shard"][0]: (path, manifest) for path, manifest in zip(paths, manifests, strict=True)}
    if len(by_index) < len(paths):
        raise InputError(f"two of the files are the same shard: {', '.join(map(str, paths))}")
    if missing := list(itertools.islice((str(index) for index in range(count) if index not in by_index), MOST_NAMED)):
        raise InputError(f"shards {', '.join(missing)} of {count} are missing: run them with --shard {missing[0]}/{count}, ...")
    return dict(by_index[index] for index in range(count))


def _outputs_of(ordered: Mapping[Path, dict[str, Any]]) -> Iterator[Output]:
    """Yields the lines of all shards, those in files of errors last.

    Raises `InputError` at the end of a file whose SHA-256 is not that of its manifest, and of all if an id occurs twice.
    """
    seen = array("Q")
    for key, finish_reason in (("sha256", "stop"), ("errors_sha256", "error")):
        for shard, manifest in ordered.items():
            if key not in manifest["output"]:
                continue
            path = shard if finish_reason == "stop" else sibling(shard, "errors")
            digest = hashlib.sha256()
            for line in _lines_of([path]):
                digest.update(line)
                try:
                    id = _line_key(parse_json(line))
                    seen.extend([] if id is None else [hash_id(json.dumps(id))])
                except (InputError, TypeError, KeyError, AttributeError) as error:
                    raise InputError(f"{path} was changed since its job wrote it: {error}") from error
                yield Output(0, 0, finish_reason, line.removesuffix(b"\n"))
            if digest.hexdigest() != manifest["output"][key]:
                raise InputError(f"{path} was changed since its job wrote it (sha256): generate it again")
    if repeated_hashes(seen):
        raise InputError("an id occurs twice in the shards: they are not of one job")


def _lines_of(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            yield from file


def _line_key(line: dict[str, Any]) -> list[Any] | None:
    """An entry that no other line of output has; None for errors of OpenAI's lines, whose ids may have been used twice."""
    if "custom_id" in line:
        return None if line["response"] is None else [line["custom_id"]]
    return [line["id"], line.get("index", 0)]


# Workers --------------------------------------------------------------------------------------------------------------------


def _merge_workers(out: Path, folder: Path, *, fresh: bool) -> dict[str, Any]:
    job = read_job(folder)
    if job is None:
        raise InputError(f"{folder} has no {JOB}: no worker has read the prompts yet")
    try:
        header = header_of(job)
        chunks = load(folder, job.pop("chunk_lines"))
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / JOB} was changed, or is none of this version: {error!r}") from error
    if not fresh:
        check_free(out, header)
    found = chunks.found
    with WorkerJournals(chunks) as journals:
        for path in sorted(folder.glob("*.journal")):
            journals.add(path, header)
        journals.check(folder)
        each = [stats for path in sorted(folder.glob("*.stats.json")) if (stats := read_json_object(path)) is not None]
        last_start = add_starts(each) if each else {}
        told = {"num_workers": len(journals.paths), "num_compared": journals.num_compared, "last_start": last_start}
        stats = {**counts_of(found, num_tokens=journals.num_tokens, num_failed=journals.num_failed), **told}
        splits = "openai" in job and bool(journals.num_failed)
        rejects = _lines_of([folder / REJECTS] if found.num_rejected else [])
        put_together(out, journals.outputs(), job, stats, splits=splits, rejects=rejects)
    return stats


class WorkerJournals:
    """The lines of output in the journals of all workers; a context manager.

    Attributes:
        paths: the journals.
        num_tokens: tokens of all lines, each once.
        num_failed: lines with finish reason "error".
        num_compared: how many more times lines were there, and had the same bytes.
    """

    def __init__(self, chunks: ChunkedLines) -> None:
        self.paths: list[Path] = []
        self.num_tokens = self.num_failed = self.num_compared = 0
        self._chunks = chunks
        self._starts = array("Q", [0, *itertools.accumulate(chunks.found.counts)])
        self._offsets = array("q", [NOWHERE]) * self._starts[-1]
        self._journals = array("I", [0]) * self._starts[-1]
        self._differences: list[str] = []  # lines that two workers gave different bytes for
        self._involved: Counter[str] = Counter()  # their hosts
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> "WorkerJournals":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, path: Path, header: Mapping[str, Any]) -> None:
        """Reads the journal at `path`; `InputError` if it belongs to another job."""
        journal = read_journal(path, header)
        if journal is None:  # its worker was killed before it wrote anything
            return
        self.paths.append(path)
        counts = self._chunks.found.counts
        offset = journal.end
        for raw in sound_lines(path, offset):
            found = line_of(raw)
            if found is None or found[0] >= len(counts) or found[1].index >= counts[found[0]]:
                raise InputError(f"{path} holds an entry of another job at byte {offset}: remove it, and start a worker again")
            self._note(*found, offset)
            offset += len(raw)

    def check(self, folder: Path) -> None:
        """Raises `InputError` if a line of output is missing, or was there twice with different bytes."""
        if self._differences:
            named = "; ".join(self._differences[:MOST_NAMED])
            tally = ", ".join(f"{host} in {number}" for host, number in self._involved.most_common(MOST_NAMED))
            raise InputError(
                f"{len(self._differences)} lines were done twice with different bytes, which one kind of machine never does: "
                f"{named}. Involved: {tally}. Remove the journals of the host that is wrong from {folder}, and start a worker "
                "elsewhere: it does their chunks again"
            )
        if missing := self._offsets.count(NOWHERE):
            raise InputError(
                f"{missing} of {len(self._offsets)} completions are missing in {folder}: start a worker again, which "
                "does what is left"
            )

    def outputs(self) -> Iterator[Output]:
        """Yields all lines of output, in the order of the input."""
        return map(self._output, range(len(self._offsets)))

    def _note(self, number: int, output: Output, offset: int) -> None:
        place = self._starts[number] + output.index
        if self._offsets[place] == NOWHERE:
            self._offsets[place] = offset
            self._journals[place] = len(self.paths) - 1
            self.num_tokens += output.num_tokens
            self.num_failed += output.finish_reason == "error"
        elif self._output(place).line == output.line:
            self.num_compared += 1
        else:
            workers = (self.paths[self._journals[place]].stem, self.paths[-1].stem)
            hosts = list(dict.fromkeys(map(host_of, workers)))
            where = f"id {line_id(output.line)!r} (line {number}, chunk {number // self._chunks.size})"
            self._differences.append(f"{where}: {' and '.join(hosts)}, see {' and '.join(workers)}")
            self._involved.update(hosts)

    def _output(self, place: int) -> Output:
        path = self.paths[self._journals[place]]
        if path not in self._files:
            if len(self._files) == MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = path.open("rb")
        self._files[path].seek(self._offsets[place])
        found = line_of(self._files[path].readline())
        if found is None:
            raise InputError(f"{path} was damaged at byte {self._offsets[place]}: remove it, and start a worker again")
        return found[1]
