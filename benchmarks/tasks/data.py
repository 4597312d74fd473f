"""Tables for the runs beside this file, made from ``../shared/data``:

python benchmarks/tasks/data.py movies runs/movies.tsv      # 10,568 snippets; positive: the raters' mean is above 0
python benchmarks/tasks/data.py docstrings runs/docstrings.tsv   # function body, first line of its docstring
"""

import ast
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

from phylon.data import PythonCorpus

SNIPPETS = Path("../shared/data/sentiment/movieReviewSnippets_GroundTruth.txt.gz")
MOST_CHARACTERS = 400  # of a body: more is cut by the model anyway


def movies() -> Iterator[tuple[str, str]]:
    """``text`` and ``label``: 1 where the raters' mean (-4 to 4) is above 0, 0 below; a mean of 0.0 is left out."""
    yield "text", "label"
    for line in gzip.decompress(SNIPPETS.read_bytes()).decode("utf-8").splitlines():
        _, mean, text = line.rstrip("\n").split("\t")
        if float(mean) and text.strip():
            yield text.strip(), str(int(float(mean) > 0))


def docstrings() -> Iterator[tuple[str, str]]:
    """``text``: the first line of a docstring; ``pair``: the function's body without it, on one line."""
    yield "text", "pair"
    for document in PythonCorpus().documents():
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (said := ast.get_docstring(node)) or len(node.body) < 2:
                continue
            body = " ".join(" ".join(ast.unparse(part) for part in node.body[1:]).split())[:MOST_CHARACTERS]
            first = " ".join(said.splitlines()[0].split())
            if len(first) >= 10 and len(body) >= 20:
                yield first, body


def main() -> None:
    kinds = {"movies": movies, "docstrings": docstrings}
    if len(sys.argv) != 3 or sys.argv[1] not in kinds:
        raise SystemExit(__doc__)
    out = Path(sys.argv[2])
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = ["\t".join(row) + "\n" for row in kinds[sys.argv[1]]()]
    out.write_text("".join(rows), encoding="utf-8")
    print(f"{len(rows) - 1:,} rows in {out}")


if __name__ == "__main__":
    main()
