"""Time decoding steps by prefix (Fig. 3b) and verification by width, and hold equation (1) against whole decodes.

    python scripts/bench_decode.py --prefixes 1K,8K,32K --dtype float32,bfloat16
    python scripts/bench_decode.py --device cuda --dtype bfloat16 --shapes llama-3.2-3b --target llama-3.1-8b

Caches are filled with random keys and values, so no long prompt is read. Fits equation (3)'s line t(n) = a + b n.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchkit.caches import full_runner, verification
from benchkit.decode import FULL, STOCK, TARGET, Decodes, StepCases, draft_policies, steps_for
from benchkit.models import Loaded
from benchkit.options import Bench, count, counts, parser, run
from benchkit.results import Column, Line, Panel, Report, Row, series
from benchkit.speculate import predicted_speedup, predicted_with_verification
from benchkit.timing import Timing, fit_line, interleaved
from masw_lightning import MemoryDraft

NAME = "bench_decode"
HEAD: tuple[Column, ...] = (("model", "model", ""), ("target", "target", ""), ("dtype", "dtype", ""))
AT: tuple[Column, ...] = (*HEAD, ("prefix", "prefix", ",d"))
MS: tuple[Column, ...] = (("ms", "median_ms", ",.2f"), ("min", "min_ms", ",.2f"), ("max", "max_ms", ",.2f"))
STEPS = (*AT, ("method", "method", ""), *MS, ("t_d ÷ t_t", "over_target", ".3f"), ("KV ÷ full", "kv_over_full", ".3f"))
LINES = (
    *HEAD,
    ("method", "method", ""),
    ("a, ms", "intercept_ms", ",.3f"),
    ("b, ms per 1K tokens", "slope_ms_per_1k", ",.4f"),
    ("R²", "r2", ".3f"),
    ("longest ÷ shortest", "growth", ".2f"),
)
WIDTHS = (*AT, ("tokens", "width", "d"), *MS, ("÷ 1 token", "over_one", ".2f"))
DECODES = (
    *AT,
    ("method", "method", ""),
    ("Tok./Iter", "emitted", ".2f"),
    ("speedup, measured", "speedup", ".3f"),
    ("equation (1)", "predicted", ".3f"),
    ("with measured verification", "predicted_verify", ".3f"),
    ("overhead", "overhead", ".1%"),
    ("rollback", "rollback", ".2%"),
)


def body(bench: Bench) -> None:
    """All models, prefix by prefix."""
    chosen = bench.chosen
    report = Report(NAME, "Decoding by prefix", bench)
    steps = steps_for(chosen.ratios)
    report.note(
        f"A step reads one token through the whole model and computes its logits; timed in runs of {steps} tokens, in "
        "which memories write their slots. Caches hold random keys and values; t_t is the target's step on our cache.",
        "Speedups: decoding only, without prefill. Acceptance is set, not learned: a scripted draft pays for every "
        "real step and proposes the target's own text up to the planned length.",
    )

    def measure(dtype: str, draft: Loaded, target: Loaded) -> None:
        report.note(*draft.notes, *target.notes)
        memories = bench.memories(draft)
        for prefix in chosen.prefixes:
            about: Row = {"model": draft.name, "target": target.name, "dtype": dtype, "prefix": prefix}
            bench.say(f"{draft.name}, {dtype}, {prefix} tokens: steps")
            steps_here = step_rows(bench, draft, target, memories, about)
            bench.say(f"{draft.name}, {dtype}, {prefix} tokens: verification")
            widths = width_rows(bench, target, about)
            report.rows += [*steps_here, *widths]
            if prefix in (chosen.hold or [max(chosen.prefixes)]):
                bench.say(f"{draft.name}, {dtype}, {prefix} tokens: whole decodes")
                report.rows += decode_rows(bench, draft, target, memories, about, steps_here, widths)
            publish(report)
        for memory in memories.values():
            memory.detach()

    bench.each(max(chosen.prefixes), measure)
    for row in report.extra.get("lines", []):
        line = f"t(n) = {row['intercept_ms']:.2f} ms + {row['slope_ms_per_1k']:.3f} ms per 1K tokens"
        print(f"{row['model']} {row['dtype']} {row['method']}: {line}")


def step_rows(bench: Bench, draft: Loaded, target: Loaded, memories: dict[str, MemoryDraft], about: Row) -> list[Row]:
    """Step latency of every method."""
    cases = StepCases(about["prefix"], steps_for(bench.chosen.ratios))
    cases.full(TARGET, target.model)
    cases.stock(STOCK, target.model)
    for name, (_, layout) in draft_policies(draft.model, memories, bench.chosen.swa).items():
        if name == FULL:
            cases.full(name, draft.model)
        else:
            cases.draft(name, memories.get(name, draft.model), layout)
    times, whole = cases.measure(bench), cases.kv_bytes[FULL]
    return [
        about
        | {"kind": "step", "method": name, **timing.record(), "over_target": timing.median / times[TARGET].median}
        | ({"kv_bytes": cases.kv_bytes[name]} if name in cases.kv_bytes else {})
        | ({"kv_over_full": cases.kv_bytes[name] / whole} if name in cases.kv_bytes and name != TARGET else {})
        for name, timing in times.items()
    ]


def width_rows(bench: Bench, target: Loaded, about: Row) -> list[Row]:
    """One target forward of 1 … widest tokens."""
    runner = full_runner(target.model, about["prefix"])
    widths = sorted({1, bench.chosen.draft_tokens + 1, *range(1, bench.chosen.widest + 1)})
    cases = {str(width): verification(runner, width) for width in widths}
    times = interleaved(cases, bench.chosen.repeats, bench.device, say=bench.say)
    one: Timing = times["1"]
    return [
        about | {"kind": "width", "width": int(w), **t.record(), "over_one": t.median / one.median}
        for w, t in times.items()
    ]


def decode_rows(
    bench: Bench,
    draft: Loaded,
    target: Loaded,
    memories: dict[str, MemoryDraft],
    about: Row,
    steps: list[Row],
    widths: list[Row],
) -> list[Row]:
    """Measured speedup of whole decodes at given acceptances beside what equation (1) predicts from the steps."""
    chosen, k = bench.chosen, bench.chosen.draft_tokens
    decodes = Decodes(target.model, about["prefix"], chosen.new_tokens, k, bench)
    t = {row["method"]: row["median_ms"] for row in steps}
    verify = next(row["median_ms"] for row in widths if row["width"] == k + 1)
    policies = {name: policy for name, (policy, _) in draft_policies(draft.model, memories, chosen.swa).items()}
    rows = []
    for accepted in chosen.acceptance:
        found = decodes.compare(policies, accepted, max(1, chosen.repeats // 3))
        plain = statistics.median(s.tokens_per_s for s in found.pop(""))
        for name, shares in found.items():
            emitted = decodes.emitted[name]
            rate = statistics.median(s.tokens_per_s for s in shares)
            rows.append(
                about
                | {"kind": "decode", "method": name, "emitted": emitted, "k": k}
                | {"tokens_per_s": rate, "autoregressive_tokens_per_s": plain, "speedup": rate / plain}
                | {"predicted": predicted_speedup(emitted, k, t[name], t[TARGET])}
                | {"predicted_verify": predicted_with_verification(emitted, k, t[name], t[TARGET], verify)}
                | {"overhead": statistics.median(s.overhead for s in shares)}
                | {"rollback": statistics.median(s.rollback_share for s in shares)}
            )
    return rows


def line_rows(steps: list[Row]) -> list[Row]:
    """Equation (3)'s line per model and method, where two prefixes or more were measured."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in steps:
        groups.setdefault((row["model"], row["target"], row["dtype"], row["method"]), []).append(row)
    rows = []
    for (model, target, dtype, method), found in groups.items():
        points = sorted((float(row["prefix"]), float(row["median_ms"])) for row in found)
        if len({x for x, _ in points}) < 2:
            continue
        a, b, r2 = fit_line(points)
        growth = points[-1][1] / points[0][1]
        names = {"model": model, "target": target, "dtype": dtype, "method": method, "kind": "line"}
        rows.append(names | {"intercept_ms": a, "slope_ms_per_1k": 1024 * b, "r2": r2, "growth": growth})
    return rows


def publish(report: Report) -> None:
    """Tables and plots of the rows so far."""
    kinds: dict[str, list[Row]] = {kind: [] for kind in ("step", "width", "decode")}
    for row in report.rows:
        kinds[row["kind"]].append(row)
    lines = line_rows(kinds["step"])
    report.extra["lines"] = lines
    report.tables = [
        ("One token", STEPS, kinds["step"]),
        ("t(n) = a + b n (equation 3)", LINES, lines),
        ("Verification by width", WIDTHS, kinds["width"]),
        ("Whole decodes and equation (1)", DECODES, kinds["decode"]),
    ]
    for row in report.rows:
        row["label"] = f"{row['model']} {row['dtype']}: {row.get('method', row['prefix'])}"
    predicted = [(row["predicted"], row["speedup"]) for row in kinds["decode"]]
    report.panels = [
        Panel("Step latency", "prefix", "ms", series(kinds["step"], "label", "prefix", "median_ms"), log_x=False),
        Panel("Verification", "tokens", "ms", series(kinds["width"], "label", "width", "median_ms"), log_x=False),
        Panel(
            "Equation (1): predicted and measured speedup",
            "predicted",
            "measured",
            [Line("decodes", predicted, "o"), Line("equal", [(0.0, 0.0), *[(x, x) for x, _ in predicted]], "-")],
            log_x=False,
        ),
    ]
    report.save()


def floats(text: str) -> list[float]:
    """Several numbers, separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    made = parser(__doc__, NAME, "1K,2K,4K,8K,16K,32K", 9)
    more = made.add_argument_group("decoding")
    more.add_argument("--draft-tokens", type=count, default=5, help="K, default 5")
    more.add_argument("--swa", type=count, default=1024, help="window of the sliding-window draft, default 1024")
    more.add_argument("--widest", type=count, default=9, help="most tokens verified at once, default 9")
    more.add_argument("--acceptance", type=floats, default=[2.0, 3.0, 4.0, 5.0], help="accepted tokens per iteration")
    more.add_argument("--new-tokens", type=count, default=61, help="of a whole decode, default 61")
    more.add_argument("--hold", type=counts, help="prefixes of whole decodes, default the longest")
    return run(NAME, made, body, arguments)


if __name__ == "__main__":
    sys.exit(main())
