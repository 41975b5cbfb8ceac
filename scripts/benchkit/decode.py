"""What decoding costs once a prefix is read: steps of drafts and target, verification, whole speculative decodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from benchkit.caches import ROOM, FilledDraft, FilledTarget, full_runner, memory_runner, our_steps, transformers_steps
from benchkit.models import random_ids
from benchkit.options import Bench
from benchkit.speculate import ScriptedDraft, Shares, planned
from benchkit.timing import Case, Timing, interleaved
from masw_lightning import (
    Decoded,
    FullKVDraft,
    MemoryDraft,
    MemoryLayout,
    MemorySlotDraft,
    SlidingWindowDraft,
    generate,
)
from masw_lightning.drafts.base import DraftPolicy

FULL, TARGET, STOCK = "full KV", "target", "target, Transformers"


def steps_for(ratios: list[int]) -> int:
    """Tokens per timed run: enough that every memory writes its slots as often as it does over a long text."""
    return min(16, max([8, *ratios]))


@dataclass
class StepCases:
    """Cases of `steps` tokens each on caches that hold `prefix`, and the bytes their caches take."""

    prefix: int
    steps: int
    cases: dict[str, Case] = field(default_factory=dict)
    kv_bytes: dict[str, int] = field(default_factory=dict)

    def draft(self, name: str, source: MemoryDraft | PreTrainedModel, layout: MemoryLayout | None) -> None:
        """A memory, or with a `layout` a window."""
        runner = memory_runner(source, layout, self.prefix)
        self.cases[name], self.kv_bytes[name] = our_steps(runner, self.steps), runner.nbytes

    def full(self, name: str, model: PreTrainedModel) -> None:
        """A model on its full cache."""
        runner = full_runner(model, self.prefix)
        self.cases[name], self.kv_bytes[name] = our_steps(runner, self.steps), runner.nbytes

    def stock(self, name: str, model: PreTrainedModel) -> None:
        """The same model through Transformers and its dynamic cache."""
        self.cases[name] = transformers_steps(model, self.prefix, self.steps)

    def measure(self, bench: Bench) -> dict[str, Timing]:
        """Seconds per token."""
        return per_token(self.cases, self.steps, bench)


def per_token(cases: dict[str, Case], steps: int, bench: Bench) -> dict[str, Timing]:
    """Seconds per token of cases that run `steps` of them each."""
    times = interleaved(cases, bench.chosen.repeats, bench.device, say=bench.say)
    return {name: timing.scaled(1.0 / steps) for name, timing in times.items()}


def draft_policies(
    model: PreTrainedModel, memories: dict[str, MemoryDraft], swa: int
) -> dict[str, tuple[DraftPolicy, MemoryLayout | None]]:
    """The policy of every row that drafts, and the window's layout where it is one."""
    found: dict[str, tuple[DraftPolicy, MemoryLayout | None]] = {FULL: (FullKVDraft(model), None)}
    found[f"window {swa}"] = (SlidingWindowDraft(model, window=swa, sink=4), MemoryLayout(4, swa, None))
    return found | {name: (MemorySlotDraft(memory), None) for name, memory in memories.items()}


@dataclass
class Decodes:
    """Autoregressive and speculative decodes of one filled target, timed in turn."""

    target: PreTrainedModel
    prefix: int
    new_tokens: int
    k: int
    bench: Bench

    def __post_init__(self) -> None:
        room = max(ROOM, self.new_tokens + self.k)
        self.ids = random_ids(self.target, self.prefix, self.bench.chosen.seed)
        self.filled = FilledTarget(self.target, self.ids, room)
        self.text = self._decode(None).tokens[0]
        self.emitted: dict[str, float] = {}  # tokens per iteration of the last comparison

    def _decode(self, draft: DraftPolicy | None) -> Decoded:
        return generate(
            self.target,
            self.ids,
            draft=draft,
            num_draft_tokens=self.k,
            max_new_tokens=self.new_tokens,
            eos_token_id=[],
            prefix=self.filled,
        )

    def compare(self, policies: dict[str, DraftPolicy], accepted: float, repeats: int) -> dict[str, list[Shares]]:
        """Decodes with `accepted` draft tokens per iteration; the autoregressive ones under an empty name."""
        plan = planned(accepted, self.new_tokens, self.k)
        drafts: dict[str, DraftPolicy | None] = {"": None}
        drafts |= {name: ScriptedDraft(FilledDraft(policy), self.text, plan) for name, policy in policies.items()}
        found: dict[str, list[Shares]] = {name: [] for name in drafts}
        for repeat in range(repeats + 1):  # the first is a warm-up
            for name, draft in drafts.items():
                decoded = self._decode(draft)
                self.emitted[name] = decoded.tokens_per_iteration
                if repeat:
                    found[name].append(Shares.of(decoded))
        return found
