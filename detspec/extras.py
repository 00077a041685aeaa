"""Packages that parts of detspec need besides those that it always needs, and how they are installed."""

import importlib.metadata


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra, by their own names: it holds wherever detspec came from."""
    try:
        listed = importlib.metadata.requires("detspec") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from its sources
        listed = []
    parts = [entry.partition(";") for entry in listed]
    names = [name.strip() for name, _, condition in parts if f'extra == "{extra}"' in condition]
    if not names:
        return f"pip install '.[{extra}]'"
    return " ".join(["pip install", *(f"'{name}'" for name in names)])
