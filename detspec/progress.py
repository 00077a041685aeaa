"""Shows the progress of long work on stderr: a bar on a terminal, otherwise a line from time to time."""

import sys
import time

from tqdm import tqdm

from detspec.say import say, stamped

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts finished items out of `total`, and generated tokens; a context manager."""

    def __init__(self, total: int, unit: str, *, done: int = 0, shown: bool = True, worker: str = "") -> None:
        """A counter of `total` items, of which `done` were finished before; silent unless `shown`.

        Lines of one of several workers begin with the time and the name of the `worker`.
        """
        self.total = total
        self.unit = unit
        self._worker = worker
        self._since = self._waits = ""  # when it began to wait, and the text that says for what
        is_bar = shown and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, unit=f" {unit}", disable=not is_bar, leave=False)
        self._says = shown and not is_bar
        self._staged = False
        self._done = self._done_before = done
        self._tokens = self._live = 0
        self._began = self._said = self._started = time.perf_counter()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def print(self, text: str) -> None:
        """Prints `text` to stdout, above the bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def stage(self, name: str, *, at_once: bool = False) -> None:
        """Shows `name` as the current work, and restarts the measurement of speed.

        Without a bar, only some of many stages get a line; with `at_once` this one does, because it may take long.
        """
        self._tokens = 0
        self._done_before = self._done
        self._began = time.perf_counter()
        self._bar.set_description(name)
        is_due = self._said == self._started or self._began - self._said >= SECONDS_BETWEEN_LINES
        if self._says and (at_once or is_due):
            self._say(name)

    def next_stage(self, name: str) -> None:
        """Counts the current stage, if any, as finished and starts the stage `name`."""
        if self._staged:
            self.finished()
        self._staged = True
        self.stage(name)

    def run_of(self, done: int, total: int, name: str) -> None:
        """Sets the counts to `done` of `total`, and starts the stage `name`."""
        self.count(done, total)
        self.stage(name)

    def count(self, done: int, total: int) -> None:
        """Sets the counts to `done` of `total`, when they become known."""
        self.total = self._bar.total = total
        self.finished(done - self._done)

    def finished(self, number: int = 1) -> None:
        """Counts `number` more items as finished, never more than there are; each counts once, however often it is done."""
        number = min(number, self.total - self._done)
        self._done += number
        self._bar.update(number)

    def segment(self, tokens: int, num_live: int, *, acceptance: float | None = None) -> None:
        """Counts `tokens` committed by `num_live` live sequences; `acceptance` is the share of drafted ones accepted so far."""
        self._tokens += tokens
        self._live = num_live
        tok_per_s = self._tokens / max(time.perf_counter() - self._began, 1e-9)
        accepted = "" if acceptance is None else f", {acceptance:.1%} accepted"
        if num_live:
            self._since = self._waits = ""
        self.show(self._waits or f"{tok_per_s:,.0f} tok/s, {num_live} live{accepted}")

    def waits(self, for_what: str) -> None:
        """Shows since when it waits, and `for_what`, in place of the speed, until a `segment` has live sequences."""
        self._since = self._since or time.strftime("%H:%M:%S")
        self._waits = f"waits since {self._since} for {for_what}"

    def show(self, state: str, *, at_once: bool = False) -> None:
        """Shows `state` after the counts; without a bar in a line from time to time, or `at_once`."""
        now = time.perf_counter()
        self._bar.set_postfix_str(state)
        if self._says and (at_once or now - self._said >= SECONDS_BETWEEN_LINES):
            left = "" if self._waits else self._left(now)
            self._say(f"{self._done} of {self.total} {self.unit}, {state}{left}")

    def _left(self, now: float) -> str:
        """Estimated time for the rest as text; the bar has its own.

        Nothing can be said before as many are done as are live: all began together.
        """
        done = self._done - self._done_before
        if not done or done < self._live or self._done == self.total:
            return ""
        minutes, seconds = divmod(round((self.total - self._done) * (now - self._began) / done), 60)
        return f", {minutes // 60}:{minutes % 60:02}:{seconds:02} left"

    def _say(self, line: str) -> None:
        self._said = time.perf_counter()
        say(stamped(self._worker, line) if self._worker else line)
