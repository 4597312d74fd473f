"""What a pre-training run has learned, as JSON: ``python summary.py RUN``, RUN being the folder of ``phylon train``.

``before`` is the same measure on the same held-out rows for the model as it was drawn from the seed.
"""

import argparse
import json
from pathlib import Path

import torch

from phylon.train import load_recipe, read_metrics
from phylon.train.prepare import prepare, recipe_source


def summary(run: Path) -> dict:
    """The figures of a run."""
    recipe = load_recipe(run / "recipe.toml")
    source = recipe_source(recipe.data)
    # The run's own vocabulary and tokens, and a model as it was drawn.
    prepared = prepare(recipe, run, source, "cpu", lambda said: None, lambda made: None, resume=True, kept=True)
    model, held_out = prepared.model.eval(), prepared.feed.held_out
    assert held_out is not None, "the run holds nothing out"
    with torch.no_grad():
        before = recipe.objective.evaluate(model, held_out())
    records = list(read_metrics(run / "metrics.jsonl"))
    steps = [record for record in records if record["kind"] == "step"]
    samples = [record for record in records if record["kind"] == "samples"]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": prepared.tokenizer.vocab_size if prepared.tokenizer else None,
        "steps": len(steps),
        "tokens": steps[-1]["tokens"],
        "seconds": round(steps[-1]["seconds"]),
        "before": before,
        "held_out": [
            {"step": r["step"], "loss": r["loss"], **r.get("metrics", {})} for r in records if r["kind"] == "eval"
        ],
        "samples": samples[-1]["texts"] if samples else [],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    print(json.dumps(summary(parser.parse_args().run), indent=1, ensure_ascii=False))
