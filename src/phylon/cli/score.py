"""``phylon score``: how probable a text is, or the classes that a model gives it."""

from typing import Annotated, Any

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, print_json


def score(
    model: ModelName,
    text: Annotated[list[str], typer.Option(metavar="TEXT", help="Text to score; repeatable.")],
    pair: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Second text of a pair, one for each --text, in order; repeatable."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Tell how probable each text is under the model; of a fine-tuned encoder, what it has been taught to say.

    That is how probable each class is, a number, the class of each word, or (two texts: question, context) the answer.
    A model that was taught pairs of texts reads --text A --pair B.
    """
    from phylon.generate import classifier, classify, taught
    from phylon.generate import score as run
    from phylon.generate.request import check_continues
    from phylon.hub import load
    from phylon.spec.errors import UserError

    if pair and len(pair) != len(text):
        raise UserError(f"--text is given {len(text)} times and --pair {len(pair)}; give one --pair for each --text")
    loaded = load(model, dtype=dtype, device=device)
    if classifier(loaded) is not None:
        classified = classify(loaded, text, pair)
        print_json({"model": model, "classes": classified}) if as_json else print(_classes(classified))
        return
    if (task := taught(loaded)) is not None:
        found = _taught(loaded, task, text, pair)
        print_json({"model": model, task: found}) if as_json else print(_page(task, found))
        return
    check_continues(loaded, "tell how probable a text is")
    if pair:
        raise UserError("this model tells how probable a text is, and reads no pairs; leave --pair out")
    results = run(loaded, text)
    if as_json:
        print_json({"model": model, "scores": results})
        return
    print(f"{'tokens':>7} {'log-prob':>11} {'nats/token':>11} {'perplexity':>11}  text")
    for result in results:
        figures = f"{result['total']:>11.3f} {result['mean_nll']:>11.4f} {result['perplexity']:>11.3f}"
        print(f"{result['n_scored']:>7} {figures}  {_shown(result['text'] or '')}")


def _taught(model: Any, task: str, texts: list[str], pairs: list[str] | None) -> list[Any]:
    """What the model says of the texts; of answers they are questions with their contexts as pairs, or in turns."""
    from phylon.generate import answer, label_words, rate
    from phylon.spec.errors import UserError

    if task == "scores":
        return list(rate(model, texts, pairs))
    if task == "words":
        if pairs:
            raise UserError("this model reads the words of one text; leave --pair out")
        return list(label_words(model, texts))
    if pairs:
        return [answer(model, *asked) for asked in zip(texts, pairs, strict=True)]
    if len(texts) % 2:
        raise UserError("this model answers questions: give --text QUESTION --text CONTEXT, in turns")
    return [answer(model, *texts[i : i + 2]) for i in range(0, len(texts), 2)]


def _page(task: str, found: list[Any]) -> str:
    if task == "scores":
        return "\n".join([f"{'score':>9}  text", *(f"{row['score']:>9.4f}  {_read(row)}" for row in found)])
    if task == "words":
        return "\n".join(" ".join(f"{word['word']}/{word['label']}" for word in row["words"]) for row in found)
    return "\n".join(f"{_shown(row['question'])} -> {row['answer']}" for row in found)


def _classes(classified: list[Any]) -> str:
    """A line a text: its likeliest class and how probable that is."""
    width = max(5, *(len(found["label"]) for found in classified))
    lines = [f"{'class':<{width}} {'probability':>11}  text"]
    for found in classified:
        share = found["probabilities"][found["label"]]
        lines.append(f"{found['label']:<{width}} {share:>11.4f}  {_read(found)}")
    return "\n".join(lines)


def _read(row: Any) -> str:
    """The text that was read, or both of a pair."""
    return " | ".join(_shown(row[name]) for name in ("text", "pair") if name in row)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 36 else text[:35] + "…"
