"""Time a training step through the memory against a plain causal one with as many trainable weights, and their peaks.

    python scripts/bench_training.py --prefixes 8K --ratios 4

Both steps train the same number of key and value weights of one frozen backbone on one sequence per step.
"""

from __future__ import annotations

import argparse
import sys

from benchkit.models import Loaded
from benchkit.options import Bench, parser, run
from benchkit.results import Column, Panel, Report, Row, series
from benchkit.timing import peak_source
from benchkit.training import MEMORY, PLAIN, measure_training

NAME = "bench_training"
COLUMNS: tuple[Column, ...] = (
    ("model", "model", ""),
    ("dtype", "dtype", ""),
    ("tokens", "prefix", ",d"),
    ("step", "method", ""),
    ("trainable weights", "weights", ",d"),
    ("tokens/s", "tokens_per_s", ",.1f"),
    ("ms", "median_ms", ",.1f"),
    ("min", "min_ms", ",.1f"),
    ("max", "max_ms", ",.1f"),
    ("tokens/s ÷ plain", "over_plain", ".3f"),
    ("peak, MiB", "peak_mib", ",.1f"),
    ("peak ÷ plain", "peak_over_plain", ".3f"),
)


def body(bench: Bench) -> None:
    """All models, lengths, writers and ratios."""
    chosen = bench.chosen
    report = Report(NAME, "Training step", bench)
    report.note(
        "plain causal: Transformers' SDPA, the backbone's own key and value projections trained. Both: one sequence, "
        f"chunked loss, AdamW, activation checkpointing {'on' if chosen.checkpointing else 'off'}. A memory's weights "
        "are float32 whatever the backbone is; the slot writer's embedding is trained as well (one vector).",
        f"Peak: {peak_source(bench.device)}; gradients and optimizer state are in it.",
    )

    def measure(dtype: str, draft: Loaded, target: Loaded) -> None:
        report.note(*draft.notes)
        for n in chosen.prefixes:
            for writer in chosen.writers:
                for ratio in chosen.ratios:
                    bench.say(f"{draft.name}, {dtype}, {n} tokens, {ratio}x {writer}")
                    found = measure_training(
                        bench, draft.model, bench.layout(ratio), writer, n, chosen.repeats, chosen.checkpointing
                    )
                    for key, timing in found.times.items():
                        row: Row = {"model": draft.name, "dtype": dtype, "prefix": n, "writer": writer, "ratio": ratio}
                        row |= {"method": key, "weights": found.weights[key], **timing.record()}
                        row |= {"tokens_per_s": n / timing.median, "peak_mib": found.peaks[key] / 2**20}
                        if key == MEMORY:
                            row["method"] = f"masw {ratio}x {writer}"
                            row |= {"over_plain": found.speed, "peak_over_plain": found.memory}
                        else:
                            row["method"] = f"{PLAIN} (beside {ratio}x {writer})"
                        report.rows.append(row)
                    publish(report)

    bench.each(max(chosen.prefixes), measure)


def publish(report: Report) -> None:
    """Tables and plots of the rows so far."""
    report.tables = [("", COLUMNS, report.rows)]
    rows = [r | {"label": f"{r['model']} {r['dtype']}: {r['method']}"} for r in report.rows]
    report.panels = [
        Panel("Training", "tokens per sequence", "tokens/s", series(rows, "label", "prefix", "tokens_per_s")),
        Panel("Peak memory", "tokens per sequence", "MiB", series(rows, "label", "prefix", "peak_mib")),
    ]
    report.save()


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    made = parser(__doc__, NAME, "8K", 2)
    made.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep only each layer's input for the backward pass, in both (default)",
    )
    return run(NAME, made, body, arguments)


if __name__ == "__main__":
    sys.exit(main())
