"""Decoding forwards under `torch.compile`: the backbone as one graph, attention and cache opaque in it.

An experiment beside the product: `run_backbone` is exchanged for the length of a `with` block. A memory's hooks decide
step by step which rows write a slot, which one graph cannot, so drafts are measured on raw entries (the same cells).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from masw_lightning.attention.interface import attention_modules
from masw_lightning.drafts import runner as runners

NAME = "masw_compiled"


class _Current:
    """What the opaque operator reads: the memory of the forward in progress, and the modules by layer."""

    memory: Any = None
    modules: tuple[nn.Module, ...] = ()


@torch.library.custom_op("masw_bench::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
    return _Current.memory.attend(_Current.modules[layer], q, k, v, scale, None).clone()


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
    return torch.empty_like(q)


def _attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    out = torch.ops.masw_bench.attend(q.contiguous(), k, v, module.layer_idx, kwargs["scaling"])
    return out.transpose(1, 2), None


@contextmanager
def compiled_backbone(model: PreTrainedModel, freezing: bool, backend: str) -> Iterator[None]:
    """Runners of `model` go through a graph compiled at their first call, one per number of rows.

    Args:
        freezing: let the compiler treat weights as constants and store them in the layout its kernels like best, which
            keeps a second copy of them.
        backend: of `torch.compile`.
    """
    import torch._inductor.config as inductor

    AttentionInterface.register(NAME, _attention)
    base = model.base_model

    def forward(embeds: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        output = base(inputs_embeds=embeds, position_ids=positions, attention_mask=mask, use_cache=False)
        return output.last_hidden_state

    torch._dynamo.reset()
    graph: Callable[..., Tensor] = torch.compile(forward, dynamic=False, fullgraph=True, backend=backend)

    def run(_model: PreTrainedModel, embeds: Tensor, positions: Tensor, memory: Any) -> Tensor:
        before, model.config._attn_implementation = model.config._attn_implementation, NAME
        _Current.memory, _Current.modules = memory, tuple(attention_modules(model))
        try:
            with inductor.patch(freezing=freezing):
                return graph(embeds, positions, embeds.new_zeros(1, 1, 1, 1))
        finally:
            model.config._attn_implementation = before
            _Current.memory = None

    before, runners.run_backbone = runners.run_backbone, run  # type: ignore[assignment]
    try:
        yield
    finally:
        runners.run_backbone = before
        torch._dynamo.reset()
