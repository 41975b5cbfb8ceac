"""A chain drafted by a feature-level head (EAGLE, EAGLE-3) on the target's own hidden states.

Entry ``t`` of the head's cache pairs the target's state at ``t`` with token ``t + 1``; its output yields token
``t + 2``. So the newest entry waits for the token that follows it, and the head lags one token behind the text. While
it drafts, it eats its own outputs; once tokens are verified those entries are taken back and written again with the
target's true states. Knows no target: states are handed over by the loop.
Shapes: B batch, n prompt tokens, K drafted tokens, T entries, h hidden size, V target vocab.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from masw_lightning.adapter.eagle_head import DraftHead
from masw_lightning.cache.full import FullCache
from masw_lightning.drafts.base import Choose, Proposal


class HeadSession:
    """State of one generation.

    Args:
        head: on the target's device.
        embed: token ids ``[B,T] -> [B,T,h]``.
        logits: the head's outputs ``[B,h] -> [B,V]``, in the target's ids.
        capacity: most entries a row may hold.
    """

    def __init__(
        self,
        head: DraftHead,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        batch: int,
        capacity: int,
    ) -> None:
        self.head, self.embed, self.logits = head, embed, logits
        self.cache = FullCache(head.kv_shape, batch, capacity)
        # True entries not read yet: hidden halves [B,T,h], the tokens that follow them [B,T], how many per row count.
        self._hidden, self._tokens, self._counts = torch.empty(0), torch.empty(0), torch.empty(0)
        self._proposed: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for the head's keys and values."""
        return self.cache.nbytes

    def prefill(self, input_ids: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        """Read all entries of the prompt but the last, whose token is not known yet."""
        fused = self.head.fuse(hidden)
        if input_ids.shape[1] > 1:
            self.read(fused[:, :-1], input_ids[:, 1:])
        self._hidden = fused[:, -1:].clone()  # a view would keep the whole prompt's states alive

    def propose(self, k: int, choose: Choose) -> Proposal:
        """See ``DraftSession``."""
        width, counts = self._tokens.shape[1], self._counts
        outputs = self.read(self._hidden, self._tokens)
        at = (counts - 1).to(outputs.device)[:, None, None].expand(-1, 1, outputs.shape[-1])
        hidden = outputs.gather(1, at)
        if int(counts.min()) < width:  # rows that had fewer true entries read padding behind them
            self.cache.rollback(width - counts)
        tokens, probs = [], []
        for index in range(k):
            token, p = choose(self.logits(hidden[:, 0]))
            tokens.append(token)
            if p is not None:
                probs.append(p)
            if index + 1 < k:
                hidden = self.read(hidden, token[:, None])
        self._proposed = torch.stack(tokens, 1)
        return Proposal(self._proposed, torch.stack(probs, 1) if probs else None)

    def commit(self, accepted: Tensor, next_token: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        """See ``DraftSession``. The verified positions' true states replace what the head had made of them."""
        self._counts = accepted + 1
        if self._proposed is None:
            self._tokens = next_token[:, None]
            return
        self.cache.rollback(self._proposed.shape[1] - 1)
        top = int(accepted.max()) + 1
        self._hidden = self.head.fuse(tuple(state[:, :top] for state in hidden))
        followed = torch.cat((self._proposed, next_token[:, None]), 1)[:, :top]
        at = accepted[:, None].to(followed.device)
        self._tokens = followed.scatter(1, at, next_token[:, None])
        self._proposed = None

    def read(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Add entries of ``hidden [B,T,h]`` and the tokens after them ``[B,T]``; their outputs ``[B,T,h]``."""
        positions = self.cache.begin(tokens.shape[1]).to(tokens.device)
        embeds = self.embed(tokens).to(hidden.dtype)
        outputs = self.head.step(embeds, hidden, positions, self.cache)
        self.cache.end()
        return outputs
