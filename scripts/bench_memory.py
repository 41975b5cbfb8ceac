"""Measure the extra peak memory of drafts and target by prefix, split into its parts, and step latency (Table 3).

    python scripts/bench_memory.py --prefixes 8K,32K --dtype bfloat16
    python scripts/bench_memory.py --phases decode          no long prompt is read: seconds instead of minutes

Extra: beyond the weights. The split: keys and values (bytes really allocated), masks and indices (tensors that a cache
or a prefill's plan holds beside them), logits (those computed), and buffers: what is left of the measured peak.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from benchkit.caches import dynamic_cache, full_runner, memory_runner, our_steps, tensor_bytes, transformers_steps
from benchkit.decode import FULL, TARGET, steps_for
from benchkit.models import Loaded, random_ids
from benchkit.options import Bench, count, names, parser, run
from benchkit.prefill import full, remembered
from benchkit.results import Column, Panel, Report, Row, series
from benchkit.timing import interleaved, peak_of, peak_source
from masw_lightning import MemoryDraft, MemoryLayout
from masw_lightning.attention.structured import make_plan
from masw_lightning.errors import UserError

NAME = "bench_memory"
STOCK = "full KV, Transformers"
WARM = 512  # tokens of an unmeasured round
COLUMNS: tuple[Column, ...] = (
    ("model", "model", ""),
    ("dtype", "dtype", ""),
    ("prefix", "prefix", ",d"),
    ("method", "method", ""),
    ("phase", "phase", ""),
    ("extra peak, MiB", "peak_mib", ",.2f"),
    ("KV", "kv_mib", ",.2f"),
    ("masks", "masks_mib", ",.2f"),
    ("logits", "logits_mib", ",.2f"),
    ("buffers", "buffers_mib", ",.2f"),
    ("step, ms", "step_ms", ",.2f"),
)


class Method:
    """One row: how it reads a prompt, how it stands after one, and how it steps."""

    def __init__(self, model: PreTrainedModel, memory: MemoryDraft | None, layout: MemoryLayout | None) -> None:
        self.model, self.memory, self.layout = model, memory, layout

    def prefill(self, n: int, seed: int) -> Callable[[], Any]:
        """Reads `n` tokens."""
        ids = random_ids(self.model, n, seed)
        if self.memory is None and self.layout is None:
            return full(self.model, ids)
        return remembered(self.memory or self.model, self.layout, ids)

    def filled(self, n: int) -> Any:
        """A runner that holds `n` tokens."""
        if self.memory is None and self.layout is None:
            return full_runner(self.model, n)
        return memory_runner(self.memory or self.model, self.layout, n)

    def plan_bytes(self, n: int) -> int:
        """Masks of a prefill."""
        layout = self.memory.layout if self.memory else self.layout or MemoryLayout(0, n, None)
        writer = self.memory.writer if self.memory else "slot"
        return tensor_bytes(make_plan(layout, writer, n, self.model.dtype, self.model.device))

    def decode(self, n: int, steps: int) -> Callable[[], Any]:
        """Takes a cache of `n` tokens and makes a few steps."""

        def case() -> Any:
            runner = self.filled(n)
            our_steps(runner, steps)()
            return (runner,)

        return case


class StockMethod(Method):
    """Transformers' own full cache."""

    def prefill(self, n: int, seed: int) -> Callable[[], Any]:
        """Reads `n` tokens; the last position's logits only."""
        ids = random_ids(self.model, n, seed)
        return lambda: (self.model(ids, use_cache=True, logits_to_keep=1),)

    def plan_bytes(self, n: int) -> int:
        """None: causal attention without a mask."""
        return 0

    def decode(self, n: int, steps: int) -> Callable[[], Any]:
        """See `Method`."""

        def case() -> Any:
            step = transformers_steps(self.model, n, steps)
            step()
            return (step,)

        return case


def body(bench: Bench) -> None:
    """All models, prefix by prefix."""
    chosen = bench.chosen
    if unknown := set(chosen.phases) - {"prefill", "decode"}:
        raise UserError(f"phase {unknown.pop()!r} is unknown: choose prefill, decode or both with a comma.")
    report = Report(NAME, "Extra peak memory by prefix", bench)
    report.note(
        f"Peak: {peak_source(bench.device)}. Extra: beyond weights.",
        "Prefill computes the logits of the last position alone; all positions' in float32 would take prefix x "
        "vocabulary x 4 bytes more.",
    )

    def measure(dtype: str, draft: Loaded, target: Loaded) -> None:
        report.note(*draft.notes, *target.notes)
        memories = bench.memories(draft)
        methods: dict[str, Method] = {TARGET: Method(target.model, None, None)}
        methods[STOCK] = StockMethod(draft.model, None, None)
        methods[FULL] = Method(draft.model, None, None)
        methods[f"window {chosen.swa}"] = Method(draft.model, None, MemoryLayout(4, chosen.swa, None))
        methods |= {name: Method(memory.model, memory, None) for name, memory in memories.items()}
        if target is draft:
            del methods[FULL]  # it is the target's row
        for method in methods.values():  # libraries allocate things of their own on first use
            for case in (method.prefill(WARM, 0), method.decode(WARM, 1)):
                case()
        for prefix in chosen.prefixes:
            latency = step_latency(bench, methods, prefix)
            for name, method in methods.items():
                for phase in chosen.phases:
                    bench.say(f"{draft.name}, {dtype}, {prefix} tokens: {name}, {phase}")
                    row = peak_row(bench, method, prefix, phase, steps_for(chosen.ratios))
                    about: Row = {"model": draft.name, "target": target.name, "dtype": dtype, "prefix": prefix}
                    report.rows.append(about | {"method": name, "phase": phase} | row | {"step_ms": latency[name]})
            publish(report)
        for memory in memories.values():
            memory.detach()

    bench.each(max(chosen.prefixes), measure)


def step_latency(bench: Bench, methods: dict[str, Method], prefix: int) -> dict[str, float]:
    """Milliseconds per token."""
    steps = steps_for(bench.chosen.ratios)
    cases = {
        name: transformers_steps(method.model, prefix, steps)
        if isinstance(method, StockMethod)
        else our_steps(method.filled(prefix), steps)
        for name, method in methods.items()
    }
    times = interleaved(cases, bench.chosen.repeats, bench.device, say=bench.say)
    return {name: 1e3 * timing.median / steps for name, timing in times.items()}


def peak_row(bench: Bench, method: Method, prefix: int, phase: str, steps: int) -> Row:
    """The peak of one phase and its parts, in MiB."""
    case = method.prefill(prefix, bench.chosen.seed) if phase == "prefill" else method.decode(prefix, steps)
    peak, kept = peak_of(case, bench.device)
    runner = kept[0]  # type: ignore[index]
    if isinstance(method, StockMethod):
        kv, masks = tensor_bytes(dynamic_cache(method.model, prefix)), 0
    else:
        kv = runner.nbytes
        masks = tensor_bytes(runner.cache, without=[t for pair in runner.cache.buffers for t in pair])
        if phase == "prefill":
            masks = max(masks, method.plan_bytes(prefix))
    logits = method.model.config.get_text_config().vocab_size * torch.finfo(method.model.dtype).bits // 8
    del kept, runner
    return split(peak, kv, masks, logits)


def split(peak: int, kv: int, masks: int, logits: int) -> Row:
    """Bytes as MiB; buffers are what the other parts leave of the peak (nothing, where they are within its noise)."""
    mib = {name: value / 2**20 for name, value in (("peak", peak), ("kv", kv), ("masks", masks), ("logits", logits))}
    mib["buffers"] = max(0.0, mib["peak"] - mib["kv"] - mib["masks"] - mib["logits"])
    return {f"{name}_mib": value for name, value in mib.items()}


def publish(report: Report) -> None:
    """Tables and plots of the rows so far."""
    report.tables = [("", COLUMNS, report.rows)]
    report.panels = []
    for phase in report.bench.chosen.phases:
        rows = [r | {"label": f"{r['model']} {r['dtype']}: {r['method']}"} for r in report.rows if r["phase"] == phase]
        lines = series(rows, "label", "prefix", "peak_mib")
        report.panels.append(Panel(f"Extra peak memory, {phase}", "prefix", "MiB", lines, log_y=True))
    report.save()


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    made = parser(__doc__, NAME, "8K,32K", 3)
    more = made.add_argument_group("memory")
    more.add_argument("--phases", type=names, default=["prefill", "decode"], help="prefill, decode or both (default)")
    more.add_argument("--swa", type=count, default=1024, help="window of the sliding-window draft, default 1024")
    return run(NAME, made, body, arguments)


if __name__ == "__main__":
    sys.exit(main())
