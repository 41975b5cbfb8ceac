"""From logits to the next token: greedy, or by temperature, top-k and top-p. Imports torch only.

Shapes: B batch, V vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """The distribution sampled from: ``[...,V] -> [...,V]``, float32.

    Temperature first, then the ``top_k`` largest, then the smallest set of tokens whose mass reaches ``top_p``.
    """
    scores = logits.float() / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    probs = scores.softmax(-1)
    if top_p is not None and top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # a token stays while the mass before it is short of top_p
        kept = torch.zeros_like(probs).scatter(-1, order, ordered * (before < top_p))
        probs = kept / kept.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row of ``[B,V]``; ``-> [B]``."""
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


@dataclass
class GreedyChoice:
    """The most likely token; no distribution."""

    vocab: int | None = None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B,V] -> [B], None``. Ids at or beyond ``vocab`` are never chosen."""
        return logits[..., : self.vocab].argmax(-1), None


@dataclass
class SampledChoice:
    """A draw, with the distribution it came from."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None
    vocab: int | None = None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B,V] -> [B], [B,V]``. Ids at or beyond ``vocab`` are never chosen."""
        probs = probabilities(logits[..., : self.vocab], self.temperature, self.top_k, self.top_p)
        return draw(probs, self.generator), probs
