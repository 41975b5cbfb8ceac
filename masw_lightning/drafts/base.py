"""The contract between a draft and the speculative loop, and what every chain of draft tokens shares.

A *policy* is a dataclass of plain settings and the models it needs; ``open`` gives a *session*, which holds all state
of one generation. The loop calls ``prefill`` once and ``commit`` with the target's first token, then ``propose`` and
``commit`` in turn. No policy reaches into the target: one that needs its hidden states names the layers in
``target_layers`` and the loop hands them over.
Shapes: B batch, n prompt tokens, K drafted tokens, T new tokens, V draft vocab, h hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from masw_lightning.errors import UserError

Choose = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Picks the next token: logits ``[B,V]`` -> tokens ``[B]`` and, when sampled, the distribution ``[B,V]``."""


@dataclass
class Proposal:
    """``tokens [B,K]`` and, when they were sampled, the distributions ``probs [B,K,V]`` they were drawn from."""

    tokens: Tensor
    probs: Tensor | None = None


class DraftSession(Protocol):
    """State of one generation."""

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for the draft's keys and values."""
        ...

    def prefill(self, input_ids: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        """Read the prompt ``[B,n]``. ``hidden``: the target's ``[B,n,h]`` at the policy's ``target_layers``."""
        ...

    def propose(self, k: int, choose: Choose) -> Proposal:
        """Draft ``k`` tokens after the text committed so far."""
        ...

    def commit(self, accepted: Tensor, next_token: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        """Keep the first ``accepted [B]`` proposed tokens, take the others back, and append ``next_token [B]``.

        ``hidden``: the target's ``[B,K+1,h]`` at the verified positions. Called once after ``prefill`` with
        ``accepted = 0`` and the target's first token.
        """
        ...


class DraftPolicy(Protocol):
    """A way of drafting."""

    # Hidden states of the target to hand over: ``i`` enters decoder layer ``i``, ``N`` leaves the final norm; (): none.
    target_layers: tuple[int, ...]

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> DraftSession:
        """A session for ``batch`` prompts of ``prompt_tokens``, text up to ``max_tokens``, ``k`` drafted at a time."""
        ...


class Runner(Protocol):
    """A model with a cache, as a chain session drives it."""

    @property
    def nbytes(self) -> int: ...

    def prefill(self, input_ids: Tensor) -> Tensor:
        """``[B,n] -> [B,h]``, the last position's hidden state."""
        ...

    def last_logits(self, tokens: Tensor) -> Tensor:
        """Read ``tokens [B,T]``; logits ``[B,V]`` after the last of them."""
        ...

    def rollback(self, tokens: Tensor) -> None:
        """Forget the newest ``tokens [B]``."""
        ...


class ChainSession:
    """Drafts one token after another with any model and cache.

    The newest token of the text is never in the cache. After a fully accepted proposal its last token is not either, so
    the next forward reads two tokens; other rows of the batch then read their last two again.
    """

    def __init__(self, runner: Runner, vocab: int) -> None:
        self.runner, self.vocab = runner, vocab
        self._unread = torch.empty(0)  # [B, 1 or 2] newest tokens of the text
        self._proposed: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for the draft's keys and values."""
        return self.runner.nbytes

    def prefill(self, input_ids: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        """See ``DraftSession``."""
        self.runner.prefill(self._known(input_ids))

    def propose(self, k: int, choose: Choose) -> Proposal:
        """See ``DraftSession``."""
        tokens, probs = [], []
        feed = self._unread
        for _ in range(k):
            token, p = choose(self.runner.last_logits(self._known(feed)))
            tokens.append(token)
            if p is not None:
                probs.append(p)
            feed = token[:, None]
        self._proposed = torch.stack(tokens, 1)
        return Proposal(self._proposed, torch.stack(probs, 1) if probs else None)

    def commit(self, accepted: Tensor, next_token: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        """See ``DraftSession``."""
        if self._proposed is None:
            self._unread = next_token[:, None]
            return
        k = self._proposed.shape[1]
        lag = 2 if int(accepted.max()) == k else 1
        self.runner.rollback(k - 2 - accepted + lag)
        text = torch.cat((self._unread[:, -1:], self._proposed), 1)
        kept = text.gather(1, accepted[:, None].to(text.device))  # last token before next_token, per row
        self._unread = torch.cat((kept, next_token[:, None]), 1)[:, -lag:]
        self._proposed = None

    def _known(self, tokens: Tensor) -> Tensor:
        """Ids beyond the draft's (less padded) vocabulary read as its last row; only acceptance can suffer."""
        return tokens.clamp(max=self.vocab - 1)


def check_draft_width(k: int, rollback: int) -> None:
    """Raise ``UserError`` when ``K + 1`` tokens do not fit a rollback window."""
    if k + 1 > rollback:
        raise UserError(
            f"num_draft_tokens={k} needs a rollback window of {k + 1}, but the layout has rollback={rollback}: "
            "draft fewer tokens or use a layout with a larger rollback."
        )
