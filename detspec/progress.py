"""Progress of long work on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts finished things of `total`, and tokens on the way; a context manager."""

    def __init__(self, total: int, unit: str, *, done: int = 0) -> None:
        """`done` of `total` were done before."""
        self.total = total
        self.unit = unit
        shown = sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, unit=f" {unit}", desc="compiling", disable=not shown, leave=False)
        self._staged = False
        self._done = self._done_before = done
        self._acceptance = ""
        self._tokens = 0
        self._began = self._said = self._started = time.perf_counter()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def stage(self, name: str) -> None:
        """Names what is being done, and restarts the clock of tokens."""
        self._tokens, self._began = 0, time.perf_counter()
        self._bar.set_description(name)
        if self._bar.disable and (self._said == self._started or self._began - self._said >= SECONDS_BETWEEN_LINES):
            self._say(name)

    def next_stage(self, name: str) -> None:
        """The last stage is done, `name` is next."""
        if self._staged:
            self.finished()
        self._staged = True
        self.stage(name)

    def run_of(self, done: int, total: int, name: str) -> None:
        """`done` of `total` are done, `name` is next."""
        self.total = self._bar.total = total
        self.finished(done - self._done)
        self.stage(name)

    def finished(self, number: int = 1, *, acceptance: float | None = None) -> None:
        """So many more are done; `acceptance` is the share of drafted tokens that were accepted so far."""
        self._done += number
        if acceptance is not None:
            self._acceptance = f", {acceptance:.1%} accepted"
        self._bar.update(number)

    def segment(self, tokens: int, num_live: int) -> None:
        """So many more tokens are committed, from this many live rows: the engine's `on_segment`."""
        self._tokens += tokens
        now = time.perf_counter()
        tok_per_s = self._tokens / max(now - self._began, 1e-9)
        state = f"{tok_per_s:,.0f} tok/s, {num_live} live{self._acceptance}"
        self._bar.set_postfix_str(state)
        if self._bar.disable and now - self._said >= SECONDS_BETWEEN_LINES:
            self._say(f"{self._done} of {self.total} {self.unit}, {state}{self._left(now)}")

    def _left(self, now: float) -> str:
        """How long the rest will take at the pace so far; the bar says it by itself."""
        done = self._done - self._done_before
        if not done:
            return ""
        minutes, seconds = divmod(round((self.total - self._done) * (now - self._began) / done), 60)
        return f", {minutes // 60}:{minutes % 60:02}:{seconds:02} left"

    def _say(self, line: str) -> None:
        self._said = time.perf_counter()
        print(f"detspec: {line}", file=sys.stderr, flush=True)
