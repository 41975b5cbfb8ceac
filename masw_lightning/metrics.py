"""Validation metrics over raw counts, summed across batches and ranks and divided once at the end.

Imports torch and torchmetrics only: no model, no decoding. Agreement is what acceptance is made of: the draft's greedy
choice is accepted exactly where it equals the target's.

Shapes: N tokens, T tokens of one greedy text, K drafted tokens per iteration.
"""

import torch
from torch import Tensor
from torchmetrics import Metric


def iterations_from_agreement(agree: Tensor, num_draft_tokens: int) -> tuple[int, int]:
    """Iterations of greedy speculative decoding, from teacher forcing along the target's own greedy text.

    The draft is always conditioned on the target's accepted tokens, so runs of agreement along that text, cut at K, are
    the iterations: each emits its accepted run plus one correction or bonus token of the target. Tokens beyond the end
    of the text are not counted (``Tok./Iter`` = emitted / iterations).

    Args:
        agree: bool ``[T]``, draft's greedy choice equals the target's, for the tokens after the first new one (that one
            comes from the target's prefill and is in nobody's count).
        num_draft_tokens: ``K``.

    Returns:
        ``(iterations, emitted tokens)``; emitted is ``T``.
    """
    hits = agree.tolist()
    iterations = at = 0
    while at < len(hits):
        accepted = 0
        while accepted < num_draft_tokens and at + accepted < len(hits) and hits[at + accepted]:
            accepted += 1
        at += accepted + 1
        iterations += 1
    return iterations, len(hits)


class _Ratio(Metric):
    """Sum of numerators over sum of denominators; NaN while nothing was counted."""

    full_state_update = False
    numerator: Tensor
    denominator: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("numerator", "denominator"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def add(self, numerator: Tensor | float, denominator: Tensor | float) -> None:
        self.numerator += numerator
        self.denominator += denominator

    def compute(self) -> Tensor:
        return (self.numerator / self.denominator).float()


class MeanPerToken(_Ratio):
    """Mean over supervised tokens of a loss, in nats, or of another number that tokens have."""

    def update(self, total: Tensor | float, count: int) -> None:
        """Adds the sum of ``count`` tokens."""
        self.add(total, count)


class Agreement(_Ratio):
    """Share of positions at which two greedy choices are the same."""

    def update(self, agree: Tensor) -> None:
        """Adds bool ``[N]``."""
        self.add(agree.sum(), agree.numel())


class TokensPerIteration(_Ratio):
    """Greedy ``Tok./Iter`` from agreement along the target's own text (see ``iterations_from_agreement``)."""

    def __init__(self, num_draft_tokens: int = 5) -> None:
        super().__init__()
        self.num_draft_tokens = num_draft_tokens

    def update(self, agree: Tensor) -> None:
        """Adds one text: bool ``[T]``, the tokens after the first new one."""
        iterations, emitted = iterations_from_agreement(agree, self.num_draft_tokens)
        self.add(emitted, iterations)
