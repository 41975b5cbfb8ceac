"""Captured hidden states are transformers' own ``hidden_states``, in every family, through either attention."""

import pytest
import torch

from masw_lightning.adapter.features import HiddenStates, target_states
from masw_lightning.drafts.runner import FullRunner
from masw_lightning.errors import UserError

IDS = torch.randint(0, 61, (2, 19), generator=torch.Generator().manual_seed(0))


def test_they_are_those_of_transformers(build_model, family):
    model = build_model(family, num_hidden_layers=2)
    with torch.no_grad():
        expected = model(IDS, output_hidden_states=True).hidden_states
        runner = FullRunner(model, 2, 30)
        runner.keep_states((2, 0, 1, 0))
        runner.prefill(IDS[:, :12])
        first = runner.states
        runner.logits(IDS[:, 12:])
        for layer, ours, later in zip((2, 0, 1, 0), first, runner.states, strict=True):
            torch.testing.assert_close(torch.cat((ours, later), 1), expected[layer], atol=2e-5, rtol=0)
    for layer, ours in zip((1, 2), target_states(model, IDS, (1, 2)), strict=True):
        torch.testing.assert_close(ours, expected[layer], atol=2e-5, rtol=0)


def test_nothing_is_kept_unless_asked_and_no_hook_stays(build_model):
    model = build_model()
    runner = FullRunner(model, 2, 40)
    runner.prefill(IDS)
    assert runner.states == ()
    runner.keep_states((1,))
    runner.logits(IDS[:, :2])
    assert [s.shape for s in runner.states] == [(2, 2, 32)]
    runner.keep_states(())
    runner.logits(IDS[:, :2])
    assert runner.states == ()
    assert all(not layer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_the_model_does_not_have(build_model, layer):
    with pytest.raises(UserError, match=f"layer {layer} .*layers 0 to 1 "):
        HiddenStates(build_model(), (layer,))
