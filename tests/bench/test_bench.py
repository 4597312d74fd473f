"""``phylon bench``: no speed without a right answer, pairs in turn, disturbed rounds dropped, files merged whole."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phylon.bench import Cell, Planned, all_cases, case, clock, memory, run
from phylon.bench.oracle import off
from phylon.bench.report import compared, elsewhere, read, row_line, store
from phylon.cli.main import main
from phylon.ops.experts import dispatch as expert_dispatch
from phylon.spec import UserError

CALLS: list[str] = []


def side(name: str, value: float) -> object:
    def call() -> float:
        CALLS.append(name)
        return value

    return call


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A case ``toy`` of two cells: 'right' and 'twin' return 1, 'wrong' returns 2, 'broken' raises."""
    all_cases()  # what a file registers once must not go into the copy
    module = sys.modules[case.__module__]
    monkeypatch.setattr(module, "_cases", dict(module._cases))
    monkeypatch.setattr(clock, "_SHORTEST", 0.0)
    CALLS.clear()

    @case("toy", peers={"twin": lambda: None, "absent": lambda: "absent is not installed"})
    def toy() -> Iterator[Planned]:
        """A toy."""
        for n in (1, 2):
            yield Planned({"n": n, "dtype": "f32"}, build)

    def build(peers: frozenset[str]) -> Cell:
        def broken() -> float:
            raise ValueError("out of luck")

        sides = {"right": side("right", 1.0), "wrong": side("wrong", 2.0), "broken": broken}
        sides |= {name: side(name, 1.0) for name in peers}
        return Cell(
            sides=sides,
            oracle=lambda name, result: None if result == 1.0 else f"got {result}",
            amounts={"tokens": 10},
            refused={"other": "not here"},
        )

    return


def test_a_wrong_side_has_no_speed() -> None:
    rows = {row["side"]: row for row in run("toy", only={"n": ["1"]})["rows"]}
    assert rows["right"]["ms"] > 0
    assert rows["right"]["rates"]["tokens"] > 0
    assert rows["wrong"]["error"] == "got 2.0"
    assert rows["broken"]["error"].startswith("ValueError: out of luck")
    assert rows["other"]["refused"] == "not here"
    assert all("ms" not in rows[name] for name in ("wrong", "broken", "other"))
    assert CALLS.count("wrong") == 1, "checked, never timed"
    assert "WRONG: got 2.0" in row_line(rows["wrong"])
    assert "refused: not here" in row_line(rows["other"])


def test_peers_take_turns_and_are_what_speedups_refer_to() -> None:
    rows = run("toy", only={"n": ["2"]}, against="twin", sides=["right"], rounds=4)["rows"]
    assert {row["side"] for row in rows} == {"right", "twin"}
    assert {row["base"] for row in rows} == {"twin"}
    timed = CALLS[2:-2]  # one call each for the oracle before and for memory after
    assert timed[0::2] == ["right"] * (len(timed) // 2)
    assert timed[1::2] == ["twin"] * (len(timed) // 2)
    assert next(row for row in rows if row["side"] == "twin")["speedup"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": "absent"}, "'toy' cannot be measured against absent: absent is not installed"),
        ({"against": "nobody"}, "'toy' at n=1 dtype=f32 has no side 'nobody'; it has right, wrong, broken"),
        ({"only": {"m": ["1"]}}, "cells of 'toy' have no 'm'; they have dtype, n"),
        ({"only": {"n": ["1", "3"]}}, "no cell of 'toy' has n=3; there are 1, 2"),
    ],
)
def test_mistakes_get_a_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        run("toy", **options)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_unknown_names_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "atention"]) == 2
    assert "did you mean 'attention'?" in capsys.readouterr().err
    bad = tmp_path / "old.json"
    bad.write_text("{}")
    assert main(["bench", "toy", "--against", str(bad)]) == 2
    assert "is no stored benchmark" in capsys.readouterr().err
    assert main(["bench", "toy", "--only", "n"]) == 2
    assert "--only takes KEY=VALUE, got 'n'" in capsys.readouterr().err


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    code = main(["bench", "toy", "--side", "right", "--only", "n=1", "--rounds", "2", "--out", str(out), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed["machine"]["threads"] == torch.get_num_threads()
    assert [row["side"] for row in printed["rows"]] == ["right"]
    assert main(["bench", "toy", "--side", "right", "--against", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("the stored" in line for line in lines)
    assert main(["bench", "toy", "--rounds", "1"]) == 2, "wrong sides are an error of the run"
    assert "results are wrong" in capsys.readouterr().err
    assert main(["bench", "--json"]) == 0
    assert "attention" in [c["name"] for c in json.loads(capsys.readouterr().out)["cases"]]


def test_files_are_merged_by_cell(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    store(path, run("toy", only={"n": ["1"]}, rounds=1))
    store(path, run("toy", only={"n": ["2"]}, rounds=1))
    store(path, run("toy", only={"n": ["2"]}, rounds=1))
    rows = read(path)["rows"]
    assert len(rows) == 8
    assert {row["key"]["n"] for row in rows} == {1, 2}
    assert all("processor" in row["machine"] for row in rows)
    assert not list(tmp_path.glob("*.part"))
    fresh = run("toy", rounds=1)["rows"]
    assert sum("change" in row for row in compared(fresh, read(path))) == 2


def test_a_row_that_stays_keeps_no_ratio_to_one_of_another_run(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    store(path, run("toy", only={"n": ["1"]}, against="twin", sides=["right"], rounds=1))
    store(path, run("toy", only={"n": ["1"]}, sides=["twin"], against="twin", rounds=1))
    rows = {row["side"]: row for row in read(path)["rows"]}
    assert "speedup" not in rows["right"]
    assert rows["twin"]["speedup"] == 1.0


def test_a_cell_that_the_base_refuses_is_measured_without_it() -> None:
    rows = {row["side"]: row for row in run("toy", sides=["right"], against="other", rounds=1)["rows"]}
    assert rows["other"]["refused"] == "not here"
    assert rows["right"]["ms"] > 0
    assert "speedup" not in rows["right"]


def test_what_was_measured_is_stored_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measure = tmp_path / "figures.json", clock.measure

    def interrupted(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(clock, "measure", stop)
        return measure(*args, **options)

    def stop(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(clock, "measure", interrupted)
    main(["bench", "toy", "--side", "right", "--rounds", "1", "--out", str(out)])
    assert [row["key"]["n"] for row in read(out)["rows"]] == [1]


def test_a_stored_result_of_other_cells_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert main(["bench", "toy", "--side", "right", "--only", "n=1", "--rounds", "1", "--out", str(out)]) == 0
    assert main(["bench", "toy", "--side", "right", "--only", "n=2", "--rounds", "1", "--against", str(out)]) == 0
    assert "has none of these cells" in capsys.readouterr().err
    assert main(["bench", "toy", "--side", "right", "--against", str(tmp_path / "no.json")]) == 2
    assert "no.json': no such file" in capsys.readouterr().err


def test_disturbed_rounds_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes a whole core during the first two turns of the second round."""
    spent = iter([0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0, *[9.0] * 100])
    monkeypatch.setattr(clock, "_busy", lambda: next(spent))
    monkeypatch.setattr(clock.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(clock.time, "sleep", lambda seconds: None)
    found = clock.measure({"a": lambda: None, "b": lambda: None}, rounds=3)
    assert found.dropped == 1
    assert found.clean
    assert len(found.timings["a"].seconds) == len(found.timings["b"].seconds) == 3


def test_a_machine_that_is_never_quiet_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter(range(0, 10**6, 50))
    monkeypatch.setattr(clock, "_busy", lambda: float(next(spent)))
    monkeypatch.setattr(clock.time, "sleep", lambda seconds: None)
    found = clock.measure({"a": lambda: None}, rounds=3, seconds=0.01)
    assert not found.clean
    assert found.timings["a"].seconds


def test_ratio_is_the_median_of_pairs() -> None:
    timings = {"a": clock.Timing((1.0, 2.0, 4.0), 3), "b": clock.Timing((2.0, 4.0, 16.0), 3)}
    assert clock.Rounds(timings, 0, True).ratio("a", "b") == 2.0


def test_memory_is_what_lies_beyond_the_result() -> None:
    size = 64 * 2**20

    def call() -> torch.Tensor:
        first = torch.ones(size // 4)
        return first[: size // 16].clone()

    extra = memory.extra_bytes(call)
    if extra is None:
        pytest.skip("this system does not tell a process's peak")
    assert 0.9 * size < extra < 1.3 * size


def test_every_case_can_be_built() -> None:
    """The smallest cell of every real case: sides, and an oracle that takes right results and refuses others."""
    made = all_cases()["attention"]
    planned = next(p for p in made.plan() if p.key["n"] == 1024 and p.key["pass"] == "forward+backward")
    cell = planned.build(frozenset())
    result = cell.sides["sdpa"]()
    assert cell.oracle("sdpa", result) is None
    assert "off by" in (cell.oracle("sdpa", [result[0], result[1] * 1.01, *result[2:]]) or "")
    for i in range(4):  # one head of one tensor, the first as well as the last
        wrong = [x.clone() for x in result]
        wrong[i][:, :, i] = 0
        assert "off by" in (cell.oracle("sdpa", wrong) or "")


def cell_of(name: str, **key: str | int) -> Cell:
    return next(p for p in all_cases()[name].plan() if key.items() <= p.key.items()).build(frozenset())


def test_the_scan_judges_every_gradient() -> None:
    cell = cell_of("scan", n=1, **{"pass": "forward+backward"})
    result = cell.sides["chunked"]()
    assert cell.oracle("chunked", result) is None
    for i in range(len(result)):
        for wrong in (float("nan"), 0.0):
            planted = [x * wrong if i == k else x for k, x in enumerate(result)]
            if float(result[i].norm()):  # the gradient of A is 0 without a state before
                assert "is off by" in (cell.oracle("chunked", planted) or "")


@pytest.mark.slow
def test_models_and_losses_are_judged_by_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = cell_of("loss", n=1024, dtype="f32")
    result = loss.sides["chunks"]()
    assert loss.oracle("chunks", result) is None
    assert "the gradient of the weights" in (loss.oracle("chunks", [*result[:2], result[2] * 0]) or "")
    assert "the loss" in (loss.oracle("chunks", [result[0] * 2, *result[1:]]) or "")
    mamba = cell_of("mamba", n=1024)
    result = mamba.sides["phylon"]()
    assert mamba.oracle("phylon", result) is None
    assert "off by" in (mamba.oracle("phylon", [result[0], *(g * 0 for g in result[1:])]) or "")
    experts = cell_of("experts", dtype="f32")
    assert experts.oracle("experts", experts.sides["experts"]()) is None
    backend = expert_dispatch.backends["native"]
    right = backend.run
    monkeypatch.setattr(backend, "run", lambda call: right(call) * 0)
    experts = cell_of("experts", dtype="f32")
    if backend.available() is None:
        assert "off by" in (experts.oracle("experts", experts.sides["experts"]()) or "")


def test_off_sees_nan_shape_and_size() -> None:
    one = torch.ones(3)
    assert off(["a"], [one], [one], 1e-9) is None
    assert "a is off" in (off(["a"], [one * float("nan")], [one], 1e-2) or "")
    assert "b is off" in (off(["a", "b"], [one, one * 1.1], [one, one], 1e-2) or "")
    assert "a is (1,)" in (off(["a"], [one[:1]], [one], 1e-2) or "")


@pytest.mark.parametrize("ms", [None, "3", True, 0, -1.0, float("nan")])
def test_a_stored_time_is_a_number(ms: object, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"rows": [{"case": "toy", "key": {"n": 1}, "side": "right", "ms": ms}]}))
    with pytest.raises(UserError, match="is no stored benchmark: its row") as refused:
        read(path)
    assert "\n" not in str(refused.value)


def test_figures_of_another_machine_are_announced() -> None:
    rows = [{"case": "toy", "key": {"n": 1}, "side": "right", "ms": 2.0, "change": 1.0}]
    here = {"processor": "this one", "threads": 2}
    assert elsewhere(rows, {"rows": [rows[0] | {"machine": here}]}, here) is None
    other = {"rows": [rows[0] | {"machine": here | {"processor": "that one"}}]}
    assert "that one" in (elsewhere(rows, other, here) or "")
    assert "other threads" in (elsewhere(rows, {"rows": [rows[0] | {"machine": here | {"threads": 1}}]}, here) or "")
    assert "an unknown machine" in (elsewhere(rows, {"rows": rows}, here) or "")
    assert elsewhere([], other, here) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--seconds", "-1"], "seconds above 0"),
        (["--side", "nonsense"], "has no side 'nonsense'; it has "),
        (["--against", "bad.json"], "a row lacks its case, key or side"),
        (["--out", "none/x.json"], "the folder 'none' does not exist"),
        (["--out", "."], "'.' is a folder"),
    ],
)
def test_what_cannot_be_measured_is_said_first(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"rows": [{"ms": 1}]}')
    monkeypatch.setattr(clock, "measure", lambda *a, **k: pytest.fail("it measured"))
    assert main(["bench", "toy", "--only", "n=1", *arguments]) == 2
    assert words in capsys.readouterr().err
