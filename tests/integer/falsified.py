"""Copies of a module in which one piece of one function reads otherwise: what tests of equality must find."""

import importlib.util
import inspect
import sys
from types import ModuleType


def falsified(module: ModuleType, function: str, old: str, new: str) -> ModuleType:
    """A copy of `module` whose `function` has `new` in the place of `old`, which stands in it once."""
    source = inspect.getsource(module)
    own = inspect.getsource(getattr(module, function))
    assert own.count(old) == 1, f"{function} has {old!r} {own.count(old)} times"
    assert source.count(own) == 1
    name = f"{module.__name__}_falsified"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy  # dataclasses look their module up
    try:
        exec(compile(source.replace(own, own.replace(old, new)), name, "exec"), copy.__dict__)
    finally:
        del sys.modules[name]
    return copy
