"""Parts of stages: programs, which need no device, and measurements, which run on one."""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.engine.compiled import ProgramCall
from detspec.engine.device import Device
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Plan
from detspec.engine.programs import Decoding
from detspec.environment import chosen_schedule, default_schedule
from detspec.held import Jitted
from detspec.model.params import param_shapes
from detspec.roofline import Work
from detspec.schedule import Numerics, Schedule
from detspec.targets import TARGETS, Target, canonical_schedule
from prove_stages.journal import Entry, Line
from prove_stages.sizes import Size

NO_WORK = Work(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Names where stages run, or what they are compiled for.

    Attributes:
        size: how large things are.
        platform: "cpu", "gpu" or "tpu".
        schedule_fn: the device's schedule for a model.
        earlier: entries of earlier stages by stage and name.
        target: data sheet of the device; None if there is none.
        ends: when the stage is ended, of `time.monotonic`.
    """

    size: Size
    platform: str
    schedule_fn: Callable[[ModelConfig], Schedule]
    earlier: Mapping[str, Mapping[str, Line]] = dataclasses.field(default_factory=dict)
    target: Target | None = None
    ends: float = math.inf

    @classmethod
    def here(
        cls, size: Size, earlier: Mapping[str, Mapping[str, Line]], switches: Mapping[str, str], *, ends: float = math.inf
    ) -> "Setting":
        """On the device of this process; `switches` are fields of `Numerics` that replace the device's own.

        Raises `InputError` if the device does not run the implementation that they name.
        """

        def schedule_of(cfg: ModelConfig) -> Schedule:
            return chosen_schedule(default_schedule(cfg).with_numerics(**switches), cfg)

        schedule_of(size.model)
        return cls(size, jax.default_backend(), schedule_of, earlier, target_of(jax.devices()[0].device_kind), ends)

    @classmethod
    def of_target(cls, size: Size, target: Target, switches: Mapping[str, str] | None = None) -> "Setting":
        """On a device that is not here."""
        changes = switches or {}
        return cls(size, target.platform, lambda cfg: canonical_schedule(target, cfg).with_numerics(**changes), target=target)

    def bar(self, value: float) -> float | None:
        """The bar of a time; None in a rehearsal, whose times mean nothing."""
        return value if self.size.is_timed else None

    def found(self, stage: str, name: str) -> float | None:
        """The value of an entry of an earlier stage; None if it has none."""
        entry = self.earlier.get(stage, {}).get(name)
        return None if entry is None else float(entry["value"])

    @property
    def peaks(self) -> tuple[float, float] | None:
        """Bytes and operations a second: measured ceilings, or the data sheet's until there are some; None without either."""
        copy, product = self.found("ceilings", "copy"), self.found("ceilings", "product")
        if copy is not None and product is not None:
            return 1e12 * copy, 1e12 * product
        return None if self.target is None else (float(self.target.bytes_per_s), float(self.target.flop_per_s))

    def predicted_s(self, work: Work) -> float | None:
        """The least seconds of `work` at these peaks."""
        return None if self.peaks is None else max(work.bytes / self.peaks[0], work.flop / self.peaks[1])

    def predicted(self, work: Work, scale: float) -> float | None:
        """Predicts these seconds in another unit, of which one second has `scale`."""
        seconds = self.predicted_s(work)
        return None if seconds is None else scale * seconds

    def predicted_ratio(self, other: Work, own: Work) -> float | None:
        """The predicted time of `other` over that of `own`."""
        one, another = self.predicted_s(other), self.predicted_s(own)
        return None if one is None or another is None else one / another

    def bound(self, work: Work) -> str:
        """Names what takes `work` longer at these peaks: "bandwidth" or "arithmetic"; "" without peaks."""
        if self.peaks is None:
            return ""
        return "bandwidth" if work.bytes / self.peaks[0] >= work.flop / self.peaks[1] else "arithmetic"

    @property
    def left_s(self) -> float:
        """Seconds until the stage is ended."""
        return self.ends - time.monotonic()


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A part of a stage.

    Attributes:
        name: as the results file calls it.
        run: returns its figures. Each is on disk before the next one is asked for; one of the same name replaces it.
        costly: it is skipped if less time is left than the costly one before it took.
        apart: what follows runs in another process.
    """

    name: str
    run: Callable[[], Iterable[Entry]]
    costly: bool = False
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and its arguments.

    Attributes:
        name: as plans call it.
        fn: a function of `args` for `jax.jit`; or one that is jitted, for which `static` holds the rest of its arguments.
        make: makes the arguments; where only shapes are needed, under `jax.eval_shape`. With `static`, it makes shapes.
        static: arguments by name that `fn` was jitted with as static.
        numerics: of the canonical passes that it is part of, whose options it is compiled with; None if of none.
        work: of one call.
        calls: how often a stage calls it, about.
    """

    name: str
    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    numerics: Numerics | None = None
    work: Work = NO_WORK
    calls: int = 1

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The arguments as shapes."""
        return jax.eval_shape(self.make)

    def lower(self, sharding: Any) -> Any:
        """Traces it for a device, which `sharding` names."""
        args = jax.tree.map(lambda leaf: _placed(leaf, sharding), self.shapes if not self.static else self.make())
        return self.jitted.lower(*args, **self.static)

    @functools.cached_property
    def jitted(self) -> Any:
        """The function that is called, compiled with the options that an engine compiles it with."""
        return self.fn if self.static else Jitted(self.fn, lambda named: self.numerics)

    def call(self) -> Callable[[], Any]:
        """Makes the arguments on the device, and returns what starts the program with them."""
        args = jax.jit(self.make)()
        return lambda: self.jitted(*args)


def target_of(device_kind: str) -> Target | None:
    """The data sheet of a device, by the name that jax gives it: "NVIDIA H100 80GB HBM3", "TPU v5 lite"."""
    known = [target for target in TARGETS.values() if re.match(rf"{re.escape(target.kind)}(?!\d)", device_kind)]
    return max(known, key=lambda target: len(target.kind), default=None)


def engine_programs(
    cfg: ModelConfig, config: EngineConfig, plans: Iterable[Plan], *, name: str, calls: int = 1
) -> list[Program]:
    """The programs that an engine needs for `plans`; `config` names the schedule of the device that they are compiled for."""
    schedule = config.schedule
    assert schedule is not None
    found: list[Program] = []

    def build() -> None:
        # Interpreted kernels are accepted anywhere, and their state has the same shapes.
        anywhere = dataclasses.replace(config, schedule=schedule.with_numerics(interpret=True), compile_cache=False)
        device = Device(Model(cfg, param_shapes(cfg), None, (), ""), anywhere)
        device.schedule = schedule
        for call in device.calls([*plans]):
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), call.args)
            args = shapes if call.cfg is None else (shapes[0], call.cfg, *shapes[1:])
            found.append(Program(f"{name}: {label_of(call)}", call.fn, lambda args=args: args, static=call.static, calls=calls))

    jax.eval_shape(build)
    return found


def label_of(call: ProgramCall) -> str:
    """The function, and for steps the plan: "run_segment ordinary", "run_segment 4x16 self"."""
    if "decoding" not in call.static:
        return str(call.fn.__name__)
    decoding = cast(Decoding, call.static["decoding"])
    budget = decoding.schedule.budget
    kind = "ordinary" if decoding.source is None else f"{budget.groups}x{budget.window} {decoding.source.name}"
    return f"{call.fn.__name__} {kind}"


def _placed(leaf: Any, sharding: Any) -> Any:
    """A shape on the device; what is no array stays as it is."""
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        else leaf
    )
