"""The paper's Table 1 on a grid of yours: targets × drafts × prefixes × methods, from LongBench rows of exact length.

    python scripts/table1.py --config configs/table1/cpu_smollm2.yaml
    python scripts/table1.py --config configs/table1/cpu_smollm2.yaml --data longbench    (its .jsonl files lie there)

Every record is written as soon as it exists; the same command continues after the last one. Beside each MASW row stand
the lines it has to beat: its sinks and window without slots, and as many entries kept in three other ways.
"""

from __future__ import annotations

import sys

from benchkit.grid import grid_parser, read_grid
from benchkit.options import Bench, run
from benchkit.results import Column, Panel, Report, Row, series
from benchkit.trials import TargetResult, run_grid
from callbacks.predictions import REFERENCE
from callbacks.summary import bucket_label

NAME = "table1"
COLUMNS: tuple[Column, ...] = (
    ("beside", "block", ""),
    ("method", "method", ""),
    ("entries", "entries", ",d"),
    ("Tok./Iter", "tokens_per_iteration", ".2f"),
    ("tokens/s", "tokens_per_s", ",.2f"),
    ("speedup", "speedup", ".3f"),
    ("speedup end to end", "speedup_end_to_end", ".3f"),
    ("draft KV, MiB", "draft_kv_mib", ",.2f"),
    ("first token, s", "time_to_first_token_s", ",.2f"),
    ("end to end, s", "end_to_end_s", ",.2f"),
    ("ROUGE-L", "rougeL", ".3f"),
    ("identical", "same_text", ""),
)
CURVES = (
    ("Tokens per iteration", "tokens_per_iteration", "tokens per target forward"),
    ("Speedup of decoding", "speedup", "times autoregressive"),
    ("Draft memory", "draft_kv_mib", "MiB"),
)
NOTES = (
    "Prompts have exactly the asked length: a longer row is cut in the middle (both ends stay), a shorter one is "
    "filled there with other rows of its data set.",
    "Tok./Iter: emitted tokens per target forward, prefill's first token not counted. tokens/s and speedup: after the "
    "first token. End to end: with both prefills, one after the other; the target's is timed once per prompt and "
    "counted for every row.",
    "`S+W rx` is a memory of S sinks, W newest tokens and one slot per r tokens. Beside it: `S+W, no slots`, the same "
    "sinks and window alone; `sinks + window`, `strided` (every r-th older entry kept raw) and `SnapKV`, each with "
    "exactly as many entries of the prompt as the whole memory, and none of them trained.",
    "ROUGE-L: F-measure against the data set's references. Identical: token for token the text of autoregressive "
    "decoding; in reduced precision a difference is legitimate at a near tie only, its margin stands there.",
)


def body(bench: Bench) -> None:
    """Read the grid, run it, publish now and then."""
    chosen = bench.chosen
    grid = read_grid(chosen.config, chosen.data)
    report = Report(chosen.config.stem, grid.title, bench)
    report.how = "Ratios of sums over all prompts of a row"
    report.note(*NOTES, *([grid.remark] if grid.remark else []))
    run_grid(bench, grid, chosen.out / chosen.config.stem, lambda results: publish(report, results))


def publish(report: Report, results: list[TargetResult]) -> None:
    """Tables and curves of everything so far."""
    report.rows = [row for result in results for row in result.rows()]
    report.extra["methods"] = {result.target.name: result.settings for result in results}
    report.tables = []
    for result in results:
        for prefix in sorted(result.target.prefixes):
            rows = [r for r in report.rows if (r["target"], r["prefix"]) == (result.target.name, prefix)]
            if rows:
                title = f"{result.target.name}, {bucket_label(prefix)} ({prefix:,} tokens, {prompts(rows)})"
                report.tables.append((title, COLUMNS, rows))
    report.panels = []
    for model in dict.fromkeys(row["model"] for row in report.rows):
        drawn = [r for r in once(report.rows) if r["model"] == model and r["method"] != REFERENCE]
        name = next(r["target"] for r in drawn or report.rows if r["model"] == model)
        for title, key, unit in CURVES:
            lines = series(drawn, "method", "prefix", key)
            baseline = 1.0 if key == "speedup" else None
            report.panels.append(Panel(f"{title}, {name}", "prompt tokens", unit, lines, baseline=baseline))
    report.save()


def prompts(rows: list[Row]) -> str:
    """How many prompts stand behind rows; less than the most where a run is not finished."""
    counts = sorted({row["prompts"] for row in rows})
    many = f"{counts[-1]} prompt" + ("s" if counts[-1] != 1 else "")
    return many if len(counts) == 1 else f"unfinished: {counts[0]} to {many}"


def once(rows: list[Row]) -> list[Row]:
    """Each row once, though it may stand in several blocks."""
    return list({(r["target"], r["prefix"], r["method"]): r for r in reversed(rows)}.values())[::-1]


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    return run(NAME, grid_parser(__doc__, NAME), body, arguments)


if __name__ == "__main__":
    sys.exit(main())
