"""What is looked at while a model trains: evaluations, samples, the weights that are kept; no bit changes by it."""

from collections.abc import Iterable

import torch

from phylon.train.batches import first_rows
from phylon.train.doubtful import doubtful
from phylon.train.final import better, check_average, check_metric, kept_weights
from phylon.train.gradients import evaluating
from phylon.train.metrics import Record
from phylon.train.objectives.base import Batch
from phylon.train.rng import random_state_kept
from phylon.train.session import Session

TRIED_ROWS = 2  # of the held-out examples, before the first step


class Looks(Session):
    """A session that evaluates and samples. What is looked at comes after the checkpoint of its step."""

    def check(self) -> None:
        """Find what would end the run only later: held-out data that cannot be read, a metric that is not measured."""
        run = self.recipe.run
        self._held_out()
        check_average(run)
        for message in doubtful(self.recipe, self.loader, self.held_out is not None):
            self._say(message)
        if run.best is not None and self.held_out is not None:
            check_metric(run.best, self._measure(first_rows(self.held_out(), TRIED_ROWS)))

    def _look(self) -> bool:
        """The evaluation and the samples that are due; whether any were. Where one fails, what was trained is saved."""
        run, step = self.recipe.run, self.state.step
        acts = [
            act
            for act, every in ((self._evaluate, run.eval_every), (self._sample, run.sample_every))
            if self._due(every)
        ]
        if not acts or not step:
            return False
        self._before_looks = (step, self.metrics.size())
        try:
            for act in acts:
                act()
        except BaseException:
            if self.world.size == 1 and self._last.get("save") != step:
                self._save()
            raise
        if self._improved:
            self._note_best()
        return True

    def _evaluate(self) -> None:
        """What the objective measures on the held-out examples; the mean of the weights, if there is one, as well."""
        if self.held_out is None:
            return
        started = self._elapsed()
        found = self._measure()
        record: Record = {"kind": "eval", "step": self.state.step, **self._held(found)}
        if self.recipe.run.best is not None and self.state.step:  # there is no checkpoint of step 0
            best = better(self.recipe.run.best, found, self.state.best, self.state.step)
            self.state.best, self._improved = best or self.state.best, best is not None
        if self.ema is not None and self.ema.updates:
            with self.ema.swapped():
                averaged = self._measure()
            record["ema_loss"] = averaged.pop("loss")
            if averaged:
                record["ema_metrics"] = averaged
        self._last["eval"] = self.state.step
        self._took("eval", started)
        self._log(record | {"tokens": self.state.tokens})

    def _keep(self) -> None:
        """Put the weights that the recipe keeps into the model, and measure them where they are not the last ones."""
        kept = self.world.from_first(lambda: kept_weights(self.recipe, self.state, self.checkpoints))
        if kept is None:
            return
        self.parallel.load_model(kept.tensors)
        self._say(kept.what)
        found = {} if self.held_out is None else self._held(self._measure())
        self._log({"kind": "kept", "step": self.state.step, "what": kept.what, **found})

    def _held(self, found: dict[str, float]) -> Record:
        """Remember an evaluation; what the log says of it."""
        self.held_out_loss = found["loss"]
        self.held_out_metrics = {name: value for name, value in found.items() if name != "loss"}
        return {"loss": self.held_out_loss} | ({"metrics": self.held_out_metrics} if self.held_out_metrics else {})

    def _measure(self, batches: Iterable[Batch] | None = None) -> dict[str, float]:
        """What the objective measures on the held-out examples, or on some of them."""
        assert self.held_out is not None
        batches = self.held_out() if batches is None else batches
        model = self.whole_model() if self.objective.decodes() else self.model
        try:
            with random_state_kept(), torch.no_grad(), evaluating(model), self.gradients.autocast():
                return self.objective.evaluate(model, map(self.gradients.on_device, batches))
        finally:
            self.parallel.reshard()

    def _sample(self) -> None:
        """Texts of the model as it is now. They are only looked at, so a failure is said and the run goes on."""
        if self.sample is None or not (self.world.first or self.parallel.kind == "fsdp"):
            return
        started = self._elapsed()
        self._last["samples"] = self.state.step
        model = self.whole_model()
        if not self.world.first:
            return
        try:
            with random_state_kept(), torch.no_grad(), evaluating(model):
                texts = self.sample(model)
        except Exception as error:
            self._say(f"no samples at step {self.state.step}: {error}")
            return
        self._took("samples", started)
        if texts:
            self.samples = texts
            self._log({"kind": "samples", "step": self.state.step, "texts": texts})

    def _due(self, every: int | None, step: int | None = None) -> bool:
        """Every so many steps; in a timed run that takes fewer steps than asked for, as often over the whole run."""
        if every is None:
            return False
        step = self.state.step if step is None else step
        asked, planned = self.recipe.run.steps, max(1, self.state.total)
        return step * asked // (planned * every) > (step - 1) * asked // (planned * every)

    def _took(self, act: str, started: float) -> None:
        """Tell the time budget what has just been done, since the end of the run needs it once more."""
        if self.budget is not None:
            self.budget.took(act, self._elapsed() - started)
