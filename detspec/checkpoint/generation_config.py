"""What a folder says about generation: which tokens end a text, and how its makers would sample."""

import json
from pathlib import Path
from typing import Any

from detspec.errors import InputError

GENERATION_CONFIG = "generation_config.json"
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text, from `generation_config.json`, else from `config.json`; empty if neither names any."""
    for name in (GENERATION_CONFIG, "config.json"):
        value = _read(folder / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise InputError(f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}")
            return tuple(ids)
    return ()


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """Temperature, top_k, top_p and min_p of `generation_config.json`; none if it does not sample, which is greedy.

    Where it samples and names no temperature, that is 1. What `SamplingParams` has no word for (repetition penalties and the
    like) is left out.
    """
    config = _read(folder / GENERATION_CONFIG)
    if not config.get("do_sample"):
        return {}
    found = {key: config[key] for key in SAMPLING_KEYS if config.get(key) is not None}
    wrong = {key: value for key, value in found.items() if isinstance(value, bool) or not isinstance(value, int | float)}
    if wrong:
        raise InputError(f"{folder / GENERATION_CONFIG}: {json.dumps(wrong)} are no numbers")
    return {"temperature": 1.0, **found}


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object but {type(value).__name__}")
    return value
