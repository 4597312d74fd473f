"""The training loop: steps, skipped and rolled-back ones, evaluation, complete checkpoints."""

import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from phylon.ops import native
from phylon.spec.errors import UserError, system_reason
from phylon.train.budget import FIRST_PLAN
from phylon.train.ceiling import ceiling_flops
from phylon.train.checkpoint import (
    RunState,
    last_good,
    last_state,
    load_checkpoint,
)
from phylon.train.gradients import Found
from phylon.train.looks import Looks
from phylon.train.memory import settled_objects
from phylon.train.metrics import Record
from phylon.train.objectives.base import Batch
from phylon.train.rng import random_state_kept
from phylon.train.signals import Interrupted, StopRequest, stop_on_signals
from phylon.train.spikes import RollBack
from phylon.train.threads import faster_threads
from phylon.train.world import PeerLost, lost_peer

MAX_SKIPPED_IN_ROW = 10


class Trainer(Looks):
    """Trains ``model`` on ``loader`` as ``recipe`` says, into ``out_dir``.

    ``held_out()`` walks the held-out batches, ``sample(model)`` gives texts; either may be ``None``. Everything that is
    random is seeded here with ``recipe.run.seed``. ``world``: the processes that share the work; the first one writes
    and speaks. Call ``check`` and ``resume`` (or not), then ``run``.
    """

    def run(self) -> RunState:
        """Train to the end (or to the end of the time). Raises Interrupted, with everything saved, after a signal."""
        state = self.state
        if state.skipped_in_row >= MAX_SKIPPED_IN_ROW:  # what ended it then may have been mended
            state.skipped_in_row = 0
        self._held_out()  # read now, so that saving depends on no data
        self._inputs()
        self._base, self._start = state.seconds, time.perf_counter()
        # The kernels of this run: one that is made while it goes would move its bits.
        native.limit(native.names())
        if state.step == 0 and not state.spikes.rollbacks:
            self._measure_threads()
            self.metrics.cut(0)  # what a run killed before its first checkpoint has left
        if self.budget is not None:
            self.budget.begin(state.step, self._elapsed())
        self._flops, self._watched = 0.0, self._elapsed()
        for callback in self.callbacks:
            callback.started(state)
        try:
            with settled_objects(), stop_on_signals() as stop:
                self._loop(stop)
        except RuntimeError as error:
            if self.world.size == 1 or not lost_peer(error):
                raise
            kept = last_state(self.checkpoints)
            raise PeerLost(f"another process of this run is gone: {kept}; start all again with --resume") from None
        finally:
            for callback in self.callbacks:
                callback.ended(self.state)
            self.metrics.close()
            native.limit(None)
            torch.set_num_threads(self._threads_before)
        return self.state

    def ended(self, why: str | None = None) -> str:
        """How the run ended, in one line: of itself, or before its end for the reason ``why``."""
        step, run = self.state.step, self.recipe.run
        if why is not None:
            return f"not of itself, after {step:,} of {self.state.total:,} steps: {why}"
        if self.budget is None or step >= run.steps:
            return f"finished, after all of its {step:,} steps"
        return f"finished, after the {step:,} steps that run.max_minutes = {run.max_minutes:g} had time for"

    def _loop(self, stop: StopRequest) -> None:
        self.model.train()
        if self.state.step == 0 and "from" in self.recipe.model:
            self._evaluate()  # where the trained weights stand before anything is changed
        if self._looks:
            self._look()
        over = self._out_of_time()
        while self.state.step < self.state.total and not over:
            if self._step():
                self._check_going()
                over = self._periodic(stop)
        self._finish()
        self._check_learned()
        self._keep()
        self._log({"kind": "end", "step": self.state.step, "seconds": self._elapsed()})

    def _measure_threads(self) -> None:
        """A timed run on the CPU takes the number of threads that is faster now; others must not depend on the time."""
        run = self.recipe.run
        if self.budget is None or run.threads is not None or self.device.type != "cpu" or self.world.size > 1:
            return
        batch = self.loader.batch(0)
        with random_state_kept():
            threads = faster_threads(lambda: self.gradients.trial(batch))
        if threads != self._threads_before:
            self._say(f"computing with {threads} thread: faster now than {self._threads_before}, the cores are busy")
        self.environment["threads"] = str(threads)

    def _step(self) -> bool:
        """One update from the gradient of a whole batch; false where the run was rolled back instead."""
        started, state = time.perf_counter(), self.state
        batch = self._read(state.step + state.spikes.passed)
        watching = self._due(self.recipe.run.watch_every, state.step + 1)
        found = self.gradients.of(batch, state.loss_scale, self.watcher.saved if watching else nullcontext)
        self.loss = found.loss
        lr, seen = self.recipe.optim.lr * self._ratio(), {}
        if self._refused(found) or self._nothing_to_learn(found, batch):
            pass
        elif (score := self._spike(found.loss)) is not None:
            if self._roll_back(score):
                return False
        else:
            seen = self._update(found, lr, watching)
        tokens = self.objective.n_tokens(batch)
        state.tokens += tokens
        if self.recipe.run.watch_every is not None:
            self._flops += self.objective.training_flops(self.model.spec, batch, self._trained)
        state.seconds = self._elapsed()
        record: Record = {
            "kind": "step",
            "step": state.step,
            "loss": self.loss,
            "lr": lr,
            "grad_norm": found.norm.value,
        }
        record |= {"tokens": state.tokens, "tokens_per_s": tokens / (time.perf_counter() - started)}
        if len(found.means) > 1:
            record["losses"] = found.means
        state.step += 1
        self._log(record | {"seconds": state.seconds})
        if watching:
            self._watch(batch, seen)
        return True

    def _read(self, number: int) -> Batch:
        try:
            batch = self.loader.batch(number)
        except (OSError, UserError) as error:
            named = f" '{error.filename}'" if isinstance(error, OSError) and error.filename else ""
            reason = system_reason(error) if isinstance(error, OSError) else str(error)
            raise UserError(
                f"cannot read the data{named} of step {self.state.step}: {reason}; {last_state(self.checkpoints)}, "
                "--resume goes on once they can be read"
            ) from None
        return batch

    def _update(self, found: Found, lr: float, watching: bool) -> Record:
        """Change the weights; what the watcher saw of it."""
        state, clip = self.state, self.recipe.optim.clip
        clipped = 1.0 if clip is None or found.norm.value <= clip else clip / found.norm.value
        if watching:
            self.watcher.before()
        self.optimizer.step(lr, clipped / found.divisor)
        seen = self.watcher.after() if watching else {}
        self.parallel.sum_loads()
        self.objective.after_step(self.model)
        if self.ema is not None:
            self.ema.update()
        if state.loss_scale is not None:
            state.loss_scale.succeeded()
        if self.recipe.run.on_spike is not None:
            state.spikes.accept(found.loss, self.recipe.run.on_spike)
        state.skipped_in_row = 0
        return seen

    def _watch(self, batch: Batch, seen: Record) -> None:
        """The "watch" record: utilisation, what moved, what attention and routers do."""
        state = self.state
        flops = self._flops / max(state.seconds - self._watched, 1e-9)
        ceiling = self.world.size * ceiling_flops(self.device, self.precision)
        record: Record = {"kind": "watch", "step": state.step, "flops_per_s": flops, "ceiling_flops_per_s": ceiling}
        record |= {"utilisation": flops / ceiling, "activation_bytes": self.watcher.activation_bytes, **seen}
        try:
            with random_state_kept():
                record |= {} if self.parallel.kind == "fsdp" else self.watcher.look(batch)
        except Exception as error:
            self._say(f"cannot look into the model at step {state.step}: {error}")
        self._log(record)
        self._flops, self._watched = 0.0, self._elapsed()

    def _ratio(self) -> float:
        """The share of the peak rate at this step; less for a while after a roll-back."""
        policy = self.recipe.run.on_spike
        if isinstance(policy, RollBack) and self.state.step < self.state.spikes.slow_until:
            return self._scheduled() * policy.slow
        return self._scheduled()

    def _scheduled(self) -> float:
        schedule, total = self.recipe.schedule, self.state.total
        if schedule.total is not None:
            return schedule.ratio(self.state.step, schedule.total)
        if self.budget is not None:
            schedule = schedule.replace(warmup=self.budget.warmup(schedule.warmup, total))  # type: ignore[attr-defined]
        return schedule.ratio(self.state.step, total)

    def _refused(self, found: Found) -> bool:
        """Leave out an update whose loss or gradient is not finite; weights and moments stay."""
        if not found.norm.not_finite and math.isfinite(found.loss):
            return False
        state, names = self.state, found.norm.not_finite
        scale = state.loss_scale
        if scale is not None and names and math.isfinite(found.loss) and scale.value > 1:
            scale.overflowed()  # the scale was too high, which says nothing against the batch
            self.optimizer.drop()
            state.idle += 1
            self._reason = f"the scaled gradient of {names[0]} is too large for fp16"
            record: Record = {"kind": "skipped", "step": state.step, "reason": self._reason}
            self._log(record | {"tensors": [], "loss_scale": scale.value})
            return True
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        what = f"the gradient of {shown}" if names else "the loss"
        self._skip(f"{what} is not finite", {"tensors": list(names)})
        return True

    def _nothing_to_learn(self, found: Found, batch: Batch) -> bool:
        """Leave out an update that would only decay the weights: no target in the batch, or all of them of weight 0."""
        if found.loss:
            return False
        auxiliary = self.objective.auxiliary()
        if any(count for name, count in self.objective.counts(batch).items() if name not in auxiliary):
            return False
        self._skip("its batch has nothing to learn (no target, or weights of 0 alone)", {"tensors": []})
        self._fix = "look at the data"
        return True

    def _spike(self, loss: float) -> float | None:
        """The robust z-score of a loss that the recipe's policy takes for a spike."""
        policy = self.recipe.run.on_spike
        return None if policy is None else self.state.spikes.z_score(loss, policy)

    def _skip(self, reason: str, record: Record) -> None:
        state = self.state
        self.optimizer.drop()
        state.skipped += 1
        state.idle += 1
        state.skipped_in_row += 1
        self._log({"kind": "skipped", "step": state.step, "reason": reason, **record})
        self._say(f"step {state.step} skipped: {reason}")
        self._reason, self._fix = reason, "lower optim.lr, or look at the data"

    def _check_going(self) -> None:
        """End a run that does not get on, with the weights of its last good step saved."""
        state = self.state
        if state.skipped_in_row < MAX_SKIPPED_IN_ROW:
            return
        raise UserError(
            f"{state.skipped_in_row} steps in a row were skipped, the last because {self._reason}: {self._fix} of step "
            f"{state.step - 1}; {self._kept()}"
        )

    def _check_learned(self) -> None:
        """Say of a run that changed no weight, or skipped the last half of its steps, that nothing came of it."""
        state = self.state
        if not state.step:
            what = "nothing was learned: the run ended before its first step"
            raise UserError(f"{what}; give it more time or steps; {self._kept()}")
        if state.idle >= state.step:
            what = f"nothing was learned: all {state.step} steps of the run were skipped"
        elif 2 * state.skipped_in_row >= state.step:
            what = f"the last {state.skipped_in_row} of {state.step} steps were skipped"
        else:
            return
        why = self._reason or "of what the log says of it"
        raise UserError(f"{what}, the last because {why}: {self._fix}; {self._kept()}")

    def _kept(self) -> str:
        """Save the weights if they are whole; where the good ones are."""
        (bad,) = self.world.most([float(not self.parallel.finite())])
        if not bad:
            if self._last.get("save") != self.state.step:
                self._save()
            return f"the weights, which no skipped step has changed, are saved in {self._saved}"
        good = self.world.from_first(lambda: last_good(self.checkpoints, self.state.step))
        return "the weights are no longer finite, and " + (
            "no good checkpoint is left: begin again" if good is None else f"the last good state is {good}"
        )

    def _roll_back(self, score: float) -> bool:
        """Back to a good checkpoint, past the data since; false (and the batch skipped) where the policy skips."""
        policy, state, loss = self.recipe.run.on_spike, self.state, self.loss
        spike = {"loss": loss, "z_score": score, "batch": state.step + state.spikes.passed}
        old = isinstance(policy, RollBack)
        good = self.world.from_first(lambda: self._good_checkpoint())
        if good is None or not isinstance(policy, RollBack):
            why = "; no checkpoint is old enough to go back to" if old else ""
            self._skip(f"the loss {loss:.4g} lies {score:.1f} deviations above the median{why}", spike)
            return False
        if state.spikes.rollbacks >= policy.most:
            raise UserError(
                f"the loss spiked again at step {state.step} after {policy.most} roll-backs; lower optim.lr or look at "
                f"the data; the last good state is {good}"
            )
        self.optimizer.drop()
        before, passed, rollbacks = state.step, state.spikes.passed, state.spikes.rollbacks
        found = load_checkpoint(good)
        self._restore(found)
        state = self.state
        first, last = state.step + state.spikes.passed, before + passed
        state.spikes.passed = last + 1 - state.step
        state.spikes.rollbacks = rollbacks + 1
        state.spikes.good_until = state.step
        state.spikes.slow_until = state.step + policy.slow_steps
        state.seconds = self._elapsed()
        self._last, self._before_looks, self._looks = {}, (-1, 0), False
        record = {"kind": "rolled_back", "step": before, "to": state.step, **spike, "batches": [first, last]}
        self._log(record | {"slow": policy.slow, "slow_until": state.spikes.slow_until})
        self._say(
            f"step {before}: the loss {loss:.4g} lies {score:.1f} deviations above the median; back to step "
            f"{state.step}, past batches {first} to {last}, at {policy.slow:g} of the rate until step "
            f"{state.spikes.slow_until}"
        )
        if self.budget is not None:
            self.budget.went_back(before - state.step)
            self._plan()
        self._save(looks=False)
        return True

    def _good_checkpoint(self) -> Path | None:
        """The newest checkpoint that the recipe's policy trusts."""
        policy, spikes = self.recipe.run.on_spike, self.state.spikes
        if not isinstance(policy, RollBack):
            return None
        return last_good(self.checkpoints, max(self.state.step - policy.margin, spikes.good_until))

    def _periodic(self, stop: StopRequest) -> bool:
        """What is due after a step; whether the time is used up. All processes decide alike."""
        state = self.state
        if self.budget is not None and state.step == state.replan:
            self._plan()
        signal, over = self.world.most([float(stop.number or 0), float(self._out_of_time())])
        # Before anything that may fail, or take long: evaluation and samples come after the checkpoint, which cuts the
        # log here, so that a resumed run takes them again.
        if self._due(self.recipe.run.save_every) or signal or over or state.step >= state.total:
            self._save()
        if signal and state.step < state.total:
            raise Interrupted(
                f"stopped after step {state.step} of {state.total}; the run is saved in {self.out}", int(signal)
            )
        if self._look() and self.budget is not None and not over:
            (over,) = self.world.most([float(self._out_of_time())])
        return bool(over)

    def _plan(self) -> None:
        budget, state, first = self.budget, self.state, self.state.replan == FIRST_PLAN
        assert budget is not None
        state.total, state.replan = self.world.from_first(lambda: budget.plan(state.step, self._elapsed()))
        self._log({"kind": "plan", "step": state.step, "total": state.total})
        if first and budget.room > 1.1 * budget.most:
            self._say(
                f"run.steps = {budget.most:,} ends this run before its run.max_minutes = "
                f"{self.recipe.run.max_minutes:g} are over: there is time for about {budget.room:,} steps"
            )

    def _finish(self) -> None:
        """The last checkpoint, and then what is to be seen of it."""
        step = self.state.step
        if self._last.get("save") != step:
            self._save()
        if self._last.get("eval") != step:
            self._evaluate()
        if self._improved:
            self._note_best()
        if self._last.get("samples") != step:
            self._sample()

    def _elapsed(self) -> float:
        return self._base + time.perf_counter() - self._start

    def _out_of_time(self) -> bool:
        return self.budget is not None and self.budget.over(self._elapsed())
