"""The table for ``movies.toml``, made from ``../shared/data/sentiment``: 10,568 snippets with ``text`` and ``label``.

``label`` is positive where the raters' mean (-4 to 4) is above 0, negative below; a mean of 0.0 is left out.

    python benchmarks/tasks/movies.py runs/movies.tsv
"""

import gzip
import sys
from pathlib import Path

SNIPPETS = Path("../shared/data/sentiment/movieReviewSnippets_GroundTruth.txt.gz")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    rows = ["text\tlabel\n"]
    for line in gzip.decompress(SNIPPETS.read_bytes()).decode("utf-8").splitlines():
        _, mean, text = line.split("\t")
        if float(mean) and text.strip():
            rows.append(f"{text.strip()}\t{'positive' if float(mean) > 0 else 'negative'}\n")
    out = Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(rows), encoding="utf-8")
    print(f"{len(rows) - 1:,} rows in {out}")


if __name__ == "__main__":
    main()
