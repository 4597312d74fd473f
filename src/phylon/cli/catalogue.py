"""The rows of ``phylon list``, and how they read."""

import importlib
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import phylon.families
from phylon.families import Family
from phylon.spec import registry
from phylon.spec.registry import Entry

Rows = list[dict[str, Any]]


def families() -> Rows:
    """Every family: paper, presets, and what of it can be loaded."""
    return [family_row(family) for family in phylon.families.families()]


def family_row(family: Family) -> dict[str, Any]:
    """One family."""
    return {
        "name": family.name,
        "title": family.title,
        "paper": family.paper,
        "presets": list(family.presets),
        "huggingface": list(family.hf.model_types) if family.hf else [],
        "gguf": list(family.gguf.architectures) if family.gguf else [],
    }


def presets(family: str | None = None) -> Rows:
    """Every preset, of one family or of all, with its exact count of parameters from the meta device."""
    from phylon.model import build_meta

    found = []
    for known in phylon.families.families():
        for name, make in known.presets.items() if family in (None, known.name) else ():
            spec = make()
            found.append(
                {
                    "name": name,
                    "family": known.name,
                    "params_total": sum(p.numel() for p in build_meta(spec).parameters()),
                    "blocks": sum(len(stack.blocks) for stack in spec.stacks.values()),
                    "d_model": spec.last_stack.d_model,
                    "max_seq_len": spec.max_seq_len,
                }
            )
    return found


def mechanisms() -> Rows:
    """Every registered mechanism: kind, slot, paper and the idea in a line."""
    importlib.import_module("phylon.train")  # optimisers, schedules and objectives are mechanisms too
    rows = [{"kind": e.kind, "slot": slot_name(e), "paper": e.paper, "idea": idea(e)} for e in registry.entries()]
    return sorted(rows, key=lambda row: (row["slot"], row["kind"]))


def backends() -> Rows:
    """Every backend of every op: available or not, and what it does with each kind of call."""
    from phylon.cli.support import matrix

    return matrix()


def recipes() -> Rows:
    """Every recipe that comes with the library: its objective, and the first sentence of its file."""
    from phylon.train.recipe import builtin_recipes, load_recipe, recipe_text

    found = []
    for name in builtin_recipes():
        words = (line[1:].strip() for line in itertools.takewhile(lambda x: x.startswith("#"), recipe_text(name)))
        about = re.split(r"\. |\.$|: ", " ".join(words), maxsplit=1)[0]
        objective = registry.entry_of(load_recipe(name).objective).kind
        found.append({"name": name, "objective": objective, "about": about})
    return found


def slot_name(entry: Entry) -> str:
    """``"mixer"``, ``"norm"``, …"""
    from phylon.spec.base import snake_case

    return snake_case(entry.slot.__name__.removesuffix("Slot"))


def idea(entry: Entry) -> str:
    """The first sentence of a mechanism's docstring."""
    first = " ".join((entry.spec.__doc__ or "").split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".")


def families_page(rows: Rows) -> str:
    width = max(12, *(len(row["name"]) + 2 for row in rows))
    blocks = []
    for row in rows:
        reads = [f"Hugging Face ({', '.join(row['huggingface'])})"] if row["huggingface"] else []
        reads += [f"GGUF ({', '.join(row['gguf'])})"] if row["gguf"] else []
        lines = [f"{row['name']:<{width}}{row['title']}", f"{'':{width}}{row['paper']}"]
        lines += _listed("presets", row["presets"], width)
        lines += _listed("loads", reads or ["Phylon's own folders"], width)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def presets_page(rows: Rows) -> str:
    return columns(
        ("preset", "family", "parameters", "blocks", "d_model", "max_seq_len"),
        (
            (r["name"], r["family"], f"{r['params_total']:,}", r["blocks"], r["d_model"], r["max_seq_len"] or "any")
            for r in rows
        ),
    )


def mechanisms_page(rows: Rows) -> str:
    from textwrap import fill

    width = max(21, *(len(row["kind"]) + 2 for row in rows))
    margin = " " * (width + 2)
    groups = []
    for slot in dict.fromkeys(row["slot"] for row in rows):
        lines = [slot]
        for row in rows:
            if row["slot"] == slot:
                idea = fill(row["idea"].replace("``", ""), 80, initial_indent=margin, subsequent_indent=margin)
                lines += [f"  {row['kind']:<{width}}{row['paper']}", idea]
        groups.append("\n".join(lines))
    return "\n\n".join(groups)


def backends_page(rows: Rows) -> str:
    width = max(44, *(len(call) + 2 for row in rows for call in row["calls"]))
    blocks = []
    for row in rows:
        state = "on GPUs, " * (row["device"] == "cuda")
        state += "available" if row["unavailable"] is None else f"not here: {row['unavailable']}"
        lines = [f"{row['op']}: {row['backend']} ({state})", *([] if row["note"] is None else [f"  {row['note']}"])]
        lines += [f"  {call:<{width}}{'yes' if why is None else why}" for call, why in row["calls"].items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def recipes_page(rows: Rows) -> str:
    page = columns(("recipe", "objective", "what it does"), ((r["name"], r["objective"], r["about"]) for r in rows))
    return f"{page}\n\nEach of them: phylon train RECIPE --out DIR"


def columns(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """Cells in aligned columns, numbers to the right."""
    table = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [all(cell.replace(",", "").isdigit() or cell == "any" for cell in c) for c in zip(*table[1:], strict=True)]
    align: list[Callable[[str, int], str]] = [str.rjust if is_right else str.ljust for is_right in right]
    lines = (zip(align, row, widths, strict=True) for row in table)
    return "\n".join("  ".join(put(cell, width) for put, cell, width in line).rstrip() for line in lines)


def _listed(name: str, items: list[str], margin: int) -> list[str]:
    from textwrap import wrap

    text = ", ".join(items).replace(" (", "\0(")
    lines = wrap(f"{name}: {text}", 68, break_on_hyphens=False, subsequent_indent="  ") if items else []
    return [f"{'':{margin}}{line}".replace("\0", " ") for line in lines]
