"""The table for ``movies.toml``, made from ``../shared/data/sentiment``: 10,568 snippets with ``text`` and ``label``.

``label`` is positive where the raters' mean (-4 to 4) is above 0, negative below; a mean of 0.0 is left out.

    python benchmarks/tasks/movies.py runs/movies.tsv
"""

import argparse
import gzip
from pathlib import Path

SNIPPETS = Path("../shared/data/sentiment/movieReviewSnippets_GroundTruth.txt.gz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the table to write")
    out = parser.parse_args().out
    rows = ["text\tlabel\n"]
    for line in gzip.decompress(SNIPPETS.read_bytes()).decode("utf-8").splitlines():
        _, mean, text = line.split("\t")
        if float(mean) and text.strip():
            rows.append(f"{text.strip()}\t{'positive' if float(mean) > 0 else 'negative'}\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(rows), encoding="utf-8")
    print(f"{len(rows) - 1:,} rows in {out}")


if __name__ == "__main__":
    main()
