"""What a step of each plan takes, kept true while they run."""

from collections.abc import Iterable, Mapping

from detspec.engine.policy import Plan

WEIGHT = 0.5  # of a segment that was slower than believed; one that was faster is believed, because noise only ever adds
MOST_GROWTH = 2.0  # a process that was held up for once says little about the plan
OPTIMISM = 0.99  # how much cheaper a plan is hoped to be for each segment that another was chosen for


class StepTimes:
    """Seconds of one step with the batch full.

    Times that were taken while other processes were busy may be wrong by any factor. The plan that runs is timed as it runs.
    Of one that is passed over a little more is hoped each time, until it is tried again, for a few steps.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self._seconds: dict[Plan, float] = {}
        self._hope: dict[Plan, float] = {}

    def measured(self, seconds: Mapping[Plan, float]) -> None:
        """Takes over what plans took side by side."""
        self._seconds.update(seconds)
        self._hope.update(dict.fromkeys(seconds, 1.0))

    def observed(self, plan: Plan, seconds: float) -> None:
        """What a step took in a segment."""
        known = self._seconds[plan]
        slower = known + WEIGHT * (min(seconds, MOST_GROWTH * known) - known)
        self._seconds[plan] = min(seconds, slower)
        self._hope[plan] = 1.0

    def passed_over(self, plans: Iterable[Plan]) -> None:
        """Plans that might have run and did not."""
        for plan in plans:
            self._hope[plan] *= OPTIMISM

    def known(self, plan: Plan) -> float:
        """What is believed of `plan`."""
        return self._seconds[plan]

    def hoped(self, plan: Plan) -> float:
        """What may be hoped of `plan`: what is believed, or less if it has not run for a while."""
        return self._seconds[plan] * self._hope[plan]
