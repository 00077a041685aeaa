"""Times that no machine decides: for tests whose engines choose by what plans take."""

from detspec.engine.agreement import Alone


class FixedTimes(Alone):
    """Whatever this machine's load is, a step takes 10 ms, and 12 ms if its pass reads drafts."""

    def same(self, seconds):
        """Instead of what was measured: step and wide step of one plan after the other."""
        return [0.010, 0.012] * (len(seconds) // 2)

    def observer(self, step_times):
        """Takes no notice of what steps take."""
        return lambda plan, seconds, num_steps: None
