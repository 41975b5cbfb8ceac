"""What `torch.compile` brings to a draft step and to a verification, and how long compiling takes.

    python scripts/bench_compile.py --prefixes 1K,8K --dtype float32,bfloat16

Steps of the same runners, eager and compiled, in blocks that follow one another; attention and cache are the same.
"""

from __future__ import annotations

import sys
import time

from benchkit.caches import full_runner, memory_runner, our_steps, verification
from benchkit.compiled import compiled_backbone
from benchkit.models import Loaded
from benchkit.options import Bench, count, parser, run
from benchkit.results import Column, Panel, Report, Row, series
from benchkit.timing import interleaved

NAME = "bench_compile"
COLUMNS: tuple[Column, ...] = (
    ("model", "model", ""),
    ("dtype", "dtype", ""),
    ("prefix", "prefix", ",d"),
    ("forward", "forward", ""),
    ("way", "way", ""),
    ("ms", "median_ms", ",.1f"),
    ("min", "min_ms", ",.1f"),
    ("max", "max_ms", ",.1f"),
    ("÷ eager", "over_eager", ".3f"),
    ("compiling, s", "compile_s", ".1f"),
    ("forwards until it pays", "pays_after", ",.0f"),
)


def body(bench: Bench) -> None:
    """All models and prefixes."""
    chosen = bench.chosen
    width = chosen.draft_tokens + 1
    report = Report(NAME, "torch.compile", bench)
    report.note(
        "One graph of all layers per number of rows, shapes fixed; attention and cache update are an opaque operator "
        "in it. Frozen: weights are constants of the graph and stored once more as its kernels like them.",
        f"draft: one token through a memory of 4x raw entries; verification: {width} tokens on the full cache.",
        "Compiling: the first forward of that graph. It is paid per number of rows, and again in every process unless "
        "the compiler's cache on disk has it; so compiling is not an option of the engine.",
    )

    def measure(dtype: str, draft: Loaded, target: Loaded) -> None:
        report.note(*draft.notes)
        for n in chosen.prefixes:
            runner = memory_runner(draft.model, bench.layout(chosen.ratios[0]), n)
            cases = {
                "draft, 1 token": our_steps(runner, 1),
                f"verification, {width} tokens": verification(full_runner(draft.model, n), width),
            }
            eager = interleaved(cases, chosen.repeats, bench.device)
            found = {("eager", name): timing for name, timing in eager.items()}
            seconds: dict[tuple[str, str], float] = {}
            for way, freezing in (("compiled", False), ("compiled, frozen", True)):
                with compiled_backbone(draft.model, freezing, chosen.backend):
                    for name, case in cases.items():
                        start = time.perf_counter()
                        case()
                        seconds[way, name] = time.perf_counter() - start
                        bench.say(f"{dtype}, {n} tokens, {name}, {way}: {seconds[way, name]:.1f} s to compile")
                    found |= {(way, k): t for k, t in interleaved(cases, chosen.repeats, bench.device).items()}
            for (way, name), timing in found.items():
                saved = eager[name].median - timing.median
                row: Row = {"model": draft.name, "dtype": dtype, "prefix": n, "forward": name, "way": way}
                row |= {**timing.record(), "over_eager": timing.median / eager[name].median}
                if way != "eager":
                    row["compile_s"] = seconds[way, name]
                    row["pays_after"] = seconds[way, name] / saved if saved > 0 else None
                report.rows.append(row)
            publish(report)

    bench.each(max(chosen.prefixes), measure)


def publish(report: Report) -> None:
    """Tables and plots of the rows so far."""
    report.tables = [("", COLUMNS, report.rows)]
    rows = [r | {"label": f"{r['dtype']}: {r['forward']}, {r['way']}"} for r in report.rows]
    report.panels = [Panel("Forward", "prefix, tokens", "ms", series(rows, "label", "prefix", "median_ms"))]
    report.save()


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    made = parser(__doc__, NAME, "1K,8K", 15)
    made.add_argument("--draft-tokens", type=count, default=5, help="K, default 5")
    made.add_argument("--backend", default="inductor", help="of torch.compile, default inductor (needs a C++ compiler)")
    return run(NAME, made, body, arguments)


if __name__ == "__main__":
    sys.exit(main())
