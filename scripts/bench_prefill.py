"""Time the prefill of plain models, of drafts that write a memory and of the target, by prefix (the paper's Table 2).

    python scripts/bench_prefill.py --prefixes 8K,32K --dtype float32,bfloat16
    python scripts/bench_prefill.py --device cuda --dtype bfloat16 --shapes llama-3.2-3b --target llama-3.1-8b

The time to first token of target and draft together is measured on two streams on CUDA; elsewhere it is their sum.
"""

from __future__ import annotations

import sys

from benchkit.models import Loaded, random_ids
from benchkit.options import Bench, parser, run
from benchkit.prefill import PLAIN, PLAIN_NOTE, TARGET, concurrent, prefill_cases
from benchkit.results import Column, Panel, Report, Row, series
from benchkit.timing import Timing, interleaved

NAME = "bench_prefill"
WARM = 1024  # tokens of the untimed round
COLUMNS: tuple[Column, ...] = (
    ("model", "model", ""),
    ("dtype", "dtype", ""),
    ("prefix", "prefix", ",d"),
    ("method", "method", ""),
    ("ms", "median_ms", ",.1f"),
    ("min", "min_ms", ",.1f"),
    ("max", "max_ms", ",.1f"),
    ("÷ plain", "over_plain", ".3f"),
    ("first token with target, ms", "first_token_ms", ",.1f"),
)


def rows_of(times: dict[str, Timing], together: dict[str, Timing], about: Row) -> list[Row]:
    """Table rows of one prefix: the ratio to plain, and the time to first token beside the target."""
    rows = []
    for name, timing in times.items():
        row = about | {"method": name, **timing.record(), "over_plain": timing.median / times[PLAIN].median}
        if name == TARGET:
            row["first_token_ms"] = row["median_ms"]
        elif name != PLAIN:
            both = together[name].median if name in together else timing.median + times[TARGET].median
            row["first_token_ms"] = 1e3 * both
        rows.append(row)
    return rows


def body(bench: Bench) -> None:
    """All models, prefix by prefix."""
    chosen = bench.chosen
    report = Report(NAME, "Prefill by prefix", bench)
    report.note(PLAIN_NOTE)
    cuda = bench.device.type == "cuda"
    report.note(
        "First token: target and draft prefill on two CUDA streams, measured."
        if cuda
        else "First token: the sum of target and draft prefill (one device without streams)."
    )

    def measure(dtype: str, draft: Loaded, target: Loaded) -> None:
        report.note(*draft.notes, *target.notes)
        memories = bench.memories(draft)
        for prefix in chosen.prefixes:
            bench.say(f"{draft.name}, {dtype}, {prefix} tokens")
            several = []
            for n in (prefix, min(prefix, WARM)):
                ids = random_ids(draft.model, n, chosen.seed)
                several.append(prefill_cases(draft.model, target.model, memories, bench.layout(None), ids))
            cases, warm = several
            times = interleaved(cases, chosen.repeats, bench.device, warm, bench.say)
            together: dict[str, Timing] = {}
            if cuda:
                pairs = {name: concurrent(cases[TARGET], cases[name]) for name in cases if name not in (PLAIN, TARGET)}
                together = interleaved(pairs, chosen.repeats, bench.device)
            about: Row = {"model": draft.name, "target": target.name, "dtype": dtype, "prefix": prefix}
            report.rows += rows_of(times, together, about)
            publish(report)
        for memory in memories.values():
            memory.detach()

    bench.each(max(chosen.prefixes), measure)


def publish(report: Report) -> None:
    """Tables and plots of the rows so far."""
    report.tables = [("", COLUMNS, report.rows)]
    named = [row | {"label": f"{row['model']} {row['dtype']}: {row['method']}"} for row in report.rows]
    report.panels = [
        Panel("Prefill", "prompt tokens", "seconds", series(named, "label", "prefix", "median_ms", 1e-3), log_y=True),
        Panel("÷ plain causal prefill", "prompt tokens", "ratio", series(named, "label", "prefix", "over_plain"), True),
    ]
    report.panels[1].baseline = 1.0
    report.save()


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    return run(NAME, parser(__doc__, NAME, "8K,16K,24K,32K", 3), body, arguments)


if __name__ == "__main__":
    sys.exit(main())
