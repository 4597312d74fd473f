"""What watches a run: the progress line, and whatever a caller adds."""

from phylon.text import Tokenizer
from phylon.train.checkpoint import RunState
from phylon.train.metrics import Record


class Callback:
    """Base of all watchers; every method may be left as it is. They see the run, and never change it."""

    def vocabulary(self, tokenizer: Tokenizer) -> None:
        """The run's tokenizer, before the data are tokenised; a UserError raised here refuses the run."""

    def started(self, run: RunState) -> None:
        """The loop begins (or goes on) at ``run.step``."""

    def record(self, record: Record, run: RunState) -> None:
        """A line of the log, as it is written: a step, an evaluation and the other kinds of ``MetricsFile``."""

    def said(self, message: str) -> None:
        """A sentence for the user: a checkpoint saved, a change named."""

    def ended(self, run: RunState) -> None:
        """The loop is over, however it ended."""
