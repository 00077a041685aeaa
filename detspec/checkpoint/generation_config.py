"""What a folder says about generation: which tokens end a text, and how its makers would sample."""

import json
from pathlib import Path

from detspec.config import MAX_COUNT, is_number
from detspec.errors import InputError
from detspec.read_json import read_json_object

GENERATION_CONFIG = "generation_config.json"
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text, from `generation_config.json`, else from `config.json`; empty if neither names any."""
    for name in (GENERATION_CONFIG, "config.json"):
        value = (read_json_object(folder / name) or {}).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= MAX_COUNT for token in ids):
                raise InputError(f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}")
            return tuple(ids)
    return ()


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """Temperature, top_k, top_p and min_p of `generation_config.json`; none if it does not sample, which is greedy.

    Where it samples and names no temperature, that is 1. Keys that `SamplingParams` does not have are left out.
    """
    config = read_json_object(folder / GENERATION_CONFIG) or {}
    if not config.get("do_sample"):
        return {}
    found = {key: config[key] for key in SAMPLING_KEYS if config.get(key) is not None}
    wrong = {key: value for key, value in found.items() if not is_number(value)}
    if wrong:
        raise InputError(f"{folder / GENERATION_CONFIG}: {json.dumps(wrong)} must be finite numbers")
    return {"temperature": 1.0, **found}
