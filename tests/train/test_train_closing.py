"""What `phylon train` says at its end, by the kind of model, and the names of classes that it saves."""

import json

import pytest
from objective_toys import TINY, tiny

from phylon.cli.main import main
from phylon.hub import load, save
from phylon.train import train

KINDS = {
    "image_classes": (0, "try: phylon show"),
    "text_classes": (1, "try: phylon score"),
    "text_scores": (0, "try: phylon score"),
    "word_classes": (0, "try: phylon score"),
    "answers": (0, "try: phylon score"),
    "contrastive": (0, "try: phylon encode"),
    "masked_language": (0, "try: phylon encode"),
    "translation": (0, "try: phylon generate"),
    "next_token": (0, "try: phylon generate"),
}


def trained(kind, number, folder):
    recipe = folder / "recipe.toml"
    recipe.write_text("schema = 1\n" + TINY[kind][number] + "\n[run]\nsteps = 1\nthreads = 1\n", "utf-8")
    assert main(["train", str(recipe), "--out", str(folder / "run"), "--device", "cpu"]) == 0
    return folder / "run" / "model"


@pytest.mark.parametrize("kind", KINDS)
def test_the_closing_hint_fits_the_model_and_works(kind, tmp_path, capfd):
    number, begin = KINDS[kind]
    model = trained(kind, number, tmp_path)
    said = capfd.readouterr().err
    assert "no samples" not in said
    assert ("images/s" if kind == "image_classes" else "tokens/s") in said
    hint = next(line for line in said.splitlines() if line.startswith("try: "))
    assert hint.startswith(f"{begin} {model}")
    words = hint.removeprefix("try: phylon ").replace("'", "").split(" --")[0].split()
    if kind == "answers":
        assert hint.count("--text") == 2
        for given in (["the cat sat", "on"], ["the cat"]):
            texts = [word for text in given for word in ("--text", text)]
            assert main([*words, *texts]) == (0 if len(given) == 2 else 2)
        return
    more = [] if kind == "image_classes" else ["--text" if words[0] != "generate" else "--prompt", "the cat"]
    assert main([*words, *more, *(["--max-new-tokens", "3"] if words[0] == "generate" else [])]) == 0


def test_numbers_of_other_data_take_the_place_of_the_old_names(tmp_path):
    recipe = tiny("text_classes", 1)
    train(recipe.replace(run=recipe.run.replace(steps=1)), out=tmp_path / "named", device="cpu")
    numbers = {name: index for index, name in enumerate("xyz")}
    rows = tuple({**row, "c": numbers[row["c"]]} for row in recipe.data.source.rows)
    later = recipe.replace(
        model={"from": str(tmp_path / "named" / "model")},
        data=recipe.data.replace(source=recipe.data.source.replace(rows=rows)),
        run=recipe.run.replace(steps=1),
    )
    assert train(later, out=tmp_path / "numbered", device="cpu").model.labels == {}


def test_names_of_classes_are_saved_and_shown(tmp_path, capfd):
    folder = trained("text_classes", 1, tmp_path)
    model = load(folder, device="cpu")
    assert model.labels == {"class": ("x", "y", "z")}
    hf = save(model, tmp_path / "hf", format="hf")
    assert json.loads((hf / "config.json").read_text("utf-8"))["id2label"] == {"0": "x", "1": "y", "2": "z"}
    capfd.readouterr()
    assert main(["show", str(folder)]) == 0
    assert "0 x, 1 y, 2 z" in capfd.readouterr().out
    assert main(["score", str(folder), "--text", "the cat", "--text", "a tree grows", "--json", "--device", "cpu"]) == 0
    found = json.loads(capfd.readouterr().out)["classes"]
    assert [row["text"] for row in found] == ["the cat", "a tree grows"]
    for row in found:
        assert row["probabilities"].keys() == {"x", "y", "z"}
        assert sum(row["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)
        assert row["label"] == max(row["probabilities"], key=row["probabilities"].get)
    assert main(["score", str(folder), "--text", "the cat"]) == 0
    assert capfd.readouterr().out.split()[:3] == ["class", "probability", "text"]


def test_a_question_may_be_given_with_its_context_as_a_pair(tmp_path, capfd):
    folder = trained("answers", 0, tmp_path)
    found = []
    for second in ("--pair", "--text"):
        capfd.readouterr()
        assert main(["score", str(folder), "--text", "who?", second, "the cat sat", "--json"]) == 0
        found.append(json.loads(capfd.readouterr().out)["answers"])
    assert found[0] == found[1]
