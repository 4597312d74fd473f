"""What a run will need: memory against a measured peak, FLOPs, the best size, and batches that cannot fit."""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from objective_toys import tiny

from phylon.account import account
from phylon.data import Document, Loader
from phylon.families import build_spec
from phylon.hub import load
from phylon.model import build_meta
from phylon.spec import UserError
from phylon.train import load_recipe, train
from phylon.train.footprint import RowCost, _group_free, row_cost
from phylon.train.forecast import _steps, check_fits, estimate
from phylon.train.parts import rough_bytes, state_bytes
from phylon.train.prepare import Sample, check, prepare
from phylon.train.progress import _smooth
from phylon.train.recipe import apply_overrides, model_spec
from phylon.train.world import World, join_world

SIZES = {"model.d_model": 64, "model.n_layers": 2, "model.d_ff": 128, "model.n_kv_heads": 4, "data.seq_len": 64}
SMALL = SIZES | {"data.tokenizer.vocab_size": 300, "data.max_bytes": 200_000, "run.max_minutes": None, "run.steps": 100}


def recipe(**changes):
    return load_recipe("demo", SMALL | {"run.precision": "fp32", **changes})


def test_an_estimate_counts_what_the_formulas_say():
    found = estimate(recipe(**{"run.batch_size": 6, "run.accumulate": 2, "run.ema": 0.9}), device="cpu")
    n = found.parameters
    model = {key: value for key, value in recipe().model.items() if key != "vocab_size"} | {"vocab_size": 300}
    assert n == account(build_spec(model), seq_len=64).params_total
    assert found.weights_bytes == found.gradients_bytes == found.mean_bytes == 4 * n
    assert found.optimizer_bytes == 8 * n
    assert found.tokens == 100 * 6 * 64
    assert found.flops_6nd == 6 * n * found.tokens
    assert found.best_tokens == pytest.approx(20 * found.best_parameters)
    assert 6 * found.best_parameters * found.best_tokens == pytest.approx(found.flops_6nd)
    assert found.rows == 3
    assert found.rows_that_fit > 1000
    assert found.activations_bytes > 3 * 64 * 2 * 64 * 4, "at least a few states of the width a block"
    page = found.page()
    assert "D = 20 N" in page
    assert "activations, 3 rows" in page


def test_the_peak_of_a_step_is_the_measured_one():
    """Of rows that were not measured, from one and two that were: within 10 % of the allocator's own peak."""
    from phylon.train.footprint import _measured
    from phylon.train.gradients import Gradients
    from phylon.train.parallel import Parallel
    from phylon.train.world import World

    from train_toys import ToyLoader, toy_model  # isort: skip
    from phylon.spec.registry import build
    from phylon.train import AdamW, NextToken

    model = toy_model(0.1).train()
    parallel = Parallel(model, World(), "ddp")
    optimizer = build(AdamW(), model.named_parameters())
    gradients = Gradients(parallel, NextToken(), optimizer, "fp32", 1)
    batch = ToyLoader(batch_size=64).batch(0)
    cost = row_cost(gradients, batch)
    kept, peak, _ = _measured(gradients, batch)
    assert cost.at(64)[0] == pytest.approx(kept, rel=0.1)
    assert cost.at(64)[1] == pytest.approx(peak, rel=0.1)
    assert kept < peak
    assert all(p.grad is None for p in model.parameters()) or optimizer.drop() is None


def test_epochs_say_how_many_steps_there_are(tmp_path):
    """Of all the data, whatever part of them is measured; a batch by tokens counts its own rows."""
    for kind, changes in (("image_classes", {}), ("text_classes", {}), ("image_classes", {"run.batch_size": 1})):
        made = apply_overrides(tiny(kind), {"run.epochs": 3, "run.accumulate": 1, **changes})
        folder, source = tmp_path / f"{kind}{len(changes)}", check(made, None, "cpu")
        prepared = prepare(made, folder, source, "cpu", lambda _: None, lambda _: None, resume=False, kept=False)
        steps, loader = 3 * prepared.feed.loader.steps_per_epoch, prepared.feed.loader
        tokens = [made.objective.n_tokens(loader.batch(i)) for i in range(steps)]
        found = estimate(made, device="cpu")
        assert found.steps == steps != made.run.steps
        assert found.tokens == pytest.approx(sum(tokens), rel=0.25)
        assert found.unit == made.objective.counted
        assert f"{found.steps:,} steps" in found.page()
        assert ("images of the run" in found.page()) == (kind == "image_classes")


def test_a_pass_over_a_mixture_is_all_its_examples_whatever_the_block():
    rows = type("Rows", (), {"__len__": lambda _: 1024, "example": lambda *_: {}, "fingerprint": ""})()
    made = apply_overrides(tiny("text_classes"), {"run.epochs": 3, "run.accumulate": 1, "run.batch_size": 1})
    assert _steps(made, Loader(rows, 2, 0, one_pass=50)) == 150


def test_rows_that_fit():
    cost = RowCost((10.0, 5.0), (100.0, 50.0), (1.0, 0.5))
    assert [cost.rows_within(n) for n in (99, 100, 149, 150, 1100)] == [0, 1, 1, 2, 21]
    assert cost.at(21) == (110.0, 1100.0, 11.0)


def test_lora_and_recomputation_and_adafactor_are_in_the_estimate():
    plain = estimate(recipe(), device="cpu")
    lora = estimate(recipe(**{"tune.lora": {"rank": 2}}), device="cpu")
    assert lora.trained < 0.1 * lora.parameters
    assert lora.gradients_bytes == 4 * lora.trained
    less = estimate(recipe(**{"run.recompute": "blocks", "optim": {"kind": "adafactor"}}), device="cpu")
    assert less.activations_bytes < 0.7 * plain.activations_bytes
    assert less.optimizer_bytes < 0.1 * plain.optimizer_bytes


def test_a_batch_that_cannot_fit_is_refused_before_it_is_tried(tmp_path, monkeypatch):
    found = estimate(recipe(), device="cpu")
    states = found.total_bytes - found.activations_bytes - found.working_bytes
    per_row = (found.activations_bytes + found.working_bytes) / found.rows
    monkeypatch.setattr("phylon.train.forecast.free_bytes", lambda device: states + 10.5 * per_row)
    with pytest.raises(UserError) as caught:
        train(recipe(**{"run.batch_size": 64}), out=tmp_path / "run", device="cpu")
    text = str(caught.value)
    assert "64 rows at once need" in text
    assert "set run.accumulate=" in text
    assert "\n" not in text
    assert not (tmp_path / "run").exists()
    parts = int(text.partition("run.accumulate=")[2].split()[0])
    assert 5 <= parts <= 8
    train(recipe(**{"run.batch_size": 64, "run.accumulate": parts, "run.steps": 1}), out=tmp_path / "run", device="cpu")
    monkeypatch.setattr("phylon.train.forecast.free_bytes", lambda device: states / 2)
    with pytest.raises(UserError, match="choose a smaller model, or LoRA"):
        train(recipe(), out=tmp_path / "other", device="cpu")


def test_a_model_that_fits_in_shards_alone_is_let_through(monkeypatch):
    """Of shards, and of processes that share one machine's memory, each counts its own; one too many is refused."""
    sharded = recipe(**{"run.parallel": "fsdp", "run.batch_size": 8, "run.ema": 0.9})
    alone, four = estimate(sharded, device="cpu"), estimate(sharded, device="cpu", world=World(size=4))
    for part in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "mean_bytes"):
        assert getattr(four, part) == getattr(alone, part) / 4
    assert alone.exchange_bytes == 0 < four.exchange_bytes < 5 * alone.weights_bytes
    assert "exchange of processes" in four.page()

    spread = sharded.replace(model=sharded.model | {"n_layers": 24})
    shape = build_meta(model_spec(spread, 300))
    whole, held = (sum(state_bytes(spread, shape, World(size=n)).values()) for n in (1, 16))
    weights = state_bytes(spread, shape, World())["weights_bytes"]
    assert max(held, weights) < 0.5 * whole
    monkeypatch.setattr("phylon.train.forecast.free_bytes", lambda device: 1.1 * max(held, weights))
    check_fits(spread, None, "cpu", World(size=16))
    for world in (World(), World(size=16, local_size=2)):
        with pytest.raises(UserError, match="are free" + (" for each of 2 processes;" if world.size > 1 else ";")):
            check_fits(spread, None, "cpu", world)
    monkeypatch.setattr("phylon.train.forecast.free_bytes", lambda device: 0.9 * weights)
    with pytest.raises(UserError, match="choose a smaller model, or LoRA"):  # it is made whole
        check_fits(spread, None, "cpu", World(size=10**6))


def test_what_no_process_here_can_hold_whole_is_estimated_by_formula(monkeypatch):
    """Nothing is made or run; the page says so."""
    wide = recipe(**{"run.parallel": "fsdp", "run.batch_size": 48, "model.n_layers": 6})
    measured = estimate(wide, device="cpu", world=World(size=16))
    assert measured.measured
    assert "formula" not in measured.page()
    monkeypatch.setattr("phylon.train.forecast.free_bytes", lambda device: 1.5 * 16 * measured.weights_bytes)
    monkeypatch.setattr("phylon.train.forecast.row_cost", lambda *_: pytest.fail("run"))
    monkeypatch.setattr("phylon.train.prepare.build", lambda *_, **options: pytest.fail("made"))
    monkeypatch.setattr("phylon.train.forecast.ceiling_flops", lambda *_: 1e9)
    found = estimate(wide, device="cpu", world=World(size=16))
    assert not found.measured
    for name in ("rows", "steps", "tokens", "flops_training_per_token", "weights_bytes", "exchange_bytes"):
        assert getattr(found, name) == getattr(measured, name), name
    peak = measured.activations_bytes + measured.working_bytes
    assert peak < found.activations_bytes + found.working_bytes < 5 * peak
    assert found.seconds_per_step == pytest.approx(3 * 64 * found.flops_training_per_token / 1e9)
    page = found.page()
    assert "activations, 3 rows         about" in page
    assert "a step                      at least" in page
    assert "by formula: one process here cannot hold the whole model" in page
    with pytest.raises(UserError, match="choose a smaller model, or LoRA"):
        estimate(wide, device="cpu")


def test_an_estimate_is_of_the_processes_that_were_announced(monkeypatch, capsys):
    from phylon.cli.main import main

    sets = [word for key, value in SMALL.items() if value is not None for word in ("--set", f"{key}={value}")]
    command = ["train", "demo", "--estimate", "--device", "cpu", *sets, "--set", "run.parallel=fsdp"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(command) == 0
    assert "exchange of processes" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    assert (main(command), capsys.readouterr().out) == (0, "")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc' and must be a whole number from 1; torchrun sets it"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' and must be a whole number from 1"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is '8' and must be a whole number from 1 to"),
        ({"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8"}, "cannot be shared by 64 processes"),
    ],
)
def test_processes_that_cannot_be_are_one_line(said, words, monkeypatch, capsys):
    from phylon.cli.main import main

    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "demo", "--estimate", "--device", "cpu", "--set", "run.batch_size=4"]) == 2
    found = capsys.readouterr().err
    assert words in found
    assert found.count("\n") == 1


def test_processes_of_one_machine_share_its_memory(monkeypatch):
    alone, two = estimate(recipe(), device="cpu"), estimate(recipe(), device="cpu", world=World(size=2))
    assert two.exchange_bytes == two.gradients_bytes == alone.gradients_bytes, "the buckets of DDP"
    monkeypatch.setattr("phylon.train.forecast.free_bytes", lambda device: 1e9)
    eight = recipe(**{"run.batch_size": 8})
    assert estimate(eight, device="cpu", world=World(size=8, local_size=4)).free_bytes == 0.25e9
    monkeypatch.setattr("phylon.train.forecast.free_bytes", lambda device: 3 * alone.total_bytes)
    check_fits(recipe(), None, "cpu", World(size=2))
    with pytest.raises(UserError, match="are free for each of 4 processes"):
        check_fits(recipe(), None, "cpu", World(size=4, local_size=4))


def test_a_process_knows_how_many_share_its_machine(monkeypatch):
    monkeypatch.setattr(logging.getLogger("phylon.data"), "setLevel", lambda level: None)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for key, value in {"WORLD_SIZE": 8, "RANK": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(key, str(value))
    assert join_world("cpu") == (World(5, 8, 1, 4), "cpu")


def test_a_teacher_is_in_the_estimate(monkeypatch):
    made = tiny("distillation")
    size = sum(p.numel() for p in load(made.objective.teacher, device="cpu").parameters())
    found = estimate(made, device="cpu")
    assert found.objective_bytes == 4 * size > found.weights_bytes / 10
    assert "held by the objective" in found.page()
    rest = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes
    monkeypatch.setattr("phylon.train.forecast.free_bytes", lambda device: rest + 2 * size)
    with pytest.raises(UserError, match="choose a smaller model, or LoRA"):
        check_fits(made, None, "cpu", World())


@pytest.mark.parametrize(
    ("line", "top", "limit", "used", "cache", "unlimited"),
    [
        ("0::/", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "max"),
        (
            "4:cpu,memory:/", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
            "total_inactive_file", str(2**63 - 4096),
        ),
    ],
)  # fmt: skip
def test_the_memory_of_control_groups(tmp_path, line, top, limit, used, cache, unlimited):
    """The least of the groups on the way counts, and cache that is not in use is free."""

    def group(path, most, now, reclaimable):
        folder = tmp_path / top / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text(f"{now}\n")
        (folder / "memory.stat").write_text(f"anon 5\nactive_file 7\n{cache} {reclaimable}\n")

    assert _group_free(tmp_path) == float("inf")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n{line}outer/inner\n")
    assert _group_free(tmp_path) == float("inf")
    group("", 1000, 900, 300)  # of a container, whose path is that of the machine
    assert _group_free(tmp_path) == 400
    group("outer", 500, 250, 20)
    group("outer/inner", unlimited, 200, 20)
    group("other", 10, 0, 0)
    assert _group_free(tmp_path) == 270
    group("outer/inner", 210, 200, 20)
    assert _group_free(tmp_path) == 30
    group("outer/inner", 100, 200, 20)
    assert _group_free(tmp_path) == 0


def test_the_shown_loss_recovers_from_one_that_was_no_number():
    for bad in (math.inf, -math.inf, math.nan):
        assert _smooth(_smooth(2.0, bad), 3.0) == 3.0
    assert _smooth(2.0, 3.0) == pytest.approx(2.1)


@pytest.mark.slow
def test_the_estimate_is_what_a_run_takes(tmp_path):
    """Peak resident memory of a whole run beyond an idle one, against the estimate of what its tensors take."""
    changes = {
        "model.d_model": 256, "model.n_layers": 6, "model.d_ff": 1024, "data.seq_len": 256, "run.batch_size": 16,
        "run.steps": 3, "run.sample_every": None, "data.held_out": 0.0, "run.max_minutes": None,
        "run.watch_every": None,
        "data.max_bytes": 300_000, "run.precision": "fp32",
    }  # fmt: skip
    script = """
import sys
from phylon.train import load_recipe, train
from phylon.train.prepare import check, prepare
from phylon.train.recipe import apply_overrides
changes, out = eval(sys.argv[1]), sys.argv[2]
train(load_recipe("demo", changes), out=out, device="cpu")
# Of this program alone: the resource limits' own peak begins with that of the process that started it.
print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""

    def peak(name, **more):
        command = [sys.executable, "-c", script, repr(changes | more), str(tmp_path / name)]
        source = str(Path(__file__).resolve().parents[2] / "src")
        environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout.strip().splitlines()[-1])

    tiny = {"model.d_model": 16, "model.n_layers": 1, "model.d_ff": 16, "model.n_heads": 2, "model.n_kv_heads": 1}
    idle, busy = peak("idle", **tiny, **{"run.batch_size": 1}), peak("busy")
    found = estimate(load_recipe("demo", changes), device="cpu")
    # The estimate counts tensors at their peak; the allocator keeps what is freed and holds up to half as much again.
    assert 0.75 < (busy - idle) / found.total_bytes < 1.6


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("width", "layers", "rows"), [(128, 4, 16), (384, 6, 8)])
def test_the_process_is_in_the_estimate(tmp_path, precision, width, layers, rows):
    """The resident peak of a small GPT's run, whose allocator's holes differ from run to run, within a fifth."""
    changes = {
        "model": {"family": "gpt2", "max_seq_len": 256, "d_model": width, "n_layers": layers, "n_heads": width // 64},
        "data.seq_len": 256, "data.max_bytes": 600_000, "run.batch_size": rows, "run.steps": 4, "run.max_minutes": None,
        "run.sample_every": None, "run.precision": precision,
    }  # fmt: skip
    script = """
import sys
from phylon.train import estimate, load_recipe, train
recipe = load_recipe("demo", eval(sys.argv[1]))
if len(sys.argv) == 2:
    print(estimate(recipe, device="cpu").resident_bytes)
else:
    train(recipe, out=sys.argv[2], device="cpu")
    print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""

    def said(*more):
        source = str(Path(__file__).resolve().parents[2] / "src")
        environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "2"}
        command = [sys.executable, "-c", script, repr(changes), *map(str, more)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout.strip().splitlines()[-1])

    assert said() == pytest.approx(said(tmp_path / "run"), rel=0.2)


def test_the_command_line_says_it_and_leaves_nothing(tmp_path, capsys):
    from phylon.cli.main import main

    sets = [word for key, value in SMALL.items() if value is not None for word in ("--set", f"{key}={value}")]
    out = tmp_path / "run"
    assert (
        main(
            [
                "train",
                "demo",
                "--out",
                str(out),
                "--estimate",
                "--device",
                "cpu",
                *sets,
                "--set",
                "run.max_minutes=none",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    for word in (
        "parameters",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "together",
        "a step",
        "sqrt(C / 120)",
    ):
        assert word in shown
    assert not out.exists()
    assert main(["train", "demo", "--estimate", "--device", "cpu", *sets, "--set", "run.stepz=3"]) == 2
    assert torch.get_num_threads() >= 1


def test_one_long_document_is_enough_to_look_at(tmp_path):
    """A first document beyond the sample: its beginning, with the weights of its parts."""
    (tmp_path / "plays.txt").write_text("To be, or not to be: that is the question. é\n" * 9000)
    found = estimate(recipe(**{"data.source": str(tmp_path / "plays.txt"), "data.max_bytes": None}), device="cpu")
    assert found.rows_that_fit > 100
    first = Document("é" * 100, "a", ((10, 0.0), (50, 2.0), (40, 1.0)))
    others = Sample(ListSource([first, Document("b", "b")]), 120)
    assert list(others.documents()) == [Document("é" * 30, "a", ((10, 0.0), (20, 2.0)))]
    assert list(Sample(ListSource([first, Document("b", "b")]), 220).documents()) == [first, Document("b", "b")]


class ListSource(list):
    def documents(self):
        yield from self


def test_the_rough_bound_sees_what_is_wide():
    """What it lets through is not measured: feed-forward networks far wider than the model, and many experts."""
    wide = recipe(**{"model.d_ff": 32_768, "model.d_model": 32, "model.n_heads": 4, "run.batch_size": 64})
    shape = build_meta(model_spec(wide, 300))
    tokens = 64 * wide.data.seq_len
    assert rough_bytes(wide, shape, World()) > 4 * tokens * 2 * 5 * 32_768, "gate, up and hidden values with gradients"
