"""Whether the memory helps: its loss beside full attention's and the bare window's, and how near it is to the target.

Overlap with full attention's distribution is one minus the total variation distance, which is the chance that a sampled
draft token is accepted. Greedy agreement is measured twice: at every validation token, and along the backbone's own
greedy continuation of a few prompts, where runs of agreement are exactly the iterations of greedy speculative decoding
(the draft is always conditioned on the target's accepted text). Knows a ``MemoryDraft``; no Lightning, no draft
policies, no decoding loop.

Shapes: B batch, n tokens, h hidden size, V vocabulary, N supervised tokens, T tokens after a prompt's first new one.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from masw_lightning.adapter.backbone import max_positions
from masw_lightning.adapter.inject import MemoryDraft
from masw_lightning.metrics import Agreement, MeanPerToken, TokensPerIteration
from masw_lightning.modules.losses import chunks, supervised, targets
from masw_lightning.modules.settings import ValidationConfig


@dataclass
class GreedyText:
    """A validation prompt and the backbone's own continuation, on the CPU: int64 ``[n]``, of which ``prompt`` given."""

    ids: Tensor
    prompt: int


class Validation(nn.Module):
    """Collects the validation metrics of one module. Holds metrics and greedy texts, no parameters."""

    def __init__(self, config: ValidationConfig, chunk: int) -> None:
        super().__init__()
        self.config, self.chunk = config, chunk
        self.losses = nn.ModuleDict({name: MeanPerToken() for name in ("loss", "loss_full", "loss_window")})
        self.agreements = nn.ModuleDict({name: Agreement() for name in ("agreement", "agreement_window")})
        self.overlaps = nn.ModuleDict({name: MeanPerToken() for name in ("overlap", "overlap_window")})
        names = ("tokens_per_iteration", "tokens_per_iteration_window") if config.prompts else ()
        self.speeds = nn.ModuleDict({name: TokensPerIteration(config.num_draft_tokens) for name in names})
        self.texts: list[GreedyText] = []  # the backbone is frozen, so they are made once and serve every epoch

    def named_metrics(self) -> list[tuple[str, Metric]]:
        """Name and metric, in the order they are logged."""
        groups = (self.losses, self.agreements, self.overlaps, self.speeds)
        return [(name, cast(Metric, metric)) for group in groups for name, metric in group.items()]

    @torch.no_grad()
    def step(self, draft: MemoryDraft, ids: Tensor, labels: Tensor, world_size: int = 1) -> None:
        """Counts one batch: int64 ``[B, n]`` each."""
        keep, wanted, metrics = supervised(labels), targets(labels), dict(self.named_metrics())
        readers = {
            "loss": draft.hidden_states(ids)[keep],
            "loss_full": draft.full_hidden_states(ids)[keep],
            "loss_window": draft.window_hidden_states(ids)[keep],
        }
        for *hidden, tokens in chunks(self.chunk, *readers.values(), wanted):
            choices, distributions = [], []
            for name, rows in zip(readers, hidden, strict=True):
                logits = draft.logits(rows).float()
                metrics[name].update(F.cross_entropy(logits, tokens, reduction="sum"), len(tokens))
                choices.append(logits.argmax(-1))
                distributions.append(logits.softmax(-1))
            metrics["agreement"].update(choices[0] == choices[1])
            metrics["agreement_window"].update(choices[2] == choices[1])
            for name, ours in (("overlap", distributions[0]), ("overlap_window", distributions[2])):
                metrics[name].update(torch.minimum(ours, distributions[1]).sum(), len(tokens))
        for row, row_labels in zip(ids, labels, strict=True):
            if len(self.texts) * world_size < self.config.prompts:
                self.texts.append(self._continue(draft, row, row_labels))

    @torch.no_grad()
    def finish_epoch(self, draft: MemoryDraft) -> None:
        """Counts iterations along the greedy texts."""
        if not self.config.prompts:
            return
        readers = {
            "tokens_per_iteration": draft.hidden_states,
            "tokens_per_iteration_window": draft.window_hidden_states,
        }
        metrics = dict(self.named_metrics())
        for name, reader in readers.items():
            metrics[name].update(torch.zeros(0, dtype=torch.bool))  # nothing to count is no error
            for text in self.texts:
                ids = text.ids.to(draft.model.device)
                hidden = reader(ids[None])[0, text.prompt : -1]
                metrics[name].update(draft.logits(hidden).argmax(-1) == ids[text.prompt + 1 :])

    def _continue(self, draft: MemoryDraft, ids: Tensor, labels: Tensor) -> GreedyText:
        limit = min(self.config.prompt_tokens, (max_positions(draft.model) or 10**9) - self.config.new_tokens)
        prompt = validation_prompt(ids, labels, max(limit, 1))
        text = draft.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=self.config.new_tokens,
            # Plain greedy, whatever the model's generation config asks for.
            do_sample=False, temperature=None, top_p=None, top_k=None, repetition_penalty=1.0,
        )[0]  # fmt: skip
        return GreedyText(text.cpu(), len(prompt))


def validation_prompt(ids: Tensor, labels: Tensor, limit: int) -> Tensor:
    """The part of a row to continue: everything before the first supervised token, at most ``limit`` tokens.

    A fine-tuning prompt that is too long loses its middle, since its question may stand at either end. A row that is
    supervised from its start (packed text) gives its first ``limit`` tokens.
    """
    start = int((labels != -100).nonzero()[0]) if bool((labels != -100).any()) else 0
    if start == 0:
        return ids[: min(limit, len(ids))]
    if start <= limit:
        return ids[:start]
    head = limit // 2
    return torch.cat((ids[:head], ids[start - (limit - head) : start]))
