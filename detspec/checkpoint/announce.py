"""Says which model a command is about to load, before it takes its time."""

from pathlib import Path

from detspec.checkpoint.load import SHIPPED_MODELS
from detspec.say import say


def say_loading(path: str | Path | None, *, what: str = "model") -> None:
    """Writes `what` is being loaded from `path` to the standard error; and of a shipped model that it is a small one.

    None is the shipped model that is loaded if none is named.
    """
    name = SHIPPED_MODELS[0] if path is None else str(path)
    asked = "; --model names another" if path is None else ""
    is_shipped = name in SHIPPED_MODELS and not Path(name).exists()
    say(f"loading the {what} {name}{f', a small one that comes with detspec{asked}' if is_shipped else ''}")
