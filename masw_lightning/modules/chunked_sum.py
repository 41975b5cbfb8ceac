"""A sum of losses over rows whose ``rows x V`` logits exist a chunk at a time and are never computed twice.

Gradients are taken chunk by chunk in the forward pass, where a checkpoint would compute the logits again in the
backward pass: with a large vocabulary on a small head that product is most of the work. Knows tensors and parameters
only. Shapes: N rows, V logits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from masw_lightning.modules.losses import chunks


def chunked_sum(loss: Callable[..., Tensor], chunk: int, parameters: Sequence[Tensor], *tensors: Tensor) -> Tensor:
    """``loss(*rows)`` of chunks of ``tensors [N,...]``, summed.

    Args:
        loss: gives a scalar; its gradients flow to ``tensors`` and ``parameters`` and nowhere else.
        chunk: rows at a time.
        parameters: all trainable ones that ``loss`` uses.
    """
    if not len(tensors[0]):
        return tensors[0].new_zeros(())
    if not torch.is_grad_enabled():
        return torch.stack([loss(*part) for part in chunks(chunk, *tensors)]).sum()
    total: Tensor = _ChunkedSum.apply(loss, chunk, list(parameters), *tensors, *parameters)
    return total


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Callable[..., Tensor], chunk: int, parameters: list[Tensor], *inputs: Tensor) -> Tensor:
        tensors = inputs[: len(inputs) - len(parameters)]
        needs = ctx.needs_input_grad[3 : 3 + len(tensors)]
        total = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
        of_tensors: list[list[Tensor]] = [[] for _ in tensors]
        of_parameters = [torch.zeros_like(p) for p in parameters]
        for part in chunks(chunk, *tensors):
            leaves = [x.detach().requires_grad_(need) for x, need in zip(part, needs, strict=True)]
            with torch.enable_grad():
                value = loss(*leaves)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            grads = torch.autograd.grad(value, [*wanted, *parameters])
            total += value.detach()
            for index, grad in zip([i for i, need in enumerate(needs) if need], grads, strict=False):
                of_tensors[index].append(grad)
            for whole, grad in zip(of_parameters, grads[len(wanted) :], strict=True):
                whole += grad
        ctx.save_for_backward(*[torch.cat(g) for g in of_tensors if g], *of_parameters)
        ctx.needs = needs
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = iter(g * grads[0] for g in ctx.saved_tensors)
        of_tensors = [next(saved) if need else None for need in ctx.needs]
        return None, None, None, *of_tensors, *saved
