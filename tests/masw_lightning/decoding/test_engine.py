"""Speculative decoding returns the target's own greedy text, whatever the draft; counts equal a simulation."""

import pytest
import torch

from masw_lightning import (
    FullKVDraft,
    MemoryLayout,
    MemorySlotDraft,
    SlidingWindowDraft,
    UserError,
    attach_memory,
    generate,
    prefill_target,
)
from masw_lightning.drafts.base import Proposal

LAYOUT = MemoryLayout(3, 6, 3)


def prompt(n, seed=0, vocab=61):
    return torch.randint(0, vocab, (1, n), generator=torch.Generator().manual_seed(seed))


def reference(model, ids, new, eos=None):
    """Hugging Face's own greedy text."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


class Scripted:
    """A draft without a model: proposes by a rule on (text so far, index); the text includes the prompt."""

    target_layers = ()
    nbytes = 0

    def __init__(self, rule):
        self.rule = rule

    def open(self, batch, prompt_tokens, max_tokens, k):
        self.text, self.last = [], []
        return self

    def prefill(self, input_ids, hidden=()):
        self.text = input_ids[0].tolist()

    def propose(self, k, choose):
        self.last = [self.rule(self.text, i) for i in range(k)]
        return Proposal(torch.tensor([self.last]))

    def commit(self, accepted, next_token, hidden=()):
        self.text += [*self.last[: int(accepted)], int(next_token)]
        self.last = []


def simulate(draft_next, text, start, new, k):
    """Accepted counts of greedy drafting along ``text`` (prompt + the target's own text), one token at a time."""
    counts, at = [], start + 1
    while at < start + new:
        run = 0
        while run < k and at + run < start + new and draft_next(text[: at + run]) == text[at + run]:
            run += 1
        counts.append(run)
        at += run + 1
    return counts


@pytest.mark.parametrize("k", range(1, 9))
def test_every_policy_is_lossless_and_counts_right(build_model, k):
    target, other = build_model("llama", 0), build_model("llama", 1)
    slot = attach_memory(other, LAYOUT, writer="slot", init="random")
    token = attach_memory(other, LAYOUT, writer="token")
    own = attach_memory(target, LAYOUT, writer="token")
    policies = {
        "full": (FullKVDraft(other), lambda ids: other(ids)),
        "swa": (SlidingWindowDraft(other, window=5), None),
        "matched": (SlidingWindowDraft(other, match=LAYOUT), None),
        "slot": (MemorySlotDraft(slot), lambda ids: slot(ids)),
        "token": (MemorySlotDraft(token), lambda ids: token(ids)),
        "own memory": (MemorySlotDraft(own), lambda ids: own(ids)),
        "identical": (FullKVDraft(target), lambda ids: target(ids)),
    }
    s, w, r = 3, 6, 3
    edges = (1, s, s + 1, s + w - 1, s + w, s + w + 1, s + w + r, 30)
    for n in {edges[k - 1], edges[(k + 2) % 8], edges[(k + 5) % 8]}:  # every edge with several k, every k with several
        ids = prompt(n, seed=n + 100 * k)
        expected = reference(target, ids, 23)
        for name, (policy, forward) in policies.items():
            out = generate(target, ids, policy, num_draft_tokens=k, max_new_tokens=23)
            assert out.tokens == [expected], (name, n)
            assert sum(out.accepted[0]) + len(out.accepted[0]) + 1 >= 23
            if forward is not None and n in (edges[k - 1], 30):
                counts = simulate(
                    lambda text, f=forward: int(f(torch.tensor([text])).logits[0, -1].argmax()),
                    ids[0].tolist() + expected, n, 23, k,
                )  # fmt: skip
                assert out.accepted == [counts], (name, n)
                assert out.tokens_per_iteration == pytest.approx(22 / len(counts))


def test_every_family_as_target_and_draft(build_model, family):
    """Mistral and Gemma 3 targets keep their own sliding-window layers."""
    target = build_model(family)
    for writer in ("slot", "token"):
        draft = attach_memory(target, LAYOUT, writer=writer)
        for n in (5, 9, 40):
            ids = prompt(n, seed=n)
            out = generate(target, ids, MemorySlotDraft(draft), 4, 25)
            assert out.tokens == [reference(target, ids, 25)] == generate(target, ids, max_new_tokens=25).tokens
        draft.detach()


def test_random_and_adversarial_drafts(build_model):
    target = build_model()
    ids = prompt(20)
    expected = reference(target, ids, 30)
    full = ids[0].tolist() + expected
    g = torch.Generator().manual_seed(0)
    rules = {
        "random": lambda text, i: int(torch.randint(0, 61, (), generator=g)),
        "always wrong": lambda text, i: (full[len(text) + i] + 1) % 61 if len(text) + i < len(full) else 0,
        "always right": lambda text, i: full[len(text) + i] if len(text) + i < len(full) else 0,
        "right but the second": lambda text, i: (
            (full[len(text) + i] + (i == 1)) % 61 if len(text) + i < len(full) else 0
        ),
    }
    for name, rule in rules.items():
        for k in range(1, 9):
            out = generate(target, ids, Scripted(rule), k, 30)
            assert out.tokens == [expected], name
            if name == "always wrong":
                assert out.accepted == [[0] * 29] and out.tokens_per_iteration == 1.0
            if name == "right but the second" and k > 1:
                assert set(out.accepted[0][:-1]) == {1}  # counted to the first miss


def test_target_as_draft_with_a_window_over_the_whole_text_accepts_everything(build_model, family):
    target = build_model(family)
    if family in ("mistral", "gemma3"):
        policy = FullKVDraft(target)  # the layout would replace the target's own windows
    else:
        policy = MemorySlotDraft(attach_memory(target, MemoryLayout(4, 200, 4, visibility="evicted"), writer="token"))
    out = generate(target, prompt(33), policy, 5, 31)
    assert out.accepted == [[5] * 5] and out.tokens_per_iteration == 6.0


def test_eos_at_each_index_of_a_block(build_model):
    target = build_model()
    ids = prompt(12)
    text = reference(target, ids, 40)
    always_right = Scripted(lambda t, i: text[len(t) - 12 + i] if len(t) - 12 + i < 40 else 0)
    for index in range(20):
        eos = text[index]
        for listed in ([eos], [60, eos], eos):
            expected = generate(target, ids, max_new_tokens=40, eos_token_id=listed)
            assert expected.tokens == [text[: text.index(eos) + 1]] or 60 in text
            out = generate(target, ids, always_right, 5, 40, eos_token_id=listed)
            assert out.tokens == expected.tokens
            length = len(out.tokens[0])
            assert sum(out.accepted[0]) <= length - 1 <= sum(a + 1 for a in out.accepted[0])


def test_eos_comes_from_the_generation_config(build_model):
    target = build_model()
    ids = prompt(12)
    text = reference(target, ids, 40)
    target.generation_config.eos_token_id = [text[7], 60]
    stop = next(i for i, t in enumerate(text) if t in (text[7], 60)) + 1
    try:
        assert generate(target, ids, FullKVDraft(target), 5, 40).tokens == [text[:stop]]
        assert generate(target, ids, FullKVDraft(target), 5, 40, eos_token_id=[]).tokens == [text]
    finally:
        target.generation_config.eos_token_id = None


def test_length_limits(build_model):
    target = build_model()
    ids = prompt(12)
    text = reference(target, ids, 30)
    for new in range(1, 20):
        out = generate(target, ids, FullKVDraft(target), 5, new)
        assert out.tokens == [text[:new]]
        full, rest = divmod(new - 1, 6)
        assert out.accepted == [[5] * full + ([rest] if rest else [])]


def test_two_prompts_in_one_process_and_after_an_exception(build_model):
    target = build_model()
    policy = MemorySlotDraft(attach_memory(target, LAYOUT))
    a, b = prompt(31, 1), prompt(14, 2)
    alone = [generate(target, ids, policy, 4, 20).tokens for ids in (a, b)]
    together = [generate(target, ids, policy, 4, 20).tokens for ids in (b, a, b)]
    assert together == [alone[1], alone[0], alone[1]]
    handle = target.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(target, a, policy, 4, 20)
    handle.remove()
    assert generate(target, b, policy, 4, 20).tokens == alone[1]


def test_shared_prefill(build_model):
    target = build_model()
    ids = prompt(25)
    prefix = prefill_target(target, ids, max_new_tokens=20, num_draft_tokens=6)
    for policy in (None, FullKVDraft(target), SlidingWindowDraft(target, 4), None):
        shared = generate(target, ids, policy, 6, 20, prefix=prefix)
        assert shared.tokens == [reference(target, ids, 20)]
        assert shared.seconds["prefill_target"] == prefix.seconds > 0
    with pytest.raises(UserError, match="another target or prompt"):
        generate(target, prompt(26), prefix=prefix, max_new_tokens=20)
    with pytest.raises(UserError, match="room for 26"):
        generate(target, ids, FullKVDraft(target), 6, 21, prefix=prefix)


def test_unequally_padded_vocabularies(build_model):
    target, small, large = build_model(), build_model(seed=1, vocab_size=50), build_model(seed=2, vocab_size=80)
    ids = prompt(20, vocab=50)
    expected = reference(target, ids, 20)
    for model in (small, large):
        for temperature in (0.0, 1.0):
            out = generate(target, ids, FullKVDraft(model), 4, 20, temperature, seed=0)
            assert max(out.tokens[0]) < 61
            if not temperature:
                assert out.tokens == [expected]


def test_seconds_add_up_and_bytes_are_reported(build_model):
    target = build_model()
    out = generate(target, prompt(40), FullKVDraft(target), 5, 60)
    parts = [out.seconds[p] for p in ("prefill_target", "prefill_draft", "draft", "verify", "rollback")]
    assert all(p > 0 for p in parts) and 0.8 * out.seconds["total"] < sum(parts) <= out.seconds["total"]
    assert out.target_kv_bytes == 2 * 2 * 2 * (40 + 60 + 5) * 8 * 4
    plain = generate(target, prompt(40), max_new_tokens=5)
    assert plain.draft_kv_bytes == 0 and plain.tokens_per_iteration == 1.0 and plain.iterations == [4]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"num_draft_tokens": 16}, "rollback=16"),
    ],
)
def test_bad_input(build_model, kwargs, words):
    target = build_model()
    with pytest.raises(UserError, match=words):
        generate(target, prompt(9), MemorySlotDraft(attach_memory(target, LAYOUT)), **kwargs)


def test_bad_prompts(build_model):
    target = build_model()
    with pytest.raises(UserError, match="2 rows"):
        generate(target, prompt(9).expand(2, -1))
    with pytest.raises(UserError, match="512 positions"):
        generate(target, prompt(512))
    with pytest.raises(UserError, match="give token ids"):
        generate(target, torch.zeros(1, 0, dtype=torch.long))
