"""Sampling leaves the target's distribution as it is: the joint of the first two tokens, by a chi-square test."""

import pytest
import torch

from masw_lightning import FullKVDraft, generate, prefill_target
from masw_lightning.decoding.sampling import probabilities
from masw_lightning.decoding.verification import GreedyRule, RejectionRule
from masw_lightning.drafts.base import ChainSession, Proposal

V, TRIALS = 16, 800


class ArgmaxClaimingToSample(ChainSession):
    """A broken draft: proposes its argmax, but reports the distribution as if it had drawn from it."""

    def propose(self, k, choose):
        def argmax(logits):
            _, probs = choose(logits)
            return probs.argmax(-1), probs

        return super().propose(k, argmax)


class HonestArgmax(ChainSession):
    """An argmax draft that says so: no distribution, which the rule reads as certainty."""

    def propose(self, k, choose):
        proposal = super().propose(k, lambda logits: (choose(logits)[1].argmax(-1), None))
        return Proposal(proposal.tokens)


def policy(model, session):
    class Policy(FullKVDraft):
        def open(self, *args):
            opened = super().open(*args)
            return session(opened.runner, opened.vocab)

    return Policy(model)


@torch.no_grad()
def joint(model, ids, temperature, top_k=None, top_p=None):
    """Exact distribution [V, V] of the first two new tokens."""
    first = probabilities(model(ids).logits[0, -1], temperature, top_k, top_p)
    longer = torch.cat((ids.expand(V, -1), torch.arange(V)[:, None]), 1)
    return first[:, None] * probabilities(model(longer).logits[:, -1], temperature, top_k, top_p)


def chi_square_per_degree(target, draft, k, temperature=1.0, top_k=None, top_p=None, second_is_last=False):
    """Pearson's statistic / degrees of freedom; about 1 for the right distribution."""
    ids = torch.arange(5)[None]
    expected = joint(target, ids, temperature, top_k, top_p).flatten() * TRIALS
    prefix = prefill_target(target, ids, 2, k)
    counts = torch.zeros(V * V)
    torch.manual_seed(0)
    for _ in range(TRIALS):
        out = generate(
            target, ids, draft, k, 2, temperature, top_k, top_p, eos_token_id=[], prefix=prefix
        ).tokens[0]  # fmt: skip
        counts[out[0] * V + out[1]] += 1
    common = expected >= 5
    rest_seen, rest_expected = counts[~common].sum(), expected[~common].sum()
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    degrees = int(common.sum()) - 1
    if rest_expected > 1:
        statistic, degrees = statistic + (rest_seen - rest_expected) ** 2 / rest_expected, degrees + 1
    assert counts[expected == 0].sum() == 0
    return float(statistic / degrees), degrees


@pytest.fixture(scope="module")
def pair(build_model):
    sizes = {"vocab_size": V, "num_hidden_layers": 1, "hidden_size": 16, "initializer_range": 0.45}
    return build_model(seed=3, **sizes), build_model(seed=4, **sizes)


def limit(degrees):
    """Above it, chance is below about one in a million (normal approximation of chi-square / degrees)."""
    return 1 + 5 * (2 / degrees) ** 0.5


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8}])
def test_speculative_sampling_keeps_the_joint_distribution(pair, settings):
    target, draft = pair
    value, degrees = chi_square_per_degree(target, FullKVDraft(draft), 2, **settings)
    assert degrees > 10 and value < limit(degrees)


def test_an_argmax_draft_is_right_when_it_says_so_and_caught_when_it_does_not(pair):
    target, draft = pair
    value, degrees = chi_square_per_degree(target, policy(draft, HonestArgmax), 1)
    assert value < limit(degrees)
    value, degrees = chi_square_per_degree(target, policy(draft, ArgmaxClaimingToSample), 1)
    assert value > 2 * limit(degrees)


def test_the_greedy_rule_fails_the_same_test(pair):
    """Sanity of the test itself: a wrong rule (argmax verification under sampling) is far off."""
    target, draft = pair
    import masw_lightning.decoding.engine as engine

    original = engine.RejectionRule
    engine.RejectionRule = lambda *a: GreedyRuleDrawingFirst(original(*a))
    try:
        value, degrees = chi_square_per_degree(target, FullKVDraft(draft), 2)
    finally:
        engine.RejectionRule = original
    assert value > 2 * limit(degrees)


class GreedyRuleDrawingFirst(GreedyRule):
    def __init__(self, rejection):
        self.first = rejection.first


def test_seeded_sampling_repeats(pair):
    target, draft = pair
    ids = torch.arange(5)[None]
    a, b, c = (generate(target, ids, FullKVDraft(draft), 3, 20, 1.0, eos_token_id=[], seed=s).tokens for s in (1, 1, 2))
    assert a == b != c


def test_filters():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    p = logits.softmax(-1)[0]
    torch.testing.assert_close(probabilities(logits, 1.0)[0], p)
    torch.testing.assert_close(probabilities(logits, 1.0, top_k=2)[0], torch.tensor([0, 0, p[2], p[3]]) / (p[2] + p[3]))
    assert probabilities(logits, 1.0, top_p=0.5)[0].tolist() == [0, 0, 0, 1]
    torch.testing.assert_close(
        probabilities(logits, 1.0, top_p=0.7)[0], torch.tensor([0, 0, p[2], p[3]]) / (p[2] + p[3])
    )
    torch.testing.assert_close(probabilities(logits, 2.0)[0], (logits / 2).softmax(-1)[0])


def test_acceptance_counts_to_the_first_miss():
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 4, 5]]), 8).float()
    verdict = GreedyRule()(Proposal(torch.tensor([[1, 0, 3, 0]])), logits)
    assert (verdict.accepted.tolist(), verdict.next.tolist()) == ([1], [2])
    certain = (logits * 1e4).expand(2, -1, -1)
    drafted = torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4]])
    verdict = RejectionRule(1.0)(Proposal(drafted), certain)
    assert (verdict.accepted.tolist(), verdict.next.tolist()) == ([4, 0], [5, 1])
