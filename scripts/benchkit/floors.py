"""The figures that are held to a floor, how each is measured, and what a verdict says. A function per group of rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from benchkit.caches import full_runner, memory_runner, verification
from benchkit.decode import FULL, STOCK, Decodes, StepCases, per_token, steps_for
from benchkit.models import random_ids
from benchkit.options import Bench
from benchkit.prefill import PLAIN, plain, remembered
from benchkit.results import Row
from benchkit.speculate import assisted_tokens_per_s
from benchkit.timing import Case, Timing, interleaved
from benchkit.training import MEMORY, measure_training
from benchkit.training import PLAIN as PLAIN_STEP
from masw_lightning import FullKVDraft, MemoryDraft, MemorySlotDraft
from masw_lightning.drafts.base import DraftPolicy

ACCEPTED = 3.0  # draft tokens per iteration of the decode whose shares are reported: some are taken back every time


@dataclass(frozen=True)
class Floor:
    """A bound on a figure: `most` or `least`, or neither where a figure is shown beside others."""

    most: float | None = None
    least: float | None = None

    def words(self, form: str) -> str:
        """As the table has it."""
        if self.most is not None:
            return f"≤ {self.most:{form}}"
        return f"≥ {self.least:{form}}" if self.least is not None else "–"

    def verdict(self, value: float) -> str:
        """Reached or missed."""
        if self.most is None and self.least is None:
            return "shown"
        good = (self.most is None or value <= self.most) and (self.least is None or value >= self.least)
        return "reached" if good else "missed"


@dataclass(frozen=True)
class Lengths:
    """The prefixes of the table: 1K, 8K and 32K."""

    short: int
    middle: int
    long: int


@dataclass
class Subject:
    """What is measured: one model in one dtype, its memories by row name."""

    bench: Bench
    model: PreTrainedModel
    dtype: str
    memories: dict[str, MemoryDraft]
    lengths: Lengths

    @property
    def half(self) -> bool:
        """Whether the weights are 16 bits wide."""
        return self.dtype != "float32"


def row(figure: str, value: float, floor: Floor, behind: str, form: str = ".3f") -> Row:
    """One line of the table."""
    return {
        "figure": figure,
        "floor": floor.words("g" if form == ".3f" else form),
        "value": value,
        "measured": format(value, form),
        "verdict": floor.verdict(value),
        "behind": behind,
    }


def ms(timing: Timing) -> str:
    """A median with its extremes, in milliseconds."""
    low, high = 1e3 * min(timing.seconds), 1e3 * max(timing.seconds)
    return f"{1e3 * timing.median:,.1f} ms ({low:,.1f}–{high:,.1f})"


def label(n: int) -> str:
    """8K, 32K, or the number."""
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def prefill(s: Subject) -> list[Row]:
    """Draft prefill with slots ÷ plain causal prefill, and the token writer ÷ the slot writer."""
    floors = {
        (4, s.lengths.middle): 1.0,
        (4, s.lengths.long): 0.65,
        (8, s.lengths.middle): 0.8,
        (8, s.lengths.long): 0.45,
    }
    rows = []
    for n in (s.lengths.middle, s.lengths.long):
        s.bench.say(f"prefill of {n} tokens")
        several = []
        for tokens in (n, min(n, 1024)):
            ids = random_ids(s.model, tokens, s.bench.chosen.seed)
            cases: dict[str, Case] = {PLAIN: plain(s.model, ids)}
            several.append(cases | {name: remembered(memory, None, ids) for name, memory in s.memories.items()})
        times = interleaved(several[0], s.bench.chosen.long_repeats, s.bench.device, several[1], s.bench.say)
        for ratio in s.bench.chosen.ratios:
            slot, token = (times.get(f"masw {ratio}x {writer}") for writer in ("slot", "token"))
            if slot:
                floor = Floor(most=floors.get((ratio, n)))
                name = f"draft prefill, slot writer r={ratio} ÷ plain causal prefill, {label(n)}"
                behind = f"{ms(slot)} ÷ {ms(times[PLAIN])}"
                rows.append(row(name, slot.median / times[PLAIN].median, floor, behind))
            if token:
                name = f"draft prefill, token writer r={ratio} ÷ plain causal prefill, {label(n)}"
                rows.append(row(name, token.median / times[PLAIN].median, Floor(), f"{ms(token)} ÷ {ms(times[PLAIN])}"))
            if slot and token:
                name = f"draft prefill, token writer ÷ slot writer, r={ratio}, {label(n)}"
                rows.append(row(name, token.median / slot.median, Floor(most=1.0), f"{ms(token)} ÷ {ms(slot)}"))
    return rows


def steps(s: Subject) -> list[Row]:
    """Draft step at the long prefix ÷ at the short one, the full-KV draft's beside it."""
    s.bench.say("draft steps")
    run = steps_for(s.bench.chosen.ratios)
    cases: dict[str, Case] = {}
    for n in (s.lengths.short, s.lengths.long):
        here = StepCases(n, run)
        here.full(f"{FULL}@{n}", s.model)
        for name, memory in s.memories.items():
            here.draft(f"{name}@{n}", memory, None)
        cases |= here.cases
    times = per_token(cases, run, s.bench)
    rows = []
    for name in (*s.memories, FULL):
        short, long = times[f"{name}@{s.lengths.short}"], times[f"{name}@{s.lengths.long}"]
        most = {"masw 4x": 1.7, "masw 8x": 1.4}.get(name.rpartition(" ")[0])
        title = f"draft step, {name}, {label(s.lengths.long)} ÷ {label(s.lengths.short)}"
        rows.append(row(title, long.median / short.median, Floor(most=most), f"{ms(long)} ÷ {ms(short)}"))
    return rows


def decode(s: Subject) -> list[Row]:
    """Autoregressive tokens/s, ours ÷ Transformers with its dynamic cache."""
    rows = []
    for n, least in ((s.lengths.middle, 3.0 if s.half else 1.5), (s.lengths.long, 6.0 if s.half else 2.0)):
        s.bench.say(f"autoregressive decoding at {n} tokens")
        here = StepCases(n, 8)
        here.full(FULL, s.model)
        here.stock(STOCK, s.model)
        times = here.measure(s.bench)
        title = f"autoregressive decode, tokens/s, ours ÷ Transformers, {label(n)}"
        behind = f"{ms(times[STOCK])} ÷ {ms(times[FULL])} per token"
        rows.append(row(title, times[STOCK].median / times[FULL].median, Floor(least=least), behind))
    return rows


def verify(s: Subject) -> list[Row]:
    """Verification of K + 1 tokens ÷ one token at the long prefix."""
    s.bench.say("verification")
    runner, width = full_runner(s.model, s.lengths.long), s.bench.chosen.draft_tokens + 1
    cases = {"1": verification(runner, 1), "K": verification(runner, width)}
    times = interleaved(cases, s.bench.chosen.repeats, s.bench.device)
    title = f"verification of {width} tokens ÷ 1 token, {label(s.lengths.long)}"
    value = times["K"].median / times["1"].median
    return [row(title, value, Floor(most=1.75), f"{ms(times['K'])} ÷ {ms(times['1'])}")]


def speculate(s: Subject) -> list[Row]:
    """Full-KV speculative decoding against Transformers' assisted generation, and where a decode's time goes."""
    s.bench.say(f"speculative decoding at {s.lengths.middle} tokens")
    chosen, n, k = s.bench.chosen, s.lengths.middle, s.bench.chosen.draft_tokens
    new = (k + 1) * chosen.rounds
    decodes = Decodes(s.model, n, new + 1, k, s.bench)
    ours, theirs, emitted = [], [], []
    assisted_tokens_per_s(s.model, s.model, random_ids(s.model, 64), k, 2 * (k + 1))  # first use
    for _ in range(chosen.long_repeats):
        rate, per_round = assisted_tokens_per_s(s.model, s.model, decodes.ids, k, new)
        theirs.append(rate)
        emitted.append(per_round)
        found = decodes.compare({FULL: FullKVDraft(s.model)}, float(k), 1)
        ours.append(found[FULL][0].tokens_per_s)
    a, b = statistics.median(ours), statistics.median(theirs)
    behind = (
        f"{a:,.2f} ({decodes.emitted[FULL]:.2f} Tok./Iter) ÷ {b:,.2f} tokens/s ({statistics.median(emitted):.2f}), "
        "draft = target"
    )
    title = f"full-KV speculative decoding, tokens/s, ours ÷ Transformers assisted, {label(n)}"
    rows = [row(title, a / b, Floor(least=1.5), behind)]
    policies: dict[str, DraftPolicy] = {FULL: FullKVDraft(s.model)}
    policies |= {name: MemorySlotDraft(memory) for name, memory in s.memories.items()}
    for name, shares in decodes.compare(policies, ACCEPTED, chosen.long_repeats).items():
        if not name:
            continue
        over = statistics.median(x.overhead for x in shares)
        back = statistics.median(x.rollback_share for x in shares)
        wall = statistics.median(x.decode for x in shares)
        where = f"of {1e3 * wall:,.0f} ms, {decodes.emitted[name]:.2f} Tok./Iter, {label(n)}"
        rows.append(row(f"wall time − draft − verify, {name}", over, Floor(most=0.05), where, ".2%"))
        rows.append(row(f"rollback, share of an iteration, {name}", back, Floor(most=0.01), where, ".2%"))
    return rows


def kv(s: Subject) -> list[Row]:
    """Bytes allocated for a draft's keys and values ÷ a full cache's, at the long prefix."""
    n = s.lengths.long
    whole = full_runner(s.model, n).nbytes
    rows = []
    for name, memory in s.memories.items():
        held = memory_runner(memory, None, n).nbytes
        most = {"masw 4x": 0.262, "masw 8x": 0.135}.get(name.rpartition(" ")[0])
        behind = f"{held / 2**20:,.2f} ÷ {whole / 2**20:,.2f} MiB, {label(n)}"
        rows.append(row(f"draft KV storage ÷ full KV, {name}", held / whole, Floor(most=most), behind))
    return rows


def training(s: Subject) -> list[Row]:
    """Tokens/s and peak memory of a training step with memory ÷ plain causal with as many trainable weights."""
    rows, chosen, n = [], s.bench.chosen, s.lengths.middle
    for memory in s.memories.values():
        if memory.layout.ratio != min(chosen.ratios):
            continue
        ratio, writer = memory.layout.ratio, memory.writer
        s.bench.say(f"training step of {n} tokens, {writer} writer")
        found = measure_training(
            s.bench, s.model, s.bench.layout(ratio), writer, n, chosen.long_repeats, chosen.checkpointing
        )
        which = f"{writer} writer r={ratio}, {label(n)}"
        behind = f"{ms(found.times[PLAIN_STEP])} ÷ {ms(found.times[MEMORY])} per step"
        rows.append(row(f"training, tokens/s ÷ plain causal, {which}", found.speed, Floor(least=0.7), behind))
        peaks = f"{found.peaks[MEMORY] / 2**20:,.0f} ÷ {found.peaks[PLAIN_STEP] / 2**20:,.0f} MiB"
        rows.append(row(f"training, peak memory ÷ plain causal, {which}", found.memory, Floor(most=1.5), peaks))
    return rows


GROUPS: dict[str, Callable[[Subject], list[Row]]] = {
    "kv": kv,
    "steps": steps,
    "decode": decode,
    "verify": verify,
    "speculate": speculate,
    "prefill": prefill,
    "training": training,
}
