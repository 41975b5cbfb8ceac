"""The paper's Figure 3a on a grid of yours: acceptance length against prefix, with ten drafted tokens per iteration.

    python scripts/figure3a.py --config configs/table1/figure3a_smollm2.yaml

Acceptance length: drafted tokens that the target accepts, per iteration; the token that the target adds is not counted,
so a draft may lie below 1. Same grid files, same records and same continuing as scripts/table1.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from benchkit.grid import check_prefixes, grid_parser, read_grid
from benchkit.options import Bench, count, counts, run
from benchkit.results import Column, Panel, Report, Row, series
from benchkit.trials import TargetResult, run_grid
from callbacks.predictions import REFERENCE
from callbacks.summary import bucket_label

NAME = "figure3a"


def body(bench: Bench) -> None:
    """Read the grid, run it with K drafted tokens, publish now and then."""
    chosen = bench.chosen
    grid = read_grid(chosen.config, chosen.data)
    grid.decoding = replace(grid.decoding, num_draft_tokens=chosen.draft_tokens)
    for target in grid.targets:
        target.prefixes = chosen.prefixes or target.prefixes
        check_prefixes(target.prefixes, target.name)
    report = Report(chosen.config.stem, f"Acceptance length by prefix, K = {chosen.draft_tokens}", bench)
    report.how = "Ratios of sums over all prompts of a row"
    report.note(
        f"Accepted drafted tokens per iteration, of {chosen.draft_tokens}; the target's own token is not counted.",
        "Prompts have exactly the asked length: longer rows are cut in the middle, shorter ones filled there.",
        *([grid.remark] if grid.remark else []),
    )
    run_grid(bench, grid, chosen.out / chosen.config.stem, lambda results: publish(report, results))


def publish(report: Report, results: list[TargetResult]) -> None:
    """One table and one set of axes per model."""
    rows = [row for result in results for row in result.rows() if row["method"] != REFERENCE]
    report.rows = list({(r["target"], r["prefix"], r["method"]): r for r in rows}.values())
    report.extra["methods"] = {result.target.name: result.settings for result in results}
    report.tables, report.panels = [], []
    for model in dict.fromkeys(row["model"] for row in report.rows):
        drawn = [row for row in report.rows if row["model"] == model]
        names = " and ".join(dict.fromkeys(row["target"] for row in drawn))
        report.tables.append((names, *wide(drawn)))
        lines = series(drawn, "method", "prefix", "accepted_length")
        report.panels.append(Panel(names, "prompt tokens", "accepted per iteration", lines, baseline=1.0))
    report.save()


def wide(rows: list[Row]) -> tuple[tuple[Column, ...], list[Row]]:
    """One line per method, one column per target and prefix."""
    targets = {row["target"] for row in rows}
    found: dict[str, Row] = {}
    columns: dict[str, Column] = {}
    for row in sorted(rows, key=lambda r: r["prefix"]):
        key = f"{row['target']} {row['prefix']}"
        label = bucket_label(row["prefix"]) + (f", {row['target']}" if len(targets) > 1 else "")
        columns[key] = (f"{label} ({row['prompts']})", key, ".2f")
    for row in rows:
        line = found.setdefault(row["method"], {"method": row["method"]})
        line[f"{row['target']} {row['prefix']}"] = row["accepted_length"]
    return (("method (prompts)", "method", ""), *columns.values()), list(found.values())


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    made = grid_parser(__doc__, NAME)
    made.add_argument("--draft-tokens", type=count, default=10, help="K, default 10")
    made.add_argument("--prefixes", type=counts, help="prompt tokens for every target; default the grid's own")
    return run(NAME, made, body, arguments)


if __name__ == "__main__":
    sys.exit(main())
