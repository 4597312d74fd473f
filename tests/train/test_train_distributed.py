"""Several processes by torchrun: the losses of one process, checkpoints for another number, a dead process."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phylon import hub
from phylon.spec import UserError
from phylon.train import latest_checkpoint, read_metrics, world

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
schema = 1
[model]
family = "llama"
d_model = 16
n_layers = 2
n_heads = 2
d_ff = 24
max_seq_len = 16
[data]
source = { kind = "texts", texts = ["the cat sat on the mat. ", "a dog ran in the fog. "], repeat = 20 }
tokenizer = { kind = "char" }
seq_len = 16
held_out = 0.2
[optim]
lr = 1e-2
clip = 1.0
[run]
steps = 8
batch_size = 8
eval_every = 4
save_every = 2
precision = "fp32"
threads = 1
watch_every = 4
"""


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(folder: Path, n: int, *more: str, recipe: str = RECIPE, site: Path | None = None) -> list[subprocess.Popen]:
    """What torchrun does, without its watchdog: n processes that know each other, so that one can be killed alone."""
    path = folder.parent / f"{folder.name}.toml"
    path.write_text(recipe)
    command = [sys.executable, "-m", "phylon", "train", str(path), "--out", str(folder), "--device", "cpu", *more]
    shared = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    if site is not None:
        shared["PYTHONPATH"] += f"{os.pathsep}{site}"
    shared |= {"MASTER_PORT": str(port()), "WORLD_SIZE": str(n)}
    return [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n)
    ]


def run(folder: Path, n: int, *more: str, recipe: str = RECIPE) -> Path:
    processes = start(folder, n, *more, recipe=recipe)
    said = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * n, said
    return folder


def losses(folder: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "step"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same(one: Path, other: Path) -> None:
    assert losses(one) == pytest.approx(losses(other), rel=2e-5)
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(other)[name], weight, rtol=1e-3, atol=2e-4)


def test_two_processes_with_ddp_are_one(tmp_path):
    one = run(tmp_path / "one", 1, "--set", "run.accumulate=2")
    two = run(tmp_path / "two", 2)
    same(one, two)
    assert len(losses(two)) == 8
    records = [r for r in read_metrics(two / "metrics.jsonl") if r["kind"] in ("eval", "watch")]
    assert [r["kind"] for r in records] == ["watch", "eval", "watch", "eval"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("n", [2, 4])
def test_several_processes_are_one_and_load_on_another_number(tmp_path, kind, n):
    """Accumulation, a mean of the weights, recomputation; stopped on n processes, continued on one and on two."""
    extra = ("--set", f"run.parallel={kind}", "--set", "run.ema=0.9", "--set", "run.accumulate=2")
    one, many = run(tmp_path / "one", 1, *extra), run(tmp_path / "many", n, *extra)
    same(one, many)
    evals = [[r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "eval"] for out in (one, many)]
    for name in ("loss", "ema_loss"):
        alone, shared = ([record[name] for record in records] for records in evals)
        assert len(alone) == 2
        assert shared == pytest.approx(alone, rel=2e-5), name
    assert hub.load(many / "model", device="cpu").spec == hub.load(one / "model", device="cpu").spec
    for processes in (1, 2):
        longer = ("--set", "run.steps=12", "--resume", "--allow-changes")
        again = run(many, processes, *extra, *longer)
        assert len(losses(again)) == 12
        changed = [r for r in read_metrics(again / "metrics.jsonl") if r["kind"] == "resumed"]
        if processes != n:
            assert any(f"and is now {processes}" in c for c in changed[-1]["changes"] if "processes" in c)
        (again / "checkpoints" / "step-00000012").rename(tmp_path / f"{processes}")
    tensors = {n: load_file(tmp_path / str(n) / "model.safetensors") for n in (1, 2)}
    for name, weight in tensors[1].items():
        torch.testing.assert_close(tensors[2][name], weight, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_killed_process_ends_all_and_the_run_goes_on_from_its_checkpoint(tmp_path, kind):
    text = RECIPE.replace("steps = 8", "steps = 160")
    more = ("--set", f"run.parallel={kind}")
    whole = run(tmp_path / "whole", 2, *more, recipe=text)
    processes = start(tmp_path / "killed", 2, *more, recipe=text)
    while (latest_checkpoint(tmp_path / "killed" / "checkpoints") or Path("step-0")).name < "step-00000040":
        time.sleep(0.05)
        assert all(process.poll() is None for process in processes)
    processes[1].send_signal(signal.SIGKILL)
    said = processes[0].communicate(timeout=100)[1]
    assert processes[0].returncode == 2, said
    assert "another process of this run is gone: the last good state is" in said
    assert len(said.strip().splitlines()[-1]) < 300
    again = run(tmp_path / "killed", 2, *more, "--resume", recipe=text)
    assert losses(again) == losses(whole)
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(whole).items())


def torchrun(folder: Path, *more: str, recipe: str = RECIPE) -> tuple[list[str], list[int]]:
    """What the command line says under the real launcher, and the exit codes of the processes it names."""
    path = folder.parent / f"{folder.name}.toml"
    path.write_text(recipe)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "phylon", "train", str(path), "--out", str(folder), "--device", "cpu", *more]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    lines = done.stderr.splitlines()
    codes = [int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("exitcode")]
    return [line.removeprefix("phylon: ") for line in lines if line.startswith("phylon: ")], codes


MISTAKES = {
    "an option": (["--bogus"], "no such option"),
    "a setting": (["--set", "run.bach_size=3"], "did you mean 'batch_size'"),
    "a batch": (["--set", "run.batch_size=1"], "run.batch_size=2 or more"),
    "the folder": (["--resume"], "there is no run to resume"),
    "the vocabulary": (["--set", "model.vocab_size=3"], "the tokenizer has 16 entries and the model 3"),
    "the steps": (["--set", "optim.lr=1e30"], "were skipped"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_told_once_and_ends_all(tmp_path, what):
    more, words = MISTAKES[what]
    said, codes = torchrun(tmp_path / "run", *more)
    assert len(said) == 1, said
    assert words in said[0]
    # The launcher ends with a signal whoever has not left by itself yet.
    assert codes
    assert set(codes) <= {2, -signal.SIGTERM}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["an option", "the folder", "the steps"])
def test_a_mistake_is_told_by_the_first_where_the_launcher_shares_no_store(tmp_path, what):
    more, words = MISTAKES[what]
    processes = start(tmp_path / "run", 3, *more)
    said = [process.communicate(timeout=150)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2, 2], said
    lines = [[line for line in text.splitlines() if line.startswith("phylon: ")] for text in said]
    assert [len(found) for found in lines] == [1, 0, 0], said
    assert words in lines[0][0]


@pytest.fixture
def store(monkeypatch):
    """The store of a launcher of three processes; ``store(rank)`` makes this process one of them."""
    number = port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(world, "_FIRST_WAIT", timedelta(seconds=0.5))
    monkeypatch.setattr(world, "_STORE_WAIT", timedelta(seconds=0.5))
    kept = torch.distributed.TCPStore("127.0.0.1", number, is_master=True, wait_for_workers=False)
    yield lambda rank: monkeypatch.setenv("RANK", str(rank))
    del kept


def test_the_first_process_says_what_all_find_and_another_what_it_alone_does(store):
    store(0)
    assert not world.said_elsewhere("the same")
    for rank in (1, 2):
        store(rank)
        assert world.said_elsewhere("the same")
    assert not world.said_elsewhere("its own"), "the first has not said it"
    store(1)
    assert world.said_elsewhere("its own"), "another one has"
    for rank in (0, 1, 2):
        store(rank)
        assert world.said_elsewhere("one is gone", lost=True), "there is a reason already"


def test_that_a_process_is_gone_is_told_once_too(store):
    store(2)
    assert not world.said_elsewhere("one is gone", lost=True), "the first has gone or does not notice"
    store(0)
    assert not world.said_elsewhere("another one is gone", lost=True)
    store(1)
    assert world.said_elsewhere("another one is gone", lost=True)


def test_without_a_store_the_first_speaks(monkeypatch):
    for name in ("_STORE_WAIT", "_HERE_WAIT"):
        monkeypatch.setattr(world, name, timedelta(seconds=0.2))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port()))
    spoken = []
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        spoken.append((world.said_elsewhere("a mistake"), world.said_elsewhere("one is gone", lost=True)))
    assert spoken == [(False, False), (True, False), (True, True)]


@pytest.mark.slow
def test_a_mistake_of_one_process_alone_is_told_by_it(tmp_path):
    """The other one, which finds it gone, has nothing to add, and does not wait for it."""
    text = RECIPE.replace("[run]", "[run]\nbest = 'loss'")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import phylon.train.prepare as prepare\n"
        "    from phylon.spec import UserError\n"
        "    def refuse(*_, **__):\n"
        "        raise UserError('the disk of this process cannot be read')\n"
        "    prepare.check_kept = refuse\n"
    )
    processes = start(tmp_path / "run", 2, recipe=text, site=tmp_path / "site")
    said = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    lines = [line for text in said for line in text.splitlines() if line.startswith("phylon: ")]
    assert lines == ["phylon: process 1: the disk of this process cannot be read"], said
    assert lines[0] in said[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("end", ["average", "best"])
def test_samples_and_what_is_kept_are_those_of_one_process(tmp_path, kind, end):
    """Texts of the whole model now and then, and at the end the mean of checkpoints, or the best one: end to end."""
    kept = {"average": ("--set", "run.average=3"), "best": ("--set", "run.best=loss")}[end]
    extra = ("--set", f"run.parallel={kind}", "--set", "run.sample_every=4", "--prompt", "the ", *kept)
    one, two = run(tmp_path / "one", 1, *extra), run(tmp_path / "two", 2, *extra)
    same(one, two)
    found = [[r for r in read_metrics(out / "metrics.jsonl") if r["kind"] in ("samples", "kept")] for out in (one, two)]
    assert [(r["kind"], r["step"]) for r in found[0]] == [(r["kind"], r["step"]) for r in found[1]]
    texts = [[r["texts"] for r in records if r["kind"] == "samples"] for records in found]
    assert len(texts[1]) == 2
    assert texts[0] == texts[1]
    if end == "average":
        (record,) = [r for r in found[1] if r["kind"] == "kept"]
        assert "mean of step-00000004, step-00000006, step-00000008" in record["what"]
        mean = [load_file(two / "checkpoints" / f"step-{n:08}" / "model.safetensors") for n in (4, 6, 8)]
        for name, weight in weights(two).items():
            assert torch.equal(weight, torch.stack([t[name].double() for t in mean]).mean(0).float()), name


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_waits_for_others_in_vain_says_so(monkeypatch, rank):
    monkeypatch.setattr(world, "MEETING", timedelta(seconds=1))
    address = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="the 2 processes of this run have not met within 1 seconds"):
        world.join_world("cpu")


STAND_INS = {
    "srun": 'echo $$ > step.pid; shift; exec "$@"',  # without its --kill-on-bad-exit
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "scancel": 'kill -TERM "$(cat step.pid)" $(pgrep -P "$(cat step.pid)")',  # every process of the step
    "scontrol": 'test "$1" = show && echo 127.0.0.1 || echo "$@" >> scontrol.log',
}


@pytest.mark.slow
def test_the_launch_file_of_the_docs_saves_and_queues_again_before_the_time_is_up(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text()
    script = page[page.index("#!/bin/bash") :].partition("```")[0]
    for old, new in (("29500", str(port())), ("--nproc-per-node 8", "--nproc-per-node 2")):
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / "train.sbatch").write_text(script)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("steps = 8", "steps = 160").replace("save_every = 2\n", ""))
    (tmp_path / "bin").mkdir()
    for name, line in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    env |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here", "OMP_NUM_THREADS": "1"}
    queue = lambda: subprocess.Popen(["bash", "train.sbatch"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    out, log = tmp_path / "runs" / "big", tmp_path / "runs" / "big" / "metrics.jsonl"
    # Killed before its first checkpoint, as by a node that fails.
    job = queue()
    while not log.exists() or not losses(out):
        time.sleep(0.05)
        assert job.poll() is None, job.stderr.read()
    step = int((tmp_path / "step.pid").read_text())
    children = subprocess.run(["pgrep", "-P", str(step)], capture_output=True, text=True).stdout.split()
    for process in [step, *map(int, children)]:
        os.kill(process, signal.SIGKILL)
    job.communicate(timeout=60)
    assert latest_checkpoint(out / "checkpoints") is None
    # Queued again; this time it is told in time.
    job = queue()
    while len(losses(out)) < 20:
        time.sleep(0.05)
        assert job.poll() is None, job.stderr.read()
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=100)[1]
    saved = latest_checkpoint(out / "checkpoints")
    assert saved is not None, said
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    assert "stopped after step" in said
    job = queue()
    said = job.communicate(timeout=200)[1]
    assert job.returncode == 0, said
    assert f"resumed at step {int(saved.name[5:])} from" in said
    assert len(losses(out)) == 160
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
