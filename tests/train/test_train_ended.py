"""However a run ends after its first step, it leaves a report that says how."""

import html
import os
import re
import signal

import pytest
from test_train_run import SMALL

from phylon.data.loader import Loader
from phylon.spec import UserError
from phylon.train import Callback, Interrupted, recipe_from_toml, session, train
from phylon.train.spikes import SpikeState


class At(Callback):
    """Does something when step ``number`` is logged."""

    def __init__(self, number, do):
        self.number, self.do = number, do

    def record(self, record, run):
        if record["kind"] == "step" and record["step"] == self.number:
            self.do()


def fail(error):
    raise error


def run(out, callbacks=(), resume=False, **overrides):
    changes = {name.replace("__", "."): value for name, value in overrides.items()}
    recipe = recipe_from_toml(SMALL)
    return train(recipe, out=out, overrides=changes, callbacks=callbacks, resume=resume, device="cpu")


def ended(out):
    page = (out / "report.html").read_text("utf-8")
    (said,) = re.findall(r"How it ended</h2><div class=\"card\">(.*?)</div>", page)
    assert "[optim]" in page
    assert "Training and held-out loss by step" in page
    return html.unescape(said)


def test_a_run_that_finishes(tmp_path):
    run(tmp_path / "steps")
    assert ended(tmp_path / "steps") == "finished, after all of its 12 steps"
    steps = run(tmp_path / "time", run__steps=10**6, run__max_minutes=0.05, run__threads=1).steps
    assert ended(tmp_path / "time") == f"finished, after the {steps:,} steps that run.max_minutes = 0.05 had time for"


def test_a_signal_and_then_a_second_end(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, [At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    said = ended(tmp_path)
    assert said.startswith("not of itself, after 4 of 12 steps: stopped after step 4 of 12; the run is saved in")
    there = []
    look = At(5, lambda: there.append((tmp_path / "report.html").exists()))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [look, At(6, lambda: fail(KeyboardInterrupt()))], resume=True)
    assert there == [False], "a report of how the run ended before is not true of it any more"
    assert ended(tmp_path) == "not of itself, after 7 of 12 steps: interrupted"


def test_sigterm_may_come_twice_and_a_second_ctrl_c_does_not_wait(tmp_path):
    def both(*numbers):
        for number in numbers:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted) as stopped:
        run(tmp_path / "a", [At(3, lambda: both(signal.SIGTERM, signal.SIGTERM))])
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert ended(tmp_path / "a").startswith(
        "not of itself, after 4 of 12 steps: stopped after step 4 of 12; the run is"
    )
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(tmp_path / "b", [At(3, lambda: both(signal.SIGINT, signal.SIGINT))])
    assert not isinstance(stopped.value, Interrupted)


def test_skipped_steps(tmp_path):
    with pytest.raises(UserError):
        run(tmp_path, optim__lr=1e30)
    said = ended(tmp_path)
    assert re.match(r"not of itself, after \d+ of 12 steps: .* steps .*were skipped", said)
    assert "the last because the gradient of" in said or "the last because the loss" in said
    assert "is not finite" in (tmp_path / "report.html").read_text("utf-8")


def test_the_end_of_a_spike_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(SpikeState, "z_score", lambda spikes, loss, policy: 9.0 if len(spikes.losses) > 3 else None)
    with pytest.raises(UserError):
        run(tmp_path, run__on_spike={"kind": "roll_back", "margin": 1, "most": 1}, run__save_every=1)
    assert "after 1 roll-backs; lower optim.lr" in ended(tmp_path)


def test_a_full_disk_and_data_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "save_checkpoint", lambda *_, **__: fail(UserError("cannot write: no space left")))
    with pytest.raises(UserError):
        run(tmp_path / "disk", run__save_every=5)
    assert ended(tmp_path / "disk") == "not of itself, after 5 of 12 steps: cannot write: no space left"
    monkeypatch.undo()
    read = Loader.batch
    monkeypatch.setattr(Loader, "batch", lambda me, n: fail(OSError(5, "gone", "a.bin")) if n == 6 else read(me, n))
    with pytest.raises(UserError):
        run(tmp_path / "data")
    assert "after 6 of 12 steps: cannot read the data 'a.bin' of step 6" in ended(tmp_path / "data")


def test_our_own_mistake_and_one_before_the_first_step(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "ours", [At(2, lambda: fail(ZeroDivisionError("of <b>")))])
    assert ended(tmp_path / "ours") == "not of itself, after 3 of 12 steps: ZeroDivisionError: of <b>"
    with pytest.raises(UserError):
        run(tmp_path / "none", run__best="bleu")
    assert not (tmp_path / "none" / "report.html").exists()


def test_a_report_that_cannot_be_written_does_not_hide_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("phylon.train.report.write_text", lambda *_: fail(UserError("no space left for the report")))
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, [At(2, lambda: fail(ZeroDivisionError("ours")))])


def test_a_batch_with_nothing_to_learn_is_not_called_a_loss_that_is_not_finite():
    from train_toys import toy_model, toy_recipe

    from phylon.train.report import report_page

    reason = "its batch has nothing to learn (no target, or weights of 0 alone)"
    page = report_page(
        "r", [{"kind": "skipped", "step": 0, "reason": reason, "tensors": []}], toy_recipe(), toy_model(), {}
    )
    assert f"skipped: {reason}" in page
    assert "not finite" not in page
