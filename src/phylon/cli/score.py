"""``phylon score``: how probable a text is, or the classes that a model gives it."""

from typing import Annotated, Any

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, print_json


def score(
    model: ModelName,
    text: Annotated[list[str], typer.Option(metavar="TEXT", help="Text to score; repeatable.")],
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Tell how probable each text is under the model; of a fine-tuned encoder, what it has been taught to say.

    That is how probable each class is, a number, the class of each word, or (two texts: question, context) the answer.
    """
    from phylon.generate import classifier, classify, taught
    from phylon.generate import score as run
    from phylon.hub import load

    loaded = load(model, dtype=dtype, device=device)
    if loaded.decoder is None and classifier(loaded) is not None:
        classified = classify(loaded, text)
        print_json({"model": model, "classes": classified}) if as_json else print(_classes(classified))
        return
    if (task := taught(loaded)) is not None:
        found = _taught(loaded, task, text)
        print_json({"model": model, task: found}) if as_json else print(_page(task, found))
        return
    results = run(loaded, text)
    if as_json:
        print_json({"model": model, "scores": results})
        return
    print(f"{'tokens':>7} {'log-prob':>11} {'nats/token':>11} {'perplexity':>11}  text")
    for result in results:
        figures = f"{result['total']:>11.3f} {result['mean_nll']:>11.4f} {result['perplexity']:>11.3f}"
        print(f"{result['n_scored']:>7} {figures}  {_shown(result['text'] or '')}")


def _taught(model: Any, task: str, texts: list[str]) -> list[Any]:
    """What the model says of the texts; of answers they are question and context in turns."""
    from phylon.generate import answer, label_words, rate
    from phylon.spec.errors import UserError

    if task != "answers":
        return list(rate(model, texts) if task == "scores" else label_words(model, texts))
    if len(texts) % 2:
        raise UserError("this model answers questions: give --text QUESTION --text CONTEXT, in turns")
    return [answer(model, *texts[i : i + 2]) for i in range(0, len(texts), 2)]


def _page(task: str, found: list[Any]) -> str:
    if task == "scores":
        return "\n".join([f"{'score':>9}  text", *(f"{row['score']:>9.4f}  {_shown(row['text'])}" for row in found)])
    if task == "words":
        return "\n".join(" ".join(f"{word['word']}/{word['label']}" for word in row["words"]) for row in found)
    return "\n".join(f"{_shown(row['question'])} -> {row['answer']}" for row in found)


def _classes(classified: list[Any]) -> str:
    """A line a text: its likeliest class and how probable that is."""
    width = max(5, *(len(found["label"]) for found in classified))
    lines = [f"{'class':<{width}} {'probability':>11}  text"]
    for found in classified:
        share = found["probabilities"][found["label"]]
        lines.append(f"{found['label']:<{width}} {share:>11.4f}  {_shown(found['text'])}")
    return "\n".join(lines)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 36 else text[:35] + "…"
