"""Chunked losses equal the plain ones, values and gradients, and never hold all logits."""

import pytest
import torch
import torch.nn.functional as F

from masw_lightning.errors import UserError
from masw_lightning.modules.losses import distillation_loss, next_token_loss, supervised

B, N, H, V = 3, 17, 8, 29


def case(seed: int = 0) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    head = torch.nn.Linear(H, V, dtype=torch.float64)
    hidden = torch.randn(B, N, H, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, V, (B, N))
    labels[0, :9] = -100
    labels[2, 12:] = -100
    return head, hidden, labels


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_next_token_equals_plain_cross_entropy(chunk: int) -> None:
    head, hidden, labels = case()
    plain = F.cross_entropy(head(hidden)[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), ignore_index=-100)
    (expected,) = torch.autograd.grad(3 * plain, hidden)
    loss = next_token_loss(head, hidden, labels, chunk)
    (found,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(loss, plain.float(), check_dtype=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)  # logits go through float32


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_distillation_equals_plain_kl(chunk: int) -> None:
    head, hidden, labels = case()
    teacher_head, teacher_hidden, _ = case(1)
    keep = supervised(labels)
    student, teacher = head(hidden)[keep].log_softmax(-1), teacher_head(teacher_hidden)[keep].log_softmax(-1).detach()
    plain = (teacher.exp() * (teacher - student)).sum(-1).mean()
    (expected,) = torch.autograd.grad(3 * plain, hidden)
    loss = distillation_loss(head, hidden, teacher_head, teacher_hidden, labels, chunk)
    (found,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(loss, plain.float(), check_dtype=False, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert teacher_hidden.grad is None


def test_distilling_from_oneself_is_zero_and_padding_rows_are_left_out() -> None:
    head, hidden, labels = case()
    assert distillation_loss(head, hidden, head, hidden, labels).item() == pytest.approx(0, abs=1e-6)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return F.pad(head(rows), (0, 3), value=-30.0)

    assert distillation_loss(head, hidden, padded, hidden, labels).item() == pytest.approx(0, abs=1e-6)
    assert distillation_loss(padded, hidden, head, hidden, labels).item() == pytest.approx(0, abs=1e-6)


def test_position_predicts_the_next_token() -> None:
    labels = torch.tensor([[-100, -100, 7, 8, -100]])
    assert supervised(labels).tolist() == [[False, True, True, False, False]]


def test_the_first_token_alone_is_predicted_by_nobody() -> None:
    head, hidden, labels = case()
    labels[:] = -100
    labels[:, 0] = 3
    for loss in (
        lambda: next_token_loss(head, hidden, labels),
        lambda: distillation_loss(head, hidden, head, hidden, labels),
    ):
        with pytest.raises(UserError, match="no supervised token"):
            loss()


def test_no_tensor_of_all_logits_is_kept() -> None:
    head, hidden, labels = case()
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        next_token_loss(head, hidden, labels, chunk=4).backward()
    assert max(kept) < N * V
