"""The doctor: certifies the compiled canonical pass, reading with thoughts and the engine's programs on the device at hand."""

import dataclasses
import math

from detspec.checkpoint.load import Model
from detspec.doctor.examination import Check, SayFn, examine, text_length
from detspec.doctor.thinking_examination import examine_thoughts
from detspec.engine.certify import Certificate
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs
from detspec.environment import chosen_schedule, fingerprint
from detspec.held import compiler_options
from detspec.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """Everything found out; `certified` is what determinism may be promised by."""

    fingerprint: dict[str, str]
    schedule: Schedule
    num_positions: int
    checks: tuple[Check, ...]
    control: Check  # the inverse control: equal means that the comparison has no power
    plans: tuple[Certificate, ...]  # the engine's own programs, against the anchor

    @property
    def certified(self) -> bool:
        """All axes hold and the inverse control found differences."""
        return all(check.equal for check in self.checks) and not self.control.equal

    def table(self) -> str:
        """The report for people."""
        lines = [f"{name:12} {value}" for name, value in self.fingerprint.items()]
        rows, window = dataclasses.astuple(self.schedule.budget)
        numerics = self.schedule.numerics
        lines.append(
            f"{'schedule':12} rows {rows}, window {window}, page {numerics.page}, query tile {numerics.query_tile}, "
            f"{numerics.cache_dtype} cache, {numerics.implementation} attention, {numerics.linear} products"
        )
        if options := compiler_options(numerics, self.fingerprint["backend"]):
            lines.append(f"{'options':12} {' '.join(f'{name}={value}' for name, value in options.items())}")
        lines += ["", f"  {'axis':16} {'what varies':58} {'runs':>4}  same bits at {self.num_positions} positions"]
        for check in self.checks:
            verdict = "yes" if check.equal else f"NO: {check.differs}"
            lines.append(f"  {check.axis:16} {check.meaning:58} {check.num_variants:4}  {verdict}")
        c = self.control
        verdict = f"differs, as it must: {c.differs}" if c.differs else "NO DIFFERENCE: the comparison has no power here"
        lines.append(f"  {c.axis:16} {c.meaning:58} {c.num_variants:4}  {verdict}")
        lines += ["", "  the engine's programs (windows x rows a window [batch]) against the anchor:"]
        if not self.plans:
            lines.append("  not examined: an engine refuses a model whose thoughts vary")
        for certificate in self.plans:
            verdict = f"{certificate.status}: {certificate.why}" if certificate.why else certificate.status
            timing = f"{certificate.step_s * 1e3:8.2f} ms a step" if math.isfinite(certificate.step_s) else " " * 18
            lines.append(f"  {certificate.plan.label:16} {timing}  {verdict}")
        lines += ["", "certified" if self.certified else "NOT CERTIFIED: determinism is not promised on this device"]
        return "\n".join(lines)


def run_doctor(
    model: Model, *, schedule: Schedule | None = None, max_requests: int = 8, on_progress: SayFn = lambda step: None
) -> DoctorReport:
    """Examines the canonical pass of `schedule` (by default the device's), and the engine's programs for `max_requests`."""
    schedule = chosen_schedule(schedule, model.cfg)
    checks, control = examine(model, schedule, on_progress)
    plans: tuple[Certificate, ...] = ()
    thoughts = examine_thoughts(model, schedule, on_progress)
    if all(check.equal for check in thoughts):  # else the engine refuses the model
        on_progress("engine programs")
        max_len = min(EngineConfig().max_len, model.cfg.max_position)
        config = EngineConfig(max_requests=max_requests, max_len=max_len, schedule=schedule)
        plans = Engine(model, config).prepare(needs=Needs(processing=False))
    return DoctorReport(fingerprint(), schedule, text_length(model.cfg, schedule), (*checks, *thoughts), control, plans)
