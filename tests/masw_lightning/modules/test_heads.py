"""Training of draft heads: what is learned, logged, saved, resumed, refused; and that a trained head is accepted."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from masw_lightning import Eagle3Draft, EagleDraft, generate, load_head
from masw_lightning.adapter.backbone import Backbone
from masw_lightning.attention.unrolled import UnrolledMemory
from masw_lightning.data import LongContextDataModule, Source
from masw_lightning.drafts.base import DraftPolicy
from masw_lightning.errors import UserError
from masw_lightning.modules import (
    AdapterPretraining,
    Eagle3Training,
    EagleTraining,
    HeadModule,
    OptimizerConfig,
    ScheduleConfig,
    ValidationConfig,
)
from masw_lightning.modules.attached_head import Entries
from masw_lightning.modules.chunked_sum import chunked_sum
from masw_lightning.modules.draft_vocabulary import frequent_tokens
from masw_lightning.modules.head_validation import chain_iterations

ROOT = Path(__file__).parents[3]
TINY = Backbone(str(ROOT / "configs" / "tiny" / "model"), random_init=True)
VALIDATION = ValidationConfig(prompts=2, prompt_tokens=20, new_tokens=14, num_draft_tokens=4)
WORDS = torch.randint(1, 48, (9, 6), generator=torch.Generator().manual_seed(3))
KINDS: list[type[HeadModule]] = [EagleTraining, Eagle3Training]

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*logging interval.*", "ignore:.*in eval mode.*")


class Text(Dataset[dict[str, Any]]):
    """Rows of fixed six-token words in random order; the first ``unsupervised`` labels are -100."""

    def __init__(self, rows: int = 64, length: int = 48, unsupervised: int = 0) -> None:
        self.rows, self.length, self.unsupervised = rows, length, unsupervised

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        order = torch.randint(0, len(WORDS), (self.length // 6 + 1,), generator=torch.Generator().manual_seed(index))
        ids = WORDS[order].flatten()[: self.length]
        labels = ids.clone()
        labels[: self.unsupervised] = -100
        return {"input_ids": ids, "labels": labels, "source": f"row {index}"}


def loader(batch: int = 4, **kwargs: int) -> DataLoader[Any]:
    return DataLoader(Text(**kwargs), batch_size=batch, generator=torch.Generator())


def module(cls: type[HeadModule], backbone: Backbone = TINY, **changes: Any) -> Any:
    own: dict[str, Any] = {"draft_vocabulary": 40, "steps": 3} if cls is Eagle3Training else {}
    return cls(backbone, **{"validation": VALIDATION, "optimizer": OptimizerConfig(lr=3e-3), **own, **changes})


def trainer(path: Path, steps: int = 3, **changes: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return L.Trainer(max_steps=steps, accelerator="cpu", default_root_dir=path, **{**quiet, **changes})


def policy(built: Any) -> DraftPolicy:
    return (Eagle3Draft if isinstance(built, Eagle3Training) else EagleDraft)(built.draft.model, built.draft.head)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """A small target that knows the words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model, text = LlamaForCausalLM(config), Text(192)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(90):
        ids = torch.stack([text[(8 * step + i) % 192]["input_ids"] for i in range(8)])
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("learned")
    model.save_pretrained(path)
    return Backbone(str(path))


@pytest.fixture(scope="module", params=KINDS, ids=lambda cls: cls.__name__)
def trained(request: pytest.FixtureRequest, learned: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A head after a short training, its trainer, and the folder with head.ckpt and head/."""
    path = tmp_path_factory.mktemp(request.param.__name__)
    L.seed_everything(0)
    built, run = module(request.param, learned), trainer(path, 150)
    before = built.validation
    run.fit(built, loader(8, rows=192), loader(rows=4))
    assert built.validation is before
    run.save_checkpoint(path / "head.ckpt")
    built.draft.save_pretrained(path / "head", trained_length=built.trained_length, base="learned")
    return built, run, path


# ---- it works -------------------------------------------------------------------------------------------------------
def test_a_trained_head_is_accepted(trained: Any, learned: Backbone, tmp_path: Path) -> None:
    """Far above an untrained one: most tokens of a chain of four."""
    built, _, _ = trained
    new, run = module(type(built), learned), trainer(tmp_path, 0)
    run.fit(new, loader())
    if isinstance(new, Eagle3Training):
        new.draft.head.choose_vocabulary(built.draft.head.draft_ids)
    counts = {}
    for name, each in (("trained", built), ("new", new)):
        with torch.no_grad():
            outs = [
                generate(each.draft.model, Text()[1000 + i]["input_ids"][None], policy(each), 4, 41) for i in range(3)
            ]
        counts[name] = sum(o.iterations[0] for o in outs) / 3
    assert 40 / counts["trained"] > 2.8
    assert 40 / counts["new"] < 1.4


def test_validation_predicts_decoding_exactly(trained: Any) -> None:
    built, run, _ = trained
    found = run.validate(built, loader(rows=4), verbose=False)[0]
    assert found["val/agreement"] > 0.8
    emitted = iterations = 0
    for index in range(2):
        ids = Text()[index]["input_ids"][None, :20]
        out = generate(built.draft.model, ids, policy(built), 4, 14)
        emitted, iterations = emitted + 13, iterations + out.iterations[0]
    assert found["val/tokens_per_iteration"] == pytest.approx(emitted / iterations)


def test_chains_are_counted_like_decoding() -> None:
    hits = torch.zeros(3, 12, dtype=torch.bool)
    hits[:, 4], hits[:1, 8], hits[1:, 10] = True, True, True  # three, one, and none: a miss comes first
    assert chain_iterations(hits, 4) == (3, 7)  # 5 6 7 +8 | 9 +10 | +11
    assert chain_iterations(hits, 11) == (0, 0)


# ---- the objectives -------------------------------------------------------------------------------------------------
def test_eagles_objective() -> None:
    built = module(EagleTraining, feature_weight=0.7, token_weight=0.3, loss_chunk=5)
    built.configure_model()
    rows = [Text(unsupervised=u)[i] for i, u in enumerate((0, 20))]
    ids, labels = torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows])
    draft = built.draft
    states = draft.model(ids, output_hidden_states=True).hidden_states[-1]
    embeds = draft.model.get_input_embeddings()(ids)
    out = draft.head.unroll(embeds[:, 1:], states[:, :-1], 1, UnrolledMemory())[0]
    losses = []
    for row in range(2):
        for t in range(46):  # state t, token t + 1 -> state t + 1, which says token t + 2
            if labels[row, t + 2] != -100:
                guess, true = out[row, t], states[row, t + 1]
                p, q = (draft.model.lm_head(x).log_softmax(-1) for x in (true, guess))
                losses.append(0.7 * F.smooth_l1_loss(guess, true) - 0.3 * (p.exp() * q).sum())
    total, count = built.objective_sum(draft.read(ids), labels)
    assert count == len(losses) == 46 + 28
    torch.testing.assert_close(total, torch.stack(losses).sum())


def test_eagle3s_objective() -> None:
    built = module(Eagle3Training, steps=3, step_decay=0.5, loss_chunk=7)
    built.configure_model()
    draft, head = built.draft, built.draft.head
    with torch.no_grad():
        choices = draft.model(torch.stack([Text()[i]["input_ids"] for i in range(2)])).logits.argmax(-1).unique()
    inside = torch.cat((choices[::2], torch.tensor([i for i in range(320) if i not in choices])))[:40]
    head.choose_vocabulary(inside)  # half of what the target chooses cannot be drafted
    rows = [Text(unsupervised=u)[i] for i, u in enumerate((0, 20))]
    ids, labels = torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows])
    entries, logits = draft.read(ids), draft.model(ids).logits
    total, counts = torch.zeros(()), []
    for i, out in enumerate(head.unroll(entries.embeds, entries.hidden, 3, UnrolledMemory())):
        losses = []
        for row in range(2):
            for t in range(46 - i):
                if labels[row, t + 2 + i] != -100:
                    true = logits[row, t + 1 + i]
                    wanted = true[head.t2d].softmax(-1)
                    loss = -(wanted * head.draft_logits(out[row, t]).log_softmax(-1)).sum()
                    losses.append(loss * head.t2d[true.argmax()])
        counts.append(len(losses))
        total = total + 0.5**i * torch.stack(losses).mean()
    summed, count = built.objective_sum(entries, labels)
    assert counts == [46 + 28, 45 + 28, 44 + 28] and count == counts[0]
    torch.testing.assert_close(summed / count, total)
    assert 0 < sum(bool(head.t2d[c]) for c in choices) < len(choices)


def test_chunks_change_neither_value_nor_gradient() -> None:
    torch.manual_seed(0)
    weight, rows = torch.nn.Parameter(torch.randn(9, 4)), torch.randn(10, 4, requires_grad=True)
    labels = torch.randint(0, 9, (10,))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ weight.T, y, reduction="sum")

    direct = loss(rows, labels)
    expected = torch.autograd.grad(direct * 0.5, [rows, weight])
    for chunk in (1, 3, 10, 99):
        total = chunked_sum(loss, chunk, [weight], rows, labels)
        torch.testing.assert_close(total, direct)
        for a, b in zip(torch.autograd.grad(total * 0.5, [rows, weight]), expected, strict=True):
            torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(chunked_sum(loss, 3, [weight], rows, labels), direct)
    assert chunked_sum(loss, 3, [weight], rows[:0], labels[:0]) == 0


@pytest.mark.parametrize("cls", KINDS)
def test_the_objectives_gradient_reaches_every_parameter(cls: type[HeadModule]) -> None:
    """The same gradients when everything is one graph."""
    grads = []
    for chunk in (11, 10**6):
        built = module(cls, loss_chunk=chunk)
        built.configure_model()
        if isinstance(built, Eagle3Training):
            built.draft.head.choose_vocabulary(torch.arange(40))
        rows = [Text()[i] for i in range(2)]
        ids, labels = torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows])
        total, _ = built.objective_sum(built.draft.read(ids), labels)
        grads.append(torch.autograd.grad(total, built.draft.adapter_parameters()))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_noise_is_uniform_and_shrinks_with_length() -> None:
    built = module(EagleTraining, noise=0.2)
    zeros = Entries(torch.zeros(1, 255, 64), torch.zeros(1, 255, 64), torch.zeros(1, 256, 64))
    noisy = built.perturb(zeros)
    width = 0.5 * 0.2 * 512 / 256
    assert noisy.hidden.abs().max() <= width and noisy.hidden.std().item() == pytest.approx(width / 3**0.5, rel=0.05)
    assert torch.equal(noisy.embeds, zeros.embeds) and module(EagleTraining, noise=0.0).perturb(zeros) is zeros


@pytest.mark.parametrize("cls", KINDS)
def test_a_few_steps_lower_the_loss_and_move_the_head_alone(tmp_path: Path, cls: type[HeadModule]) -> None:
    built, run = module(cls), trainer(tmp_path, 12)
    built.configure_model()
    frozen = {k: v.clone() for k, v in built.draft.model.state_dict().items()}
    before = {k: v.clone() for k, v in built.draft.head.named_parameters()}
    losses: list[float] = []
    built.log = lambda name, value, **_: losses.append(float(value.detach())) if name == "train/loss" else None
    run.fit(built, DataLoader(Text(4), batch_size=4))
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3])
    assert same(frozen, built.draft.model.state_dict())
    assert all(not torch.equal(v, before[k]) for k, v in built.draft.head.named_parameters())


def test_bfloat16_targets_have_float32_heads(tmp_path: Path) -> None:
    for cls in KINDS:
        built = module(cls, Backbone(TINY.path, "bfloat16", random_init=True))
        run = trainer(tmp_path, 2, val_check_interval=2)
        run.fit(built, loader(), loader(rows=2))
        assert built.draft.model.dtype == torch.bfloat16 and built.draft.head.dtype == torch.float32
        assert built.draft.head.rotary_emb.inv_freq.dtype == torch.float32
        assert bool(torch.isfinite(run.callback_metrics["val/loss"]))


# ---- draft vocabulary -----------------------------------------------------------------------------------------------
def test_the_most_frequent_supervised_tokens() -> None:
    rows = [{"input_ids": torch.tensor([5, 5, 5, 7, 2]), "labels": torch.tensor([-100, 5, 5, 7, 2])}] * 3
    assert frequent_tokens(rows, 2, 1, 9).tolist() == [5]
    assert frequent_tokens(rows, 2, 3, 9).tolist() == [2, 5, 7]
    assert frequent_tokens(rows, 9, 5, 9).tolist() == [0, 1, 2, 5, 7]


def test_vocabularies_from_data_from_a_file_and_refused(tmp_path: Path) -> None:
    built = module(Eagle3Training)
    trainer(tmp_path, 1).fit(built, loader())
    seen = torch.cat([Text()[i]["input_ids"] for i in range(64)]).unique()
    assert bool(built.draft.head.t2d[seen].all()) and int(built.draft.head.t2d.sum()) == 40
    (tmp_path / "ids.json").write_text(str(list(range(100, 140))))
    built = module(Eagle3Training, vocabulary_file=str(tmp_path / "ids.json"))
    trainer(tmp_path, 1).fit(built, loader())
    assert built.draft.head.draft_ids.tolist() == list(range(100, 140))
    for changes, told in (
        ({"vocabulary_file": str(tmp_path / "none.json")}, "no JSON list"),
        ({"vocabulary_file": str(tmp_path / "ids.json"), "draft_vocabulary": 41}, "lists 40 different ids .*=41"),
        ({"draft_vocabulary": 321}, "exceeds the target's 320"),
    ):
        with pytest.raises(UserError, match=told):
            trainer(tmp_path, 1).fit(module(Eagle3Training, **changes), loader())
    with pytest.raises(UserError, match="no draft vocabulary yet"):
        trainer(tmp_path).validate(module(Eagle3Training), loader(rows=2), verbose=False)


# ---- checkpoints ----------------------------------------------------------------------------------------------------
def test_a_checkpoint_and_an_export_hold_the_head(trained: Any, learned: Backbone) -> None:
    built, _, path = trained
    checkpoint = torch.load(path / "head.ckpt", weights_only=True)
    state = built.draft.adapter_state_dict()
    assert same(checkpoint["state_dict"], state) and "embed_tokens.weight" not in state
    record = checkpoint["masw"]
    assert (record["head"], record["trained_length"], record["trained_by"]) == (
        built.draft.head.kind, 48, type(built).__name__,
    )  # fmt: skip
    assert record["base"]["hidden_size"] == 48
    again = type(built).load_from_checkpoint(path / "head.ckpt")
    assert same(again.draft.adapter_state_dict(), state) and again.trained_length == 48
    exported = load_head(path / "head", built.draft.model)
    assert same({k: v for k, v in exported.state_dict().items() if k != "embed_tokens.weight"}, state)
    ids = Text()[5]["input_ids"][None]
    expected = generate(built.draft.model, ids, policy(built), 4, 30).accepted
    draft = (Eagle3Draft if isinstance(built, Eagle3Training) else EagleDraft)(built.draft.model, exported)
    assert generate(built.draft.model, ids, draft, 4, 30).accepted == expected


def test_training_starts_from_a_head(trained: Any, learned: Backbone, tmp_path: Path) -> None:
    built, _, path = trained
    for name in ("head.ckpt", "head"):
        # sizes and draft vocabulary are the head's, whatever this run would have chosen
        other = {"draft_vocabulary": 11} if isinstance(built, Eagle3Training) else {}
        new = module(type(built), learned, init_from=str(path / name), **other)
        new.configure_model()
        assert same(new.draft.adapter_state_dict(), built.draft.adapter_state_dict())
        assert new.trained_length == 48
    trainer(tmp_path, 1).fit(new, loader())
    assert not same(new.draft.adapter_state_dict(), built.draft.adapter_state_dict())
    if isinstance(built, Eagle3Training):
        assert torch.equal(new.draft.head.d2t, built.draft.head.d2t)


@pytest.mark.parametrize("cls", KINDS)
def test_six_steps_are_three_and_three_bitwise(
    tmp_path: Path, cls: type[HeadModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    source = [Source(path="configs/tiny/data/redpajama.jsonl", text="text", limit=8)]

    def fit(steps: int, resume: Path | None, seed: int) -> Any:
        L.seed_everything(seed)
        built, run = module(cls, schedule=ScheduleConfig(1, 6)), trainer(tmp_path, steps)
        data = LongContextDataModule(train=source, val_documents=2, sequence_length=32, batch_size=2)
        run.fit(built, datamodule=data, ckpt_path=resume)
        run.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return built

    whole = fit(6, None, 1)
    (tmp_path / "6.ckpt").rename(tmp_path / "whole.ckpt")
    fit(3, None, 1)
    rest = fit(6, tmp_path / "3.ckpt", 2)
    assert same(whole.draft.adapter_state_dict(), rest.draft.adapter_state_dict())
    a, b = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "6"))
    assert str(a["optimizer_states"]) == str(b["optimizer_states"]) and a["masw"]["tokens_seen"] == 6 * 2 * 32


def test_what_does_not_belong_is_refused(trained: Any, learned: Backbone, tmp_path: Path) -> None:
    built, _, path = trained
    other = KINDS[1 - KINDS.index(type(built))]
    for name in ("head.ckpt", "head"):
        with pytest.raises(UserError, match="of kind"):
            module(other, learned, init_from=str(path / name)).configure_model()
        with pytest.raises(UserError, match=r"hidden_size=48, but .* has hidden_size=64"):
            module(type(built), init_from=str(path / name)).configure_model()
    with pytest.raises(UserError, match=f"written by {type(built).__name__}, and {other.__name__} cannot resume"):
        trainer(tmp_path).fit(module(other, learned), loader(), ckpt_path=path / "head.ckpt")
    with pytest.raises(UserError, match=r"draft head of kind .* and no memory"):
        AdapterPretraining(learned, init_from=str(path / "head.ckpt")).configure_model()
    memory = AdapterPretraining(TINY)
    run = trainer(tmp_path, 1)
    run.fit(memory, loader())
    run.save_checkpoint(tmp_path / "memory.ckpt")
    with pytest.raises(UserError, match="holds no draft head"):
        module(type(built), init_from=str(tmp_path / "memory.ckpt")).configure_model()
    with pytest.raises(UserError, match="holds a memory and no draft head"):
        trainer(tmp_path).fit(module(type(built)), loader(), ckpt_path=tmp_path / "memory.ckpt")


@pytest.mark.parametrize(
    ("cls", "changes", "told"),
    [
        (EagleTraining, {"noise": -1.0}, "noise=-1.0 is negative"),
        (EagleTraining, {"loss_chunk": 0}, "loss_chunk=0"),
        (Eagle3Training, {"steps": 0}, "steps=0 is too small"),
        (Eagle3Training, {"step_decay": 0.0}, "step_decay=0.0 is out of range"),
    ],
)
def test_numbers_out_of_range(cls: type[HeadModule], changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        module(cls, **changes)


@pytest.mark.parametrize("cls", KINDS)
def test_a_batch_without_answers_names_its_source(tmp_path: Path, cls: type[HeadModule]) -> None:
    with pytest.raises(UserError, match=r"step 0, row 0, row 1, row 2, row 3: .*no supervised token"):
        trainer(tmp_path).fit(module(cls), loader(unsupervised=48))
