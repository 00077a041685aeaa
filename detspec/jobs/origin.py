"""Where the records of an audit come from: what the manifest of a job says that bits depend on, and whether it is so here."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.held import compiler_options
from detspec.jobs.files import sibling
from detspec.jobs.manifest import differences, read_manifest
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the records came from, according to the manifest: the part that an audit needs."""

    digest: str  # digest of the fingerprint; part of each completion's digest
    fingerprint: dict[str, Any]  # device kind, versions, model, schedule
    text: dict[str, Any]  # digests of tokenizer and chat template, and the model's end-of-sequence tokens
    sampling: SamplingParams  # default sampling parameters of the job
    engine: EngineConfig  # settings of the engine; its capacities decide which requests are valid
    source: str  # name of the file of prompts
    sha256: str  # SHA-256 of the file of prompts
    column: str | None = None  # column of a table that prompts came from
    id_column: str | None = None  # and of their ids
    is_openai: bool = False  # the records are OpenAI's batch lines
    created: int | None = None  # seconds since 1970 that the job said it is


def read_origin(records: Path) -> Origin:
    """The origin of `records`, read from the manifest next to them.

    Raises `InputError` if the manifest is missing or malformed, or its digest is not that of its fingerprint.
    """
    path = sibling(records, "manifest")
    manifest = read_manifest(records)
    if manifest is None:
        raise InputError(f"{path} is no manifest of a job: an audit needs the one that the job wrote next to its output")
    try:
        fingerprint = manifest["fingerprint"]
        texts = [fingerprint["detspec"], fingerprint["model"], manifest["digest"]]
        texts += [manifest["prompts"]["source"], manifest["prompts"]["sha256"]]
        if not isinstance(fingerprint, dict) or not all(isinstance(text, str) for text in texts):
            raise TypeError("fingerprint must be an object; its detspec and model, digest, source and sha256 must be texts")
        origin = Origin(
            digest=manifest["digest"],
            fingerprint=fingerprint,
            text=dict(manifest["text"]),
            sampling=SamplingParams(**manifest["sampling"]),
            engine=EngineConfig(**{**manifest["engine"], "schedule": Schedule.from_bits(fingerprint["schedule"])}),
            source=manifest["prompts"]["source"],
            sha256=manifest["prompts"]["sha256"],
            column=manifest["prompts"].get("column"),
            id_column=manifest["prompts"].get("id_column"),
            is_openai="openai" in manifest,
            created=_created(manifest["openai"]["created"] if "openai" in manifest else manifest.get("created")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no manifest that this version can read: {error!r}") from error
    if hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest() != origin.digest:
        raise InputError(f"{path}: its digest {origin.digest} is not that of its fingerprint: the file was changed")
    return origin


def check_model(origin: Origin, model: Model) -> None:
    """Raises `InputError` unless `model` is the one that the records come from."""
    if origin.fingerprint["model"] != model.digest:
        raise InputError(
            f"the records come from the model with digest {origin.fingerprint['model']}, but this one's is {model.digest}: "
            "name the right folder with --model"
        )
    if parts := differences(origin.text, model.text_facts(), them="the records' model", us="this one"):
        raise InputError(f"this model maps text and tokens differently from the records' model: {'; '.join(parts)}")


def machine_differences(origin: Origin, mesh: str) -> list[str]:
    """The differences between this machine's fingerprint, with its `mesh`, and the manifest's, a sentence each.

    The options of canonical programs are among them, which follow from the schedule and the machine. Flags of the compiler are
    unknown where an older version wrote the manifest, so they are no difference.
    """
    machine = fingerprint()
    schedule = origin.engine.schedule
    options = compiler_options(schedule.numerics, machine["backend"]) if schedule else {}
    return [
        f"{name} is {here!r}, the records' was {origin.fingerprint.get(name)!r}"
        for name, here in {**machine, "mesh": mesh, "options": options or None}.items()
        if origin.fingerprint.get(name) != here and (name != "flags" or name in origin.fingerprint)
    ]


def _created(value: object) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"created must be an integer, got {value!r}")
    return value
