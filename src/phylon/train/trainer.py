"""The training loop: token-exact accumulation, clipping, skipped bad gradients, evaluation, complete checkpoints."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phylon.data import Batches
from phylon.model import Model
from phylon.spec import to_data
from phylon.spec.errors import UserError, system_reason
from phylon.spec.registry import build
from phylon.train.budget import FIRST_PLAN, TimeBudget
from phylon.train.callbacks import Callback
from phylon.train.checkpoint import (
    Checkpoint,
    Manifest,
    RunState,
    load_checkpoint,
    load_model_tensors,
    model_tensors,
    save_checkpoint,
)
from phylon.train.final import better, finish
from phylon.train.machine import check_threads, environment, resolve_precision
from phylon.train.metrics import MetricsFile, Record
from phylon.train.objectives.base import Batch, divisor
from phylon.train.recipe import Recipe
from phylon.train.resume import check_continuation
from phylon.train.rng import random_state, random_state_kept, seed_all, set_random_state
from phylon.train.signals import Interrupted, StopRequest, stop_on_signals
from phylon.train.threads import faster_threads

MAX_SKIPPED_IN_ROW = 10


class Trainer:
    """Trains ``model`` on ``loader`` as ``recipe`` says, into ``out_dir``.

    ``held_out()`` walks the held-out batches, ``sample(model)`` gives texts; either may be ``None``. Everything that is
    random is seeded here with ``recipe.run.seed``. Call ``resume`` (or not), then ``run``.
    """

    def __init__(
        self,
        model: Model,
        loader: Batches,
        recipe: Recipe,
        out_dir: str | Path,
        callbacks: Sequence[Callback] = (),
        *,
        held_out: Callable[[], Iterable[Batch]] | None = None,
        sample: Callable[[Model], list[str]] | None = None,
    ) -> None:
        run = recipe.run
        check_threads(run.threads)
        self._threads_before = torch.get_num_threads()
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        self.model, self.loader, self.recipe, self.callbacks = model, loader, recipe, callbacks
        self.objective = recipe.objective
        self.held_out, self.sample = held_out, sample
        self.device = model.device
        self.precision = resolve_precision(run.precision, self.device)
        if run.best is not None and held_out is None:
            raise UserError(f"run.best = '{run.best}' needs held-out data to compare weights on; set data.held_out")
        self.environment = environment(self.device, self.precision)
        self.out = Path(out_dir)
        self.checkpoints = self.out / "checkpoints"
        self.optimizer = build(recipe.optim, model.named_parameters())  # type: ignore[arg-type]
        self.budget = None if run.max_minutes is None else TimeBudget(run.max_minutes * 60, run.steps)
        self.state = RunState(
            total=run.steps,
            replan=None if self.budget is None else FIRST_PLAN,
            limit=None if self.budget is None else self.budget.seconds,
        )
        self.loss: float | None = None
        self.held_out_loss: float | None = None
        self.held_out_metrics: dict[str, float] = {}
        self.samples: list[str] = []
        self._improved = False
        self._last: dict[str, int] = {}
        self._base, self._start = 0.0, time.perf_counter()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to '{self.out}': {system_reason(error)}") from None
        self.metrics = MetricsFile(self.out / "metrics.jsonl")
        seed_all(run.seed)

    def resume(self, checkpoint: Path, *, allow_changes: bool = False) -> None:
        """Put a checkpoint back, so that the run goes on bit for bit; what is not the same any more is named."""
        found = load_checkpoint(checkpoint)
        manifest = found.manifest
        self._threads_as_before(manifest.environment)
        changed = check_continuation(manifest, self.recipe, self.environment, allow_changes)
        self.loader.load_state_dict(manifest.data)
        load_model_tensors(self.model, found.model)
        self.optimizer.load_state_tensors(found.optimizer)
        self.state, self.state.limit = manifest.run, self.state.limit
        if self.budget is None:
            self.state.total = self.recipe.run.steps
        if not self.metrics.cut(manifest.metrics_bytes):
            changed.append(f"{self.metrics.path.name} is shorter than it was, so a part of the log is missing")
        self._last["save"] = self.state.step
        self._say(f"resumed at step {self.state.step} from {checkpoint}")
        if changed:
            self._say(f"the continuation may differ in its last bits: {'; '.join(changed)}")
            self._log({"kind": "resumed", "step": self.state.step, "changes": changed})
        set_random_state(found.random_state)

    def run(self) -> RunState:
        """Train to the end (or to the end of the time). Raises Interrupted, with everything saved, after a signal."""
        state = self.state
        self._base, self._start = state.seconds, time.perf_counter()
        if state.step == 0:
            self._measure_threads()
            self.metrics.cut(0)  # what a run killed before its first checkpoint has left
        if self.budget is not None:
            self.budget.begin(state.step, self._elapsed())
        for callback in self.callbacks:
            callback.started(state)
        try:
            with stop_on_signals() as stop:
                self.model.train()
                if state.step == 0 and "from" in self.recipe.model:
                    self._evaluate()  # where the trained weights stand before anything is changed
                if state.step and state.step < state.total and self._due(self.recipe.run.sample_every):
                    self._sample()  # a checkpoint is written before the samples of its step, and cuts the log there
                while state.step < state.total and not self._out_of_time():
                    self._step()
                    self._periodic(stop)
                self._finish()
                self._log({"kind": "end", "step": state.step, "seconds": self._elapsed()})
        finally:
            for callback in self.callbacks:
                callback.ended(state)
            self.metrics.close()
            torch.set_num_threads(self._threads_before)
        return state

    def _measure_threads(self) -> None:
        """A timed run on the CPU takes the number of threads that is faster now; others must not depend on the time."""
        if self.budget is None or self.recipe.run.threads is not None or self.device.type != "cpu":
            return
        batch = self.loader.batch(0)
        part, counts = _parts(batch, self.recipe.run.accumulate)[0], self.objective.counts(batch)

        def work() -> None:
            with self._autocast():
                losses = self.objective.losses(self.model, part)
            self.objective.summed(losses, counts).backward()

        with random_state_kept():
            threads = faster_threads(work)
        self.optimizer.drop()
        if threads != self._threads_before:
            self._say(f"computing with {threads} thread: faster now than {self._threads_before}, the cores are busy")
        self.environment["threads"] = str(threads)

    def _threads_as_before(self, environment: dict[str, str]) -> None:
        """The measured number of threads of a timed run stays what it was, for the sake of the same bits."""
        threads = int(environment.get("threads", 0))
        if self.budget is not None and self.recipe.run.threads is None and 0 < threads <= self._threads_before:
            torch.set_num_threads(threads)
            self.environment["threads"] = str(threads)

    def _step(self) -> None:
        """One update: the gradient of the whole batch, each term divided by its count in all of it."""
        started, state, optim = time.perf_counter(), self.state, self.recipe.optim
        batch = self.loader.batch(state.step)
        counts = self.objective.counts(batch)
        count = divisor(counts)
        # Detached sums stay tensors until the end: asking for a number waits for the device.
        sums: dict[str, list[Tensor]] = {}
        for part in _parts(batch, self.recipe.run.accumulate):
            with self._autocast():
                losses = self.objective.losses(self.model, self._on_device(part))
                total = self.objective.summed(losses, counts)
            total.backward()
            self.optimizer.collect()
            for name, loss in losses.items():
                sums.setdefault(name, []).append(loss.sum.detach())
        means = {name: float(sum(parts)) / (counts[name] or 1.0) for name, parts in sums.items()}
        self.loss = self.objective.total(means)
        norm = self.optimizer.norm(count)
        lr = optim.lr * self._ratio()
        if norm.not_finite or not math.isfinite(self.loss):
            self._skip(norm.not_finite)
        else:
            clipped = 1.0 if optim.clip is None or norm.value <= optim.clip else optim.clip / norm.value
            self.optimizer.step(lr, clipped / count)
            self.objective.after_step(self.model)
            state.skipped_in_row = 0
        tokens = self.objective.n_tokens(batch)
        state.tokens += tokens
        state.seconds = self._elapsed()
        record = {"kind": "step", "step": state.step, "loss": self.loss, "lr": lr, "grad_norm": norm.value}
        record |= {"tokens": state.tokens, "tokens_per_s": tokens / (time.perf_counter() - started)}
        if len(means) > 1:
            record["losses"] = means
        state.step += 1
        self._log(record | {"seconds": state.seconds})

    def _ratio(self) -> float:
        """The share of the peak rate at this step."""
        schedule, total = self.recipe.schedule, self.state.total
        if schedule.total is not None:
            return schedule.ratio(self.state.step, schedule.total)
        if self.budget is not None:
            schedule = schedule.replace(warmup=self.budget.warmup(schedule.warmup, total))  # type: ignore[attr-defined]
        return schedule.ratio(self.state.step, total)

    def _skip(self, names: tuple[str, ...]) -> None:
        """Leave out an update whose loss or gradient (of ``names``) is not finite; weights and moments stay."""
        state = self.state
        self.optimizer.drop()
        state.skipped += 1
        state.skipped_in_row += 1
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        what = f"the gradient of {shown}" if names else "the loss"
        self._log({"kind": "skipped", "step": state.step, "tensors": list(names)})
        self._say(f"step {state.step} skipped: {what} is not finite")
        if state.skipped_in_row >= MAX_SKIPPED_IN_ROW:
            raise UserError(
                f"{MAX_SKIPPED_IN_ROW} steps in a row were skipped, the last because {what} is not finite; "
                f"lower optim.lr, or look at the data of step {state.step}"
            )

    def _periodic(self, stop: StopRequest) -> None:
        run = self.recipe.run
        if self._due(run.eval_every):
            self._evaluate()
        if self.budget is not None and self.state.step == self.state.replan:
            self.state.total, self.state.replan = self.budget.plan(self.state.step, self._elapsed())
            self._log({"kind": "plan", "step": self.state.step, "total": self.state.total})
        if self._due(run.save_every) or stop.number is not None or self._improved:
            self._save()
        if stop.number is not None and self.state.step < self.state.total:
            raise Interrupted(
                f"stopped after step {self.state.step} of {self.state.total}; the run is saved in {self.out}",
                stop.number,
            )
        if self._due(run.sample_every):
            self._sample()

    def _finish(self) -> None:
        if self._last.get("eval") != self.state.step:
            self._evaluate()
        if self._last.get("save") != self.state.step:
            self._save()
        if self._last.get("samples") != self.state.step:
            self._sample()

    def finish(self) -> None:
        """Put the weights that the recipe keeps into the model, and measure them where they are not the last ones."""
        said = finish(self.model, self.recipe, self.state.best, self.checkpoints)
        if said is None or (self.state.best is not None and self.state.best.step == self.state.step):
            return
        self._say(said)
        if self.held_out is None:
            return
        found = self._measure()
        self.metrics = MetricsFile(self.metrics.path)
        self._log({"kind": "kept", "step": self.state.step, "what": said, **self._held(found)})
        self.metrics.close()

    def _evaluate(self) -> None:
        """What the objective measures on the held-out examples: the mean loss and more."""
        if self.held_out is None:
            return
        started = time.perf_counter()
        found = self._measure()
        record: Record = {"kind": "eval", "step": self.state.step, **self._held(found)}
        if self.recipe.run.best is not None:
            best = better(self.recipe.run.best, found, self.state.best, self.state.step)
            self.state.best, self._improved = best or self.state.best, best is not None
        self._last["eval"] = self.state.step
        self._took("eval", started)
        self._log(record | {"tokens": self.state.tokens})

    def _measure(self) -> dict[str, float]:
        """What the objective measures on the held-out examples, with the weights as they are."""
        assert self.held_out is not None
        with random_state_kept(), torch.no_grad(), _evaluating(self.model), self._autocast():
            return self.objective.evaluate(self.model, map(self._on_device, self.held_out()))

    def _held(self, found: dict[str, float]) -> Record:
        """Remember an evaluation; what the log says of it."""
        self.held_out_loss = found["loss"]
        self.held_out_metrics = {name: value for name, value in found.items() if name != "loss"}
        return {"loss": self.held_out_loss} | ({"metrics": self.held_out_metrics} if self.held_out_metrics else {})

    def _sample(self) -> None:
        """Texts of the model as it is now. They are only looked at, so a failure is said and the run goes on."""
        if self.sample is None:
            return
        started = time.perf_counter()
        self._last["samples"] = self.state.step
        try:
            with random_state_kept(), torch.no_grad(), _evaluating(self.model):
                self.samples = self.sample(self.model)
        except Exception as error:
            self._say(f"no samples at step {self.state.step}: {error}")
            return
        self._took("samples", started)
        self._log({"kind": "samples", "step": self.state.step, "texts": self.samples})

    def _save(self) -> None:
        state = self.state
        state.seconds = self._elapsed()
        self.loader.step = state.step
        random = random_state()
        manifest = Manifest(
            run=state,
            recipe=to_data(self.recipe),
            environment=self.environment,
            data=self.loader.state_dict(),
            metrics_bytes=self.metrics.sync(),
            python_random=random.python,
            numpy_random=random.numpy,
        )
        checkpoint = Checkpoint(
            manifest=manifest,
            model=model_tensors(self.model),
            optimizer=self.optimizer.state_tensors(),
            random=random.torch,
        )
        run = self.recipe.run
        path = save_checkpoint(self.checkpoints, checkpoint, max(run.keep, run.average or 1))
        self._last["save"], self._improved = state.step, False
        self._say(f"saved {path}")

    def _due(self, every: int | None) -> bool:
        """Every so many steps; in a timed run that takes fewer steps than asked for, as often over the whole run."""
        if every is None:
            return False
        step, asked, planned = self.state.step, self.recipe.run.steps, max(1, self.state.total)
        return step * asked // (planned * every) > (step - 1) * asked // (planned * every)

    def _elapsed(self) -> float:
        return self._base + time.perf_counter() - self._start

    def _out_of_time(self) -> bool:
        return self.budget is not None and self.budget.over(self._elapsed())

    def _took(self, act: str, started: float) -> None:
        """Tell the time budget what has just been done, since the end of the run needs it once more."""
        if self.budget is not None:
            self.budget.took(act, time.perf_counter() - started)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _on_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def _log(self, record: Record) -> None:
        self.metrics.write(record)
        for callback in self.callbacks:
            callback.record(record, self.state)

    def _say(self, message: str) -> None:
        for callback in self.callbacks:
            callback.said(message)


class _evaluating:
    """Evaluation mode inside the block, and the mode of before after it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = self.model.training
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.before)


def _parts(batch: Batch, count: int) -> list[Batch]:
    """``count`` consecutive parts of a batch, as equal as its rows allow."""
    if count == 1:
        return [batch]
    split = {name: tensor.tensor_split(count) for name, tensor in batch.items()}
    parts = [{name: cut[i] for name, cut in split.items()} for i in range(count)]
    return [part for part in parts if len(next(iter(part.values())))]  # a batch by token count may have few rows
