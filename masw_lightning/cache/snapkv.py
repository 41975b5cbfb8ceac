"""The prompt's entries that its last queries look at, chosen once per layer and head; then every generated token.

SnapKV (Li et al., 2024): softmax scores of the last ``window`` prompt queries over all keys, summed over those queries,
smoothed along the keys by 1-D pooling; the ``budget - window`` best of the keys before the window are kept, and the
window itself exactly. One layer's full keys and values exist at a time, while that layer is computed; a score matrix is
``window x n``, never ``n x n``. Keys keep the positions they were rotated at. Knows no policy and no adapter.
Shapes: B batch, T new tokens, n prompt tokens, E kept prompt entries, H query heads, G KV heads, X heads that select
(G, or H on request), D head dim.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from masw_lightning.attention.cached import Reading, attend_cached, plan_reading
from masw_lightning.attention.structured import Plan, make_plan, structured_attention
from masw_lightning.cache.base import KVCache, KVShape, rows_to_take_back
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout

Pooling = Literal["avg", "max"]


@dataclass(frozen=True)
class SnapKVRule:
    """Which prompt entries are kept.

    Args:
        budget: entries kept per layer and head, the window included; a prompt no longer than this is kept whole.
        window: last prompt tokens, whose queries choose and whose own entries are always kept.
        kernel: width of the pooling, odd, in tokens; 1 = none.
        pooling: ``"avg"`` (the original's default; missing neighbours at the ends count as zero) or ``"max"``.
        per_query_head: ``True``: every query head keeps a set of its own, as the original does, at ``H / G`` times the
            bytes. ``False``: the query heads of a KV head add their scores and share one set.

    Raises:
        UserError: a number is out of range, or the pooling is unknown.
    """

    budget: int = 4096
    window: int = 32
    kernel: int = 5
    pooling: Pooling = "avg"
    per_query_head: bool = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"SnapKV's window={self.window} is out of range: let at least 1 prompt query choose.")
        if self.budget < self.window:
            raise UserError(
                f"SnapKV's budget={self.budget} is smaller than its window={self.window}, which is always kept: "
                "raise the budget or shorten the window."
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"SnapKV's kernel={self.kernel} has no middle: give an odd, positive width, or 1 for none.")
        if self.pooling not in ("avg", "max"):
            raise UserError(f"SnapKV's pooling={self.pooling!r} is unknown: use 'avg' or 'max'.")

    def kept(self, n: int) -> int:
        """``E``, entries kept of a prompt of ``n`` tokens."""
        return min(n, self.budget)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """How much the prompt's last queries look at each earlier key, pooled: ``[B,X,n - window]``, float32.

        Args:
            q: ``[B,H,n,D]``.  k: ``[B,G,n,D]``, ``n > window``.
        """
        (b, h, n, d), g, w = q.shape, k.shape[1], self.window
        rows = q[:, :, n - w :].reshape(b, g, h // g * w, d)
        scores = (rows @ k.transpose(-1, -2) * scale).view(b, h, w, n)
        later = torch.ones(w, w, dtype=torch.bool, device=q.device).triu(1)
        scores[..., n - w :].masked_fill_(later, float("-inf"))
        seen = scores.softmax(-1, dtype=torch.float32)[..., : n - w].sum(2)  # [B,H,n-w]
        if not self.per_query_head:
            seen = seen.view(b, g, h // g, n - w).sum(2)
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(seen, self.kernel, stride=1, padding=self.kernel // 2)

    def select(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Prompt positions kept, ascending: ``q [B,H,n,D], k [B,G,n,D] -> [B,X,E]``."""
        (b, h, n, _d), g = q.shape, k.shape[1]
        heads = h if self.per_query_head else g
        if n <= self.budget:
            return torch.arange(n, device=q.device).expand(b, heads, n)
        best = self.scores(q, k, scale).topk(self.budget - self.window).indices.sort(-1).values
        return torch.cat((best, torch.arange(n - self.window, n, device=q.device).expand(b, heads, -1)), -1)


class SnapKVCache(KVCache):
    """Chosen entries of ``batch`` prompts of ``prompt_tokens`` each, with room for text up to ``max_tokens``.

    The layers' own sliding windows (Mistral, Gemma 3) do not apply: every layer reads the whole prompt and chooses from
    it, as the memory layouts replace those windows too.
    """

    def __init__(
        self, rule: SnapKVRule, shape: KVShape, query_heads: int, batch: int, prompt_tokens: int, max_tokens: int
    ) -> None:
        self.rule, self.prompt_tokens, self.max_tokens = rule, prompt_tokens, max_tokens
        self.kept = rule.kept(prompt_tokens)
        if rule.per_query_head:
            shape = replace(shape, kv_heads=query_heads)
        super().__init__(shape.buffers(batch, self.kept + max_tokens - prompt_tokens), batch)
        self._keep: Tensor | None = None
        self._readings: dict[torch.device, Reading] = {}
        self._plan: Plan | None = None

    def rollback(self, tokens: int | list[int] | Tensor) -> None:
        """Forget the newest ``tokens`` (one number, or one per row) in O(1).

        Raises:
            UserError: that would reach into the prompt, whose entries were chosen once.
        """
        lengths = self.lengths - rows_to_take_back(tokens, self.lengths)
        if int(lengths.min()) < self.prompt_tokens:
            raise UserError(
                f"rolling back to {lengths.tolist()} tokens reaches into the prompt of {self.prompt_tokens}, whose "
                "entries were chosen once: take back generated tokens only."
            )
        self.lengths = lengths

    def begin(self, new: int) -> Tensor:
        """Announce ``new`` tokens per row, the whole prompt first. Returns their positions ``[B,T]``."""
        top = int(self.lengths.max())
        if top == 0 and new != self.prompt_tokens:
            raise UserError(f"the cache was made for prompts of {self.prompt_tokens} tokens and is given {new}.")
        if top + new > self.max_tokens:
            raise UserError(f"the cache was allocated for {self.max_tokens} tokens and is asked to hold {top + new}.")
        self._new, self._keep, self._readings, self._plan = new, None, {}, None
        if top and (new > 1 or len(self.lengths) > 1):
            last = self._cells(self.lengths)[:, None] + torch.arange(new)  # the newest cell each new row sees
            self._keep = torch.arange(int(last.max()) + 1) <= last[:, :, None]
        return self.lengths[:, None] + torch.arange(new)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """See ``AttentionMemory``: the prompt's rows choose what this layer keeps, later rows are appended."""
        buffers = self.buffers[int(module.layer_idx)]  # type: ignore[arg-type]
        group = buffers[0].shape[1] // k.shape[1]
        if int(self.lengths.max()) == 0:
            index = self.rule.select(q, k, scale)
            for buffer, x in zip(buffers, (k, v), strict=True):
                buffer[:, :, : self.kept] = _take(x, index)
            return self._prefill(q, k, v, scale)
        for row, cell in enumerate(self._cells(self.lengths).tolist()):
            for buffer, x in zip(buffers, (k, v), strict=True):
                buffer[row, :, cell : cell + self._new] = x[row].repeat_interleave(group, 0)
        used = int(self._cells(self.lengths).max()) + self._new
        keys, values = (x[:, :, :used] for x in buffers)
        if q.device not in self._readings:
            self._readings[q.device] = plan_reading(self._keep, used, q, keys.shape[1])
        return attend_cached(q, keys, values, self._readings[q.device], scale)

    def _cells(self, lengths: Tensor) -> Tensor:
        """Cells in use by texts of ``lengths`` tokens, the prompt read."""
        return lengths - self.prompt_tokens + self.kept

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Plain causal attention: the no-slot memory whose window is the whole prompt."""
        n = q.shape[2]
        if self._plan is None:
            self._plan = make_plan(MemoryLayout(sink=0, window=n, ratio=None), "slot", n, q.dtype, q.device)
        nothing = k[:, :, :0]
        return structured_attention(self._plan, q, k, v, nothing, nothing, scale)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Entries ``index [B,X,E]`` of ``x [B,G,n,D]``, ``X`` a multiple of ``G``; ``-> [B,X,E,D]``, a copy."""
    (b, heads, kept), g, d = index.shape, x.shape[1], x.shape[3]
    flat = index.reshape(b, g, heads // g * kept)
    return x.gather(2, flat[..., None].expand(-1, -1, -1, d)).view(b, heads, kept, d)
