"""MLPs in parts: the same numbers, and a model that is left as it was."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from masw_lightning import MemoryLayout, attach_memory
from masw_lightning.attention import rowwise
from masw_lightning.attention.rowwise import mlp_rows_in_cache
from masw_lightning.modules.modes import checkpoint_activations

CPU = torch.device("cpu")


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).double()


def mlps(model: nn.Module) -> list[nn.Module]:
    return [layer.mlp for layer in model.model.layers]  # type: ignore[union-attr]


@pytest.mark.parametrize("t", [512, 700, 1025])
@torch.no_grad()
def test_outputs_are_the_same(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, t: int) -> None:
    monkeypatch.setattr(rowwise, "BYTES", 0)  # so few bytes that only FEWEST counts
    x = torch.randn(2, t, 16, dtype=torch.float64)
    expected = model.model.layers[0].mlp(x)
    seen: list[int] = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    with mlp_rows_in_cache(model, t, CPU):
        found = model.model.layers[0].mlp(x)
    torch.testing.assert_close(found, expected)
    assert len(seen) == -(-2 * t // rowwise.FEWEST) and sum(seen) == 2 * t and max(seen) == rowwise.FEWEST


def test_training_is_left_alone(model: LlamaForCausalLM) -> None:
    with mlp_rows_in_cache(model, 4096, CPU):
        assert not any("forward" in mlp.__dict__ for mlp in mlps(model))


def test_a_long_text_trains_under_gradient_checkpointing(model: LlamaForCausalLM) -> None:
    # a replayed layer must save what the first forward saved
    draft = attach_memory(model, MemoryLayout(8, 8, 4), writer="token")
    checkpoint_activations(model, True)
    draft(torch.randint(1, 64, (1, 700))).logits.sum().backward()
    assert all(p.grad is not None for p in draft.adapter_parameters())


@torch.no_grad()
def test_the_model_is_left_as_it_was(model: LlamaForCausalLM) -> None:
    def fail() -> None:
        with mlp_rows_in_cache(model, 4096, CPU):
            assert all("forward" in mlp.__dict__ for mlp in mlps(model))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert not any("forward" in mlp.__dict__ for mlp in mlps(model))


@torch.no_grad()
@pytest.mark.parametrize(("rows", "device"), [(2 * rowwise.FEWEST - 1, CPU), (4096, torch.device("meta"))])
def test_short_forwards_and_other_devices_are_left_alone(
    model: LlamaForCausalLM, rows: int, device: torch.device
) -> None:
    with mlp_rows_in_cache(model, rows, device):
        assert not any("forward" in mlp.__dict__ for mlp in mlps(model))
