"""The two training objectives over raw tokens, computed in chunks so that ``n x V`` float32 logits never exist at once.

``next_token`` is equation 5 of the paper (cross entropy through the memory); ``distill`` is KL(teacher || student) from
full attention to the memory. Knows hidden states, a function that turns them into logits, and labels; no model, no
memory. The gradient of a chunk is taken at once and its logits are dropped; the head is frozen and gets none.

Shapes: B batch, n tokens, h hidden size, V vocabulary, N = supervised tokens. A chunk holds ``chunk`` of the N.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from masw_lightning.errors import UserError

Head = Callable[[Tensor], Tensor]  # hidden [..., h] -> logits [..., V]


def supervised(labels: Tensor) -> Tensor:
    """Positions that predict a supervised token: bool ``[B, n]`` from labels ``[B, n]`` (-100 = not supervised).

    Position ``i`` predicts token ``i + 1``, so the mask is the labels' shifted by one; the last position predicts none.
    """
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != -100
    return mask


def targets(labels: Tensor) -> Tensor:
    """The supervised next tokens ``[N]``, in the order of ``hidden[supervised(labels)]``.

    Raises:
        UserError: there are none.
    """
    picked = labels[:, 1:][labels[:, 1:] != -100]
    if picked.numel() == 0:
        raise UserError(
            "a batch has no supervised token (all labels are -100): check the answer field, or raise the length at "
            "which samples are cut."
        )
    return picked


def next_token_loss(head: Head, hidden: Tensor, labels: Tensor, chunk: int = 1024) -> Tensor:
    """Mean cross entropy of the next raw token in nats (equation 5).

    Args:
        head: hidden states to logits.
        hidden: ``[B, n, h]``, raw positions.
        labels: int64 ``[B, n]``, not shifted; -100 where not supervised.
        chunk: supervised tokens whose logits exist at a time.

    Raises:
        UserError: no label is supervised.
    """
    wanted = targets(labels)

    def nll(rows: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(head(rows).float(), ids, reduction="sum")

    return _sum_chunks(nll, chunk, hidden[supervised(labels)], wanted) / wanted.numel()


def distillation_loss(
    head: Head, hidden: Tensor, teacher_head: Head, teacher_hidden: Tensor, labels: Tensor, chunk: int = 1024
) -> Tensor:
    """Mean KL(teacher || student) per supervised position in nats, in float32.

    Rows a teacher has beyond the student's vocabulary (or the other way round: padding) are left out.

    Args:
        head, hidden: the student's, ``[B, n, h]``.
        teacher_head, teacher_hidden: the teacher's, ``[B, n, h']``; no gradient flows into them.
        labels: int64 ``[B, n]``; says which positions count.
        chunk: supervised tokens whose logits exist at a time.

    Raises:
        UserError: no label is supervised.
    """
    count = targets(labels).numel()
    keep = supervised(labels)

    def kl(rows: Tensor, teacher_rows: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher_head(teacher_rows).float()
        logits = head(rows).float()
        vocabulary = min(logits.shape[-1], wanted.shape[-1])
        return F.kl_div(
            logits[..., :vocabulary].log_softmax(-1),
            wanted[..., :vocabulary].log_softmax(-1),
            reduction="sum",
            log_target=True,
        )

    return _sum_chunks(kl, chunk, hidden[keep], teacher_hidden[keep].detach()) / count


def chunks(chunk: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walks several tensors of equal first size in steps of ``chunk`` rows."""
    return zip(*(tensor.split(chunk) for tensor in tensors), strict=True)


def _sum_chunks(loss: Callable[..., Tensor], chunk: int, *tensors: Tensor) -> Tensor:
    """Sum of ``loss`` over chunks of rows; the first tensor is the hidden states ``[N, h]``."""
    if torch.is_grad_enabled() and tensors[0].requires_grad:
        return cast(Tensor, _SumChunks.apply(loss, chunk, *tensors))
    return torch.stack([loss(*part) for part in chunks(chunk, *tensors)]).sum()


class _SumChunks(torch.autograd.Function):
    """Takes the gradient of each chunk's rows while its logits are there; the backward pass only scales it.

    The head is frozen, so this is all the gradient there is, and nothing is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, loss: Callable[..., Tensor], chunk: int, hidden: Tensor, *others: Tensor) -> Tensor:
        losses, gradients = [], []
        for rows, *rest in chunks(chunk, hidden, *others):
            leaf = rows.detach().requires_grad_()
            with torch.enable_grad():
                part = loss(leaf, *rest)
            gradients.append(torch.autograd.grad(part, leaf)[0])
            losses.append(part.detach())
        ctx.save_for_backward(torch.cat(gradients))
        ctx.others = len(others)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return None, None, grads[0].to(gradient.dtype) * gradient, *(None,) * ctx.others
