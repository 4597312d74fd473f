"""The order of the backends is the measured one, as ``benchmarks/attention/README.md`` states it."""

import json
import re
from pathlib import Path

from phylon.ops.attention import dispatch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "attention"


def test_the_order_is_the_documented_one() -> None:
    text = (FOLDER / "README.md").read_text()
    stated = re.search(r"^Order of the backends: (.+)\.$", text, re.MULTILINE)
    assert stated is not None
    assert re.findall(r"`(\w+)`", stated.group(1)) == list(dispatch.backends)


def test_figures_are_whole() -> None:
    rows = json.loads((FOLDER / "cpu.json").read_text())["rows"]
    assert rows
    for row in rows:
        assert row["case"] == "attention"
        assert "error" not in row
        assert "refused" in row or (row["ms"] > 0 and row["machine"]["versions"])
