"""Reads config files, and checks fields that several configs have."""

import inspect
import runpy
from pathlib import Path
from typing import Any

from detspec.config import is_count
from detspec.errors import InputError
from detspec.train.experiment import TrainConfig


def load_config(source: str | Path) -> TrainConfig:
    """Runs the Python file that `source`, "FILE" or "FILE:ARM", names; returns its `get_config()` or `get_config(ARM)`.

    Raises `InputError` if the file is missing, `get_config` takes no arm or needs one, or the result is no config of a run.
    """
    path, arm = split_source(source)
    if not path.is_file():
        raise InputError(f"{path}: no such config file")
    get_config = runpy.run_path(str(path)).get("get_config")
    if get_config is None:
        raise InputError(f"{path}: defines no get_config()")
    args = () if arm is None else (arm,)
    try:
        inspect.signature(get_config).bind(*args)
    except TypeError as error:
        wrong = f"needs an arm; give {path}:ARM" if arm is None else f"takes no arm, got {arm!r}; give {path} alone"
        raise InputError(f"{path}: its get_config {wrong}") from error
    config = get_config(*args)
    if not isinstance(config, TrainConfig):
        kind = type(config).__name__
        raise InputError(f"{path}: get_config must return the config of a run, such as LanguageConfig; got {kind}")
    return config


def split_source(source: str | Path) -> tuple[Path, str | None]:
    """Splits "FILE" or "FILE:ARM" into file and arm. The arm follows the last colon; without a colon it is None."""
    file, colon, arm = str(source).rpartition(":")
    if not colon:
        return Path(source), None
    if not file or not arm:
        raise InputError(f"config {str(source)!r} must be FILE or FILE:ARM")
    return Path(file), arm


def require_seed(config: Any) -> None:
    """Raises `InputError` unless `config.seed` is an integer of at least 0."""
    if not isinstance(config.seed, int) or isinstance(config.seed, bool) or config.seed < 0:
        raise InputError(f"{type(config).__name__}.seed must be an integer of at least 0, got {config.seed!r}")


def require_positive(config: Any, *fields: str) -> None:
    """Raises `InputError` unless each of `fields` is a positive integer."""
    for field in fields:
        value = getattr(config, field)
        if not is_count(value):
            raise InputError(f"{type(config).__name__}.{field} must be a positive integer, got {value!r}")


def require_one_of(config: Any, field: str, accepted: tuple[str, ...]) -> None:
    """Raises `InputError` unless `field` is one of the `accepted` strings."""
    value = getattr(config, field)
    if value not in accepted:
        raise InputError(f"{type(config).__name__}.{field} must be one of {', '.join(map(repr, accepted))}, got {value!r}")
