"""What reading a prompt costs: plain Transformers, and our target and drafts. Logits of the last position in all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchkit.caches import ROOM
from benchkit.timing import Case
from masw_lightning import MemoryDraft, MemoryLayout
from masw_lightning.attention.interface import output_logits
from masw_lightning.drafts.runner import FullRunner, MemoryRunner

PLAIN, WINDOW, TARGET = "plain (Transformers)", "window", "target"
PLAIN_NOTE = (
    "plain is `model(input_ids, use_cache=False, logits_to_keep=1)` of the same backbone through Transformers' SDPA: "
    "causal, no cache kept. All others allocate and fill their caches and compute the last position's logits."
)


def plain(model: PreTrainedModel, ids: Tensor) -> Case:
    """Transformers' own forward, keeping nothing."""
    return lambda: model(ids, use_cache=False, logits_to_keep=1).logits


def full(model: PreTrainedModel, ids: Tensor) -> Case:
    """Into our full cache."""

    def run() -> tuple[object, Tensor]:
        runner = FullRunner(model, 1, ids.shape[1] + ROOM)
        return runner, output_logits(model, runner.prefill(ids))

    return run


def remembered(source: MemoryDraft | PreTrainedModel, layout: MemoryLayout | None, ids: Tensor) -> Case:
    """Into a compact memory (or, with a `layout` without slots, a window)."""

    def run() -> tuple[object, Tensor]:
        runner = MemoryRunner(source, layout, 1, ids.shape[1] + ROOM)
        return runner, output_logits(runner.model, runner.prefill(ids))

    return run


def prefill_cases(
    draft: PreTrainedModel, target: PreTrainedModel, memories: dict[str, MemoryDraft], window: MemoryLayout, ids: Tensor
) -> dict[str, Case]:
    """One case per row of Table 2, by name."""
    cases: dict[str, Case] = {PLAIN: plain(draft, ids)}
    cases |= {name: remembered(memory, None, ids) for name, memory in memories.items()}
    cases[WINDOW] = remembered(draft, window.without_slots(), ids)
    cases[TARGET] = full(target, ids)
    return cases


def concurrent(target: Case, draft: Case) -> Callable[[], None]:
    """Both at once, on a CUDA stream each."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def run() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        held = []
        for stream, case in zip(streams, (target, draft)):
            with torch.cuda.stream(stream):
                held.append(case())
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()  # before what was held is freed for other streams

    return run
