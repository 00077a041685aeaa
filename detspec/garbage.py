"""Python's garbage collector, held off where much is made that stays."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def kept_garbage() -> Iterator[None]:
    """Collects no garbage meanwhile, in any thread; for a second or two.

    Imports and traces make half a million objects that live on, and at every turn the collector would search those before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
