"""Every policy is lossless: a new one is a row of the table. Prompts at every edge of what they keep, K 1 to 8."""

import pytest
import torch

from masw_lightning import (
    FullKVDraft,
    MemoryLayout,
    MemorySlotDraft,
    SelfSpeculativeDraft,
    SlidingWindowDraft,
    SnapKVDraft,
    StridedDraft,
    attach_memory,
    generate,
)

LAYOUT = MemoryLayout(3, 6, 3)

# name -> policy, given the target and another model of its family
TABLE = {
    "full": lambda target, other: FullKVDraft(other),
    "swa": lambda target, other: SlidingWindowDraft(other, window=5),
    "matched": lambda target, other: SlidingWindowDraft(other, match=LAYOUT),
    "slot": lambda target, other: MemorySlotDraft(attach_memory(other, LAYOUT, init="random")),
    "slot, repeat": lambda target, other: MemorySlotDraft(attach_memory(target, LAYOUT, slot_input="repeat")),
    "token": lambda target, other: MemorySlotDraft(attach_memory(target, LAYOUT, writer="token")),
    "snapkv": lambda target, other: SnapKVDraft(other, budget=7, window=3, kernel=3),
    "snapkv, max, per query head": lambda target, other: SnapKVDraft(target, 7, 3, 3, "max", True),
    "snapkv, window only": lambda target, other: SnapKVDraft(target, budget=3, window=3, kernel=1),
    "snapkv, matched": lambda target, other: SnapKVDraft(other, window=3, match=LAYOUT),
    "strided": lambda target, other: StridedDraft(other, LAYOUT),
    "self": lambda target, other: SelfSpeculativeDraft(target, LAYOUT),
    "self, first layer": lambda target, other: SelfSpeculativeDraft(target, LAYOUT, layers=1),
    "self, first layer, memory": lambda target, other: SelfSpeculativeDraft(
        target, layers=1, memory=attach_memory(target, LAYOUT, init="random")
    ),
}
EDGES = (1, 30, 3, 9, 4, 10, 8, 12, 7)
NEW = 13


@pytest.fixture(params=TABLE)
def make(request):
    return TABLE[request.param]


def prompt(n, seed=0):
    return torch.randint(0, 61, (1, n), generator=torch.Generator().manual_seed(seed))


def greedy(model, ids, new):
    """Hugging Face's own greedy text."""
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def texts(build_model):
    target = build_model()
    return target, {n: (prompt(n, n), greedy(target, prompt(n, n), NEW)) for n in EDGES}


def test_lossless_at_every_edge_and_width(texts, build_model, make):
    target, expected = texts
    policy = make(target, build_model(seed=1))
    for k, n in [*zip(range(1, 9), EDGES), (5, EDGES[8])]:
        ids, text = expected[n]
        out = generate(target, ids, policy, k, NEW)
        assert out.tokens == [text], (k, n)
        assert NEW <= sum(out.accepted[0]) + len(out.accepted[0]) + 1 <= NEW + 1
    for memory in (getattr(policy, "memory", None), getattr(policy, "draft", None)):
        if memory is not None:
            memory.detach()


def test_lossless_for_every_family(build_model, family, make):
    """Mistral and Gemma 3 targets keep their own sliding-window layers, whatever the draft does."""
    target = build_model(family)
    policy = make(target, build_model(family, seed=1))
    for n in (8, 40):
        assert generate(target, prompt(n, n), policy, 4, 14).tokens == [greedy(target, prompt(n, n), 14)]


def test_a_second_prompt_after_an_exception(build_model, make):
    target = build_model()
    policy = make(target, build_model(seed=1))
    alone = generate(target, prompt(14, 2), policy, 4, 9)
    for model in {policy.target if hasattr(policy, "target") else target, target}:
        handle = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(target, prompt(31, 1), policy, 4, 9)
        handle.remove()
    again = generate(target, prompt(14, 2), policy, 4, 9)
    assert (again.tokens, again.accepted) == (alone.tokens, alone.accepted)


def test_sampling_runs_and_repeats(build_model, make):
    target = build_model()
    policy = make(target, build_model(seed=1))
    first, second = (generate(target, prompt(20), policy, 4, 12, temperature=1.0, seed=3) for _ in range(2))
    assert first.tokens == second.tokens and len(first.tokens[0]) == 12
