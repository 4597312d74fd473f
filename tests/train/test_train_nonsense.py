"""What was wrong without a word: lost answers, shares of one row, passes over mixtures, moving metrics, empty texts."""

import itertools

import numpy as np
import pytest
import torch
from objective_toys import tiny

from phylon.data.buckets import BucketLoader, PaddedLoader
from phylon.ops.loss import IGNORE
from phylon.spec import UserError
from phylon.spec.override import parse_value
from phylon.train import NextToken
from phylon.train.final import with_epochs
from phylon.train.gradients import Gradients
from phylon.train.measures import macro_f1, retrieval_accuracy
from phylon.train.objectives import mixing
from phylon.train.objectives.classify import TextClasses
from phylon.train.objectives.contrastive import Contrastive
from phylon.train.objectives.distillation import Distillation
from phylon.train.objectives.mixing import MixedExamples, mixing_rates
from phylon.train.objectives.supervised import Listed
from phylon.train.objectives.text_to_text import TextToText
from phylon.train.objectives.translation import Translation
from phylon.train.prepare import check, prepare
from phylon.train.schedule import Linear


def fed(recipe, tmp_path, say=lambda message: None):
    source = check(recipe, None, "cpu")
    return prepare(recipe, tmp_path, source, "cpu", say, lambda t: None, resume=False, kept=False)


def test_windows_leave_no_gap_whatever_the_stride(tmp_path):
    said = []
    recipe = tiny("answers")
    recipe = recipe.replace(
        objective=recipe.objective.replace(stride=1000),
        data=recipe.data.replace(seq_len=12, held_out=0.0),
    )
    examples = fed(recipe, tmp_path, said.append).feed.loader.rows.examples
    answered = sum(bool(example["targets"].any()) for example in examples)
    lost = [message for message in said if "whole in no window" in message]
    n_lost = int(lost[0].split(" questions")[0].split()[3]) if lost else 0
    rows = len(recipe.data.source.rows)
    assert answered + n_lost == rows, "every answer is in a window, or is said to be in none"
    inside = [example["spans"][example["spans"][:, 0] >= 0] for example in examples]
    assert len({tuple(span) for spans in inside for span in spans.tolist()}) > 0
    for one, two in itertools.pairwise(inside):
        if two[0, 0] > 0:  # the same context goes on
            assert two[0, 0] <= one[-1, 1] + 1


class Shares:
    """As much of ``Parallel`` as sharing a batch asks for."""

    def __init__(self, size, rank):
        self.world = type("World", (), {"size": size, "rank": rank})()
        self.model = torch.nn.Linear(1, 1)
        self.model.device = torch.device("cpu")


@pytest.mark.parametrize(("rows", "size", "accumulate"), [(1, 2, 1), (3, 2, 2), (5, 4, 3), (8, 2, 2), (1, 1, 4)])
def test_every_process_has_as_many_parts_and_the_rows_are_there_once(rows, size, accumulate):
    batch = {"tokens": torch.arange(1, 1 + rows)[:, None], "targets": torch.arange(1, 1 + rows)[:, None]}
    found = [Gradients(Shares(size, r), NextToken(), None, "fp32", accumulate).parts(batch) for r in range(size)]
    assert len({len(parts) for parts in found}) == 1, "they wait for each other in every part"
    flat = [part["targets"].flatten().tolist() for parts in found for part in parts]
    assert all(flat), "no part is without a row"
    assert [x for part in flat for x in part if x != IGNORE] == list(range(1, 1 + rows))


def test_a_blank_row_teaches_nothing(tmp_path):
    made = fed(tiny("translation"), tmp_path)
    recipe = tiny("translation")
    batch = made.feed.loader.batch(0)
    loss = recipe.objective.losses(made.model.train(), recipe.objective.blank(batch))["lm"]
    loss.sum.backward()
    assert loss.sum.item() == loss.count.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in made.model.parameters())


def test_fewer_rows_than_processes_are_refused_unless_rows_follow_tokens(monkeypatch):
    from phylon.train.parallel import check_parallel

    with pytest.raises(UserError, match=r"shared by 8 processes in 2 parts each; give run.batch_size=16"):
        check_parallel(tiny("next_token"), 8)
    check_parallel(tiny("translation"), 8)


def test_the_heaviest_batch_is_one_of_the_loader():
    rng = np.random.default_rng(0)
    examples = [{"tokens": np.ones(n, np.int64)} for n in rng.integers(1, 40, 60)]
    loader = BucketLoader(examples, 120, 0)
    areas = [loader.batch(step)["tokens"].numel() for step in range(len(loader.order))]
    assert loader.heaviest()["tokens"].numel() == max(areas)
    rows = PaddedLoader(Listed(examples), 8, 0)
    areas = [rows.batch(step)["tokens"].numel() for step in range(rows.steps_per_epoch * 3)]
    assert rows.heaviest()["tokens"].shape == (8, max(len(e["tokens"]) for e in examples))
    assert rows.heaviest()["tokens"].numel() >= max(areas)


def test_a_translation_batch_is_guarded_by_its_tokens(monkeypatch):
    from phylon.train import forecast
    from phylon.train.world import World

    recipe = tiny("translation")
    found = forecast.estimate(recipe, device="cpu")
    assert found.rows * recipe.run.accumulate == 8 < 120 / 12, "as many rows as 120 tokens take"
    states = found.total_bytes - found.activations_bytes - found.working_bytes
    monkeypatch.setattr(forecast, "free_bytes", lambda device: states + 0.6 * (found.total_bytes - states))
    with pytest.raises(UserError, match=r"rows fit: set run.accumulate=\d+ .*, or objective.max_tokens"):
        forecast.check_fits(recipe, None, "cpu", World())


@pytest.mark.parametrize("n_tasks", [1, 3])
def test_an_epoch_of_a_mixture_is_a_pass_over_its_examples(n_tasks):
    sizes = [3000, 200, 50][:n_tasks]
    tasks = {str(t): [{"tokens": np.array([t, i])} for i in range(size)] for t, size in enumerate(sizes)}
    mixed = MixedExamples(tasks, mixing_rates(sizes, None, 1.0), 0)
    loader = PaddedLoader(mixed, 32, 0, one_pass=sum(sizes))
    assert loader.steps_per_epoch == -(-sum(sizes) // 32)
    recipe = tiny("text_to_text")
    assert with_epochs(recipe.replace(run=recipe.run.replace(epochs=2)), loader).run.steps == 2 * loader.steps_per_epoch
    if n_tasks == 1:
        seen = {int(i) for step in range(93) for i in loader.batch(step)["tokens"][:, 1]}
        assert len(seen) == 93 * 32, "none comes back before all have been"


def test_a_task_is_shuffled_once_an_epoch_of_its_own(monkeypatch):
    sizes, made = [900, 800, 700, 600, 500], []
    real = mixing.permutation
    monkeypatch.setattr(mixing, "permutation", lambda *place: made.append(place) or real(*place))
    tasks = {str(t): [{"tokens": np.array([t, i])} for i in range(size)] for t, size in enumerate(sizes)}
    loader = PaddedLoader(MixedExamples(tasks, mixing_rates(sizes, None, 1.0), 0), 32, 0)
    for step in range(100):
        loader.batch(step)
    assert len(made) == len(set(made)) <= 10


def test_f1_is_the_same_figure_whatever_is_predicted():
    metrics = TextClasses().metrics
    right = [0, 1, 0, 1, 1, 0]
    assert metrics([0, 1, 0, 1, 0, 0], right, 3)["f1"] == pytest.approx((6 / 7 + 4 / 5) / 2)
    assert metrics([0, 1, 0, 1, 0, 2], right, 3)["f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert metrics([0, 1, 0, 1, 0, 0], right, 2)["f1"] == pytest.approx(4 / 5)
    assert macro_f1([0, 1, 2], [0, 1, 1]) == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_a_text_that_says_the_same_as_the_own_one_is_found():
    vectors = np.eye(2)[[0, 1] * 5]
    assert retrieval_accuracy(vectors, vectors, np.array([7, 9] * 5)) == 1.0
    assert retrieval_accuracy(np.ones((10, 2)), np.ones((10, 2))) == 0.1
    assert retrieval_accuracy(vectors, vectors[::-1], np.array([7, 9] * 5)) == 0.0


def test_a_warmup_of_the_whole_run_is_refused_where_the_run_is_known():
    with pytest.raises(UserError, match="warmup 10 must be less than the total of 10"):
        Linear(warmup=10, total=10)


@pytest.mark.parametrize("kind", ["text_classes", "text_scores", "word_classes", "contrastive", "text_to_text"])
def test_rows_without_room_for_a_text_are_refused(tmp_path, kind):
    recipe = tiny(kind)
    recipe = recipe.replace(data=recipe.data.replace(seq_len=1 if kind == "text_to_text" else 2))
    with pytest.raises(UserError, match=r"leaves no room for|no room"):
        fed(recipe, tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Contrastive(temperature=1e-30),
        lambda: Contrastive(temperature=1e9),
        lambda: Distillation(teacher="x", temperature=1e-30),
        lambda: TextToText(temperature=1e-30),
    ],
)
def test_temperatures_that_leave_no_numbers_are_refused(make):
    with pytest.raises(UserError, match="temperature must"):
        make()


def test_null_and_none_unset():
    assert parse_value("null") is None
    assert parse_value("none") is None
    assert Translation.by_tokens
