"""What the bytes of an output depend on: the head of its journal, and most of its manifest."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.jobs.files import sibling
from detspec.jobs.prompts import Prompts, hash_file
from detspec.jobs.scan import Scan
from detspec.sampling_params import SamplingParams

HEADER_KEYS = ("fingerprint", "text", "sampling", "on_error", "prompts", "shard")


def job_header(
    engine: Engine, prompts: Prompts, defaults: SamplingParams, *, shard: tuple[int, int], on_error: str
) -> dict[str, Any]:
    """Everything that the output's bytes depend on, as JSON gives it back; two jobs of one header have one output."""
    header = {
        "fingerprint": engine.fingerprint(),
        "text": text_facts(engine.model),
        "sampling": dataclasses.asdict(defaults),
        "on_error": on_error,
        "prompts": prompts.sha256,
        "shard": shard,
    }
    return json.loads(json.dumps(header))  # type: ignore[no-any-return]


def text_facts(model: Model) -> dict[str, Any]:
    """What decides which tokens a text is, which text tokens are, and where it ends by itself."""
    return {
        "tokenizer": model.tokenizer.digest if model.tokenizer else None,
        "chat_template": model.chat_template.digest if model.chat_template else None,
        "eos_token_ids": list(model.eos_ids),
    }


def job_manifest(
    header: Mapping[str, Any], engine: Engine, prompts: Prompts, scan: Scan, output: Mapping[str, Any]
) -> dict[str, Any]:
    """What `*.manifest.json` holds: the header, the engine's settings, what went in, and the facts of the `output`."""
    return {
        "digest": hashlib.sha256(json.dumps(header["fingerprint"], sort_keys=True).encode()).hexdigest(),
        **header,
        "engine": {**dataclasses.asdict(engine.config), "schedule": engine.schedule.bits()},
        "prompts": {
            "source": prompts.source,
            "sha256": prompts.sha256,
            "num_requests": scan.num_requests,
            "num_rejected": scan.num_rejected,
        },
        "output": dict(output),
    }


def read_manifest(out: Path) -> dict[str, Any] | None:
    """The manifest beside `out`; None if there is none or it is no job's."""
    try:
        value = json.loads(sibling(out, "manifest").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    parts = [value.get(key) for key in ("prompts", "output")] if isinstance(value, dict) else []
    return value if parts and all(isinstance(part, dict) and "sha256" in part for part in parts) else None


def header_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The header in a manifest, as far as it is there."""
    header = {key: manifest[key] for key in HEADER_KEYS if key in manifest}
    return {**header, "prompts": manifest["prompts"]["sha256"]}


def complete_manifest(out: Path, header: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest beside `out` if `out` is the whole output of the job of `header`, bit for bit; else None."""
    manifest = read_manifest(out)
    if manifest is None or header_of(manifest) != header or not out.is_file():
        return None
    with out.open("rb") as file:
        same = hash_file(file) == manifest["output"]["sha256"]
    return manifest if same else None


def differences(theirs: object, ours: object, *, them: str, us: str = "this job", name: str = "") -> list[str]:
    """Where two headers differ, one sentence each: `sampling.temperature: journal has 0.0, this job has 0.8`."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        keys = dict.fromkeys((*theirs, *ours))
        pairs = [(f"{name}.{key}".lstrip("."), theirs.get(key), ours.get(key)) for key in keys]
        return [line for key, a, b in pairs for line in differences(a, b, them=them, us=us, name=key)]
    return [] if theirs == ours else [f"{name}: {them} has {json.dumps(theirs)}, {us} has {json.dumps(ours)}"]
