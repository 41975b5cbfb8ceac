"""Draft on the prompt entries that the prompt's own last tokens look at (SnapKV), plus every generated token.

Training-free. The cache stops growing with the prompt at ``budget`` entries and then grows by one entry per generated
token. Generated tokens continue at the text's true positions. Which entries are kept: ``cache/snapkv.py``.
Shapes: B batch, n prompt tokens, T new tokens, h hidden size, V vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from masw_lightning.attention.interface import run_backbone, text_config
from masw_lightning.cache.base import KVShape
from masw_lightning.cache.snapkv import Pooling, SnapKVCache, SnapKVRule
from masw_lightning.drafts.base import ChainSession
from masw_lightning.drafts.runner import CachedModel
from masw_lightning.layout import MemoryLayout


class SnapKVRunner(CachedModel[SnapKVCache]):
    """A model on a SnapKV cache. Only generated tokens can be taken back."""

    def __init__(self, model: PreTrainedModel, rule: SnapKVRule, batch: int, prompt_tokens: int, max_tokens: int):
        self.model = model
        heads = int(text_config(model).num_attention_heads)
        self.cache = SnapKVCache(rule, KVShape.of(model), heads, batch, prompt_tokens, max_tokens)

    @torch.no_grad()  # a graph would keep every layer's full keys alive
    def hidden(self, tokens: Tensor) -> Tensor:
        """Read ``tokens [B,T]``; hidden states ``[B,T,h]`` after the final norm."""
        positions = self.cache.begin(tokens.shape[1]).to(tokens.device)
        embeds = self.model.get_input_embeddings()(tokens)
        hidden = run_backbone(self.model, embeds, positions, self.cache)
        self.cache.end()
        return hidden


@dataclass
class SnapKVDraft:
    """``model`` on ``budget`` chosen entries of the prompt; its own sliding windows are replaced.

    Args:
        budget: entries kept per layer and head, the window included (4096: the paper's). Shorter prompts stay whole.
        window: last prompt tokens, whose queries choose; always kept.
        kernel: odd width of the pooling over neighbouring keys.
        pooling: ``"avg"`` or ``"max"``.
        per_query_head: the original's selection per query head, at ``H / G`` times the bytes; ``False`` keeps one set
            per KV head, chosen by the added scores of its query heads.
        match: replaces the budget at prefill by as many entries as this layout keeps for the prompt (never fewer than
            the window).

    Raises:
        UserError: a budget smaller than the window, an even kernel, or another number out of range.
    """

    model: PreTrainedModel
    budget: int = 4096
    window: int = 32
    kernel: int = 5
    pooling: Pooling = "avg"
    per_query_head: bool = False
    match: MemoryLayout | None = None
    target_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.rule(1)

    def rule(self, prompt_tokens: int) -> SnapKVRule:
        """What is kept of a prompt of that length."""
        budget = self.budget
        if self.match is not None:
            budget = max(self.match.num_entries(prompt_tokens), self.window)
        return SnapKVRule(budget, self.window, self.kernel, self.pooling, self.per_query_head)

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> ChainSession:
        """See ``DraftPolicy``."""
        runner = SnapKVRunner(self.model, self.rule(prompt_tokens), batch, prompt_tokens, max_tokens + k)
        return ChainSession(runner, text_config(self.model).vocab_size)
