"""Heads draft losslessly, incrementally as from scratch, and with every state beside the right token."""

import pytest
import torch

import masw_lightning.decoding.engine as engine
from masw_lightning import Eagle3Draft, EagleDraft, FullKVDraft, UserError, generate, prefill_target
from masw_lightning.adapter.eagle_head import Eagle3Head, EagleHead
from masw_lightning.adapter.features import target_states
from masw_lightning.adapter.head_storage import head_config
from masw_lightning.attention.unrolled import UnrolledMemory
from masw_lightning.decoding.sampling import SampledChoice

KINDS = ["eagle", "eagle3"]


def prompt(n, seed=0, vocab=61):
    return torch.randint(0, vocab, (1, n), generator=torch.Generator().manual_seed(seed))


def random_draft(target, kind, seed=0, vocabulary=20):
    """A head with large random weights: its outputs move with everything it reads."""
    torch.manual_seed(seed)
    v = target.config.get_text_config().vocab_size
    head = EagleHead(head_config(target)) if kind == "eagle" else Eagle3Head(head_config(target, vocabulary))
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(torch.randn_like(p) * (0.5 if "norm" in name else 0.3) + ("norm" in name))
    if isinstance(head, Eagle3Head):
        head.choose_vocabulary(torch.randperm(v)[:vocabulary])
    head.requires_grad_(False)
    return EagleDraft(target, head) if kind == "eagle" else Eagle3Draft(target, head)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", range(1, 9))
def test_lossless(build_model, kind, k):
    target = build_model()
    policy = random_draft(target, kind, seed=k)
    for n in (1 + k % 3, 17 + k):
        ids = prompt(n, seed=n)
        out = generate(target, ids, policy, k, 17)
        assert out.tokens == generate(target, ids, max_new_tokens=17).tokens
        assert sum(out.accepted[0]) + len(out.accepted[0]) + 1 >= 17


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_as_target(build_model, family, kind):
    target = build_model(family)
    for n in (5, 40):
        ids = prompt(n, seed=n)
        assert generate(target, ids, random_draft(target, kind), 4, 20).tokens == (
            generate(target, ids, max_new_tokens=20).tokens
        )


def test_the_layers_that_are_read(build_model):
    deep = build_model(num_hidden_layers=8)
    assert random_draft(deep, "eagle").target_layers == (8,)
    assert random_draft(deep, "eagle3").target_layers == (2, 4, 5)
    assert random_draft(build_model(), "eagle3").target_layers == (0, 1, 1)
    head = random_draft(deep, "eagle3").head
    assert head.target_layers(32) == (2, 16, 29)  # Llama-3.1-8B
    assert head.target_layers(80) == (2, 40, 77)


# ---- the decode invariant -------------------------------------------------------------------------------------------
class Recorder:
    """Chooses tokens at random and keeps the logits it was shown."""

    def __init__(self, seed, vocab):
        self.generator, self.vocab, self.seen = torch.Generator().manual_seed(seed), vocab, []

    def __call__(self, logits):
        self.seen.append(logits)
        return torch.randint(0, self.vocab, (len(logits),), generator=self.generator), None


def from_scratch(policy, text, drafted):
    """Draft logits ``[K,V]`` after ``text``, by one teacher-forced run over it and the drafted tokens."""
    ids = torch.cat((text, drafted))[None]
    head, target = policy.head, policy.target
    states = target_states(target, ids, policy.target_layers)
    hidden = head.fuse([s[:, :-1] for s in states])
    outputs = head.unroll(target.get_input_embeddings()(ids[:, 1:]), hidden, len(drafted), UnrolledMemory())
    rows = torch.stack([out[0, len(text) - 2] for out in outputs])
    return policy.open(1, 1, 1, 1).logits(rows)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 21])
def test_drafting_equals_a_fresh_run_whatever_was_accepted(build_model, kind, n):
    """Two rows that accept different numbers; the target's states are handed over, the head's own are forgotten."""
    target, batch, k = build_model(num_hidden_layers=6).double(), 2, 4  # float64: EAGLE's head has no norms to tame it
    policy = random_draft(target, kind)
    policy.head.double()
    text = list(torch.cat([prompt(n, seed) for seed in range(batch)]))
    session = policy.open(batch, n, n + 80, k)
    session.prefill(torch.stack(text), target_states(target, torch.stack(text), policy.target_layers))
    generator, first = torch.Generator().manual_seed(n), torch.randint(0, 61, (batch,))
    session.commit(torch.zeros(batch, dtype=torch.long), first)
    text = [torch.cat((row, token[None])) for row, token in zip(text, first, strict=True)]
    for turn in range(8):
        recorder = Recorder(turn, 61)
        proposed = session.propose(k, recorder).tokens
        drafted = torch.stack(recorder.seen, 1)
        for row in range(batch):
            expected = from_scratch(policy, text[row], proposed[row])
            torch.testing.assert_close(drafted[row], expected, atol=1e-5, rtol=1e-7)
        accepted = torch.randint(0, k + 1, (batch,), generator=generator)
        following = torch.randint(0, 61, (batch,), generator=generator)
        states = []
        for row in range(batch):
            all_states = target_states(target, torch.cat((text[row], proposed[row]))[None], policy.target_layers)
            states.append([s[:, -k - 1 :] for s in all_states])
            text[row] = torch.cat((text[row], proposed[row, : accepted[row]], following[row, None]))
        session.commit(accepted, following, tuple(torch.cat(s) for s in zip(*states, strict=True)))


# ---- alignment ------------------------------------------------------------------------------------------------------
def successor_target(build_model, layers=2):
    """A target that says ``token + 1`` (modulo V): rows are one-hot, its layers add nothing."""
    v = 32
    target = build_model(vocab_size=v, hidden_size=v, num_hidden_layers=layers, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.embed_tokens.weight.copy_(torch.eye(v))
        target.lm_head.weight.copy_(torch.eye(v).roll(1, 0))
        target.model.norm.weight.fill_(1.0)
    return target


def silent_head(head):
    """A head whose layer passes its input on unchanged."""
    with torch.no_grad():
        for p in head.parameters():
            p.fill_(1.0 if p.dim() == 1 else 0.0)
    return head.requires_grad_(False)


@pytest.mark.parametrize("half", ["embedding", "hidden"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_eagle_reads_each_state_beside_the_token_after_it(build_model, half, k):
    """Perfect on either half alone: the embedding of ``t + 1`` as it is, or the state at ``t`` moved on by one."""
    target = successor_target(build_model)
    head = silent_head(EagleHead(head_config(target)))
    eye = torch.eye(32)
    with torch.no_grad():
        zero = torch.zeros(32, 32)
        head.fc.weight.copy_(torch.cat((eye, zero) if half == "embedding" else (zero, eye.roll(1, 0)), 1))
    out = generate(target, prompt(7, vocab=32), EagleDraft(target, head), k, 1 + 5 * (k + 1))
    assert out.accepted == [[k] * 5]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_eagle3_reads_each_state_beside_the_token_after_it(build_model, layer):
    """One layer's state at ``t`` moved on by two is token ``t + 2``; the second step only repeats itself."""
    target = successor_target(build_model, layers=6)
    head = silent_head(Eagle3Head(head_config(target, 32)))
    head.choose_vocabulary(torch.arange(32))
    with torch.no_grad():
        head.lm_head.weight.copy_(torch.eye(32))
        head.fc.weight[:, 32 * layer : 32 * (layer + 1)] = torch.eye(32).roll(2, 0)
    assert generate(target, prompt(7, vocab=32), Eagle3Draft(target, head), 1, 11).accepted == [[1] * 5]
    assert generate(target, prompt(7, vocab=32), Eagle3Draft(target, head), 2, 11).accepted == [[1] * 5]


def test_eagle3_writes_target_ids(build_model):
    """A draft vocabulary of every other id: exactly every other token is drafted right."""
    target = successor_target(build_model, layers=6)
    head = silent_head(Eagle3Head(head_config(target, 16)))
    head.choose_vocabulary(torch.arange(0, 32, 2))
    with torch.no_grad():
        head.lm_head.weight.copy_(torch.eye(32)[::2])
        head.fc.weight[:, :32] = torch.eye(32).roll(2, 0)
    assert head.d2t.tolist() == list(range(16)) and int(head.t2d.sum()) == 16
    out = generate(target, torch.tensor([[4, 5, 6]]), Eagle3Draft(target, head), 1, 11)
    assert out.accepted == [[1] * 5]  # 7 is the prefill's; 8, 10, ... are drafted, 9, 11, ... the target's
    out = generate(target, torch.tensor([[4, 5, 6, 7]]), Eagle3Draft(target, head), 1, 5)
    assert out.accepted == [[0, 1, 1]]  # 9 cannot be drafted


# ---- sampling -------------------------------------------------------------------------------------------------------
def test_the_draft_distribution_is_in_the_targets_vocabulary(build_model):
    target = build_model()
    policy = random_draft(target, "eagle3")
    session, ids = policy.open(1, 9, 30, 3), prompt(9)
    session.prefill(ids, target_states(target, ids, policy.target_layers))
    session.commit(torch.zeros(1, dtype=torch.long), torch.tensor([3]))
    proposal = session.propose(3, SampledChoice(1.0, None, None, torch.Generator().manual_seed(0), 61))
    assert proposal.probs.shape == (1, 3, 61)
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(1, 3))
    assert bool((proposal.probs[..., ~policy.head.t2d] == 0).all()) and bool(policy.head.t2d[proposal.tokens].all())


def test_sampling_keeps_the_targets_distribution(build_model):
    """Second and third token over many runs from one prompt, against the exact joint distribution (chi-square)."""
    target = build_model(vocab_size=4, initializer_range=0.1)
    policy, ids, runs = random_draft(target, "eagle3", vocabulary=2), prompt(5, vocab=4), 300
    prefix = prefill_target(target, ids, 3, 2, policy.target_layers)
    count = torch.zeros(4, 4)
    torch.manual_seed(0)
    for _ in range(runs):
        _, second, third = generate(target, ids, policy, 2, 3, temperature=1.0, prefix=prefix).tokens[0]
        count[second, third] += 1
    with torch.no_grad():
        first = target(ids).logits[0, -1].softmax(-1)
        exact = torch.zeros(4, 4)
        for a in range(4):
            after = target(torch.cat((ids, torch.tensor([[a]])), 1)).logits[0, -1].softmax(-1)
            for b in range(4):
                text = torch.cat((ids, torch.tensor([[a, b]])), 1)
                exact[b] += first[a] * after[b] * target(text).logits[0, -1].softmax(-1)
    common = exact * runs >= 5
    chi, freedom = ((count - exact * runs) ** 2 / (exact * runs))[common].sum(), int(common.sum()) - 1
    assert freedom > 8 and chi < freedom + 4 * (2 * freedom) ** 0.5


# ---- what the loop hands over ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefill_reads_the_prompt_once(build_model, kind, monkeypatch):
    target = build_model()
    policy, ids = random_draft(target, kind), prompt(25)
    reads, real = [], engine.FullRunner.prefill
    monkeypatch.setattr(engine.FullRunner, "prefill", lambda self, x: reads.append(self.model) or real(self, x))
    expected = generate(target, ids, max_new_tokens=20).tokens
    reads.clear()
    told = prefill_target(target, ids, 20, 4, policy.target_layers)
    for draft in (policy, None, policy):
        out = generate(target, ids, draft, 4, 20, prefix=told)
        assert out.tokens == expected and out.seconds["prefill_target"] == told.seconds
    assert len(reads) == 1
    untold = prefill_target(target, ids, 20, 4)
    for draft in (FullKVDraft(target), policy, policy, None):
        out = generate(target, ids, draft, 4, 20, prefix=untold)
        assert out.tokens == expected and out.seconds["prefill_target"] == untold.seconds
        assert 0.8 * out.seconds["total"] < sum(v for k, v in out.seconds.items() if k != "total")
    reads = [model for model in reads if model is target]
    assert len(reads) == 4  # told; untold, the full-KV draft's own, and untold's states, once
    told.forget()
    assert generate(target, ids, policy, 4, 20, prefix=told).tokens == expected


def test_bytes_are_those_of_the_heads_cache(build_model):
    target = build_model()
    out = generate(target, prompt(40), random_draft(target, "eagle"), 5, 60)
    assert out.draft_kv_bytes == 2 * 2 * (40 + 60 + 5) * 8 * 4  # two sides, two KV heads, one layer
    assert out.seconds["prefill_draft"] > 0


# ---- refused --------------------------------------------------------------------------------------------------------
def test_a_head_of_another_target_or_kind(build_model):
    head = random_draft(build_model(), "eagle").head
    with pytest.raises(UserError, match=r"hidden_size=32.*hidden_size=48"):
        EagleDraft(build_model(hidden_size=48), head)
    with pytest.raises(UserError, match=r"vocab_size=61.*vocab_size=70"):
        EagleDraft(build_model(vocab_size=70), head)
    with pytest.raises(UserError, match=r"kind 'eagle', and 'eagle3'"):
        Eagle3Draft(build_model(), head)
