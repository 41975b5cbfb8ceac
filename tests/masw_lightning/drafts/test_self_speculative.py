"""The target drafts for itself: the same weights, fewer layers, a compact cache, and nothing left behind."""

import pytest
import torch

from masw_lightning import (
    MemoryLayout,
    MemorySlotDraft,
    SelfSpeculativeDraft,
    StridedDraft,
    UserError,
    attach_memory,
    generate,
)
from masw_lightning.adapter.shallow import first_layers
from masw_lightning.attention.interface import output_logits
from masw_lightning.drafts.runner import MemoryRunner

LAYOUT = MemoryLayout(3, 6, 3)
IDS = torch.arange(40)[None] % 61


def outcome(target, policy, k=4):
    out = generate(target, IDS, policy, k, 20)
    return out.tokens, out.accepted, out.draft_kv_bytes


def test_the_first_layers_share_every_weight(build_model, family):
    target = build_model(family, num_hidden_layers=3, **({"layer_types": None} if family == "gemma3" else {}))
    with torch.no_grad():
        before = target(IDS).logits
        states = target(IDS, output_hidden_states=True).hidden_states
        for layers in (1, 2, 3):
            view = first_layers(target, layers)
            assert len(view.base_model.layers) == layers
            own = dict(target.named_parameters())
            assert all(p is own[name] for name, p in view.named_parameters())
            if layers < 3:
                expected = output_logits(target, target.model.norm(states[layers]))
                torch.testing.assert_close(output_logits(view, view.base_model(IDS).last_hidden_state), expected)
        assert len(target.model.layers) == target.config.num_hidden_layers == 3
        assert torch.equal(target(IDS).logits, before)


def test_without_a_memory_it_is_the_strided_draft(build_model):
    target = build_model()
    assert outcome(target, SelfSpeculativeDraft(target, LAYOUT)) == outcome(target, StridedDraft(target, LAYOUT))
    assert outcome(target, SelfSpeculativeDraft(target, LAYOUT, layers=2)) == outcome(
        target, StridedDraft(target, LAYOUT)
    )


@pytest.mark.parametrize("writer", ["slot", "token"])
def test_with_a_memory_it_is_the_memory_draft(build_model, writer):
    target = build_model()
    memory = attach_memory(target, LAYOUT, writer=writer, init="random")
    expected = outcome(target, MemorySlotDraft(memory))
    assert outcome(target, SelfSpeculativeDraft(target, LAYOUT, memory=memory)) == expected
    assert outcome(target, SelfSpeculativeDraft(target, layers=2, memory=memory)) == expected


@pytest.mark.parametrize("writer", ["slot", "token", None])
def test_few_layers_decode_as_they_prefill(build_model, writer):
    """After any accepts and rejects the next logits are those of a fresh read, through the first layers' mirrors."""
    target = build_model(num_hidden_layers=3)
    source = attach_memory(target, LAYOUT, writer=writer, init="random") if writer else target
    layout = MemoryLayout(3, 6, 3, visibility="evicted")
    text = torch.randint(0, 61, (1, 60), generator=torch.Generator().manual_seed(1))
    runner = MemoryRunner(source, layout, 1, 80, layers=2)
    runner.prefill(text[:, :20])
    at = 20
    for t, back in ((5, 0), (6, 4), (1, 1), (3, 0), (6, 5)):
        with torch.no_grad():
            logits = runner.last_logits(text[:, at : at + t])
            fresh = output_logits(target, MemoryRunner(source, layout, 1, 80, layers=2).prefill(text[:, : at + t]))
        torch.testing.assert_close(logits, fresh, atol=2e-4, rtol=1e-5)
        runner.rollback(back)
        at += t - back
    if writer:  # and the mirrors act: other mirrors, other logits
        with torch.no_grad():
            for mirror in source.mirrors[:2].parameters():
                mirror.zero_()
            changed = output_logits(target, MemoryRunner(source, layout, 1, 80, layers=2).prefill(text[:, :at]))
            fresh = output_logits(target, runner.hidden(text[:, at : at + 1])[:, -1])
        assert not torch.allclose(changed, fresh, atol=1e-2)


def test_the_cache_grows_with_the_layers(build_model):
    target = build_model(num_hidden_layers=4)
    sizes = [outcome(target, SelfSpeculativeDraft(target, LAYOUT, layers=n))[2] for n in (1, 2, 4, None)]
    assert [size // sizes[0] for size in sizes] == [1, 2, 4, 4]
    assert sizes[1] == 2 * sizes[0]


def test_the_target_is_untouched(build_model):
    target = build_model()
    with torch.no_grad():
        before = target(IDS).logits
        weights = {name: p.data_ptr() for name, p in target.named_parameters()}
        outcome(target, SelfSpeculativeDraft(target, LAYOUT, layers=1))
        assert torch.equal(target(IDS).logits, before)
    assert {name: p.data_ptr() for name, p in target.named_parameters()} == weights
    assert (len(target.model.layers), target.config.num_hidden_layers) == (2, 2)
    assert target.config._attn_implementation == "sdpa"


def test_bad_input(build_model):
    target, other = build_model(), build_model(seed=1)
    for layers in (0, -1, 3):
        with pytest.raises(UserError, match=f"layers={layers} is out of range: the model has 2 layers"):
            SelfSpeculativeDraft(target, LAYOUT, layers)
    with pytest.raises(UserError, match="needs a layout"):
        SelfSpeculativeDraft(target)
    with pytest.raises(UserError, match="another model"):
        SelfSpeculativeDraft(target, memory=attach_memory(other, LAYOUT))
    with pytest.raises(UserError, match="is not the memory's"):
        SelfSpeculativeDraft(target, MemoryLayout(2, 6, 3), memory=attach_memory(target, LAYOUT))
    with pytest.raises(UserError, match="rollback=16"):
        generate(target, IDS, SelfSpeculativeDraft(target, LAYOUT), 16, 20)
