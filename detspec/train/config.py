"""The reader of config files, and the check their fields share."""

import inspect
import runpy
from pathlib import Path
from typing import Any

from detspec.config import is_count
from detspec.errors import InputError
from detspec.train.experiment import TrainConfig


def load_config(source: str | Path) -> TrainConfig:
    """Runs the Python file of `source`, "FILE" or "FILE:ARM", and returns what its `get_config()` or `get_config(ARM)` makes.

    Raises `InputError` if there is no such file, its `get_config` takes no arm or needs one, or it makes no config of a run.
    """
    path, arm = split_source(source)
    if not path.is_file():
        raise InputError(f"{path}: no such config file")
    get_config = runpy.run_path(str(path)).get("get_config")
    if get_config is None:
        raise InputError(f"{path}: defines no get_config()")
    args = () if arm is None else (arm,)
    if not accepts(get_config, *args):
        if arm is None:
            raise InputError(f"{path}: its get_config needs an arm; give {path}:ARM")
        raise InputError(f"{path}: its get_config takes no arm, got {arm!r}; give {path} alone")
    config = get_config(*args)
    if not isinstance(config, TrainConfig):
        raise InputError(
            f"{path}: get_config must return the config of a run, such as LanguageConfig; got {type(config).__name__}"
        )
    return config


def split_source(source: str | Path) -> tuple[Path, str | None]:
    """The file and the arm of "FILE" or "FILE:ARM": the arm is what follows the last colon, None without one."""
    file, colon, arm = str(source).rpartition(":")
    if not colon:
        return Path(source), None
    if not file or not arm:
        raise InputError(f"config {str(source)!r} must be FILE or FILE:ARM")
    return Path(file), arm


def accepts(fn: Any, *args: Any) -> bool:
    """Whether `fn` can be called with `args`."""
    try:
        inspect.signature(fn).bind(*args)
    except TypeError:
        return False
    return True


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
