"""A run's parts and its whole state: made, saved, put back bit for bit."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from phylon.data import Batches
from phylon.data.documents import digest
from phylon.model import Model
from phylon.model import build as build_model
from phylon.model.passes import add_lora, compile_blocks, recompute_blocks
from phylon.ops import native
from phylon.spec import to_data
from phylon.spec.errors import UserError, system_reason
from phylon.spec.registry import build
from phylon.train.batches import hash_of
from phylon.train.budget import FIRST_PLAN, TimeBudget
from phylon.train.callbacks import Callback
from phylon.train.checkpoint import (
    Checkpoint,
    Manifest,
    RunState,
    amend_checkpoint,
    check_model_tensors,
    load_checkpoint,
    load_model_tensors,
    model_tensors,
    save_checkpoint,
)
from phylon.train.ema import Ema
from phylon.train.gradients import Gradients
from phylon.train.machine import check_threads, environment, resolve_precision
from phylon.train.memory import keep_freed_memory
from phylon.train.metrics import MetricsFile, NoMetrics, Record
from phylon.train.objectives.base import Batch
from phylon.train.parallel import Parallel
from phylon.train.recipe import Recipe
from phylon.train.resume import check_continuation
from phylon.train.rng import random_state, random_state_kept, seed_all, set_random_state
from phylon.train.scaling import LossScale
from phylon.train.spikes import RollBack
from phylon.train.watch import Watcher, trained_share
from phylon.train.world import World


class OtherData(UserError):
    """The data are not those that a checkpoint was made on. ``what`` says which; ``files``: the ones that changed."""

    def __init__(self, what: str, files: str = "") -> None:
        super().__init__(f"{what}{files}: put them back, or resume with --allow-changes to go on with what is there")
        self.what = what


# What a loader's position says of the data themselves; the rest is the order.
OF_THE_DATA = ("data", "n_rows", "n_examples")


class Session:
    """What ``Trainer`` drives: model, data, optimizer, mean of the weights, log, and their state in checkpoints."""

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
        world: World | None = None,
    ) -> None:
        run = recipe.run
        self.world = world = world or World()
        check_threads(run.threads)
        self._threads_before = torch.get_num_threads()
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        if model.device.type == "cpu":
            keep_freed_memory()
        self.model, self.loader, self.recipe = model, loader, recipe
        self.callbacks = callbacks if world.first else ()
        self.objective = recipe.objective
        self.held_out, self.sample = held_out, sample
        self.device = model.device
        self.precision = resolve_precision(run.precision, self.device)
        if run.best is not None and held_out is None:
            raise UserError(f"run.best = '{run.best}' needs held-out data to compare weights on; set data.held_out")
        native.refresh()
        self.environment = environment(self.device, self.precision, world)
        self.out = Path(out_dir)
        self.checkpoints = self.out / "checkpoints"
        unused = self._tried()
        if run.recompute == "blocks":
            recompute_blocks(model)
        self.parallel = Parallel(model, world, run.parallel, unused=unused)
        parameters = self.parallel.parameters()
        self.optimizer: Any = build(recipe.optim, parameters.items())  # type: ignore[arg-type]
        self.gradients = Gradients(self.parallel, self.objective, self.optimizer, self.precision, run.accumulate)
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self.ema = None if run.ema is None else Ema(run.ema, trained, self.optimizer.masters)
        self.watcher = Watcher(model, self.gradients, parameters)
        self.budget = None if run.max_minutes is None else TimeBudget(run.max_minutes * 60, run.steps)
        self.state = RunState(
            total=run.steps,
            replan=None if self.budget is None else FIRST_PLAN,
            limit=None if self.budget is None else self.budget.seconds,
            loss_scale=LossScale() if self.precision == "fp16" else None,
        )
        self.loss: float | None = None
        self.held_out_loss: float | None = None
        self.held_out_metrics: dict[str, float] = {}
        self.samples: list[str] = []
        self._improved = False
        self._reason: str | None = None  # why the last skipped step was
        self._fix = "look at the data"
        self._last: dict[str, int] = {}
        self._saved: Path | None = None
        self._looks = False  # whether those of this step are still to come
        self._before_looks = (-1, 0)  # a step, and how long the log was before its evaluation and samples
        self._held_out_hash: str | None = None
        self._input_hashes: dict[str, str] | None = None
        self._trained, self._flops, self._watched = trained_share(parameters), 0.0, 0.0
        self._base, self._start = 0.0, time.perf_counter()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to '{self.out}': {system_reason(error)}") from None
        self.metrics = MetricsFile(self.out / "metrics.jsonl") if world.first else NoMetrics()
        # Each process draws its own dropout; the first draws what one alone would.
        seed_all(run.seed + world.rank)

    def resume(self, checkpoint: Path, *, allow_changes: bool = False) -> None:
        """Put a checkpoint back, so that the run goes on bit for bit; what is not the same any more is named."""
        found = load_checkpoint(checkpoint)
        manifest = found.manifest
        self._machine_as_before(manifest.environment)
        changed = check_continuation(manifest, self.recipe, self.environment, allow_changes)
        changed += self._data_changes(manifest, allow_changes)
        self._check_fit(found, allow_changes)
        changed += self._held_out_changes(manifest, allow_changes)
        changed += self._input_changes(manifest, allow_changes)
        self._restore(found)
        self._saved, self._looks = checkpoint, manifest.looks
        if self.budget is None:
            self.state.total = self.recipe.run.steps
        if not self.metrics.cut(manifest.metrics_bytes):
            changed.append(f"{self.metrics.path.name} is shorter than it was, so a part of the log is missing")
        self._last["save"] = self.state.step
        self._say(f"resumed at step {self.state.step} from {checkpoint}")
        if changed:
            self._say(f"the continuation is not bit for bit that of the run before: {'; '.join(changed)}")
            self._log({"kind": "resumed", "step": self.state.step, "changes": changed})

    def whole_model(self, *, averaged: bool = False) -> Model:
        """The trained model on this process; every process must ask.

        A new one where its weights are in shards, or where the mean of the weights is asked for.
        """
        mine = self.model
        if self.parallel.kind != "fsdp" and not averaged:
            return mine
        whole = self.parallel.whole(model_tensors(mine))
        if averaged:
            assert self.ema is not None
            whole |= self.parallel.whole(self.ema.means)
        model = build_model(mine.spec, dtype=mine.dtype, device=self.device)
        model.tokenizer, model.generation, model.family = mine.tokenizer, mine.generation, mine.family
        model.labels, model.kept, model.unread = mine.labels, mine.kept, mine.unread
        model.kept_generation = mine.kept_generation
        if self.recipe.tune.lora is not None:
            add_lora(model, self.recipe.tune.lora)
        load_model_tensors(model, whole)
        return model

    def _save(self, *, looks: bool = True) -> None:
        """Write a checkpoint. ``looks``: the evaluation and samples due at this step come (again) after it."""
        state = self.state
        state.seconds = self._elapsed()
        self.loader.step = state.step + state.spikes.passed
        random, *others = self.world.gather(random_state())
        logged, (looked, before) = self.metrics.sync(), self._before_looks
        manifest = Manifest(
            run=state,
            recipe=to_data(self.recipe),
            environment=self.environment,
            data=self.loader.state_dict(),
            metrics_bytes=before if looks and looked == state.step else logged,
            held_out=self._held_out(),
            inputs=self._inputs(),
            looks=looks,
            python_random=random.python,
            numpy_random=random.numpy,
            others_random=[(other.python, other.numpy) for other in others],
        )
        drawn = {f"{rank}:{name}": t for rank, other in enumerate(others, 1) for name, t in other.torch.items()}
        checkpoint = Checkpoint(
            manifest=manifest,
            model=self.parallel.whole(model_tensors(self.model)),
            optimizer=self.parallel.whole(self.optimizer.state_tensors()),
            random=random.torch | drawn,
            ema={} if self.ema is None else self.parallel.whole(self.ema.state_tensors()),
        )
        policy = self.recipe.run.on_spike
        margin = policy.margin if isinstance(policy, RollBack) else 0
        run = self.recipe.run
        self._saved = self.world.from_first(
            lambda: save_checkpoint(
                self.checkpoints, checkpoint, run.keep, margin, average=run.average or 0, every=run.save_every
            )
        )
        self._last["save"], self._improved = state.step, False
        self._say(f"saved {self._saved}")

    def _note_best(self) -> None:
        """Keep the checkpoint of this step as the best one; weights are written only where they are not yet."""
        saved = self._saved
        if self._last.get("save") != self.state.step or saved is None:
            self._save()
            return
        self.world.from_first(lambda: amend_checkpoint(saved, self.state.best))
        self._improved = False

    def _check_fit(self, found: Checkpoint, allow_changes: bool) -> None:
        """Refuse a checkpoint that this model, optimizer and order of the data cannot go on from."""
        try:
            self.loader.load_state_dict(self._position(found.manifest))
            check_model_tensors(self.model, found.model)
            self.optimizer.check_state_tensors(self.parallel.own(found.optimizer))
            if self.ema is not None and found.ema:
                self.ema.check_state_tensors(found.ema)
        except UserError as error:
            if not allow_changes:
                raise
            raise UserError(f"{error}: --allow-changes cannot change that on the way, it takes a new run") from None

    def _data_changes(self, manifest: Manifest, allow_changes: bool) -> list[str]:
        """What to say of training data that are not those of the checkpoint; they have an order all the same."""
        now = self.loader.state_dict()
        if all(manifest.data.get(name) == now.get(name) for name in OF_THE_DATA):
            return []
        if not allow_changes:
            raise OtherData("the training data are not those of this run")
        return ["the training data have changed"]

    def _position(self, manifest: Manifest) -> dict[str, Any]:
        """Where a checkpoint is in the data that there are now."""
        now = self.loader.state_dict()
        return manifest.data | {name: now[name] for name in OF_THE_DATA if name in now}

    def _held_out(self) -> str:
        """A hash of the held-out examples."""
        if self._held_out_hash is None:
            held = self.held_out
            self._held_out_hash = "" if held is None else self.world.from_first(lambda: hash_of(held()))
        return self._held_out_hash

    def _held_out_changes(self, manifest: Manifest, allow_changes: bool) -> list[str]:
        """What to say of held-out examples that are not those of the checkpoint: no measure could be compared."""
        rows = manifest.recipe["run"].get("eval_rows"), self.recipe.run.eval_rows
        if rows[0] != rows[1] or self._held_out() == manifest.held_out:
            return []
        if not allow_changes:
            raise OtherData("the held-out data are not those of this run, so its evaluations could not be compared")
        return ["the held-out data have changed"]

    def _inputs(self) -> dict[str, str]:
        """Hashes of what the run reads beside its data, by name. Of ``model.from`` all but the weights, which are in
        the checkpoint."""
        if self._input_hashes is None:
            model, start = self.model, self.recipe.model.get("from")
            begun = {} if start is None else {f"the model '{start}'": digest(to_data(model.spec), model.kept)}
            self._input_hashes = self.world.from_first(lambda: begun | self.objective.inputs(str(self.device)))
        return self._input_hashes

    def _input_changes(self, manifest: Manifest, allow_changes: bool) -> list[str]:
        """What to say of inputs that are not those of the checkpoint."""
        now = self._inputs()
        changed = [name for name, found in manifest.inputs.items() if now.get(name, found) != found]
        if changed and not allow_changes:
            raise OtherData(f"{changed[0]} is not the one of this run")
        return [f"{name} has changed" for name in changed]

    def _restore(self, found: Checkpoint) -> None:
        """Weights, moments, mean, random states, data position and counters of a checkpoint."""
        self.loader.load_state_dict(self._position(found.manifest))
        self.parallel.load_model(found.model)
        self.optimizer.load_state_tensors(self.parallel.own(found.optimizer))
        if self.ema is not None and found.ema:
            self.ema.load_state_tensors(self.parallel.own(found.ema))
        elif self.ema is not None:
            self.ema.begin()
        limit, scale = self.state.limit, self.state.loss_scale
        self.state = found.manifest.run
        self.state.limit = limit
        if scale is None or self.state.loss_scale is None:
            self.state.loss_scale = scale
        random = found.random_state(self.world.rank)
        if random is not None:
            set_random_state(random)

    def _tried(self) -> bool:
        """Compile the blocks if the recipe says so; whether the objective leaves a parameter without a gradient."""
        run, model = self.recipe.run, self.model
        if run.compile == "off" and self.world.size == 1:
            return False
        parts = run.accumulate * self.world.size
        gradients = Gradients(Parallel(model, World(), "ddp"), self.objective, _Dropping(model), self.precision, parts)
        work = lambda: gradients.trial(self.loader.batch(0), keep=True)
        with random_state_kept():
            if run.compile == "blocks":
                reason = compile_blocks(model, work)
                self.environment["compiled"] = "blocks" if reason is None else "no"
                if reason is not None:
                    self._say(f"torch.compile does not work here, going on without: {reason}")
            else:
                work()
        unused = any(p.grad is None for p in model.parameters() if p.requires_grad)
        model.zero_grad(set_to_none=True)
        return unused

    def _machine_as_before(self, environment: dict[str, str]) -> None:
        """What was measured or found at the start of the run stays what it was, for the sake of the same bits."""
        threads = int(environment.get("threads", 0))
        if self.budget is not None and self.recipe.run.threads is None and 0 < threads <= self._threads_before:
            torch.set_num_threads(threads)
            self.environment["threads"] = str(threads)
        kernels = environment.get("native kernels")
        if kernels is not None:
            native.limit(() if kernels == "none" else kernels.split(", "))
            self.environment["native kernels"] = ", ".join(native.names()) or "none"

    def _log(self, record: Record) -> None:
        self.metrics.write(record)
        for callback in self.callbacks:
            callback.record(record, self.state)

    def _say(self, message: str) -> None:
        for callback in self.callbacks:
            callback.said(message)

    def _elapsed(self) -> float:
        raise NotImplementedError


class _Dropping:
    """Stands for an optimizer where a pass is only tried."""

    def __init__(self, model: Model) -> None:
        self.model, self.masters = model, {}

    def drop(self) -> None:
        self.model.zero_grad(set_to_none=True)
