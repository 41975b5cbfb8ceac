"""Mirror projections: trainable copies of frozen ``k_proj``/``v_proj`` (or q, o) that serve the slots.

A mirror is attached with forward hooks, so the backbone's modules and state dict stay untouched and several memories
can share one backbone. Hooks act only inside a forward of their own memory (they recognise its ``masw_memory``), also
when gradient checkpointing replays a layer later. Knows no layout and no cache.
Shapes: B batch, T raw rows, P slot rows, G KV heads, D head dim, h hidden size.
"""

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from masw_lightning.attention.interface import MEMORY_KWARG, memory_attention
from masw_lightning.errors import UserError
from masw_lightning.layout import Writer

Projection = Literal["q", "k", "v", "o"]


class MirrorLinear(nn.Linear):
    """A linear layer kept in its own dtype and applied in its input's."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B,P,in] -> [B,P,out]``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def make_mirror(
    source: nn.Module, init: Literal["copy", "random"], std: float, generator: torch.Generator, dtype: torch.dtype
) -> MirrorLinear:
    """A trainable twin of ``source``: an exact copy, or drawn anew from N(0, std) (bias zero)."""
    weight, bias = getattr(source, "weight", None), getattr(source, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise UserError(f"cannot mirror {type(source).__name__}: it has no plain floating-point weight matrix.")
    mirror = MirrorLinear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=dtype)
    with torch.no_grad():
        if init == "copy":
            mirror.weight.copy_(weight)
            if bias is not None:
                mirror.bias.copy_(bias)
        else:
            mirror.weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            if bias is not None:
                mirror.bias.zero_()
    return mirror


@dataclass
class SlotRows:
    """Which rows of a forward are slots, and the slots' keys and values of the layer being computed.

    ``raw``: number of raw rows; rows after them are slot rows. ``slots``: number of slots written (0: no mirror acts).
    ``written``: ``[P]`` or ``[B,P]``, the raw row that writes each slot (token writer only; ``None`` = slots are rows
    of their own).
    """

    raw: int
    slots: int = 0
    written: Tensor | None = None
    slot_k: Tensor | None = None
    slot_v: Tensor | None = None


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index [P]`` or ``[B,P]`` of ``x [B,T,X]``; ``-> [B,P,X]``."""
    if index.dim() == 1:
        return x[:, index]
    if x.shape[0] == 1 < index.shape[0]:
        x = x.expand(index.shape[0], -1, -1)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


class _Route:
    """What the hooks of one layer share during one forward (a plain object: nn.Module attributes are slow to set)."""

    __slots__ = ("rotary", "rows", "scope", "slot_inputs")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows: SlotRows | None = None
        self.slot_inputs: Tensor | None = None
        self.rotary: tuple[Tensor, Tensor] | None = None
        self.scope: AbstractContextManager[None] | None = None


class LayerMirrors(nn.Module):
    """The mirrors of one attention layer."""

    def __init__(self, mirrors: dict[Projection, MirrorLinear], writer: Writer) -> None:
        super().__init__()
        for name, mirror in mirrors.items():
            self.add_module(f"{name}_proj", mirror)
        self.writer = writer
        self._route = _Route()

    def attach(self, attention: nn.Module, owner: object) -> list[RemovableHandle]:
        """Hook this layer's mirrors into ``attention``, active for memories whose ``owner`` is the one given."""

        route = self._route

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            memory = kwargs.get(MEMORY_KWARG)
            if memory is None or getattr(memory, "owner", None) is not owner:
                return
            if torch.is_grad_enabled():
                # A replayed layer (gradient checkpointing) runs outside run_backbone's scope, so it opens its own.
                route.scope = memory_attention(module.config)
                route.scope.__enter__()
            if memory.rows.slots:
                route.rows, route.rotary = memory.rows, kwargs.get("position_embeddings")

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if route.scope is not None:
                route.scope.__exit__(None, None, None)
            if route.scope is not None or route.rows is not None:
                route.clear()

        handles = [
            attention.register_forward_pre_hook(enter, with_kwargs=True),
            attention.register_forward_hook(leave, always_call=True),
        ]
        for name, mirror in self.named_children():
            source = cast(nn.Module, getattr(attention, name))
            if self.writer == "slot":
                handles.append(source.register_forward_pre_hook(self._split))
                handles.append(source.register_forward_hook(self._joiner(cast(MirrorLinear, mirror))))
            else:
                handles.append(source.register_forward_hook(self._tapper(attention, name, cast(MirrorLinear, mirror))))
        return handles

    # ---- slot writer: slot rows go through the mirror instead of the frozen projection -------------------------
    def _split(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        route = self._route
        if route.rows is None:
            return None
        x, n = args[0], route.rows.raw
        # With one text, rows [T,h] of one matrix: a slice of [1,T,h] would go through a slower product.
        raw, route.slot_inputs = (x[0, :n][None], x[0, n:][None]) if len(x) == 1 else (x[:, :n], x[:, n:])
        return (raw, *args[1:])

    def _joiner(self, mirror: MirrorLinear) -> Any:
        route = self._route

        def join(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if route.slot_inputs is None:
                return None
            slots, route.slot_inputs = mirror(route.slot_inputs), None
            return torch.cat((output, slots), 1)

        return join

    # ---- token writer: some raw rows also write a slot through the mirror --------------------------------------
    def _tapper(self, attention: nn.Module, name: str, mirror: MirrorLinear) -> Any:
        route = self._route

        def tap(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            rows = route.rows
            if rows is None or rows.written is None:
                return
            x = mirror(take_rows(args[0], rows.written))
            head_dim = int(attention.head_dim)  # type: ignore[arg-type]
            x = x.view(*x.shape[:2], x.shape[2] // head_dim, head_dim)  # [B,P,G,D]
            if name == "v_proj":
                rows.slot_v = x.transpose(1, 2)
                return
            if hasattr(attention, "k_norm"):
                x = cast(nn.Module, attention.k_norm)(x)
            assert route.rotary is not None
            cos, sin = (take_rows(t, rows.written) for t in route.rotary)
            x = x.transpose(1, 2)
            rows.slot_k = _rotate(attention, x, cos, sin)

        return tap


def _rotate(attention: nn.Module, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE by the model family's own function."""
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    return cast(Tensor, rotate(k, k, cos, sin)[1])


def check_token_writer(attention: nn.Module) -> None:
    """Raise ``UserError`` where keys are not simply ``RoPE(k_norm(k_proj(h)))`` with a norm per head."""
    norm = getattr(attention, "k_norm", None)
    per_head = norm is None or getattr(norm, "weight", torch.empty(0)).numel() == attention.head_dim
    rotates = hasattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb")
    if not per_head or not rotates or hasattr(attention, "v_norm"):
        raise UserError(
            f"writer='token' does not know how {type(attention).__name__} makes its keys: use writer='slot'."
        )
