"""Every command on a tiny model: what it prints, what it writes, and nothing else on standard output."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phylon import __version__
from phylon.cli.train import _sampler
from phylon.families import family
from phylon.families.llama import llama_spec
from phylon.generate import generate
from phylon.hub import describe, load, save
from phylon.model import GenerationDefaults, build
from phylon.text import char_tokenizer

MIXER = '''
from phylon.layers.part import Linear, Part
from phylon.spec.base import Mechanism, Mixer
from phylon.spec.registry import register


class Halver(Mechanism, Mixer, frozen=True, kw_only=True):
    """Half of a linear map. For a test."""

    def streams(self):
        return None


class HalverModule(Part):
    def __init__(self, spec, d_model):
        super().__init__()
        self.proj = Linear(d_model, d_model, bias=False)

    def forward(self, x, ctx):
        return self.proj(x) / 2


register(
    Halver, module=HalverModule, paper="none", cases=lambda: [Halver()], flops=lambda s, width, n: 2 * width * width
)
'''


def test_help_costs_no_import_of_torch() -> None:
    program = "import sys; from phylon.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Usage: phylon" in done.stdout
    assert "'typer'" in done.stdout
    for heavy in ("torch", "tokenizers", "numpy", "msgspec", "gguf", "jinja2", "rich", "safetensors"):
        assert f"'{heavy}'" not in done.stdout, heavy


def test_version(run: Callable) -> None:
    assert run("--version") == (0, f"phylon {__version__}\n", "")


def test_without_a_command_there_is_help(run: Callable) -> None:
    assert run().out == run("--help").out
    assert run().code == 0


def test_generate_as_text_and_json(run: Callable, model_folder: Path) -> None:
    options = ["--max-new-tokens", 6, "--temperature", 0]
    shown = run("generate", model_folder, "--prompt", "abc", *options)
    found = run("generate", model_folder, "--prompt", "abc", "--prompt-ids", "0, 1 2", *options, "--json")
    assert shown.code == found.code == 0
    assert found.err == ""
    results = json.loads(found.out)["results"]
    assert shown.out == "abc" + results[0]["text"] + "\n"
    assert [len(r["tokens"]) for r in results] == [6, 6]
    assert results[0]["finish_reason"] == "length"
    assert results[1]["prompt"] == [0, 1, 2]
    both = run("generate", model_folder, "--prompt", "abc", "--prompt", "h", *options).out
    assert both.startswith(shown.out + "\n---\n\nh")


def test_an_encoder_decoder_prints_what_it_makes_of_its_prompt(run: Callable, tmp_path: Path) -> None:
    """The target alone, streamed or one of several, of texts and of ids; a sample in training keeps them apart."""
    model = build(family("t5").cases()[0], device="cpu")
    model.tokenizer = char_tokenizer("abcdefgh")
    model.generation = GenerationDefaults(decoder_start_id=0, pad_id=0)
    save(model, tmp_path / "model")
    options = ["--max-new-tokens", 6, "--temperature", 0]
    first, second = (r["text"] for r in generate(model.eval(), ["abc", [7, 1]], max_new_tokens=6, temperature=0))
    assert first
    assert second
    assert run("generate", tmp_path / "model", "--prompt", "abc", *options) == (0, first + "\n", "")
    assert run("generate", tmp_path / "model", "--prompt-ids", "7 1", *options).out == second + "\n"
    both = run("generate", tmp_path / "model", "--prompt", "abc", "--prompt-ids", "7 1", *options)
    assert both.out == f"{first}\n\n---\n\n{second}\n"
    found = json.loads(run("generate", tmp_path / "model", "--prompt", "abc", *options, "--json").out)
    assert (found["results"][0]["prompt"], found["results"][0]["text"]) == ("abc", first)
    assert all(text.startswith("abc -> ") for text in _sampler(["abc"]).take(model))


def test_the_seed_decides_what_is_drawn(run: Callable, model_folder: Path) -> None:
    texts = [run("generate", model_folder, "--prompt", "a", "--max-new-tokens", 20, "--seed", n).out for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_score_is_what_the_model_says(run: Callable, model_folder: Path) -> None:
    found = run("score", model_folder, "--text", "abcd", "--text", "hh", "--json")
    scores = json.loads(found.out)["scores"]
    model = load(model_folder, device="cpu")
    ids = model.tokenizer.encode("abcd")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    wanted = sum(float(logits[i, token]) for i, token in enumerate(ids[1:]))
    assert scores[0]["total"] == pytest.approx(wanted, abs=1e-4)
    assert len(scores) == 2
    assert run("score", model_folder, "--text", "abcd").out.splitlines()[1].split()[0] == "3"


def test_encode_is_the_mean_of_what_the_model_sees(run: Callable, model_folder: Path) -> None:
    data = json.loads(run("encode", model_folder, "--text", "abcd", "--text", "hh", "--json").out)
    model = load(model_folder, device="cpu")
    with torch.no_grad():
        hidden = [model(torch.tensor([model.tokenizer.encode(text)])).hidden[0].mean(0) for text in ("abcd", "hh")]
    first, second = (torch.nn.functional.normalize(h, dim=0) for h in hidden)
    assert data["embeddings"][1] == pytest.approx(second.tolist(), abs=1e-5)
    assert data["cosines"][0][1] == pytest.approx(float(first @ second), abs=1e-5)
    lines = run("encode", model_folder, "--text", "abcd", "--text", "hh").out.splitlines()
    assert lines[0].split()[1:] == ["1.0000", f"{data['cosines'][0][1]:.4f}", "abcd"]


def test_account(run: Callable, model_folder: Path) -> None:
    data = json.loads(run("account", "gpt2", "--seq-len", 64, "--dtype", "float32", "--json").out)
    assert data["params_total"] == 124_439_808
    assert data["state_bytes_total"] == 64 * data["state_bytes_per_token"] == 64 * 12 * 2 * 768 * 4
    page = run("account", model_folder, "--batch", 3).out
    assert "batch 3, seq_len 32, float16" in page
    assert "params_total" in page


def test_show_and_account_read_no_weights(run: Callable, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "phylon.json").write_bytes((model_folder / "phylon.json").read_bytes())
    for command in (["show"], ["account"], ["show", "--shapes"]):
        assert run(*command, tmp_path).code == 0


def test_list_as_json(run: Callable) -> None:
    families = json.loads(run("list", "families", "--json").out)["families"]
    assert {"gpt2", "llama", "mistral", "tinygpt"} <= {f["name"] for f in families}
    assert next(f for f in families if f["name"] == "llama")["gguf"] == ["llama"]
    presets = json.loads(run("list", "presets", "--json").out)["presets"]
    assert {p["name"]: p["params_total"] for p in presets}["llama2-70b"] == 68_976_648_192
    mechanisms = json.loads(run("list", "mechanisms", "--json").out)["mechanisms"]
    assert {"attention", "rms_norm", "causal", "adamw"} <= {m["kind"] for m in mechanisms}
    backends = json.loads(run("list", "backends", "--json").out)["backends"]
    sdpa = next(b for b in backends if b["backend"] == "sdpa")
    assert sdpa["calls"]["causal"] is None
    assert "softcap" in sdpa["calls"]["softcap"]
    reference = next(b for b in backends if (b["op"], b["backend"]) == ("attention", "reference"))
    assert set(reference["calls"].values()) == {None}


def test_every_recipe_is_listed_with_its_objective(run: Callable) -> None:
    from phylon.train.recipe import builtin_recipes

    rows = json.loads(run("list", "recipes", "--json").out)["recipes"]
    assert [row["name"] for row in rows] == builtin_recipes()
    objectives = {row["name"]: row["objective"] for row in rows}
    assert objectives["translation"] == "translation"
    assert objectives["demo"] == "next_token"
    assert all(10 < len(row["about"]) < 120 for row in rows), "one line each"
    page = run("list", "recipes").out
    assert all(name in page for name in builtin_recipes())
    assert "phylon list recipes" in run("train", "--help").out


@pytest.mark.parametrize("what", ["families", "presets", "mechanisms", "backends"])
def test_lists_fit_a_terminal(run: Callable, what: str) -> None:
    lines = run("list", what).out.splitlines()
    assert len(lines) > 10
    assert max(map(len, lines)) <= 100


def test_convert_there_and_back(run: Callable, model_folder: Path, tmp_path: Path) -> None:
    assert run("convert", model_folder, tmp_path / "hf", "--to", "hf").code == 0
    assert run("convert", tmp_path / "hf", tmp_path / "back", "--to", "native").out == ""
    assert describe(tmp_path / "hf").format == "hf"
    first, last = load(model_folder, device="cpu").state_dict(), load(tmp_path / "back", device="cpu").state_dict()
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_convert_to_gguf(run: Callable, tmp_path: Path) -> None:
    spec = llama_spec(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96, vocab_size=64, max_seq_len=32)
    save(build(spec, device="cpu"), tmp_path / "model")
    assert run("convert", tmp_path / "model", tmp_path / "m.gguf", "--to", "gguf", "--quant", "F16").code == 0
    assert describe(tmp_path / "m.gguf").spec == spec
    assert run("generate", tmp_path / "m.gguf", "--prompt-ids", "1 2", "--max-new-tokens", 3).out.count(" ") == 2


def test_verify(run: Callable, model_folder: Path) -> None:
    found = run("verify", model_folder, "--json")
    report = json.loads(found.out)
    assert found.code == 0
    assert report["passed"] is True
    assert run("verify", model_folder).out.rstrip().endswith("holds")


def test_a_verdict_against_the_model_is_exit_code_1(
    run: Callable, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phylon.checkpoint import verify

    cell = verify.Cell(name="chunks", passed=False, error=0.5, bound=1e-5)
    monkeypatch.setattr(verify, "verify", lambda model, **_: verify.Report(dtype="float32", lengths=[3], cells=[cell]))
    found = run("verify", model_folder)
    assert found.code == 1
    assert "fails: chunks" in found.out


def test_the_page_of_verify_keeps_its_columns_apart_and_says_what_it_judges() -> None:
    from phylon.cli.verify import page

    names = ["chunks", "reference:decoder.blocks.11.resid_post"]
    cells = [{"name": name, "passed": False, "error": 0.5, "bound": 1e-5, "reason": None} for name in names]
    data = {"model": "m", "dtype": "float32", "inputs": "images", "lengths": [5], "cells": cells, "passed": False}
    lines = page(data).splitlines()
    assert lines[0] == "m: float32, 1 image of 5 tokens"
    assert [line.split()[:2] for line in lines[2:4]] == [[name, "FAILED"] for name in names]
    assert len({line.index("FAILED") for line in lines[2:4]}) == 1
    assert "not the values" in lines[-2]


def test_names_of_families_and_kinds_stand_apart(run: Callable) -> None:
    lines = run("list", "families").out.splitlines()
    assert sum("loads: " in line for line in lines) == sum(1 for line in lines if "presets: " in line)
    assert any("loads: Phylon's own folders" in line for line in lines)
    data = json.loads(run("list", "families", "--json").out)["families"]
    heads = [line for line in lines if line and not line.startswith(" ")]
    assert [line.split("  ")[0] for line in heads] == [row["name"] for row in data]
    assert len({line.index(row["title"], len(row["name"])) for line, row in zip(heads, data, strict=True)}) == 1
    mechanisms = json.loads(run("list", "mechanisms", "--json").out)["mechanisms"]
    words = [line.split()[0] for line in run("list", "mechanisms").out.splitlines() if line.strip()]
    assert {row["kind"] for row in mechanisms} <= set(words)


def test_an_image_model_is_verified_and_walked(run: Callable, tmp_path: Path) -> None:
    save(build(family("vit").cases()[0], device="cpu"), tmp_path / "model")
    found = run("verify", tmp_path / "model")
    assert found.code == 0
    assert "images of" in found.out.splitlines()[0]
    assert "control_image" in found.out
    assert "encoder" in run("show", tmp_path / "model", "--shapes").out
    for command in (["verify", "--length", 9], ["show", "--shapes", "--seq-len", 9]):
        assert run(*command, tmp_path / "model").code == 2


def test_train_samples_resumes_and_starts_afresh(run: Callable, tmp_path: Path) -> None:
    small = ["--set", "run.steps=3", "--set", "run.sample_every=1", "--set", "data.source.repeat=1"]
    small += ["--set", "data.seq_len=19", "--out", tmp_path / "run", "--device", "cpu"]
    found = run("train", "tinygpt", *small)
    assert found.code == 0, found.err
    assert found.out == ""
    assert (tmp_path / "run/model/phylon.json").exists()
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    samples = [m for m in metrics if m["kind"] == "samples"]
    assert samples
    assert all(isinstance(text, str) and text for text in samples[0]["texts"])
    again = run("train", "tinygpt", *small)
    assert again.code == 2
    assert "--resume goes on with it, --fresh replaces it" in again.err
    (tmp_path / "run/mine.txt").write_text("kept")
    assert run("train", "tinygpt", *small, "--fresh").code == 0
    assert (tmp_path / "run/mine.txt").read_text() == "kept"
    more = [*small[:1], "run.steps=4", *small[2:]]
    changed = run("train", "tinygpt", *more, "--resume")
    assert changed.code == 2
    assert "--allow-changes" in changed.err
    assert run("train", "tinygpt", *more, "--resume", "--allow-changes").code == 0
    assert run("train", tmp_path / "run/recipe.toml", *small[-4:], "--resume").code == 0


def test_a_stopped_run_says_how_to_go_on(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phylon.train import Interrupted

    def stop(*_args: object, **_options: object) -> None:
        raise Interrupted("stopped after step 1 of 9", 15)

    monkeypatch.setattr(sys.modules["phylon.train"], "train", stop)
    found = run("train", "tinygpt", "--out", tmp_path / "a run")
    assert found.code == 143
    assert found.err.endswith(f"--out '{tmp_path}/a run' --resume\n")


def test_chat_reads_a_pipe(run: Callable, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    class Session:
        n_forgotten = 0

        def __init__(self, model: object, system: str | None, **options: object) -> None:
            assert options["temperature"] == 0.0

        def reset(self) -> None:
            sent.append("reset")

        def send(self, text: str):
            sent.append(text)
            if text == "stop":
                raise KeyboardInterrupt
            yield from ("you said ", text)

    monkeypatch.setattr("phylon.generate.ChatSession", Session)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/reset\n/what\nstop\nmore\n/quit\nnever\n"))
    found = run("chat", model_folder)
    assert found.code == 0
    assert sent == ["hello", "reset", "stop", "more"]
    assert found.out == "you said hello\n …\nyou said more\n"
    assert "unknown command /what" in found.err


def test_a_model_without_a_chat_template_is_told_so(
    run: Callable, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    found = run("chat", model_folder)
    assert "chat template" in found.err
    assert found.out == ""


def test_a_file_of_ones_own_mechanisms(run: Callable, tmp_path: Path) -> None:
    file = tmp_path / "my_mixer.py"
    file.write_text(MIXER)
    script = "from phylon.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"
    called = [sys.executable, "-c", script, "list", "mechanisms", "--json", "--import", str(file)]
    done = subprocess.run(called, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["mechanisms"]
    assert {"kind": "halver", "slot": "mixer", "paper": "none", "idea": "Half of a linear map"} in rows


def test_a_broken_file_of_mechanisms_is_one_line(run: Callable, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    for text, words in (("x = (", "line 1"), ("\nraise KeyError('a')", "line 2 cannot be imported: KeyError")):
        file.write_text(text)
        found = run("--import", file, "list", "families")
        assert found.code == 2
        assert found.err.count("\n") == 1
        assert words in found.err
        assert "broken.py" in found.err
