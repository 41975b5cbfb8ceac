"""MLPs of long prefills on the CPU, a few hundred rows at a time, so that what lies between their layers stays cached.

An MLP treats every row alone, so cutting changes nothing but rounding. It is the larger half of a forward's products,
and 8,192 rows at once write and read hundreds of megabytes between them (``docs/results/speed_notes.md``). Nothing is
replaced for longer than one forward. Knows Transformers' gated MLPs, no attention and no memory.
Shapes: B batch, T rows, h hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

BYTES = 3 << 20  # of one intermediate activation: 512 rows of SmolLM2-135M in float32
FEWEST = 256  # rows below which a matrix product loses more than the cache gains
PARTS = ("gate_proj", "up_proj", "down_proj")


@contextmanager
def mlp_rows_in_cache(model: nn.Module, rows: int, device: torch.device) -> Iterator[None]:
    """Inside the block, every gated MLP of ``model`` works on few rows at a time.

    Args:
        rows: T of the forward to come.  device: of its rows. Short forwards and other devices are left alone, and so is
            training: gradient checkpointing replays a layer outside the block and expects what it saw inside.
    """
    found = []
    if device.type == "cpu" and rows >= 2 * FEWEST and not torch.is_grad_enabled():
        found = [m for m in model.modules() if all(isinstance(getattr(m, p, None), nn.Linear) for p in PARTS)]
    try:
        for module in found:
            module.forward = _in_parts(module.forward, _rows(module))
        yield
    finally:
        for module in found:
            module.__dict__.pop("forward", None)


def _rows(module: nn.Module) -> int:
    down = cast(nn.Linear, module.down_proj)
    return max(FEWEST, BYTES // (down.in_features * down.weight.element_size()))


def _in_parts(forward: Callable[[Tensor], Tensor], rows: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        if x.dim() != 3 or x.shape[:2].numel() <= rows:
            return forward(x)
        parts = x.flatten(0, 1).split(rows)  # of one [BT,h]: a slice of [B,T,h] would go through a slower product
        return torch.cat([forward(part[None]) for part in parts], 1).view_as(x)

    return run
