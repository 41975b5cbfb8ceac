"""The strided cache is the token writer's memory with copied mirrors, without the copies."""

import pytest
import torch

from masw_lightning import MemoryLayout, MemorySlotDraft, StridedDraft, UserError, attach_memory, generate
from masw_lightning.adapter.inject import window_hidden_states
from masw_lightning.drafts.runner import MemoryRunner
from masw_lightning.drafts.strided import strided


@pytest.mark.parametrize("numbers", [(3, 6, 3), (2, 5, 1), (4, 3, 5)])
def test_equals_the_token_writer_with_copied_mirrors(build_model, family, numbers):
    model, layout = build_model(family), strided(MemoryLayout(*numbers))
    draft = attach_memory(model, layout, writer="token")
    g = torch.Generator().manual_seed(0)
    for n in (1, 4, 9, 10, 40):
        ids = torch.randint(0, 61, (2, n), generator=g)
        ours = window_hidden_states(model, ids, layout)
        torch.testing.assert_close(ours, draft.hidden_states(ids), atol=2e-5, rtol=1e-5)
        raw, copied = MemoryRunner(model, layout, 2, n + 60), MemoryRunner(draft, None, 2, n + 60)
        for runner in (raw, copied):
            runner.prefill(ids)
        assert raw.nbytes == copied.nbytes
        for t, back in ((1, [0, 1]), (5, [2, 4]), (7, [0, 7]), (4, [3, 1])):
            block = torch.randint(0, 61, (2, t), generator=g)
            with torch.no_grad():
                torch.testing.assert_close(raw.logits(block), copied.logits(block), atol=2e-4, rtol=1e-5)
            for runner in (raw, copied):
                runner.rollback(torch.tensor(back))


def test_same_outcome_and_bytes_as_the_memory(build_model):
    """Under either visibility of the layout: a raw entry is never seen twice."""
    model, ids = build_model(), torch.arange(50)[None] % 61
    draft = attach_memory(model, MemoryLayout(3, 6, 3), writer="token")
    theirs = generate(model, ids, MemorySlotDraft(draft), 4, 30)
    hidden = draft.hidden_states(ids)[:, -1].detach()
    for visibility in (None, "evicted", "written"):
        policy = StridedDraft(model, MemoryLayout(3, 6, 3, visibility=visibility))
        torch.testing.assert_close(policy.open(1, 50, 60, 4).runner.prefill(ids), hidden, atol=2e-5, rtol=1e-5)
        ours = generate(model, ids, policy, 4, 30)
        assert (ours.tokens, ours.accepted) == (theirs.tokens, theirs.accepted)
        assert ours.draft_kv_bytes == theirs.draft_kv_bytes


def test_entries_are_those_of_the_prompt(build_model):
    """Slot ``k`` holds position ``b_k - 1``, bit for bit: one layer, whose keys depend on nothing else."""
    model = build_model(num_hidden_layers=1)
    ids = torch.randint(0, 61, (1, 30), generator=torch.Generator().manual_seed(0))
    runner = MemoryRunner(model, strided(MemoryLayout(2, 4, 3)), 1, 40)
    full = MemoryRunner(model, MemoryLayout(30, 1, None), 1, 40)
    for r in (runner, full):
        r.prefill(ids)
    cache = runner.cache
    for kept, whole in zip(cache.buffers[0], full.cache.buffers[0]):
        slots = kept[0, :, cache.first_slot : cache.first_slot + 9]
        assert torch.equal(slots, whole[0, :, [4, 7, 10, 13, 16, 19, 22, 25, 28]])


def test_no_hooks_and_no_weights(build_model):
    model = build_model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    generate(model, torch.arange(30)[None], StridedDraft(model, MemoryLayout(3, 6, 3)), 4, 9)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_more_drafted_tokens_than_can_be_taken_back(build_model):
    model = build_model()
    with pytest.raises(UserError, match="rollback=4"):
        generate(model, torch.arange(9)[None], StridedDraft(model, MemoryLayout(3, 6, 3, rollback=4)), 4, 9)
