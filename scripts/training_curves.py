"""Publish training runs: their curves beside the bare window's, their end values, and the configuration of each.

    python scripts/training_curves.py --runs runs/smollm2/pretrain_* --out docs/results/smollm2_adapters/pretraining

A run is a `trainer.default_root_dir`: TensorBoard's files (of every resume) and `config.yaml`. Time is tokens divided
by the median of the logged tokens/s, so pauses and validations are not in it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchkit.results import Column, Line, Panel, draw, markdown_table
from callbacks.environment import environment
from masw_lightning.errors import UserError

COLUMNS: tuple[Column, ...] = (
    ("run", "run", ""),
    ("class", "class", ""),
    ("objective", "objective", ""),
    ("steps", "steps", ",d"),
    ("tokens", "tokens", ",d"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("minutes", "minutes", ".1f"),
    ("validated at", "validated_at", ",d"),
    ("loss", "loss", ".3f"),
    ("window's", "loss_window", ".3f"),
    ("full attention's", "loss_full", ".3f"),
    ("agreement", "agreement", ".3f"),
    ("window's", "agreement_window", ".3f"),
    ("1 - TV", "overlap", ".3f"),
    ("window's", "overlap_window", ".3f"),
    ("Tok./Iter", "tokens_per_iteration", ".2f"),
    ("window's", "tokens_per_iteration_window", ".2f"),
)
CURVES = ("agreement", "overlap", "tokens_per_iteration")


@dataclass
class Run:
    """One training or validation run as its files have it."""

    name: str
    config: dict[str, Any]
    scalars: dict[str, dict[int, float]]  # tag -> step -> value; a resumed run's later value of a step holds

    @classmethod
    def read(cls, folder: Path) -> Run:
        """A run's folder.

        Raises:
            UserError: it holds no `config.yaml` or nothing that TensorBoard could show.
        """
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} holds no config.yaml: give a run's trainer.default_root_dir.")
        scalars: dict[str, dict[int, float]] = {}
        for file in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime):
            events = EventAccumulator(str(file))
            events.Reload()
            for tag in events.Tags()["scalars"]:
                # Lightning counts from the step before an optimizer step
                found = {event.step + 1: event.value for event in events.Scalars(tag)}
                scalars.setdefault(tag, {}).update(found)
        if not any(tag.startswith("val/") for tag in scalars):
            raise UserError(f"{folder} holds no validation in TensorBoard's files: let the run validate once.")
        return cls(folder.name, yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")), scalars)

    def row(self) -> dict[str, Any]:
        """End values, and what they cost."""
        init = self.config["model"]["init_args"]
        row: dict[str, Any] = {"run": self.name, "class": self.config["model"]["class_path"].rpartition(".")[2]}
        row["objective"] = init.get("objective")
        if seen := self.scalars.get("train/tokens_seen"):
            row |= {"steps": max(seen), "tokens": int(max(seen.values()))}
            row["tokens_per_s"] = statistics.median(self.scalars["train/tokens_per_s"].values())
            row["minutes"] = row["tokens"] / row["tokens_per_s"] / 60
        for tag, values in self.scalars.items():
            if tag.startswith("val/"):
                row[tag.removeprefix("val/")] = values[max(values)]
                row["validated_at"] = max(values)
        return row

    def line(self, key: str, label: str, style: str = "") -> Line:
        """A validation value by optimizer step."""
        values = self.scalars.get(f"val/{key}", {})
        return Line(label, [(float(step), value) for step, value in sorted(values.items())], style)


def publish(runs: list[Run], out: Path, title: str, command: str) -> None:
    """Markdown, JSON, plot, and the configurations."""
    rows, about = [run.row() for run in runs], environment(torch.device("cpu"))
    panels = []
    for key in CURVES:
        lines = [run.line(key, run.name) for run in runs]
        lines += [runs[0].line(f"{key}_window", "bare window of the same S and W", ":")]
        panels.append(Panel(key.replace("_", " "), "optimizer steps", key, lines, log_x=False))
    (out / "configs").mkdir(parents=True, exist_ok=True)
    for run in runs:
        dumped = yaml.safe_dump(run.config, sort_keys=False)
        (out / "configs" / f"{run.name}.yaml").write_text(dumped, encoding="utf-8")
    record = {"command": command, "environment": about, "rows": rows}
    record["curves"] = {run.name: {tag: sorted(v.items()) for tag, v in run.scalars.items()} for run in runs}
    (out / "curves.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(panels).savefig(out / "curves.png", dpi=90)
    used = [c for c in COLUMNS if any(row.get(c[1]) is not None for row in rows)]
    page = [
        f"# {title}",
        markdown_table(used, rows),
        f"![{title}](curves.png)",
        'Values after the last validation; a column "window\'s" is the bare window of the same S and W on the same '
        "tokens. Minutes: tokens ÷ the median of the logged tokens/s (validation and pauses are not in it). Every run "
        "as it was run: [configs](configs). All points: [curves.json](curves.json).",
        f"Made by `{command}` on {about['device']} ({about['cpus']} cores), {about['date']}, commit {about['commit']}.",
    ]
    (out / "README.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    made.add_argument("--runs", nargs="+", type=Path, required=True, help="folders of runs")
    made.add_argument("--out", type=Path, required=True, help="folder of the page")
    made.add_argument("--title", default="Training runs", help="of the page")
    chosen = made.parse_args(given)
    try:
        runs = [Run.read(folder) for folder in chosen.runs]
    except UserError as error:
        print(f"training_curves: {error}", file=sys.stderr)
        return 2
    shown = [Path(word).name if Path(word).is_absolute() else word for word in given]
    publish(runs, chosen.out, chosen.title, shlex.join(["python", "scripts/training_curves.py", *shown]))
    print(f"written: {chosen.out / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
