"""Looks into a run: what the numbers are, that looking changes nothing, and where they are shown."""

import math
import re

import pytest
import torch
from objective_toys import TINY, tiny
from torch.utils.flop_counter import FlopCounterMode
from train_toys import ToyLoader, toy_model, toy_recipe

from phylon.layers.mixers.attention import Attention
from phylon.ops import native
from phylon.ops.attention import dispatch
from phylon.train import TensorBoard, Trainer, read_metrics, train, write_report
from phylon.train import ceiling as module
from phylon.train.ceiling import ceiling_flops
from phylon.train.gradients import Gradients
from phylon.train.parallel import Parallel
from phylon.train.prepare import check, prepare
from phylon.train.watch import Watcher, _balance, layer_of, trained_share
from phylon.train.world import World


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_measure", lambda device, dtype: 1e9)


def watched(folder):
    return [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "watch"]


def test_looking_changes_no_bit_and_comes_when_due(tmp_path):
    runs = {}
    for every in (None, 5):
        runs[every] = Trainer(toy_model(0.2), ToyLoader(), toy_recipe(watch_every=every), tmp_path / str(every))
        runs[every].run()
    weights = [list(trainer.model.parameters()) for trainer in runs.values()]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert [r["step"] for r in watched(tmp_path / "5")] == [5, 10, 15, 20]
    assert not watched(tmp_path / "None")
    record = watched(tmp_path / "5")[0]
    assert record["ceiling_flops_per_s"] == 1e9
    assert record["utilisation"] == pytest.approx(record["flops_per_s"] / 1e9)
    blocks = {f"decoder.blocks.{i}.attn" for i in range(2)}
    assert record["attention_entropy"].keys() == record["logit_max"].keys() == blocks
    assert all(0 < value < math.log(12) for value in record["attention_entropy"].values())
    assert record["activation_bytes"] > 4 * 12 * 16 * 4 * 2
    assert 0.9 < record["moved"] <= 1.0
    assert set(record["update_ratio"]) == {
        "decoder.embed",
        "decoder.norm_final",
        *(f"decoder.blocks.{i}" for i in range(2)),
    }


def test_the_ratio_and_the_share_that_moved_are_what_they_say():
    model = toy_model(dtype="bfloat16")
    parameters = dict(model.named_parameters())
    watcher = Watcher(model, Gradients(Parallel(model, World(), "ddp"), None, None, "fp32", 1), parameters)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    watcher.before()
    with torch.no_grad():
        for p in parameters.values():
            # Half of every matrix by a hundredth, which bf16 keeps; all the rest by what it swallows.
            p.mul_(torch.where(torch.arange(len(p)) % 2 == 0, 1.01, 1.0001).bfloat16().view(-1, *[1] * (p.ndim - 1)))
    found = watcher.after()
    first = [name for name in parameters if "blocks.0." in name]
    change = sum(float((parameters[n].detach().float() - before[n].float()).square().sum()) for n in first)
    weight = sum(float(before[n].float().square().sum()) for n in first)
    assert found["update_ratio"]["decoder.blocks.0"] == pytest.approx((change / weight) ** 0.5, rel=1e-3)
    moved = sum(int((p.detach() != before[n]).sum()) for n, p in parameters.items())
    assert found["moved"] == pytest.approx(moved / sum(p.numel() for p in parameters.values()))
    assert 0.2 < found["moved"] < 0.6


def test_a_uniform_attention_has_the_entropy_of_its_length(tmp_path):
    model = toy_model()
    with torch.no_grad():
        for block in model.decoder.blocks:
            block.attn.q_proj.weight.zero_()
    trainer = Trainer(model, ToyLoader(), toy_recipe(), tmp_path)
    batch = {"tokens": torch.zeros(2, 12, dtype=torch.int64), "segments": torch.ones(2, 12, dtype=torch.int64)}
    found = trainer.watcher.look(batch | {"targets": torch.zeros(2, 12, dtype=torch.int64)})
    expected = sum(math.log(n) for n in range(1, 13)) / 12
    assert found["attention_entropy"]["decoder.blocks.1.attn"] == pytest.approx(expected, rel=1e-5)
    assert found["logit_max"]["decoder.blocks.1.attn"] == 0.0
    assert trainer.model.taps is None


@pytest.mark.parametrize("kind", [kind for kind in TINY if kind != "distillation"])
def test_the_flops_of_every_objective_are_those_that_pytorch_counts(kind, tmp_path):
    """Of its passes on the reference kernels, which compute every key: causal queries are charged half of a row's."""
    recipe = tiny(kind)
    source = check(recipe, None, "cpu")
    prepared = prepare(recipe, tmp_path, source, "cpu", lambda _: None, lambda _: None, resume=False, kept=False)
    model, batch, objective = prepared.model.eval(), prepared.feed.loader.batch(0), recipe.objective
    counter = FlopCounterMode(display=False)
    with dispatch.force("reference"), native.without(), torch.no_grad(), counter:
        objective.losses(model, batch)
    found = objective.training_flops(model.spec, batch) / 3
    causal = 0
    if model.decoder is not None:
        rows, length = batch["tokens"].shape
        ops = [block.op(name) for block in model.spec.decoder.blocks for name in block.ops()]
        heads = sum(op.n_heads * op.head_dim for op in ops if isinstance(op, Attention))
        causal = 4 * rows * length * heads * (length - (length + 1) // 2)
    assert found + causal == counter.get_total_flops() > 0


def test_a_teacher_costs_its_forward_pass_and_the_student_a_second_score(tmp_path):
    recipe = tiny("distillation")
    source = check(recipe, None, "cpu")
    prepared = prepare(recipe, tmp_path, source, "cpu", lambda _: None, lambda _: None, resume=False, kept=False)
    model, batch, objective = prepared.model.eval(), prepared.feed.loader.batch(0), recipe.objective
    with_teacher, alone = objective.training_flops(model.spec, batch), objective.task.training_flops(model.spec, batch)
    width, vocabulary = model.spec.last_stack.d_model, next(iter(model.spec.heads.values())).vocab_size
    asked = int((objective.inner.asked(batch)[1] != -100).sum())
    assert with_teacher > alone + 3 * 2 * width * vocabulary * asked
    assert with_teacher < 2.5 * alone


def test_the_share_of_the_trained_matrices():
    model = toy_model()
    assert trained_share(dict(model.named_parameters())) == 1.0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".blocks.1." in name)
    assert trained_share(dict(model.named_parameters())) == pytest.approx(0.5, abs=0.2)
    objective, batch = toy_recipe().objective, ToyLoader().batch(0)
    whole, none = (objective.training_flops(model.spec, batch, share) for share in (1.0, 0.0))
    assert whole == 1.5 * none > 0


def test_layers_have_short_names():
    assert layer_of("decoder.blocks.3.attn.q_proj.weight") == "decoder.blocks.3"
    assert layer_of("heads.lm.proj.weight") == "heads.lm"
    assert layer_of("decoder.norm_final.bias") == "decoder.norm_final"


def test_the_ceiling_is_measured_once_and_a_damaged_cache_is_no_trouble(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_measure", lambda device, dtype: calls.append(dtype) or 2e9)
    cpu = torch.device("cpu")
    assert [ceiling_flops(cpu, "fp32") for _ in range(3)] == [2e9] * 3
    assert ceiling_flops(cpu, "bf16") == 2e9
    assert calls == [torch.float32, torch.bfloat16]
    (tmp_path / "cache" / "phylon" / "ceiling.json").write_text("{")
    assert ceiling_flops(cpu, "fp32") == 2e9
    assert len(calls) == 3


def test_the_report_has_pictures_and_tensorboard_the_numbers(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(tmp_path / "run" / "tensorboard")
    recipe = toy_recipe(watch_every=5, ema=0.9, eval_every=10)
    held_out = lambda: [ToyLoader(seed=9).batch(0)]
    trainer = Trainer(toy_model(), ToyLoader(), recipe, tmp_path / "run", [board], held_out=held_out)
    trainer.run()
    page = write_report(trainer.out, recipe, trainer.model, trainer.environment).read_text("utf-8")
    for word in (
        "Size of the updates",
        "Attention entropy",
        "Utilisation",
        "mean of weights",
        "block 1.attn",
        "activations kept",
    ):
        assert word in page
    assert not re.search(r"<script|https?://|\ssrc=|<link|@import|url\(", page)
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    assert {"step/loss", "eval/ema_loss", "watch/update_ratio/decoder.blocks.0", "watch/utilisation"} <= set(names)
    assert len(events.Scalars("step/loss")) == 20


def test_the_balance_of_routers_is_in_the_log_and_the_report(tmp_path):
    """By layer: 1 where all experts are equally busy, the number of experts where one does all."""
    logits = torch.eye(4).repeat(3, 1)[None]
    assert _balance(logits) == 1.0
    assert _balance(torch.tensor([[5.0, 0, 0, 0]] * 6)) == 4.0
    recipe = tiny("denoising", 1)
    recipe = recipe.replace(run=recipe.run.replace(steps=2, watch_every=1, eval_every=None))
    train(recipe, out=tmp_path / "run", device="cpu")
    for record in watched(tmp_path / "run"):
        assert len(record["router_balance"]) == 2, "a layer of the encoder and one of the decoder"
        assert all(1 <= value <= 3 for value in record["router_balance"].values())
    assert "Router balance" in (tmp_path / "run" / "report.html").read_text("utf-8")
