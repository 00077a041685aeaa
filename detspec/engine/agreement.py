"""Agreement of processes that share a mesh: by process 0's measurements, and by nothing else that differs between them.

Every process runs the same host loop over the same requests. Each measures what a plan's step takes and what a look costs, but
decisions read what process 0 measured. After every `SEGMENTS` segments all exchange one small message:

    process 0   ->   seconds of each segment's step, and of a look
    any process ->   the signal that asks it to stop, requests to abort, and a digest of its decisions so far, which all compare

Between two messages no process waits for another but in the programs themselves. A process alone exchanges nothing.
"""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from detspec.distributed import exchange
from detspec.engine.decide import Observe, Segment, StepTimes
from detspec.engine.policy import Plan
from detspec.engine.sequence import SequenceState
from detspec.engine.watchdog import Watchdog
from detspec.errors import DivergenceError, InputError

T = TypeVar("T")
SEGMENTS = 8  # between two messages
MOST_ABORTED = 8  # requests of one process in one message; the others come with the next
TRIAL_S = 30.0  # predicted for a certificate, or the times of a batch's plans
MESSAGE_S = 1.0  # predicted for a message, before which a process waits for the slowest
NAMED = 16  # decisions that an error names
MESSAGE = np.dtype(
    [
        ("decisions", "V32"),  # SHA-256
        ("visit_s", "f8"),
        ("step_s", "f8", SEGMENTS),  # 0 where it is not known
        ("num_steps", "i4", SEGMENTS),
        ("signal", "i4"),  # 0 for none
        ("aborted", "V16", MOST_ABORTED),  # digests of ids
    ]
)
ExchangeFn = Callable[[bytes], list[bytes]]  # as `detspec.distributed.exchange`


class Alone:
    """A process alone: what it measures and decides holds, and at once."""

    is_first = True  # whether this process writes results

    def exchange(self, content: bytes) -> list[bytes]:
        """The `content` of each process, in their order."""
        return [content]

    def watched(self, fn: Callable[[], T]) -> T:
        """Returns what `fn` does, a trial run of programs."""
        return fn()

    def same(self, seconds: Sequence[float]) -> Sequence[float]:
        """Process 0's measurements in place of these."""
        return seconds

    def check(self, decision: str) -> None:
        """Raises `DivergenceError` unless all processes decided the same, now and before."""

    def observer(self, step_times: StepTimes) -> Observe:
        """Takes this process's measurements of segments, so that `step_times` learn process 0's."""
        return step_times.observed

    def visit_s(self, measured: float) -> float:
        """Process 0's seconds of a look at the device; `measured` are this one's."""
        return measured

    def started(self, plan: Plan, segment: Segment, sequences: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """A segment was decided on."""

    def finished(self, sequences: Sequence[SequenceState]) -> list[str]:
        """A segment has ended; `sequences` are all in flight. Returns ids of requests that all processes abort now."""
        return []

    def aborts(self, id: str) -> bool:
        """Whether request `id` is aborted now; else a later `finished` returns it."""
        return True

    def stops(self, signal: int) -> int:
        """The signal by which all processes stop now, 0 for none; `signal` is what this one has received."""
        return signal

    def ended(self, signal: int) -> int:
        """Returns the signal by which all stop, after the last segment."""
        return signal


@dataclasses.dataclass
class _Ran:
    """A segment since the last message."""

    plan: Plan
    step_s: float = 0.0  # time of a step here; 0 if it is not known
    num_steps: int = 0  # so many steps took that


class Processes:
    """An `Agreement` of several processes, of which this one is number `index`.

    `watchdog` is told what is expected; None ends no process.
    """

    def __init__(self, index: int, exchange_fn: ExchangeFn, watchdog: Watchdog | None = None) -> None:
        self.is_first = index == 0
        self._exchange = exchange_fn
        self._watchdog = watchdog
        self._decisions = hashlib.sha256()
        self._last: deque[str] = deque(maxlen=NAMED)
        self._ran: list[_Ran] = []
        self._num_segments = 0
        self._step_times: StepTimes | None = None
        self._visit_s = self._own_visit_s = 1e-3  # until the first message, what a clock assumes
        self._signal = 0  # received here
        self._agreed_signal = 0
        self._to_abort: deque[str] = deque()

    def exchange(self, content: bytes) -> list[bytes]:
        """The `content` of each process, in their order; waits as long as the slowest needs to read, load or write."""
        return self._exchange(content)

    def watched(self, fn: Callable[[], T]) -> T:
        """Returns what `fn` does; the watchdog ends the process if a trial run waits for the others in vain."""
        self._expect(TRIAL_S)
        found = fn()
        self._rest()
        return found

    def same(self, seconds: Sequence[float]) -> Sequence[float]:
        """Process 0's measurements in place of these."""
        return np.frombuffer(self._meet(np.asarray(seconds, np.float64).tobytes())[0], np.float64).tolist()

    def check(self, decision: str) -> None:
        """Raises `DivergenceError` unless all processes decided the same, now and before."""
        self._decide(decision)
        self._compare(self._meet(self._decisions.digest()))

    def observer(self, step_times: StepTimes) -> Observe:
        """Keeps what is observed here for the next message, which tells `step_times` what process 0 observed."""
        self._step_times = step_times

        def observed(plan: Plan, seconds: float, num_steps: int) -> None:
            self._ran[-1].step_s = seconds
            self._ran[-1].num_steps = num_steps

        return observed

    def visit_s(self, measured: float) -> float:
        """Process 0's seconds of a look at the device, as of the last message."""
        self._own_visit_s = measured
        return self._visit_s

    def started(self, plan: Plan, segment: Segment, sequences: Sequence[SequenceState], page_table: np.ndarray) -> None:
        """Notes the plan, and which sequences are where; their places and pages count, too."""
        self._num_segments += 1
        self._ran.append(_Ran(plan))
        facts = [(sequence.request.id, sequence.request.sampling.seed, sequence.place) for sequence in sequences]
        self._decide(f"segment {self._num_segments}: {plan.label} {dataclasses.astuple(segment)} for {facts}")
        self._decisions.update(page_table.tobytes())
        step_s = 0.0 if self._step_times is None else self._step_times.known(plan)
        self._expect(step_s * (segment.num_steps + segment.num_prefill_passes))

    def finished(self, sequences: Sequence[SequenceState]) -> list[str]:
        """Notes how far the sequences are, and with every eighth segment exchanges messages."""
        for sequence in sequences:
            self._decisions.update(repr((sequence.committed, sequence.finish_reason)).encode())
            if sequence.finish_reason:
                self._decisions.update(repr((sequence.tokens, sequence.logprobs)).encode())
        self._rest()
        aborted = self._renew() if len(self._ran) == SEGMENTS else set()
        ids = dict.fromkeys(sequence.request.id for sequence in sequences) if aborted else ()
        return [id for id in ids if _digest_of(id) in aborted]

    def aborts(self, id: str) -> bool:
        """False: it ends with the next message."""
        self._to_abort.append(id)
        return False

    def stops(self, signal: int) -> int:
        """The signal that all know of since the last message; `signal` goes into the next."""
        self._signal = signal
        return self._agreed_signal

    def ended(self, signal: int) -> int:
        """The signal that all know of now; it is dealt with."""
        self._signal = signal
        self._renew()
        agreed = self._agreed_signal
        self._signal = self._agreed_signal = 0
        return agreed

    def _renew(self) -> set[bytes]:
        """Exchanges messages; returns digests of the ids of requests to abort."""
        own = np.zeros((), MESSAGE)
        own["decisions"] = self._decisions.digest()
        own["visit_s"] = self._own_visit_s
        own["step_s"][: len(self._ran)] = [each.step_s for each in self._ran]
        own["num_steps"][: len(self._ran)] = [each.num_steps for each in self._ran]
        own["signal"] = self._signal
        for place in range(min(MOST_ABORTED, len(self._to_abort))):
            own["aborted"][place] = _digest_of(self._to_abort.popleft())
        messages = [np.frombuffer(each, MESSAGE)[0] for each in self._meet(own.tobytes())]
        self._compare([bytes(message["decisions"]) for message in messages])
        first = messages[0]
        for each, step_s, num_steps in zip(self._ran, first["step_s"].tolist(), first["num_steps"].tolist(), strict=False):
            if num_steps and self._step_times is not None:
                self._step_times.observed(each.plan, step_s, num_steps)
        self._ran.clear()
        self._visit_s = float(first["visit_s"])
        self._agreed_signal = max(int(message["signal"]) for message in messages)
        return {bytes(digest) for message in messages for digest in message["aborted"]}

    def _decide(self, decision: str) -> None:
        self._decisions.update(decision.encode())
        self._last.append(decision)

    def _compare(self, digests: Sequence[bytes]) -> None:
        """Raises `DivergenceError` unless all `digests` of decisions are the same."""
        if len(set(digests)) == 1:
            return
        texts = [text.decode(errors="replace") for text in self._meet("\n".join(self._last).encode())]
        other = next(process for process, digest in enumerate(digests) if digest != digests[0])
        raise DivergenceError(
            f"processes 0 and {other} have decided differently since their last message.\nprocess 0:\n{texts[0]}\n"
            f"process {other}:\n{texts[other]}"
        )

    def _meet(self, content: bytes) -> list[bytes]:
        """`exchange` where all processes come at about the same time."""
        self._expect(MESSAGE_S)
        contents = self._exchange(content)
        self._rest()
        return contents

    def _expect(self, seconds: float) -> None:
        if self._watchdog is not None:
            self._watchdog.expect(seconds)

    def _rest(self) -> None:
        if self._watchdog is not None:
            self._watchdog.rest()


def agreement_of(place: Any) -> Alone | Processes:
    """Makes the agreement of an engine whose model lies at `place`: `Alone`, unless a mesh has chips of other processes.

    Raises `InputError` if a process of this run has no chip in the mesh: it would wait for the others for ever.
    """
    processes = {device.process_index for device in place.devices.flat} if isinstance(place, Mesh) else set()
    if processes <= {jax.process_index()}:
        return Alone()
    if len(processes) != jax.process_count():
        raise InputError(
            f"the model lies on chips of {len(processes)} of {jax.process_count()} processes: load it on chips of all of them, "
            f"chips={jax.device_count()}, or start fewer processes"
        )
    index = jax.process_index()
    return Processes(index, exchange, Watchdog(f"process {index} of {jax.process_count()}"))


def _digest_of(id: str) -> bytes:
    """A digest of an id, as messages carry it."""
    return hashlib.blake2b(id.encode(), digest_size=16).digest()


Agreement = Alone | Processes
