"""SnapKV against a plain dense reference of its rule, written apart from it; what stays in memory; bad input."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from masw_lightning import FullKVDraft, MemoryLayout, SnapKVDraft, UserError, generate
from masw_lightning.attention.dense import dense_attention
from masw_lightning.attention.interface import output_logits, run_backbone
from masw_lightning.cache.snapkv import SnapKVCache, SnapKVRule
from masw_lightning.drafts.snapkv import SnapKVRunner


def dense_scores(q, k, scale, rule):
    """One number per selecting head and earlier key, key by key, from the whole attention matrix ``n x n``."""
    h, n, g = q.shape[0], q.shape[1], k.shape[0]
    past = n - rule.window
    weights = torch.zeros(h, n, n)
    for head in range(h):
        keys = k[head // (h // g)]
        for i in range(n):
            weights[head, i, : i + 1] = torch.softmax(keys[: i + 1] @ q[head, i] * scale, 0)
    seen = weights[:, past:, :past].sum(1)  # [H, past]
    if not rule.per_query_head:
        seen = torch.stack([seen[i * (h // g) : (i + 1) * (h // g)].sum(0) for i in range(g)])
    pooled = torch.zeros_like(seen)
    for j in range(past):
        near = seen[:, max(0, j - rule.kernel // 2) : j + rule.kernel // 2 + 1]
        pooled[:, j] = near.sum(1) / rule.kernel if rule.pooling == "avg" else near.max(1).values
    return pooled


def dense_choice(q, k, scale, rule):
    """Positions kept per selecting head: sorted by score, best first, then the window."""
    n, heads = q.shape[1], q.shape[0] if rule.per_query_head else k.shape[0]
    if n <= rule.budget:
        return [list(range(n))] * heads
    scores, past = dense_scores(q, k, scale, rule), n - rule.window
    best = [sorted(range(past), key=lambda j, row=row: -float(row[j]))[: rule.budget - rule.window] for row in scores]
    return [sorted(b) + list(range(past, n)) for b in best]


RULES = [
    SnapKVRule(12, 4, 5),
    SnapKVRule(12, 4, 5, "max"),
    SnapKVRule(9, 3, 1, "avg", per_query_head=True),
    SnapKVRule(14, 1, 7, "max", per_query_head=True),
    SnapKVRule(5, 5, 3),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [6, 13, 14, 15, 40])
def test_the_rule(rule, n):
    g = torch.Generator().manual_seed(n)
    q, k = torch.randn(2, 6, n, 8, generator=g) * 2, torch.randn(2, 3, n, 8, generator=g)
    chosen = rule.select(q, k, 0.4)
    assert chosen.shape == (2, 6 if rule.per_query_head else 3, min(n, rule.budget))
    for row in range(2):
        if n > rule.budget:
            scores = dense_scores(q[row], k[row], 0.4, rule)
            torch.testing.assert_close(rule.scores(q, k, 0.4)[row], scores, atol=1e-5, rtol=1e-5)
            for head, (ours, theirs) in enumerate(zip(chosen[row].tolist(), dense_choice(q[row], k[row], 0.4, rule))):
                assert ours == sorted(set(ours)) and ours[-rule.window :] == list(range(n - rule.window, n))
                # max pooling ties neighbours: then either of them may be kept, but never a lower score
                kept, wanted = (scores[head, [j for j in x if j < n - rule.window]] for x in (ours, theirs))
                torch.testing.assert_close(kept.sort().values, wanted.sort().values, atol=1e-5, rtol=0)
                assert rule.pooling == "max" or ours == theirs
        else:
            assert chosen[row].tolist() == dense_choice(q[row], k[row], 0.4, rule)


class DenseSnapKV:
    """Teacher forcing over a whole text: prompt rows see their past, later rows the chosen prompt keys and theirs."""

    def __init__(self, prompt, rule):
        self.prompt, self.rule = prompt, rule

    def attend(self, module, q, k, v, scale, sliding_window):
        n, h, group = q.shape[2], q.shape[1], q.shape[1] // k.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril().expand(1, h, n, n).clone()
        mask[:, :, self.prompt :, : self.prompt] = False
        choice = dense_choice(q[0, :, : self.prompt], k[0, :, : self.prompt], scale, self.rule)
        for head in range(h):
            mask[0, head, self.prompt :, choice[head if self.rule.per_query_head else head // group]] = True
        return dense_attention(q, k, v, mask, scale)[0]


@torch.no_grad()
def dense_logits(model, text, prompt, rule):
    embeds = model.get_input_embeddings()(text)
    positions = torch.arange(text.shape[1])[None]
    return output_logits(model, run_backbone(model, embeds, positions, DenseSnapKV(prompt, rule)))[0, -1]


@torch.no_grad()
def walk(model, rule, prompt, batch, steps, seed):
    """Random blocks, random rollbacks per row; the largest difference to the dense reference after any forward."""
    g = torch.Generator().manual_seed(seed)
    text = [torch.randint(0, 61, (prompt,), generator=g) for _ in range(batch)]
    runner = SnapKVRunner(model, rule, batch, prompt, prompt + 7 * steps)
    runner.prefill(torch.stack(text))
    worst = 0.0
    for _ in range(steps):
        t = int(torch.randint(1, 7, (), generator=g))
        block = torch.randint(0, 61, (batch, t), generator=g)
        logits = runner.logits(block)
        for row in range(batch):
            text[row] = torch.cat((text[row], block[row]))
            expected = dense_logits(model, text[row][None], prompt, rule)
            worst = max(worst, float((logits[row, -1] - expected).abs().max()))
        back = torch.randint(0, t + 1, (batch,), generator=g)
        runner.rollback(back)
        text = [row[: len(row) - int(b)] for row, b in zip(text, back)]
    return worst


@pytest.mark.parametrize("rule", [r for r in RULES if r.pooling == "avg"])  # max has ties, see above
@pytest.mark.parametrize("prompt", [1, 12, 30])
def test_decoding_equals_the_dense_reference(build_model, rule, prompt):
    if prompt >= rule.window or prompt <= rule.budget:
        assert walk(build_model(), rule, prompt, 2, 5, seed=prompt) < 2e-4


def test_every_family_reads_past_its_own_windows(build_model, family):
    assert walk(build_model(family), SnapKVRule(14, 3, 3), 27, 2, 4, seed=0) < 2e-4


def test_a_prompt_within_the_budget_stays_whole(build_model):
    target, ids = build_model(), torch.arange(40)[None]
    for budget in (40, 4096):
        snap, full = (generate(target, ids, d, 5, 20) for d in (SnapKVDraft(target, budget), FullKVDraft(target)))
        assert snap.accepted == full.accepted == [[5, 5, 5, 1]]
        assert snap.draft_kv_bytes == full.draft_kv_bytes


def test_as_many_entries_as_a_memory(build_model):
    layout, model = MemoryLayout(3, 6, 3), build_model()
    policy = SnapKVDraft(model, window=4, kernel=3, match=layout)
    for n in (1, 5, 9, 30, 90):
        session = policy.open(1, n, n + 20, 5)
        session.prefill(torch.zeros(1, n, dtype=torch.long))
        assert session.runner.cache.kept == min(n, max(4, layout.num_entries(n)))
        assert session.nbytes == 2 * 2 * 2 * (session.runner.cache.kept + 25) * 8 * 4


@pytest.mark.parametrize("heads", [2, 4])
def test_the_prompt_is_freed(build_model, heads):
    """Storage of the chosen cells only: 2 sides x layers x heads x cells x dim x 4 B, however long the prompt."""
    model = build_model()
    for n in (60, 400):
        runner = SnapKVRunner(model, SnapKVRule(24, 4, per_query_head=heads == 4), 1, n, n + 30)
        runner.prefill(torch.zeros(1, n, dtype=torch.long))
        assert runner.nbytes == 2 * 2 * heads * (24 + 30) * 8 * 4
        assert sum(x.untyped_storage().nbytes() for pair in runner.cache.buffers for x in pair) == runner.nbytes


def test_one_layer_at_a_time_and_no_square_matrix(build_model, monkeypatch):
    model, n = build_model(num_hidden_layers=3), 400
    layers, largest = [], []
    attend = SnapKVCache.attend

    def watch(self, module, q, k, v, scale, sliding_window):
        assert all(ref() is None for ref in layers), "an earlier layer's keys or values are still alive"
        out = attend(self, module, q, k, v, scale, sliding_window)
        layers.extend(weakref.ref(x) for x in (k, v))
        return out

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    monkeypatch.setattr(SnapKVCache, "attend", watch)
    runner = SnapKVRunner(model, SnapKVRule(24, 4), 1, n, n + 30)
    with Largest():
        runner.prefill(torch.zeros(1, n, dtype=torch.long))
    assert len(layers) == 6 and all(ref() is None for ref in layers)
    assert max(largest) < n * n / 4  # of a single head


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": 31}, "budget=31 is smaller than its window=32"),
        ({"kernel": 4}, "kernel=4"),
        ({"kernel": -1}, "kernel=-1"),
        ({"window": 0}, "window=0"),
        ({"pooling": "median"}, "pooling='median'"),
    ],
)
def test_bad_settings(build_model, settings, words):
    with pytest.raises(UserError, match=words):
        SnapKVDraft(build_model(), **settings)


def test_limits(build_model):
    runner = SnapKVRunner(build_model(), SnapKVRule(6, 2), 1, 10, 14)
    with pytest.raises(UserError, match="prompts of 10 tokens and is given 9"):
        runner.prefill(torch.zeros(1, 9, dtype=torch.long))
    runner.prefill(torch.zeros(1, 10, dtype=torch.long))
    runner.logits(torch.zeros(1, 3, dtype=torch.long))
    runner.rollback(2)
    assert runner.cache.mark().tolist() == [11]
    with pytest.raises(UserError, match="reaches into the prompt of 10"):
        runner.rollback(2)
    with pytest.raises(UserError, match="allocated for 14"):
        runner.logits(torch.zeros(1, 4, dtype=torch.long))
