"""Measure every figure that is held to a floor and write the table: reached or missed, and the medians behind it.

    python scripts/bench_floors.py --dtype float32,bfloat16
    python scripts/bench_floors.py --groups steps,decode,verify         only some; rows of other groups are kept

Each ratio is taken in one run with interleaved repeats. The floors hold for SmolLM2-135M's shapes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import sys

from benchkit.floors import GROUPS, Lengths, Subject
from benchkit.models import Loaded
from benchkit.options import Bench, count, names, parser, run
from benchkit.prefill import PLAIN_NOTE
from benchkit.results import Column, Line, Panel, Report, Row
from benchkit.timing import peak_source
from callbacks.environment import environment
from masw_lightning.errors import UserError

NAME = "bench_floors"
COLUMNS: tuple[Column, ...] = (
    ("figure", "figure", ""),
    ("floor", "floor", ""),
    ("measured", "measured", ""),
    ("", "verdict", ""),
    ("medians (min–max)", "behind", ""),
)


def body(bench: Bench) -> None:
    """All groups of all dtypes; the files are written after each group."""
    chosen = bench.chosen
    unknown = set(chosen.groups) - GROUPS.keys()
    if unknown:
        raise UserError(f"group {sorted(unknown)[0]!r} is unknown: choose from {', '.join(GROUPS)}.")
    lengths = Lengths(chosen.short, chosen.middle, chosen.long)
    report = Report(NAME, "Figures with a floor", bench)
    report.rows = earlier(bench)
    report.note(
        PLAIN_NOTE,
        "Steps, decodes and verification run on caches filled with random keys and values. Transformers decodes with "
        "its DynamicCache; its assisted generation has a constant schedule and counts from the end of its first round.",
        "Shares of a decode: three drafted tokens accepted each time, set by a scripted draft that pays for every one.",
        f"Training: activation checkpointing {'on' if chosen.checkpointing else 'off'} in both, the backbone's own key "
        f"and value projections trained in the plain one. Peak: {peak_source(bench.device)}.",
    )

    def measure(dtype: str, draft: Loaded, target: Loaded) -> None:
        report.note(*draft.notes)
        memories = bench.memories(draft)
        subject = Subject(bench, draft.model, dtype, memories, lengths)
        about = environment(bench.device)
        for group in chosen.groups:
            mine = {"model": draft.name, "dtype": dtype, "group": group}
            new = [mine | row | {"date": about["date"], "commit": about["commit"]} for row in GROUPS[group](subject)]
            for row in new:
                bench.say(f"{row['figure']}: {row['measured']} ({row['floor']}, {row['verdict']})")
            report.rows = [row for row in report.rows if any(row.get(k) != v for k, v in mine.items())] + new
            publish(report)
        for memory in memories.values():
            memory.detach()

    bench.each(lengths.long, measure)


def earlier(bench: Bench) -> list[Row]:
    """Rows of an earlier run into the same folder."""
    try:
        held = json.loads((bench.chosen.out / f"{NAME}.json").read_text(encoding="utf-8"))
        return list(held["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def publish(report: Report) -> None:
    """One table per model and dtype; the plot shows how far each figure is from its floor."""
    order = list(GROUPS)
    report.rows.sort(key=lambda row: (row["model"], row["dtype"] != "float32", order.index(row["group"])))
    report.tables, report.panels = [], []
    for model, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in report.rows):
        rows = [row for row in report.rows if (row["model"], row["dtype"]) == (model, dtype)]
        held = [row for row in rows if row["verdict"] != "shown"]
        reached = sum(row["verdict"] == "reached" for row in held)
        commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
        title = f"{model}, {dtype}: {reached} of {len(held)} reached (commit {commits})"
        report.tables.append((title, COLUMNS, rows))
        lines = []
        for verdict, style in (("reached", "o"), ("missed", "x")):
            found = [(headroom(row), float(y)) for y, row in enumerate(held) if row["verdict"] == verdict]
            lines.append(Line(verdict, found, style))
        shown = [f"{row['figure']} ({row['floor']})" for row in held]
        panel = Panel(f"{model}, {dtype}", "times better than the floor", "", lines, False, baseline=1.0, rows=shown)
        report.panels.append(panel)
    report.save()


def headroom(row: Row) -> float:
    """Floor ÷ value for an upper bound, value ÷ floor for a lower one: at least 1 where it is reached."""
    sign, _, bound = row["floor"].partition(" ")
    limit = float(bound.rstrip("%")) / (100 if bound.endswith("%") else 1)
    value = max(float(row["value"]), 1e-9)
    return min(10.0, limit / value if sign == "≤" else value / limit)


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    made = parser(__doc__, NAME, "1K,8K,32K", 9)
    made.set_defaults(dtype=["float32", "bfloat16"])
    more = made.add_argument_group("floors")
    more.add_argument("--groups", type=names, default=list(GROUPS), help=f"default all: {','.join(GROUPS)}")
    more.add_argument("--short", type=count, default=1024, help="default 1K")
    more.add_argument("--middle", type=count, default=8192, help="default 8K")
    more.add_argument("--long", type=count, default=32768, help="default 32K")
    more.add_argument("--long-repeats", type=count, default=3, help="of prefill, whole decodes and training, default 3")
    more.add_argument("--draft-tokens", type=count, default=5, help="K, default 5")
    more.add_argument("--rounds", type=count, default=10, help="iterations of a whole decode, default 10")
    more.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="in training steps")
    return run(NAME, made, body, arguments)


if __name__ == "__main__":
    sys.exit(main())
