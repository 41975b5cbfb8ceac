"""The one-layer heads of EAGLE and EAGLE-3: they predict a target's next hidden state, or a chain of their own.

Entry ``t`` pairs the target's hidden state at ``t`` with the embedding of token ``t + 1`` and stands at position ``t``.
Its output predicts the hidden state at ``t + 1``, from which token ``t + 2`` is read; fed back with that token, it
drafts on. Module names are those of the public checkpoints (SafeAILab/EAGLE), so a state dict here *is* the published
layout. Knows tensors only: whoever runs a head brings embeddings, the target's states and an attention memory.
Shapes: B batch, T entries, h hidden size, H heads, G KV heads, D head dim, V target vocab, Vd draft vocab.
"""

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from masw_lightning.attention.interface import AttentionMemory
from masw_lightning.cache.base import KVShape


class HeadAttention(nn.Module):
    """Grouped-query attention with RoPE over rows of width ``width``; the memory decides who sees whom."""

    layer_idx = 0

    def __init__(self, config: LlamaConfig, width: int, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj = nn.Linear(width, kv, bias=bias)
        self.v_proj = nn.Linear(width, kv, bias=bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], memory: AttentionMemory) -> Tensor:
        """``[B,T,width] -> [B,T,h]``. ``rotation``: cosine and sine ``[B or 1,T,D]``."""
        rows = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (p(x).view(rows).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        out = memory.attend(self, q, k, v, self.head_dim**-0.5, None)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1)))


class HeadMLP(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """``[...,h] -> [...,h]``."""
        return cast(Tensor, self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x)))


class EagleLayer(nn.Module):
    """EAGLE's decoder layer: Llama's, without the input norm."""

    def __init__(self, config: LlamaConfig, bias: bool) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, config.hidden_size, bias)
        self.mlp = HeadMLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], memory: AttentionMemory) -> Tensor:
        """``[B,T,h] -> [B,T,h]``."""
        x = x + self.self_attn(x, rotation, memory)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Eagle3Layer(nn.Module):
    """EAGLE-3's: embedding and hidden state are normed apart and enter attention side by side."""

    def __init__(self, config: LlamaConfig, bias: bool) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, 2 * config.hidden_size, bias)
        self.mlp = HeadMLP(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeds: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], memory: AttentionMemory
    ) -> Tensor:
        """``[B,T,h], [B,T,h] -> [B,T,h]``."""
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(x, rotation, memory)
        return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))


class DraftHead(nn.Module):
    """What both heads share: sizes, rotation, the cache they need, and their unrolled chain.

    ``config.vocab_size`` is the target's vocabulary. ``trained_length``: tokens of the longest training text, if known.
    """

    kind: ClassVar[str]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.trained_length: int | None = None
        self.embed_tokens: nn.Embedding | None = None  # a table of its own, where it differs from the target's

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    @property
    def kv_shape(self) -> KVShape:
        """Keys and values of the head's one layer."""
        weight = next(self.parameters())
        return KVShape(self.config.num_key_value_heads, self.config.head_dim, weight.dtype, (weight.device,))

    def target_layers(self, layers: int) -> tuple[int, ...]:
        """The hidden states the head reads, of a target of so many ``layers`` (numbered as in ``features``)."""
        raise NotImplementedError

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """The target's states ``[B,T,h]`` at those layers ``-> [B,T,h]``, what an entry's hidden half is."""
        raise NotImplementedError

    def step(self, embeds: Tensor, hidden: Tensor, positions: Tensor, memory: AttentionMemory) -> Tensor:
        """Entries of ``embeds, hidden [B,T,h]`` at ``positions [B or 1,T]`` ``-> [B,T,h]``: the next hidden halves."""
        raise NotImplementedError

    def unroll(self, embeds: Tensor, hidden: Tensor, steps: int, memory: AttentionMemory) -> list[Tensor]:
        """``steps`` self-fed steps from every entry at once, along the text's own tokens (training-time test).

        Args:
            embeds: ``[B,T,h]``, of token ``t + 1`` at row ``t``.  hidden: ``[B,T,h]``, of ``fuse``.
            memory: an ``UnrolledMemory``.

        Returns:
            per step ``i`` ``[B,T,h]``: row ``t`` is the output at position ``t + i`` (the last ``i`` rows are void).
        """
        outputs, at = [], torch.arange(hidden.shape[1], device=hidden.device)[None]
        for i in range(steps):
            shifted = torch.cat((embeds[:, i:], torch.zeros_like(embeds[:, :i])), 1)
            hidden = self.step(shifted, hidden, at + i, memory)
            outputs.append(hidden)
        return outputs

    def _rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], self.rotary_emb(x, positions))


class EagleHead(DraftHead):
    """EAGLE (first version): regresses the target's last hidden state; the target's own head reads tokens from it."""

    kind: ClassVar[str] = "eagle"

    def __init__(self, config: LlamaConfig, bias: bool = False, qkv_bias: bool = False) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList([EagleLayer(config, qkv_bias)])

    def target_layers(self, layers: int) -> tuple[int, ...]:
        """The final norm's output."""
        return (layers,)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """The state as it is."""
        return states[0].to(self.dtype)

    def step(self, embeds: Tensor, hidden: Tensor, positions: Tensor, memory: AttentionMemory) -> Tensor:
        """See ``DraftHead``."""
        x = self.fc(torch.cat((embeds, hidden), -1))
        return cast(Tensor, self.layers[0](x, self._rotation(x, positions), memory))


class Eagle3Head(DraftHead):
    """EAGLE-3: fuses three of the target's layers and reads tokens of a draft vocabulary with a head of its own.

    ``d2t [Vd]``: target id = draft id + ``d2t``; ``t2d [V]``: whether a target id is in the draft vocabulary.
    """

    kind: ClassVar[str] = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig, qkv_bias: bool = False) -> None:
        super().__init__(config)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config, qkv_bias)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def target_layers(self, layers: int) -> tuple[int, ...]:
        """What enters layers 2, N//2 and N-3. Fewer than six layers have no such three; they give the nearest."""
        low, mid, high = sorted((min(2, layers - 1), layers // 2, max(layers - 3, 0)))
        return (low, mid, high)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """``fc`` of the three, side by side. Self-fed steps do without: their hidden half is the layer's own output."""
        return cast(Tensor, self.fc(torch.cat([s.to(self.dtype) for s in states], -1)))

    def step(self, embeds: Tensor, hidden: Tensor, positions: Tensor, memory: AttentionMemory) -> Tensor:
        """See ``DraftHead``."""
        return cast(Tensor, self.midlayer(embeds, hidden, self._rotation(hidden, positions), memory))

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """``[...,h] -> [...,Vd]``."""
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    @property
    def draft_ids(self) -> Tensor:
        """Target id of every draft id ``[Vd]``."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def logits(self, hidden: Tensor) -> Tensor:
        """``[...,h] -> [...,V]``: in the target's ids, ``-inf`` for what the draft vocabulary lacks."""
        drafted = self.draft_logits(hidden)
        logits = drafted.new_full((*drafted.shape[:-1], len(self.t2d)), float("-inf"))
        logits[..., self.draft_ids] = drafted
        return logits

    def choose_vocabulary(self, target_ids: Tensor) -> None:
        """Set ``d2t`` and ``t2d`` to the target ids ``[Vd]``, in ascending order as published heads have them."""
        ids = target_ids.sort().values.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True
