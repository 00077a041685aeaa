"""All that the bytes of an output depend on: the header of the journal, and most of the manifest."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detspec.checkpoint.folder import SHIPPED_MODELS
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.errors import InputError
from detspec.jobs.files import sibling
from detspec.jobs.prompts import JobSpec, PromptLines, hash_file
from detspec.jobs.scan import Scan
from detspec.model.params import num_params
from detspec.read_json import differing_entries, read_json_object

SHOWN_DIGEST = 12  # hex digits
HEADER_KEYS = ("fingerprint", "text", "sampling", "on_error", "prompts", "shard", "openai", "created")


def job_header(engine: Engine, spec: JobSpec) -> dict[str, Any]:
    """Everything that the output's bytes depend on, as parsed JSON. Jobs with equal headers have equal outputs."""
    header = {
        "fingerprint": engine.fingerprint(),
        "text": engine.model.text_facts(),
        "sampling": dataclasses.asdict(spec.defaults),
        "on_error": spec.on_error,
        "prompts": spec.prompts.sha256,
        "shard": spec.shard,
        **_clock(engine, spec),
    }
    return json.loads(json.dumps(header))  # type: ignore[no-any-return]


def _clock(engine: Engine, spec: JobSpec) -> dict[str, Any]:
    """The time that the job says it is, and of OpenAI's lines, whose chats may be as long as there is room for, `max_len`."""
    if spec.is_openai:
        return {"openai": {"created": spec.created, "max_len": engine.config.max_len}}
    return {} if spec.created is None else {"created": spec.created}


def job_manifest(header: Mapping[str, Any], engine: Engine, prompts: PromptLines, scan: Scan) -> dict[str, Any]:
    """Content of `*.manifest.json` without facts about the output: header, model, the engine's settings, the prompts' facts.

    A model may lie at another path when the job goes on, so `model` is no part of the header.
    """
    return {
        "digest": hashlib.sha256(json.dumps(header["fingerprint"], sort_keys=True).encode()).hexdigest(),
        **header,
        "model": model_facts(engine.model),
        "engine": {**dataclasses.asdict(engine.config), "schedule": engine.schedule.bits()},
        "prompts": {
            "source": prompts.source,
            **prompts.options,
            "sha256": prompts.sha256,
            "num_requests": scan.num_requests,
            "num_rejected": scan.num_rejected,
        },
    }


def model_facts(model: Model) -> dict[str, Any]:
    """The model as a manifest names it: where it was loaded from, its size, and the digest of its weights."""
    return {
        "source": model.source or None,
        "family": model.family or None,
        "num_params": num_params(model.cfg),
        "dtype": model.cfg.dtype,
        "weights": model.cfg.weights,
        **({"long_texts": True} if model.loading.long_texts else {}),
        "digest": model.digest,
    }


def describe_model(model: Model) -> str:
    """The model in a line: `the shipped tiny_python, llama, 3,426,560 parameters, bfloat16, digest 1253e77ce261`."""
    source = f"the shipped {model.source}" if model.source in SHIPPED_MODELS else model.source
    dtype = model.cfg.dtype if model.cfg.weights is None else f"{model.cfg.dtype} as {model.cfg.weights}"
    parts = [source, model.family, f"{num_params(model.cfg):,} parameters", dtype, f"digest {model.digest[:SHOWN_DIGEST]}"]
    return ", ".join(filter(None, parts))


def read_manifest(out: Path) -> dict[str, Any] | None:
    """The manifest next to `out`; None if there is none or it is malformed."""
    try:
        value = read_json_object(sibling(out, "manifest")) or {}
    except InputError:
        return None
    parts = [value.get(key) for key in ("prompts", "output")]
    return value if all(isinstance(part, dict) and "sha256" in part for part in parts) else None


def header_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The header that a manifest holds, without missing keys."""
    header = {key: manifest[key] for key in HEADER_KEYS if key in manifest}
    return {**header, "prompts": manifest["prompts"]["sha256"]}


def complete_manifest(out: Path, header: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest next to `out` if `out` is the complete, unchanged output of the job with `header`; else None."""
    manifest = read_manifest(out)
    if manifest is None or header_of(manifest) != header or not out.is_file():
        return None
    if not all(type(count) is int for count in (manifest["prompts"].get("num_rejected"), manifest["output"].get("num_failed"))):
        return None
    expected = {out: manifest["output"]["sha256"], sibling(out, "errors"): manifest["output"].get("errors_sha256")}
    return manifest if all(digest is None or _has_digest(path, digest) for path, digest in expected.items()) else None


def _has_digest(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hash_file(file) == digest


def differences(theirs: object, ours: object, *, them: str, us: str = "this job") -> list[str]:
    """The differences of two headers, one sentence each: `sampling.temperature: journal has 0.0, this job has 0.8`."""
    pairs = differing_entries(theirs, ours)
    return [f"{name}: {them} has {json.dumps(a)}, {us} has {json.dumps(b)}" for name, a, b in pairs]
