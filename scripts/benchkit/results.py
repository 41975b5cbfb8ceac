"""A benchmark's three files: NAME.json with everything, NAME.md to read, NAME.png to look at.

Each carries what a speed figure must: hardware, date, commit, versions and the command.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from benchkit.options import PATHS, Bench
from callbacks.environment import environment

Row = dict[str, Any]
# (column's title, key in a row, format)
Column = tuple[str, str, str]


@dataclass
class Line:
    """One line of a plot; `style` as matplotlib has it, empty for a solid or, past ten lines, a dashed one."""

    label: str
    points: list[tuple[float, float]]
    style: str = ""


@dataclass
class Panel:
    """One set of axes."""

    title: str
    xlabel: str
    ylabel: str
    lines: list[Line]
    log_x: bool = True
    log_y: bool = False
    baseline: float | None = None
    rows: list[str] = field(default_factory=list)  # names of y = 0, 1, …, from the top, for a plot of one dot per row


@dataclass
class Report:
    """What a benchmark found. `save` may be called after every step: a run that is killed keeps what it had."""

    name: str
    title: str
    bench: Bench
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[tuple[str, Sequence[Column], list[Row]]] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    how: str = "Medians"  # what a number of the tables is of its repeats

    def note(self, *lines: str) -> None:
        """Say something once."""
        self.notes = list(dict.fromkeys([*self.notes, *lines]))

    def save(self) -> None:
        """Write the three files and say where they are."""
        bench, stem = self.bench, self.bench.chosen.out / self.name
        about = environment(bench.device)
        document = {
            "name": self.name,
            "command": bench.chosen.command,
            "environment": about,
            "settings": {
                k: v for k, v in vars(bench.chosen).items() if f"--{k}".replace("_", "-") not in PATHS and _plain(v)
            },
            "rows": self.rows,
            "notes": self.notes,
            **self.extra,
        }
        stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(self.markdown(about), encoding="utf-8")
        draw(self.panels).savefig(stem.with_suffix(".png"), dpi=120)
        bench.say(f"written: {self.name}.json, {self.name}.md, {self.name}.png")

    def markdown(self, about: dict[str, Any]) -> str:
        """The page."""
        parts = [f"# {self.title}"]
        for title, columns, rows in self.tables:
            parts += [f"## {title}" if title else "", markdown_table(columns, rows)]
        parts += [f"![{self.title}]({self.name}.png)"]
        if self.notes:
            parts += ["\n".join(f"* {note}" for note in self.notes)]
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
        parts += [
            f"Made by `{self.bench.chosen.command}` on {about['device']} ({about['cpus']} cores, "
            f"{about['memory_gib']} GiB), {about['date']}, commit {about['commit'] or 'unknown'}; "
            f"{about['system']}; {versions}. {self.how}; all numbers are in [{self.name}.json]({self.name}.json)."
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(columns: Sequence[Column], rows: list[Row]) -> str:
    """A table; a value that is not there is a dash."""
    lines = [f"| {' | '.join(title for title, _, _ in columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [format(row[key], form) if row.get(key) is not None else "–" for _, key, form in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(panels: list[Panel]) -> Figure:
    """All panels side by side; without pyplot, so that no display is needed."""
    tall = max([4.8, *[1.5 + 0.22 * len(panel.rows) for panel in panels]])
    figure = Figure(figsize=(1.0 + 8.0 * max(1, len(panels)), tall), layout="constrained")
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        for index, line in enumerate(panel.lines):
            if line.points:
                style = line.style or ("o-" if index < 10 else "s--")
                axes.plot(*zip(*sorted(line.points)), style, color=f"C{index % 10}", markersize=4, label=line.label)
        if panel.log_x:
            axes.set_xscale("log", base=2)
        if panel.rows:
            axes.set_yticks(range(len(panel.rows)), panel.rows, fontsize="x-small")
            axes.invert_yaxis()
        elif panel.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        if panel.baseline is not None:
            mark = axes.axvline if panel.rows else axes.axhline
            mark(panel.baseline, color="0.5", linewidth=1, zorder=0)
        sizes = sorted({x for line in panel.lines for x, _ in line.points if not panel.rows})
        if sizes and len(sizes) <= 12:
            axes.set_xticks(sizes, [f"{x / 1024:g}K" if x >= 1024 else f"{x:g}" for x in sizes])
            axes.minorticks_off()
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def series(rows: list[Row], label: str, x: str, y: str, scale: float = 1.0) -> list[Line]:
    """One line per value of `label`, of `(x, y * scale)` where both are there."""
    lines: dict[str, Line] = {}
    for row in rows:
        if row.get(x) is not None and row.get(y) is not None:
            name = str(row[label])
            lines.setdefault(name, Line(name, [])).points.append((row[x], row[y] * scale))
    return list(lines.values())


def _plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list))
