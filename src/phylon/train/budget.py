"""A run that must fit a time: measure the speed, and set the number of steps so that the schedule reaches its end."""

FIRST_PLAN = 2  # the very first step pays for warming up; the next plans come soon, and then more rarely
ACT_SHARE = 0.02  # of the time, for the last evaluation and the last samples each, until they are measured
MOST_WARMUP = 0.1  # of the planned steps
PLANS = 25  # how often the plan is looked at again over a run


class TimeBudget:
    """Plans a run of at most ``seconds`` (evaluations and samples included) and at most ``most`` steps.

    The plan is made again about ``PLANS`` times, from the mean of the speed since the last plan and that since the
    beginning, so that a machine that slows down shortens the run instead of overrunning it. ``reserve`` seconds are
    kept for what follows the last step.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds, self.most = seconds, most
        self._last_acts = {"eval": seconds * ACT_SHARE, "samples": seconds * ACT_SHARE}
        self._start = self._mark = (0, 0.0)
        self.room = 0
        """The steps that there was time for at the last plan, however many are wanted."""

    @property
    def reserve(self) -> float:
        """Seconds for one more evaluation and sampling after the last step."""
        return sum(self._last_acts.values())

    def took(self, act: str, seconds: float) -> None:
        """What an evaluation ("eval") or a sampling ("samples") has cost just now."""
        self._last_acts[act] = 1.5 * seconds

    def begin(self, step: int, elapsed: float) -> None:
        """The speed is measured from here."""
        self._start = self._mark = (step, elapsed)

    def went_back(self, steps: int) -> None:
        """The count of steps has gone back by so many; what they took stays in the speed."""
        (start, since), (mark, then) = self._start, self._mark
        self._start, self._mark = (start - steps, since), (mark - steps, then)

    def plan(self, step: int, elapsed: float) -> tuple[int, int]:
        """Total steps of the run, and the step at which to plan again."""
        speeds = [(elapsed - since) / max(1, step - first) for first, since in (self._start, self._mark)]
        per_step = sum(speeds) / 2
        left = max(0.0, self.seconds - self.reserve - elapsed)
        self.room = step + int(left / max(per_step, 1e-9))
        total = min(self.most, self.room)
        self._mark = (step, elapsed)
        return max(total, step), step + max(1, min(2 * step, total // PLANS))

    def warmup(self, wanted: int, total: int) -> int:
        """A warmup that leaves most of a short plan to the schedule proper."""
        return min(wanted, max(1, int(total * MOST_WARMUP)))

    def over(self, elapsed: float) -> bool:
        """Whether the time is used up."""
        return elapsed >= self.seconds - self.reserve
