"""Whatever is proposed, accepted and rejected, a cache's next logits are those of a fresh read of the accepted text."""

import pytest
import torch

from masw_lightning import MemoryLayout, UserError, attach_memory
from masw_lightning.adapter.inject import window_hidden_states
from masw_lightning.attention import cached
from masw_lightning.attention.interface import output_logits
from masw_lightning.drafts.runner import FullRunner, MemoryRunner

LAYOUTS = [(2, 5, 3), (3, 4, 4), (4, 3, 1), (1, 6, 8), (5, 7, 2)]


def fresh_logits(source, layout, text):
    """Logits after ``text [B,n]``, teacher-forced."""
    with torch.no_grad():
        if layout is None:
            return source(text).logits[:, -1]
        if layout.ratio is None:
            return output_logits(source, window_hidden_states(source, text, layout)[:, -1])
        return source(text).logits[:, -1]


@torch.no_grad()
def random_walk(runner, source, layout, vocab, batch, prompt, steps, seed, width=5):
    """Feed random blocks, take random numbers back (a different one per row), compare after every forward."""
    g = torch.Generator().manual_seed(seed)
    text = [torch.randint(0, vocab, (prompt,), generator=g) for _ in range(batch)]
    runner.prefill(torch.stack(text))
    worst = 0.0
    for _ in range(steps):
        t = int(torch.randint(1, width + 2, (), generator=g))
        block = torch.randint(0, vocab, (batch, t), generator=g)
        logits = runner.logits(block)
        for row in range(batch):
            text[row] = torch.cat((text[row], block[row]))
            expected = fresh_logits(source, layout, text[row][None])
            worst = max(worst, (logits[row, -1] - expected[0]).abs().max().item())
        back = torch.randint(0, t + 1, (batch,), generator=g)
        runner.rollback(back)
        text = [row[: len(row) - int(b)] for row, b in zip(text, back, strict=True)]
    return worst


@pytest.mark.parametrize(("writer", "slot_input"), [("slot", "learned"), ("slot", "repeat"), ("token", "learned")])
@pytest.mark.parametrize("visibility", ["written", "evicted"])
def test_compact_memory(build_model, writer, slot_input, visibility):
    model = build_model("llama")
    for case, (s, w, r) in enumerate(LAYOUTS):
        layout = MemoryLayout(s, w, r, visibility=visibility)
        draft = attach_memory(model, layout, writer=writer, init="random", slot_input=slot_input, seed=case)
        for prompt in (1, s, s + 1, s + w, s + w + r, 40):
            runner = MemoryRunner(draft, None, batch=2, max_tokens=prompt + 90)
            assert random_walk(runner, draft, draft.layout, 61, 2, prompt, 8, seed=prompt) < 2e-4
        draft.detach()


@pytest.mark.parametrize(("writer", "slot_input"), [("slot", "learned"), ("slot", "repeat"), ("token", "learned")])
def test_every_family(build_model, family, writer, slot_input):
    layout = MemoryLayout(3, 6, 3)
    draft = attach_memory(build_model(family), layout, writer=writer, init="random", slot_input=slot_input)
    runner = MemoryRunner(draft, None, batch=3, max_tokens=130)
    assert random_walk(runner, draft, draft.layout, 61, 3, 21, 12, seed=1) < 2e-4


@pytest.mark.parametrize("sink", [0, 4])
def test_window_without_slots(build_model, family, sink):
    model, layout = build_model(family), MemoryLayout(sink, 6, None)
    runner = MemoryRunner(model, layout, batch=2, max_tokens=120)
    assert random_walk(runner, model, layout, 61, 2, 19, 10, seed=2) < 2e-4


def test_full_cache(build_model, family):
    model = build_model(family)
    runner = FullRunner(model, batch=2, capacity=150)
    assert random_walk(runner, model, None, 61, 2, 17, 12, seed=3) < 2e-4


@pytest.mark.parametrize("writer", ["slot", "token", None])
def test_cells_read_in_parts(build_model, writer, monkeypatch):
    """The same invariant where cells are read in parts (of 4 and more here; 1024 otherwise)."""
    monkeypatch.setattr(cached, "FEWEST", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    model = build_model()
    if writer is None:
        assert random_walk(FullRunner(model, 1, 150), model, None, 61, 1, 33, 12, seed=5) < 2e-4
        return
    for visibility in ("written", "evicted"):
        draft = attach_memory(model, MemoryLayout(2, 5, 3, visibility=visibility), writer=writer, init="random")
        runner = MemoryRunner(draft, None, batch=1, max_tokens=190)
        assert random_walk(runner, draft, draft.layout, 61, 1, 90, 12, seed=6) < 2e-4
        (reading,) = runner.cache._readings.values()
        assert reading.parts == 7


def test_rollback_across_a_slot_boundary_twice_in_a_row(build_model):
    draft = attach_memory(build_model(), MemoryLayout(2, 4, 3), init="random")
    runner = MemoryRunner(draft, None, 1, 100)
    text = torch.arange(30)[None] % 61
    runner.prefill(text[:, :20])
    with torch.no_grad():
        runner.logits(text[:, 20:26])  # boundaries at 20, 23, 26
        runner.rollback(3)
        runner.logits(text[:, 26:28])
        runner.rollback(4)
        kept = torch.cat((text[:, :21], text[:, 28:]), 1)
        ours = runner.logits(text[:, 28:])[:, -1]
        torch.testing.assert_close(ours, draft(kept).logits[:, -1], atol=2e-4, rtol=0)


def test_rollback_limits(build_model):
    draft = attach_memory(build_model(), MemoryLayout(2, 4, 3, rollback=6))
    runner = MemoryRunner(draft, None, 1, 100)
    runner.prefill(torch.zeros(1, 30, dtype=torch.long))
    runner.rollback(4)
    with pytest.raises(UserError, match="rollback=6"):
        runner.rollback(3)
    assert runner.cache.mark().tolist() == [26]
    with pytest.raises(UserError, match="rollback=6"):
        runner.logits(torch.zeros(1, 7, dtype=torch.long))
    full = FullRunner(build_model(), 1, 10)
    with pytest.raises(UserError, match="allocated for 10"):
        full.prefill(torch.zeros(1, 11, dtype=torch.long))
    with pytest.raises(UserError, match="cannot roll back"):
        full.rollback(1)


def test_failed_forward_changes_no_counter(build_model):
    model = build_model()
    runner = FullRunner(model, 1, 40)
    runner.prefill(torch.zeros(1, 8, dtype=torch.long))
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.logits(torch.zeros(1, 2, dtype=torch.long))
    handle.remove()
    assert runner.cache.mark().tolist() == [8]
    assert model.config._attn_implementation == "sdpa"


def test_bytes_are_those_of_the_storage(build_model):
    """A long prompt leaves nothing behind but the allocated cells: 2 sides x layers x KV heads x cells x dim x 4 B."""
    draft = attach_memory(build_model(), MemoryLayout(4, 8, 4, rollback=6))
    runner = MemoryRunner(draft, None, 1, 400)
    runner.prefill(torch.zeros(1, 300, dtype=torch.long))
    cells = 4 + (8 + 6) + (400 - 4) // 4 + 1
    assert runner.nbytes == 2 * 2 * 2 * cells * 8 * 4
    assert FullRunner(build_model(), 1, 400).nbytes == 2 * 2 * 2 * 400 * 8 * 4
