"""Warm-up, cosine, and numbers that make no sense."""

import pytest
import torch

from masw_lightning.errors import UserError
from masw_lightning.modules import OptimizerConfig, ScheduleConfig


def rates(config: ScheduleConfig, steps: int) -> list[float]:
    optimizer = OptimizerConfig(lr=1.0).build([torch.nn.Parameter(torch.zeros(1))])
    schedule = config.build(optimizer, steps)
    found = []
    for _ in range(steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_linear_up_then_cosine_to_the_end() -> None:
    found = rates(ScheduleConfig(warmup_steps=4, min_ratio=0.1), 24)
    assert found[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert found[14] == pytest.approx(0.55)  # half way down
    assert found[24] == pytest.approx(0.1)
    assert found[4:] == sorted(found[4:], reverse=True)


def test_own_length_wins_over_the_trainers() -> None:
    assert rates(ScheduleConfig(total_steps=10, min_ratio=0.5), 20)[10:] == pytest.approx([0.5] * 11)


def test_adamw_gets_the_numbers() -> None:
    built = OptimizerConfig(lr=2e-3, betas=(0.8, 0.9), weight_decay=0.1).build([torch.nn.Parameter(torch.zeros(1))])
    group = built.param_groups[0]
    assert isinstance(built, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (2e-3, (0.8, 0.9), 0.1)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: OptimizerConfig(lr=0.0), "lr=0.0"),
        (lambda: OptimizerConfig(lr=float("nan")), "lr=nan"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), "betas"),
        (lambda: OptimizerConfig(weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: ScheduleConfig(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: ScheduleConfig(min_ratio=2.0), "min_ratio=2.0"),
        (lambda: ScheduleConfig(total_steps=0), "total_steps=0"),
        (lambda: rates(ScheduleConfig(warmup_steps=5), 5), "warmup_steps=5 leaves nothing"),
    ],
)
def test_senseless_numbers_are_refused(make, told: str) -> None:
    with pytest.raises(UserError, match=told):
        make()


def test_an_endless_run_needs_an_end() -> None:
    optimizer = OptimizerConfig().build([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(UserError, match="max_steps"):
        ScheduleConfig().build(optimizer, float("inf"))
