"""Attaching a memory: what is trained, what is equal to what, that nothing of the backbone changes."""

import copy

import pytest
import torch

from masw_lightning import MemoryLayout, UserError, attach_memory
from masw_lightning.adapter.mirror import SlotRows
from masw_lightning.attention.dense import dense_attention
from masw_lightning.attention.interface import run_backbone

LAYOUT = MemoryLayout(3, 6, 3)


def ids(n, batch=3, seed=0):
    return torch.randint(0, 61, (batch, n), generator=torch.Generator().manual_seed(seed))


class DenseMemory:
    """The definition: one dense mask over raw and slot rows, through the same model code."""

    def __init__(self, draft, n, rows):
        self.mask, self.n, self.rows, self.owner = draft.layout.dense_mask(n, draft.writer), n, rows, draft

    def attend(self, module, q, k, v, scale, sliding_window):
        if self.rows.slots and self.rows.written is not None:
            k, v = torch.cat((k, self.rows.slot_k), 2), torch.cat((v, self.rows.slot_v), 2)
        return dense_attention(q, k, v, self.mask, scale)[0]


def dense_logits(draft, input_ids):
    """``draft(input_ids).logits`` by the dense definition."""
    n = input_ids.shape[1]
    m = draft.layout.num_slots(n)
    rows, embeds, positions = SlotRows(n, m), draft.embed(input_ids), torch.arange(n)
    slots = torch.tensor(draft.layout.slot_positions(n, draft.writer), dtype=torch.long)
    if draft.writer == "slot":
        rows_, at = draft.slot_rows(embeds, slots - 1, slots)
        embeds, positions = torch.cat((embeds, rows_), 1), torch.cat((positions, at))
    else:
        rows.written = slots
    hidden = run_backbone(draft.model, embeds, positions[None], DenseMemory(draft, n, rows))
    return draft.logits(hidden[:, :n])


def nothing(draft):
    """Zero with a graph: a text too short for slots has zero gradients, not none."""
    return sum(p.sum() * 0 for p in draft.adapter_parameters())


@pytest.mark.parametrize(("writer", "slot_input"), [("slot", "learned"), ("slot", "repeat"), ("token", "learned")])
@pytest.mark.parametrize("visibility", ["written", "evicted"])
def test_model_forward_and_gradients_equal_the_dense_definition(build_model, writer, slot_input, visibility):
    model = build_model().double()
    layout = MemoryLayout(3, 6, 3, visibility=visibility)
    draft = attach_memory(model, layout, writer=writer, slot_input=slot_input)
    for n in (1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 50):
        x = ids(n, seed=n)
        fast, slow = draft(x).logits, dense_logits(draft, x)
        assert fast.shape == (3, n, 61)
        torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
        grads = [
            torch.autograd.grad(
                y.logsumexp(-1).sum() + nothing(draft), draft.adapter_parameters(), materialize_grads=True
            )
            for y in (fast, slow)
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    draft.detach()
    model.float()


def test_every_family_equals_the_dense_definition(build_model, family):
    model = build_model(family)
    for writer in ("slot", "token"):
        draft = attach_memory(model, LAYOUT, writer=writer, init="random")
        with torch.no_grad():
            for n in (4, 17, 41):
                x = ids(n)
                torch.testing.assert_close(draft(x).logits, dense_logits(draft, x), atol=1e-4, rtol=1e-4)
        draft.detach()


def test_token_writer_with_copied_mirrors_is_a_strided_raw_cache(build_model, family):
    """Its slots are every r-th old token kept raw: the plain backbone under the corresponding n x n mask."""
    model = build_model(family)
    draft = attach_memory(model, LAYOUT, writer="token")
    n, s, w, r = 47, 3, 6, 3
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    strided = (j <= i) & ((j < s) | (i - j < w) | ((j >= s) & ((j - s) % r == r - 1)))

    class Strided:
        owner = rows = None

        def attend(self, module, q, k, v, scale, sliding_window):
            return dense_attention(q, k, v, strided, scale)[0]

    x = ids(n)
    with torch.no_grad():
        expected = draft.logits(run_backbone(model, draft.embed(x), torch.arange(n)[None], Strided()))
        torch.testing.assert_close(draft(x).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_slot_that_repeats_its_token_starts_as_that_token(build_model, family):
    """Before any training the first layer's slots are the raw keys and values of tokens ``b_k - 1``."""
    model = build_model(family)
    draft = attach_memory(model, LAYOUT, slot_input="repeat")
    seen = {}

    class Watch(DenseMemory):
        def attend(self, module, q, k, v, scale, sliding_window):
            seen.setdefault("k", k)
            seen.setdefault("v", v)
            return super().attend(module, q, k, v, scale, sliding_window)

    n, x = 41, ids(41)
    boundaries = torch.tensor(LAYOUT.boundaries(n))
    rows, at = draft.slot_rows(draft.embed(x), boundaries - 1, boundaries)
    assert at.tolist() == [b - 1 for b in LAYOUT.boundaries(n)]
    embeds, positions = torch.cat((draft.embed(x), rows), 1), torch.cat((torch.arange(n), at))
    with torch.no_grad():
        run_backbone(model, embeds, positions[None], Watch(draft, n, SlotRows(n, len(at))))
    for x in seen.values():
        torch.testing.assert_close(x[:, :, n:], x[:, :, at], atol=1e-6, rtol=0)


def test_only_the_memory_is_trained(build_model, family):
    for writer, mirror, train in (
        ("slot", ("k", "v"), True),
        ("slot", ("q", "k", "v", "o"), False),
        ("token", ("k", "v"), True),
    ):
        model = build_model(family)
        draft = attach_memory(model, LAYOUT, writer, mirror, train_slot_embedding=train)
        names = {n for n, p in draft.named_parameters() if p.requires_grad}
        projections = {n for n in names if n.startswith("mirrors.")}
        assert names - projections == ({"slot_embedding"} if writer == "slot" and train else set())
        assert {n.split(".")[2][0] for n in projections} == set(mirror)
        draft(ids(30)).logits.square().mean().backward()
        for name, p in draft.named_parameters():
            # in the last layer nothing reads what a slot row's own query and output give
            if p.requires_grad and not name.startswith(("mirrors.1.q", "mirrors.1.o")):
                assert p.grad is not None and p.grad.abs().sum() > 0, name
        assert all(p.grad is None for p in model.parameters())
        assert len(draft.adapter_parameters()) == len(names)
        draft.detach()


def test_detaching_gives_back_the_same_model(build_model, family):
    model = build_model(family)
    x = ids(40)
    before, weights = model(x).logits, copy.deepcopy(model.state_dict())
    draft = attach_memory(model, LAYOUT)
    assert torch.equal(model(x).logits, before)  # the backbone's own forward is untouched while attached, too
    draft(x).logits.sum().backward()
    torch.optim.SGD(draft.adapter_parameters(), 0.1).step()
    assert draft.detach() is model
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert torch.equal(model(x).logits, before) and all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(UserError, match="detached"):
        draft(x)


def test_two_memories_share_one_backbone(build_model):
    model, x = build_model(), ids(40)
    alone = []
    for writer in ("slot", "token"):
        draft = attach_memory(model, LAYOUT, writer, init="random", seed=3)
        alone.append(draft(x).logits)
        draft.detach()
    a = attach_memory(model, LAYOUT, "slot", init="random", seed=3)
    b = attach_memory(model, LAYOUT, "token", init="random", seed=3)
    assert torch.equal(a(x).logits, alone[0]) and torch.equal(b(x).logits, alone[1])


def test_gradient_checkpointing_keeps_the_memory(build_model, family):
    """A replayed layer must see the slots again: same gradients, and zeroing the mirrors changes the loss."""
    for writer in ("slot", "token"):
        model = build_model(family)
        draft = attach_memory(model, LAYOUT, writer)
        x = ids(40)

        def loss(draft=draft, x=x):
            return draft(x).logits.logsumexp(-1).square().mean()

        plain = torch.autograd.grad(loss(), draft.adapter_parameters())
        model.gradient_checkpointing_enable()
        model.train()
        replayed = torch.autograd.grad(loss(), draft.adapter_parameters())
        for a, b in zip(plain, replayed, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        with_memory = loss().item()
        for mirror in draft.mirrors:
            for p in mirror.parameters():
                p.data.zero_()
        assert abs(loss().item() - with_memory) > 1e-4
        assert model.config._attn_implementation == "sdpa"


def test_mirrors_in_float32_beside_a_bfloat16_backbone(build_model):
    model = build_model().bfloat16()
    draft = attach_memory(model, LAYOUT, dtype=torch.float32)
    assert draft(ids(30)).logits.dtype == torch.bfloat16
    assert {p.dtype for p in draft.adapter_parameters()} == {torch.float32}


def test_random_init_differs_and_repeats(build_model):
    model = build_model()
    a, b, c = (attach_memory(model, LAYOUT, init="random", seed=s).adapter_state_dict() for s in (0, 0, 1))
    key = "mirrors.0.k_proj.weight"
    assert torch.equal(a[key], b[key]) and not torch.equal(a[key], c[key])
    copied = attach_memory(model, LAYOUT).adapter_state_dict()
    assert torch.equal(copied[key], model.model.layers[0].self_attn.k_proj.weight)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"writer": "both"}, "writer='both'"),
        ({"init": "zeros"}, "init='zeros'"),
        ({"mirror": ("k", "x")}, "mirror="),
        ({"slot_input": "copy"}, "slot_input='copy'"),
        ({"slot_input": "repeat", "writer": "token"}, "no slot rows"),
        ({"mirror": ()}, "mirror="),
        ({"writer": "token", "mirror": ("q", "k", "v")}, "keys and values only"),
    ],
)
def test_bad_options(build_model, kwargs, words):
    with pytest.raises(UserError, match=words):
        attach_memory(build_model(), LAYOUT, **kwargs)


def test_models_and_layouts_that_do_not_fit(build_model):
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2))
    with pytest.raises(UserError, match="k_proj and v_proj"):
        attach_memory(gpt2, LAYOUT)
    with pytest.raises(UserError, match="ratio=null"):
        attach_memory(build_model(), MemoryLayout(3, 6, None))
    with pytest.raises(UserError, match="give token ids"):
        attach_memory(build_model(), LAYOUT)(torch.zeros(3))
