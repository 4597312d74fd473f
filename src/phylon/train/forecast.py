"""Before a run: parameters, FLOPs, memory by part, time on this machine, and the size its budget would suit best."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phylon.data import Batches, BatchOrder, BucketLoader, Loader, PaddedLoader, Source
from phylon.model import Model, build_meta, resolve_device
from phylon.spec.errors import UserError
from phylon.spec.registry import build
from phylon.train.ceiling import ceiling_flops
from phylon.train.final import with_epochs
from phylon.train.footprint import RowCost, free_bytes, in_words, row_cost, steps_peak
from phylon.train.gradients import Gradients
from phylon.train.machine import resolve_precision
from phylon.train.memory import give_back
from phylon.train.objectives.base import Batch
from phylon.train.parallel import Parallel, check_parallel
from phylon.train.parts import formula_bytes, rough_bytes, shards, state_bytes
from phylon.train.prepare import PROVISIONAL_VOCAB, Sample, prepare, prepare_feed, recipe_source
from phylon.train.pretrained import apply_tune
from phylon.train.recipe import Recipe, model_spec, with_values
from phylon.train.vocabulary import Loaded
from phylon.train.watch import trained_share
from phylon.train.world import World

SAMPLE_BYTES = 300_000  # of the data, enough for rows to measure with
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. (arXiv:2203.15556), table 3, for compute-optimal training
N_SAMPLED = 8  # batches that are looked at
BY_FORMULA = "by formula: one process here cannot hold the whole model, of which a step would be run"
HOLES = 0.07  # of the process: what the allocator's holes take more in a run; measured 2 % less to 13 % more
ROOMY = 0.25  # of the free memory: what is surely below it is not measured before a run


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Figures of a run. Bytes are at the peak of a step on one process; ``tokens`` and FLOPs are of the whole run.

    ``tokens`` are real ones, or images, as ``unit`` says; ``flops_training_per_token`` is what one costs with the
    padding around it. ``rows`` are those of a part of a batch on one process. ``flops_6nd`` is C = 6 N D with N all
    parameters and D the tokens seen (arXiv:2001.08361, section 2.1). For that C the best size follows from C = 6 N D
    and D = 20 N: N = sqrt(C / 120), D = 20 N (arXiv:2203.15556). ``objective_bytes``: a teacher's weights;
    ``exchange_bytes``: what several processes hold to exchange; ``free_bytes``: this process's share of them.
    ``process_bytes`` is what the process has beside tensors (interpreter, libraries, what the allocator cannot use); 0
    on a GPU, whose memory it does not take. Where not ``measured``, activations are by formula, and seconds those that
    the machine's fastest products would take.
    """

    parameters: int
    trained: int
    tokens: int
    flops_training_per_token: float
    flops_6nd: float
    best_parameters: float
    best_tokens: float
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    mean_bytes: float
    objective_bytes: float
    exchange_bytes: float
    activations_bytes: float
    working_bytes: float
    process_bytes: float
    free_bytes: float
    rows: int
    rows_that_fit: int
    seconds_per_step: float
    steps: int
    unit: str = "token"
    measured: bool = True

    @property
    def total_bytes(self) -> float:
        """Everything at the peak."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.mean_bytes
        return states + self.objective_bytes + self.exchange_bytes + self.activations_bytes + self.working_bytes

    @property
    def resident_bytes(self) -> float:
        """The process at its peak, as the system counts it; 0 where that is not known."""
        return self.total_bytes + self.process_bytes if self.process_bytes else 0.0

    def page(self) -> str:
        """The estimate as text."""
        trained = "" if self.trained == self.parameters else f", {self.trained:,} trained"
        roughly, about = ("", "about") if self.measured else ("about ", "at least")
        rows = [
            ("parameters", f"{self.parameters:,}{trained}"),
            (f"{self.unit}s of the run", f"{self.tokens:,}"),
            (f"FLOPs {_a(self.unit)}, training", f"{self.flops_training_per_token:,.0f}"),
            *(self._best() if self.unit == "token" else ()),
            ("weights", in_words(self.weights_bytes)),
            ("gradients", in_words(self.gradients_bytes)),
            ("optimizer", in_words(self.optimizer_bytes)),
            *([("mean of the weights", in_words(self.mean_bytes))] if self.mean_bytes else []),
            *([("held by the objective", in_words(self.objective_bytes))] if self.objective_bytes else []),
            *([("exchange of processes", in_words(self.exchange_bytes))] if self.exchange_bytes else []),
            (f"activations, {self.rows} rows", f"{roughly}{in_words(self.activations_bytes)}"),
            ("loss and working space", in_words(self.working_bytes)),
            ("together", f"{in_words(self.total_bytes)} of {in_words(self.free_bytes)} free"),
            *self._resident(),
            ("a step", f"{about} {self.seconds_per_step:.2f} s"),
            (f"{self.steps:,} steps", f"{about} {_clock(self.steps * self.seconds_per_step)}"),
            *([] if self.measured else [("", BY_FORMULA)]),
        ]
        return "\n".join(f"{name:<28}{text}" for name, text in rows)

    def _resident(self) -> list[tuple[str, str]]:
        if not self.process_bytes:
            return []
        return [("with the process itself", f"{in_words(self.resident_bytes)} at the peak")]

    def _best(self) -> list[tuple[str, str]]:
        return [
            ("compute, C = 6 N D", f"{self.flops_6nd:.3g} FLOPs"),
            ("best size for that C", f"N = sqrt(C / 120) = {self.best_parameters:,.0f} parameters"),
            ("", f"D = 20 N = {self.best_tokens:,.0f} tokens"),
        ]


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    """What a few batches tell: the cost of the largest one's rows, and means over all, each a row's.

    ``share``: the mean row's FLOPs over those of the rows that were measured. ``rows``: of a whole batch, on the mean;
    ``most_rows``: those of the largest one, which the memory must do for. ``stepped``: of how many
    rows whole steps were run, and the process at their peak (0 where it is not known).
    """

    cost: RowCost
    stepped: tuple[int, float]
    rows: float
    most_rows: int
    steps: int
    tokens: float
    flops: float
    share: float


def estimate(
    recipe: Recipe,
    source: Source | None = None,
    device: str = "auto",
    world: World | None = None,
    *,
    whole_steps: int = 4,
) -> Estimate:
    """Measure a step of one and two rows of ``recipe`` and say what the run will need; nothing is left behind.

    ``whole_steps`` are run to see what the process has beside its tensors; none leave that out.
    Where the run is to be spread (FSDP) over processes because none holds it whole, a formula stands for the step.
    The model is made in memory; the data are read up to a few hundred kilobytes, or whole where ``run.epochs`` asks
    how many steps they give.
    """
    world, target = world or World(), resolve_device(device)
    check_parallel(recipe, world.size)
    spec = model_spec(recipe, _vocabulary(recipe))
    shape = build_meta(spec)
    apply_tune(shape, recipe.tune)
    _check_states(recipe, shape, target, world)
    n, free = sum(p.numel() for p in shape.parameters()), _free(target, world)
    states = state_bytes(recipe, shape, world)
    measured = _holds_whole(recipe, shape, target, world)
    with tempfile.TemporaryDirectory() as folder:
        found = _sampled(recipe, source, Path(folder), device, None if measured else shape, world, whole_steps)
    rows = math.ceil(found.most_rows / (recipe.run.accumulate * world.size))
    kept, peak, seconds = found.cost.at(rows)
    per_step = seconds * found.share * recipe.run.accumulate * found.rows / found.most_rows
    limit = math.inf if recipe.run.max_minutes is None else recipe.run.max_minutes * 60 / per_step
    steps = int(min(found.steps, limit))
    tokens = round(steps * found.rows * found.tokens)
    compute = 6.0 * n * tokens
    best = math.sqrt(compute / (6 * TOKENS_PER_PARAMETER))
    return Estimate(
        parameters=n,
        trained=sum(p.numel() for p in shape.parameters() if p.requires_grad),
        tokens=tokens,
        flops_training_per_token=found.flops / found.tokens,
        flops_6nd=compute,
        best_parameters=best,
        best_tokens=TOKENS_PER_PARAMETER * best,
        **states,
        activations_bytes=kept,
        working_bytes=max(0.0, peak - kept),
        process_bytes=_beside_tensors(found, state_bytes(recipe, shape, World())),
        free_bytes=free,
        rows=rows,
        rows_that_fit=found.cost.rows_within(free - sum(states.values())),
        seconds_per_step=per_step,
        steps=steps,
        unit=recipe.objective.counted,
        measured=measured,
    )


def check_fits(recipe: Recipe, source: Source | None, device: str, world: World) -> None:
    """Refuse a batch that cannot fit, before it is tried, with the size that would.

    What a rough bound puts well below the free memory is let through without measuring.
    """
    target = resolve_device(device)
    shape = build_meta(model_spec(recipe, _vocabulary(recipe)))
    apply_tune(shape, recipe.tune)
    _check_states(recipe, shape, target, world)
    free = _free(target, world)
    if sum(state_bytes(recipe, shape, world).values()) + rough_bytes(recipe, shape, world) < ROOMY * free:
        return
    if not _holds_whole(recipe, shape, target, world):
        return
    # How long the run is does not matter here, and may take all of the data to say.
    found = estimate(recipe.replace(run=recipe.run.replace(epochs=None)), source, device, world, whole_steps=0)
    give_back()
    if found.rows <= found.rows_that_fit:
        return
    if not found.rows_that_fit:
        raise UserError(
            f"not even one row of {recipe.data.seq_len} tokens fits: it needs {in_words(found.total_bytes)}, and "
            f"{_are_free(target, world)}; lower data.seq_len, or set run.recompute=blocks"
        )
    remedy = recipe.objective.shrunk(recipe, found.rows_that_fit, found.rows, world.size)
    raise UserError(
        f"{found.rows} rows at once need {in_words(found.total_bytes)}, and {_are_free(target, world)}; "
        f"{found.rows_that_fit} rows fit: {remedy}"
    )


def _holds_whole(recipe: Recipe, shape: Model, target: torch.device, world: World) -> bool:
    """Whether one process, which measures, can hold the whole of what is spread over several."""
    if shards(recipe, world) == 1:
        return True
    alone = state_bytes(recipe, shape, World())
    return alone["weights_bytes"] + alone["gradients_bytes"] + alone["objective_bytes"] <= free_bytes(target)


def _sampled(
    recipe: Recipe,
    source: Source | None,
    folder: Path,
    device: str,
    shape: Model | None,
    world: World,
    whole_steps: int,
) -> _Sampled:
    """Look at a few batches, of a small part of the data unless all must be counted, and run one and two rows.

    Nothing is run where there is a ``shape``, which stands for the model.
    """
    run, objective = recipe.run, recipe.objective
    small: dict[str, Any] = {"run.accumulate": 1, "run.batch_size": max(2, run.batch_size)}
    if run.epochs is None:
        small |= {"run.batch_size": 2, "data.held_out": 0.0}
        if objective.reads_text:
            # A batch by tokens must find as many in the sample as it may hold.
            enough = SAMPLE_BYTES if not objective.by_tokens else max(SAMPLE_BYTES, 16 * objective.most_tokens(recipe))
            if recipe.data.max_bytes is None or recipe.data.max_bytes > enough:
                whole: Any = recipe_source(recipe.data) if source is None else source
                source = Sample(whole, enough)
    if recipe.objective.reads_text and "family" in recipe.model and "vocab_size" not in recipe.model:
        small["model.vocab_size"] = _vocabulary(recipe)
    changed = with_values(recipe, small)
    source = recipe_source(changed.data) if source is None else source
    unheard: Any = lambda message: None
    if shape is None:
        prepared = prepare(changed, folder, source, device, unheard, unheard, resume=False, kept=False)
        model, loader = prepared.model.train(), prepared.feed.loader
        _as_recipe_says(model, recipe)
    else:
        model, loader = shape, prepare_feed(changed, folder, source, unheard, unheard, kept=False).feed.loader
    parallel = Parallel(model, World(), "ddp")
    heaviest = loader.heaviest() if isinstance(loader, BucketLoader | PaddedLoader) else loader.batch(0)
    batches = [loader.batch(step) for step in range(N_SAMPLED)]
    sizes, trained = [_rows(batch) for batch in batches], trained_share(parallel.parameters())
    flops = [objective.training_flops(model.spec, b, trained) / n for b, n in zip(batches, sizes, strict=True)]
    largest = objective.training_flops(model.spec, heaviest, trained) / _rows(heaviest)
    mean = sum(f * n for f, n in zip(flops, sizes, strict=True)) / sum(sizes)
    by_rows = isinstance(getattr(loader, "order", None), BatchOrder)
    most_rows = run.batch_size if by_rows else _rows(heaviest)
    part = math.ceil(most_rows / (run.accumulate * world.size))
    precision = resolve_precision(run.precision, resolve_device(device))
    if shape is None:
        optimizer = build(recipe.optim, parallel.parameters().items())  # type: ignore[arg-type]
        gradients = Gradients(parallel, objective, optimizer, precision, 1)
        stepped = (0, 0.0)
        if whole_steps and gradients.device.type != "cuda":
            # Before anything else is run, whose memory the process would keep.
            most = rough_bytes(recipe, model, World()) + sum(state_bytes(recipe, model, World()).values())
            rows = part if most < _free(gradients.device, world) else 2
            stepped = steps_peak(gradients, heaviest, recipe.optim.lr, rows, whole_steps)
        cost = row_cost(gradients, heaviest)
    else:
        row = formula_bytes(recipe, shape, world) / part
        seconds = largest / ceiling_flops(resolve_device(device), precision)
        cost, stepped = RowCost((row, row), (row, row), (seconds, seconds)), (0, 0.0)
    return _Sampled(
        cost=cost,
        stepped=stepped,
        rows=run.batch_size if by_rows else sum(sizes) / N_SAMPLED,
        most_rows=most_rows,
        steps=_steps(recipe, loader),
        tokens=sum(map(objective.n_tokens, batches)) / sum(sizes),
        flops=mean,
        share=mean / largest if largest else 1.0,
    )


def _beside_tensors(found: _Sampled, states: dict[str, float]) -> float:
    """What the process had at the peak of steps that were run beside their tensors; no mean of the weights was made."""
    rows, resident = found.stepped
    if not resident:
        return 0.0
    return max(0.0, (1 + HOLES) * resident - sum(states.values()) + states["mean_bytes"] - found.cost.at(rows)[1])


def _steps(recipe: Recipe, loader: Batches) -> int:
    """The updates of the run; ``loader`` has at least two rows a batch, the run may have one."""
    epochs = recipe.run.epochs
    if epochs is not None and recipe.run.batch_size == 1 and isinstance(loader, Loader):
        return epochs * loader.one_pass
    return with_epochs(recipe, loader).run.steps


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _as_recipe_says(model: Model, recipe: Recipe) -> None:
    from phylon.model.passes import recompute_blocks

    if recipe.run.recompute == "blocks":
        recompute_blocks(model)


def _vocabulary(recipe: Recipe) -> int:
    """The size of the vocabulary as far as it is known before the data are read."""
    tokenizer = recipe.data.tokenizer
    if isinstance(tokenizer, Loaded) and "from" not in recipe.model:  # which has a vocabulary of its own
        return tokenizer.make(lambda: iter(())).vocab_size
    return getattr(tokenizer, "vocab_size", PROVISIONAL_VOCAB)


def _check_states(recipe: Recipe, shape: Model, target: torch.device, world: World) -> None:
    """Refuse a model of which one process cannot hold what it must, whatever the batch."""
    whole = state_bytes(recipe, shape, World())
    # Each process makes the model whole before it gives its shards away.
    made = whole["weights_bytes"] + whole["objective_bytes"]
    needed = max(made, sum(state_bytes(recipe, shape, world).values()))
    if needed > _free(target, world):
        n = sum(p.numel() for p in shape.parameters())
        raise UserError(
            f"training {n:,} parameters needs {in_words(needed)} beside activations, and {_are_free(target, world)}; "
            "choose a smaller model, or LoRA"
        )


def _sharing(target: torch.device, world: World) -> int:
    """How many processes share the memory of ``target``: one a GPU, all of a machine its own."""
    return 1 if target.type == "cuda" else world.local_size


def _free(target: torch.device, world: World) -> float:
    return free_bytes(target) / _sharing(target, world)


def _are_free(target: torch.device, world: World) -> str:
    sharing = _sharing(target, world)
    return f"{in_words(_free(target, world))} are free" + (f" for each of {sharing} processes" if sharing > 1 else "")


def _a(unit: str) -> str:
    return f"an {unit}" if unit == "image" else f"a {unit}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    shown = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    found = [f"{number} {unit}" for number, unit in shown if number]
    return " ".join(found[:2]) or "0 s"
