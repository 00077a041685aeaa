"""Merges the outputs of all shards into the output of one job, byte for byte."""

import hashlib
import itertools
import json
import shutil
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from detspec.engine.request import STATS_FIELDS, Stats
from detspec.errors import InputError
from detspec.jobs.files import find_shards, journal_path, new_files, pretty_json, shard_path, sibling
from detspec.jobs.manifest import differences, header_of, read_manifest
from detspec.jobs.overwrite import check_free
from detspec.jobs.scan import hash_id, repeated_hashes
from detspec.read_json import parse_json, read_json_object

PROMPT_COUNTS = ("num_requests", "num_rejected")
OUTPUT_COUNTS = ("bytes", "num_failed")
MOST_NAMED = 10  # missing shards


def merge(out: Path, shards: Sequence[Path] = (), *, fresh: bool = False) -> dict[str, Any]:
    """Merges outputs, statistics, manifests and rejected lines of `shards` into those of `out`; returns the statistics.

    `out` is what a job without shards would write; `shards`, in any order, are by default those in its folder.

    Raises `InputError` if a shard is missing, unfinished or was changed, or the shards belong to different jobs, or `out` to
    another one and is not to be `fresh`.
    """
    paths = list(shards) or _shards_of(out)
    ordered = _in_order(paths, [_finished_manifest(path) for path in paths])
    manifests = list(ordered.values())
    merged = _merge_manifests(manifests)
    if not fresh:
        check_free(out, header_of(merged))
    rejects = [sibling(path, "rejects") for path, manifest in ordered.items() if manifest["prompts"]["num_rejected"]]
    each = [read_json_object(sibling(path, "stats")) or {} for path in ordered]
    try:
        stats = _add_stats(each)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(f"the shards' statistics are none of this version: {error!r}") from error
    whole = {path: manifest["output"]["sha256"] for path, manifest in ordered.items()}
    failed = {
        sibling(path, "errors"): manifest["output"]["errors_sha256"]
        for path, manifest in ordered.items()
        if "errors_sha256" in manifest["output"]
    }
    kinds = [kind for kind, there in (("errors", failed), ("rejects", rejects)) if there]
    seen = array("Q")
    with new_files(out, *(sibling(out, kind) for kind in (*kinds, "stats", "manifest"))) as files:
        out_file, *kind_files, stats_file, manifest_file = files
        apart = dict(zip(kinds, kind_files, strict=True))
        merged["output"] = {"sha256": _copy(whole, out_file, seen), **merged["output"]}
        if failed:
            merged["output"]["errors_sha256"] = _copy(failed, apart["errors"], seen)
        if repeated_hashes(seen):
            raise InputError("an id occurs twice in the shards: they are not of one job")
        for path in rejects:
            with path.open("rb") as file:
                shutil.copyfileobj(file, apart["rejects"])
        stats_file.write(pretty_json(stats))
        manifest_file.write(pretty_json(merged))
    if not rejects:
        sibling(out, "rejects").unlink(missing_ok=True)  # left by an earlier job
    if "openai" in merged and not failed:
        sibling(out, "errors").unlink(missing_ok=True)
    return stats


def _shards_of(out: Path) -> list[Path]:
    """The shards of `out` in its folder, which must all belong to one number of shards."""
    found = find_shards(out)
    counts = sorted({count for _, count in found})
    if not counts:
        raise InputError(f"there are no shards of {out}: expected files like {shard_path(out, 0, 4)}")
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


def _copy(digests: Mapping[Path, str], target: BinaryIO, seen: "array[int]") -> str:
    """Appends all files to `target`, and hashes of their lines' ids to `seen`; returns the SHA-256 of them all, in hex.

    Raises `InputError` if the SHA-256 of a file is not the one in `digests`.
    """
    whole = hashlib.sha256()
    for path, expected in digests.items():
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for line in file:
                digest.update(line)
                try:
                    key = _line_key(parse_json(line))
                    seen.extend([] if key is None else [hash_id(json.dumps(key))])
                except (InputError, TypeError, KeyError, AttributeError) as error:
                    raise InputError(f"{path} was changed since its job wrote it: {error}") from error
                target.write(line)
                whole.update(line)
        if digest.hexdigest() != expected:
            raise InputError(f"{path} was changed since its job wrote it (sha256): generate it again")
    return whole.hexdigest()


def _line_key(line: dict[str, Any]) -> list[Any] | None:
    """What no other line of output has; None for errors of OpenAI's lines, among which are those whose id was used twice."""
    if "custom_id" in line:
        return None if line["response"] is None else [line["custom_id"]]
    return [line["id"], line.get("index", 0)]


def _merge_manifests(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The manifest of the same job without shards, except for the digest of its output."""

    def total(part: str, key: str) -> int:
        return sum(manifest[part][key] for manifest in manifests)

    counts = {key: total("prompts", key) for key in PROMPT_COUNTS}
    output = {key: total("output", key) for key in OUTPUT_COUNTS}
    first = manifests[0]
    return {**first, "shard": [0, 1], "prompts": {**first["prompts"], **counts}, "output": output}


def _add_stats(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of the merged job: counts and seconds are summed, also of the last starts."""
    return {"num_shards": len(each), **_sums(each), "last_start": add_starts([stats["last_start"] for stats in each])}


def add_starts(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of several starts: counts and seconds are summed; speed and acceptance follow."""
    last_start = _sums(each)
    counters = Stats(**{key: last_start[key] for key in STATS_FIELDS})
    speed = last_start["num_tokens"] / last_start["generate_s"] if last_start["generate_s"] else 0.0
    return last_start | {
        "tok_per_s": round(speed, 1),
        "mean_acceptance_length": counters.mean_acceptance_length,
        "draft_acceptance_rate": counters.draft_acceptance_rate,
    }


def _sums(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over all statistics of the entries that are counts or seconds."""
    counted = [key for key in each[0] if key.startswith("num_") or (key.endswith("_s") and key != "tok_per_s")]
    return {key: sum(stats[key] for stats in each) for key in counted}
