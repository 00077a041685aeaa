"""The device's programs: compiled at the same time, once for all devices of a process, and kept in files for the next process.

A program is looked up by its function, its static arguments and the shapes of the others. One that is not there is traced at
once, and loaded or compiled in another thread: tracing holds Python's lock, compiling does not. So a caller that needs several
programs starts all of them, first the one that it needs first.

A file is found by the text of the traced program. So it does not matter how the program came about: an ablation that replaces a
function of this package makes another program.
"""

import ctypes
import functools
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, SingleDeviceSharding

from detspec.compile_cache import CompileCache
from detspec.config import ModelConfig
from detspec.garbage import kept_garbage
from detspec.held import Jitted
from detspec.mesh import mesh_of, over_chips
from detspec.state import GenState

JAX_CACHE_HIT = "/jax/compilation_cache/cache_hits"  # jax's event, in the thread that compiles

Executable = Callable[..., Any]  # takes the `args` of a `ProgramCall`


class ProgramCall(NamedTuple):
    """A jitted function and its arguments: `fn(args[0], cfg, *args[1:], **static)`, or `fn(*args, **static)` without `cfg`."""

    fn: Any  # a function that `jax.jit` or `Jitted` made
    cfg: ModelConfig | None
    args: tuple[Any, ...]  # pytrees of arrays
    static: dict[str, Hashable]
    results: Any = None  # on a mesh, the specs of what it returns, which may stand for whole subtrees


class Programs:
    """The programs of a process."""

    def __init__(self) -> None:
        self._begun: dict[Hashable, Future[Executable]] = {}
        self._lock = threading.RLock()
        # One core traces. On two cores, two programs compiled at a time take a fifth more memory and hardly less time.
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="compile")
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="compile-behind")  # the other cores are for what runs

    def start(self, call: ProgramCall, cache: CompileCache | None) -> Future[Executable]:
        """Begins to load or to compile the program of `call`, unless that has begun before; `cache` has the files."""
        return self._start(_wanted(call), cache)

    def start_behind(self, calls: Sequence[ProgramCall], cache: CompileCache | None) -> Future[None]:
        """As `start` of one call after the other, but traces in another thread, too; done when all programs are there."""
        wanted = list(map(_wanted, calls))  # at once: when they are traced, their arrays may have been donated

        def make() -> None:
            for each in wanted:
                self._start(each, cache).result()

        return self._behind.submit(make)

    def _start(self, wanted: "_Wanted", cache: CompileCache | None) -> Future[Executable]:
        with self._lock:
            begun = self._begun.get(wanted.key)
            if begun is not None and not (begun.done() and begun.exception() is not None):  # a failure may not come again
                return begun
            begun = self._begun[wanted.key] = Future()
        try:
            with kept_garbage():
                lowered = _lower(wanted.call, wanted.mesh)
        except BaseException as error:
            begun.set_exception(error)
            raise
        is_shared = any(device.process_index != jax.process_index() for device in wanted.devices)
        # Where processes share a mesh, jax's own cache alone keeps programs: there all must compile, or none.
        if cache is None or is_shared or (wanted.mesh is None and len(wanted.devices) != 1):
            self._threads.submit(self._fulfil, begun, lowered.compile)
        else:
            options = str(_options(wanted.call))
            self._threads.submit(self._fulfil, begun, lambda: _load_or_compile(lowered, options, cache, wanted.devices))
        return begun

    def _fulfil(self, begun: Future[Executable], make: Callable[[], Executable]) -> None:
        """Sets what `make` returns, or raises, as the result of `begun`; returns freed memory if that was the last."""
        try:
            begun.set_result(make())
        except BaseException as error:
            begun.set_exception(error)
        if not self.is_compiling:
            return_freed()

    def made_from(self, fn: Any) -> list[Any]:
        """The compiled programs of a jitted function, of whatever shapes."""
        with self._lock:
            begun = [program for key, program in self._begun.items() if key[0] is fn]  # type: ignore[index]
        return [program.result() for program in begun]

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being loaded or compiled."""
        return any(not program.done() for program in list(self._begun.values()))

    def forget(self) -> None:
        """Drops all programs, as `jax.clear_caches` does with those that `jax.jit` keeps."""
        with self._lock:
            self._begun.clear()


PROGRAMS = Programs()


class _Wanted(NamedTuple):
    """A program that is to be made.

    Attributes:
        key: finds the program.
        call: a call of the program, with shapes in the place of jax's arrays.
        mesh: the chips that it runs on; None on one device.
        devices: these chips, or that device.
    """

    key: Hashable
    call: ProgramCall
    mesh: Mesh | None
    devices: list[jax.Device]


def _wanted(call: ProgramCall) -> _Wanted:
    leaves, structure = jax.tree.flatten(call.args)
    mesh = mesh_of(call.args)
    devices = _devices_of(leaves) if mesh is None else list(mesh.devices.flat)
    shapes = [_without_content(leaf, devices) for leaf in leaves]
    facts = tuple((leaf.shape, str(leaf.dtype), getattr(leaf, "sharding", None)) for leaf in shapes)
    key = (call.fn, call.cfg, tuple(call.static.items()), structure, tuple(devices), facts)
    return _Wanted(key, call._replace(args=jax.tree.unflatten(structure, shapes)), mesh, devices)


def _devices_of(leaves: Sequence[Any]) -> list[jax.Device]:
    """The devices, in general one, that arrays are committed to; if there are none, those where arrays are."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    bound = [array for array in arrays if array.committed] or arrays
    return list({device for array in bound for device in array.devices()})


def _without_content(leaf: Any, devices: Sequence[jax.Device]) -> Any:
    """The shape, dtype and place of an array, which is all that tracing sees."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding_of(leaf, devices), weak_type=leaf.weak_type)


def return_freed() -> None:
    """Returns to Linux the memory that glibc keeps after it was freed: compilers leave a quarter of a process in it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _lower(call: ProgramCall, mesh: Mesh | None) -> Any:
    """Traces the function, on a mesh as the body of one `jax.shard_map`; donated there are the arguments that are states."""
    cfg = () if call.cfg is None else (call.cfg,)
    if mesh is None:
        return call.fn.lower(*call.args[:1], *cfg, *call.args[1:], **call.static)

    @functools.wraps(call.fn)
    def body(*args: Any) -> Any:
        return call.fn.__wrapped__(*args[:1], *cfg, *args[1:], **call.static)

    donated = [number for number, arg in enumerate(call.args) if isinstance(arg, GenState)]
    jitted = jax.jit(
        over_chips(body, mesh, call.args, call.results), donate_argnums=donated, compiler_options=_options(call) or None
    )
    return jitted.lower(*call.args)


def _options(call: ProgramCall) -> dict[str, Any]:
    """The options that the program is compiled with; its text does not have them."""
    return call.fn.options(call.args, call.static) if isinstance(call.fn, Jitted) else {}


def _load_or_compile(lowered: Any, options: str, cache: CompileCache, devices: list[jax.Device]) -> Executable:
    """The program from a file, or else from the compiler, and then written to a file.

    One that jax found in a cache of its own is not written: XLA:CPU would leave out a part, and the file could not run.
    """
    name = cache.name(lowered.as_text(), str(lowered.in_tree), str(lowered.out_tree), str(devices), options)
    content = cache.read(name)
    if content is not None:
        try:
            serialized, *_ = pickle.loads(content)
            # The trees are those of the traced program: functions in them are the same objects, which are compared fast.
            return deserialize_and_load(serialized, lowered.in_tree, lowered.out_tree, devices[0].client, devices)
        except Exception as error:  # a file of another jaxlib raises errors of any kind
            cache.drop(name, f"it cannot be loaded ({error})")
    before = _jax_hits()
    program = lowered.compile()
    if _jax_hits() > before:
        _from_jax.add(name)  # jax may give the same program again without looking there
    if name in _from_jax:
        return program
    try:
        content = pickle.dumps(serialize(program)[:1])  # before its first call: XLA:CPU cannot write a sort that has run
    except Exception as error:  # compilers say in many ways that they cannot
        warnings.warn(f"a compiled program is not kept, its compiler cannot write it: {error}", stacklevel=2)
    else:
        cache.write(name, content)
    return program


_hits = threading.local()
_from_jax: set[str] = set()  # names of programs that jax has found in its own cache, in this process


def _jax_hits() -> int:
    """How many programs jax has found in its own cache, in this thread."""
    return getattr(_hits, "number", 0)


def _note_hit(event: str, **_: Any) -> None:
    if event == JAX_CACHE_HIT:
        _hits.number = _jax_hits() + 1


jax.monitoring.register_event_listener(_note_hit)


def _sharding_of(array: jax.Array, devices: Sequence[jax.Device]) -> Any:
    """Place where an array of a program on `devices` must be; None if jax finds it.

    On one device it does not matter whether the array is committed: weights of a trainer are, others are not, and so are what
    programs make of them. On jax's own device no program names the place.
    """
    if len(devices) != 1:
        return array.sharding if array.committed else None
    is_free = jax.config.jax_default_device is None  # type: ignore[attr-defined]  # missing in jax's stub
    return None if is_free and devices[0] == jax.local_devices()[0] else SingleDeviceSharding(devices[0])
