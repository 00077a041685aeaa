"""The device's programs: compiled at the same time, once for all devices of a process, and kept in files for the next process.

A program is looked up by its function, its static arguments and the shapes of the others. One that is in a file is neither
traced nor compiled. Otherwise it is traced at once and compiled in another thread: tracing holds Python's lock, compiling does
not. So a caller that needs several programs starts all of them, first the one that it needs first.
"""

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from detspec.compile_cache import CompileCache
from detspec.config import ModelConfig
from detspec.draft.source import DraftSource
from detspec.draft.table import SOURCES

Executable = Callable[..., Any]  # takes the `args` of a `Call`


class Call(NamedTuple):
    """A jitted function and its arguments: `fn(args[0], cfg, *args[1:], **static)`, or `fn(*args, **static)` without `cfg`."""

    fn: Any  # what `jax.jit` made
    cfg: ModelConfig | None
    args: tuple[Any, ...]  # pytrees of arrays
    static: dict[str, Hashable]

    @property
    def text(self) -> str | None:
        """All that decides the program but shapes; None if no text does: draft sources of users may hold anything."""
        values = [_name_of(value) for value in self.static.values()]
        if None in values:
            return None
        return f"{self.fn.__name__} {self.cfg} {dict(zip(self.static, values, strict=True))}"


def _name_of(value: Hashable) -> str | None:
    if isinstance(value, DraftSource):
        return value.name if value in SOURCES.values() else None
    return repr(value)


class Programs:
    """The programs of a process."""

    def __init__(self) -> None:
        self._begun: dict[Hashable, Future[Executable]] = {}
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile")

    def start(self, call: Call, cache: CompileCache | None) -> Future[Executable]:
        """Begins to load or to compile the program of `call`, unless that has begun before; `cache` has the files."""
        leaves, structure = jax.tree.flatten(call.args)
        shapes = tuple(map(_shape_of, leaves))
        key = (call.fn, call.cfg, tuple(call.static.items()), structure, shapes)
        with self._lock:
            if key not in self._begun:
                devices = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
                kept = None
                if cache is not None and (text := call.text) is not None and len(devices) == 1:
                    name = cache.name(text, str(structure), str(shapes), str(devices))
                    kept = _Kept(cache, name, devices.pop())
                self._begun[key] = self._begin(_without_arrays(call), kept)
            return self._begun[key]

    def forget(self) -> None:
        """Drops all programs, as `jax.clear_caches` does with those that `jax.jit` keeps."""
        with self._lock:
            self._begun.clear()

    def _begin(self, call: Call, kept: "_Kept | None") -> Future[Executable]:
        if kept is None:
            return self._threads.submit(_lower(call).compile)
        content = kept.cache.read(kept.name)
        if content is None:
            return self._threads.submit(_compile_and_keep, _lower(call), kept)
        return self._threads.submit(_load, content, call, kept)


PROGRAMS = Programs()


class _Kept(NamedTuple):
    """Where a program is kept, and the device that runs it."""

    cache: CompileCache
    name: str
    device: jax.Device


def _lower(call: Call) -> Any:
    """Traces the function."""
    cfg = () if call.cfg is None else (call.cfg,)
    return call.fn.lower(*call.args[:1], *cfg, *call.args[1:], **call.static)


def _compile_and_keep(lowered: Any, kept: _Kept) -> Executable:
    """Compiles, and writes the program to a file."""
    program = lowered.compile()
    try:
        content = pickle.dumps(serialize(program))  # before its first call: XLA:CPU cannot write a sort that has run
    except Exception as error:  # compilers say in many ways that they cannot
        warnings.warn(f"a compiled program is not kept, its compiler cannot write it: {error}", stacklevel=2)
    else:
        kept.cache.write(kept.name, content)
    return program


def _load(content: bytes, call: Call, kept: _Kept) -> Executable:
    """The program in `content`; if it cannot be loaded, it is compiled."""
    try:
        serialized, args, results = pickle.loads(content)
        return deserialize_and_load(serialized, args, results, kept.device.client, [kept.device])
    except Exception as error:  # a file of another jaxlib raises errors of any kind
        kept.cache.drop(kept.name, f"it cannot be loaded ({error})")
        return _compile_and_keep(_lower(call), kept)


def _without_arrays(call: Call) -> Call:
    """The same with shapes for arrays, which may be donated before the function is traced."""
    return call._replace(args=jax.tree.map(_abstract, call.args))


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding_of(leaf))


def _shape_of(leaf: Any) -> tuple[Hashable, ...]:
    return leaf.shape, str(leaf.dtype), _sharding_of(leaf)


def _sharding_of(leaf: Any) -> Any:
    """Where an array must be; None if it goes where the others are."""
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
