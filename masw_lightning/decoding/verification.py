"""The two rules by which a target accepts drafted tokens without changing its own output. Imports torch only.

``GreedyRule``: the target's argmax. ``RejectionRule``: speculative sampling (Leviathan et al., 2023), which leaves the
target's distribution exactly as it is. They are two classes because one rule for both is wrong at temperature zero.
Shapes: B batch, K drafted tokens, V target vocab.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from masw_lightning.decoding.sampling import draw, probabilities


class Drafted(Protocol):
    """What a rule reads of a proposal: ``tokens [B,K]``, ``probs [B,K,<=V]`` or ``None`` (chosen, not drawn)."""

    tokens: Tensor
    probs: Tensor | None


@dataclass
class Verdict:
    """``accepted [B]``: drafted tokens kept, counted to the first miss. ``next [B]``: the target's own next token."""

    accepted: Tensor
    next: Tensor


def _until_first_miss(hits: Tensor) -> Tensor:
    """bool ``[B,K]`` -> ``[B]``: ``[1,0,1,0]`` counts 1."""
    return hits.long().cumprod(1).sum(1)


class GreedyRule:
    """Keep drafted tokens while they are the target's argmax."""

    def first(self, logits: Tensor) -> Tensor:
        """The token after the prompt: ``[B,V] -> [B]``."""
        return logits.argmax(-1)

    def __call__(self, proposal: Drafted, logits: Tensor) -> Verdict:
        """``logits [B,K+1,V]`` of the target at the proposal's positions, the last one after all of it."""
        best = logits.argmax(-1)
        accepted = _until_first_miss(proposal.tokens == best[:, :-1])
        return Verdict(accepted, best.gather(1, accepted[:, None])[:, 0])


@dataclass
class RejectionRule:
    """Keep a token drawn from ``q`` with probability ``min(1, p/q)``; at the first miss draw from ``(p - q)+``."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def first(self, logits: Tensor) -> Tensor:
        """The token after the prompt: ``[B,V] -> [B]``."""
        return draw(self._probs(logits), self.generator)

    def __call__(self, proposal: Drafted, logits: Tensor) -> Verdict:
        """``logits [B,K+1,V]`` of the target at the proposal's positions, the last one after all of it."""
        p, tokens = self._probs(logits), proposal.tokens
        b, k = tokens.shape
        q = torch.zeros_like(p)  # zero after the last drafted token: the bonus token is drawn from p itself
        if proposal.probs is None:
            q[:, :k].scatter_(2, tokens[..., None], 1.0)
        else:
            q[:, :k, : proposal.probs.shape[-1]] = proposal.probs
        p_token = p[:, :k].gather(2, tokens[..., None])[..., 0]
        q_token = q[:, :k].gather(2, tokens[..., None])[..., 0]
        u = torch.rand(b, k, generator=self.generator, device=p.device)
        accepted = _until_first_miss(u * q_token < p_token)
        at = accepted[:, None, None].expand(-1, -1, p.shape[-1])
        p_next = p.gather(1, at)[:, 0]
        rest = (p_next - q.gather(1, at)[:, 0]).clamp_(min=0)
        mass = rest.sum(-1, keepdim=True)
        # p == q up to rounding leaves no residual; the miss itself was then rounding, and p is right.
        return Verdict(accepted, draw(torch.where(mass > 0, rest / mass.clamp(min=1e-38), p_next), self.generator))

    def _probs(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.temperature, self.top_k, self.top_p)
