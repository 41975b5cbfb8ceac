"""How well a draft head would do: its loss, its first guess's agreement, the exact greedy ``Tok./Iter`` of its chains.

Along the backbone's own greedy text every chain's fate is known without decoding: its tokens are the text's as long as
they are accepted, so ``K`` self-fed steps from all positions at once say how far each would get. Knows an
``AttachedHead``; no Lightning, no draft policies, no decoding loop.
Shapes: B batch, n tokens, h hidden size, K drafted tokens.
"""

import torch
from torch import Tensor, nn

from masw_lightning.attention.unrolled import UnrolledMemory
from masw_lightning.metrics import Agreement, MeanPerToken, TokensPerIteration
from masw_lightning.modules.attached_head import AttachedHead, Entries
from masw_lightning.modules.losses import chunks, supervised
from masw_lightning.modules.settings import ValidationConfig
from masw_lightning.modules.validation import Validation


class HeadValidation(Validation):
    """Collects the validation metrics of one head. Holds metrics and greedy texts, no parameters."""

    def __init__(self, config: ValidationConfig, chunk: int) -> None:
        super().__init__(config, chunk)
        self.losses = nn.ModuleDict({"loss": MeanPerToken()})
        self.agreements = nn.ModuleDict({"agreement": Agreement()})
        self.overlaps = nn.ModuleDict()  # a head may draft from a vocabulary of its own
        names = ("tokens_per_iteration",) if config.prompts else ()
        self.speeds = nn.ModuleDict({name: TokensPerIteration(config.num_draft_tokens) for name in names})

    @torch.no_grad()
    def count(self, draft: AttachedHead, entries: Entries, ids: Tensor, labels: Tensor, world_size: int = 1) -> None:
        """Counts one batch: int64 ``[B,n]`` each, and the entries made of it."""
        keep, metrics = supervised(labels)[:, 1:], dict(self.named_metrics())
        outputs = draft.head.unroll(entries.embeds, entries.hidden, 1, UnrolledMemory())[0]
        for guessed, true in chunks(self.chunk, outputs[keep], entries.final[:, 1:][keep]):
            metrics["agreement"].update(draft.logits(guessed).argmax(-1) == draft.target_logits(true).argmax(-1))
        for row, row_labels in zip(ids, labels, strict=True):
            if len(self.texts) * world_size < self.config.prompts:
                self.texts.append(self._continue(draft, row, row_labels))  # type: ignore[arg-type]

    @torch.no_grad()
    def finish(self, draft: AttachedHead) -> None:
        """Counts iterations along the greedy texts."""
        if not self.config.prompts:
            return
        metric = dict(self.named_metrics())["tokens_per_iteration"]
        metric.update(torch.zeros(0, dtype=torch.bool))  # nothing to count is no error
        for text in self.texts:
            hits = self.chain_hits(draft, text.ids.to(draft.model.device))
            iterations, emitted = chain_iterations(hits, text.prompt)
            metric.add(emitted, iterations)

    def chain_hits(self, draft: AttachedHead, ids: Tensor) -> Tensor:
        """Bool ``[K,n]``: with text ``0..s`` known (column ``s``), is the chain's ``i``-th token (row) the text's?"""
        k, n = self.config.num_draft_tokens, len(ids)
        entries = draft.read(ids[None])
        hits = torch.zeros(k, n, dtype=torch.bool, device=ids.device)
        for i, outputs in enumerate(draft.head.unroll(entries.embeds, entries.hidden, k, UnrolledMemory())):
            guesses = torch.cat([draft.logits(rows).argmax(-1) for rows in outputs[0].split(self.chunk)])
            known = n - 2 - i  # rows whose i-th token is still in the text; row t starts at s = t + 1
            if known > 0:
                hits[i, 1 : 1 + known] = guesses[:known] == ids[2 + i :]
        return hits


def chain_iterations(hits: Tensor, prompt: int) -> tuple[int, int]:
    """``(iterations, emitted tokens)`` of greedy chain drafting along a text of ``n`` tokens, ``prompt`` of them given.

    ``hits``: of ``chain_hits``. The first new token comes from the target's prefill and is in nobody's count.
    """
    runs, n = hits.long().cumprod(0).sum(0).tolist(), hits.shape[1]
    at, iterations = prompt, 0
    while at < n - 1:
        at += runs[at] + 1
        iterations += 1
    return iterations, n - 1 - prompt
