"""One training step with a memory beside one without, on the same backbone with as many trainable weights.

Plain: causal attention through Transformers' SDPA, the backbone's own key and value projections trained. Both use the
same chunked loss, AdamW and, where asked for, activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchkit.models import random_ids
from benchkit.options import Bench
from benchkit.timing import Case, Timing, interleaved, peak_of
from masw_lightning import attach_memory
from masw_lightning.attention.interface import attention_modules, output_logits
from masw_lightning.layout import MemoryLayout, Writer
from masw_lightning.modules.losses import next_token_loss
from masw_lightning.modules.modes import checkpoint_activations

PLAIN, MEMORY = "plain causal", "memory"
WARM = 512  # tokens of a first, unmeasured step


@dataclass(frozen=True)
class Trained:
    """What was found: seconds per step, peak bytes beyond the weights, trainable weights."""

    times: dict[str, Timing]
    peaks: dict[str, int]
    weights: dict[str, int]
    tokens: int

    @property
    def speed(self) -> float:
        """Tokens/s with memory ÷ plain."""
        return self.times[PLAIN].median / self.times[MEMORY].median

    @property
    def memory(self) -> float:
        """Peak memory with memory ÷ plain."""
        return self.peaks[MEMORY] / max(1, self.peaks[PLAIN])


def measure_training(
    bench: Bench, model: PreTrainedModel, layout: MemoryLayout, writer: Writer, n: int, repeats: int, checkpoint: bool
) -> Trained:
    """Time and peak of both steps, in turn, on one sequence of `n` tokens. The model is left as it was."""
    ids = random_ids(model, n, bench.chosen.seed)
    projections = [getattr(a, f"{p}_proj").weight for a in attention_modules(model) for p in ("k", "v")]
    before = [p.detach().clone() for p in projections]
    memory = attach_memory(model, layout, writer, dtype=torch.float32)
    ours = memory.adapter_parameters()
    if checkpoint:
        checkpoint_activations(model, True)

    def plain_loss(ids: Tensor) -> Tensor:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return next_token_loss(lambda rows: output_logits(model, rows), hidden, ids)

    def memory_loss(ids: Tensor) -> Tensor:
        return next_token_loss(memory.logits, memory.hidden_states(ids), ids)

    def step(parameters: list[nn.Parameter], loss_of: Callable[[Tensor], Tensor], ids: Tensor) -> Case:
        def run() -> None:
            for p in projections:
                p.requires_grad_(parameters is not ours)
            optimizer = torch.optim.AdamW(parameters, lr=1e-6)
            with torch.enable_grad():
                loss_of(ids).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    def both(ids: Tensor) -> dict[str, Case]:
        return {PLAIN: step(projections, plain_loss, ids), MEMORY: step(ours, memory_loss, ids)}

    try:
        for case in both(ids[:, :WARM]).values():
            case()
        # Each peak's step is an untimed one of full length as well.
        peaks = {name: peak_of(case, bench.device)[0] for name, case in both(ids).items()}
        times = interleaved(both(ids), repeats, bench.device, warm={}, say=bench.say)
    finally:
        if checkpoint:
            checkpoint_activations(model, False)
        memory.detach()
        model.requires_grad_(False)
        for p, old in zip(projections, before, strict=True):
            p.data.copy_(old)
    weights = {PLAIN: sum(p.numel() for p in projections), MEMORY: sum(p.numel() for p in ours)}
    return Trained(times, peaks, weights, n)
