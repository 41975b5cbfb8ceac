"""Whole fits on a tiny random backbone: what is trained, saved, resumed, refused and logged."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, Dataset

from masw_lightning import MemoryLayout, MemorySlotDraft, generate, load_memory
from masw_lightning.adapter.backbone import Backbone, load_backbone, rotary_buffers
from masw_lightning.data import LongContextDataModule, Source
from masw_lightning.errors import UserError
from masw_lightning.modules import (
    AdapterConfig,
    AdapterPretraining,
    MemoryModule,
    OptimizerConfig,
    ScheduleConfig,
    SupervisedFinetuning,
    ValidationConfig,
)

TINY = Path(__file__).parents[3] / "configs" / "tiny"
BACKBONE = Backbone(str(TINY / "model"), random_init=True)
LAYOUT = MemoryLayout(4, 6, 3)
VALIDATION = ValidationConfig(prompts=2, prompt_tokens=20, new_tokens=10, num_draft_tokens=3)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*LeafSpec.*",
    "ignore:.*logging interval.*",
    "ignore:.*in eval mode.*",
)


class Rows(Dataset[dict[str, Any]]):
    """Random tokens; the first ``unsupervised`` labels of a row are -100."""

    def __init__(self, rows: int = 64, length: int = 40, unsupervised: int = 0) -> None:
        self.rows, self.length, self.unsupervised = rows, length, unsupervised

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(1, 320, (self.length,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: self.unsupervised] = -100
        return {"input_ids": ids, "labels": labels, "source": f"file.jsonl, line {index + 1}"}


def loader(**kwargs: int) -> DataLoader[Any]:
    return DataLoader(Rows(**kwargs), batch_size=2, generator=torch.Generator())


def module(cls: type[MemoryModule] = AdapterPretraining, **changes: Any) -> MemoryModule:
    return cls(**{"backbone": BACKBONE, "memory": LAYOUT, "validation": VALIDATION, **changes})


def trainer(path: Path, steps: int = 4, **changes: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "max_steps": steps,
        "accelerator": "cpu",
        "default_root_dir": path,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**settings, **changes})


def adapter(built: MemoryModule) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in built.draft.adapter_state_dict().items()}


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of nested states."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pretrain.ckpt and adapter/ after four steps."""
    path = tmp_path_factory.mktemp("pretrained")
    built, run = module(), trainer(path)
    run.fit(built, loader())
    run.save_checkpoint(path / "pretrain.ckpt")
    built.draft.save_pretrained(path / "adapter", trained_length=40, base="tiny")
    return path


# ---- what is trained ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("writer", ["slot", "token"])
@pytest.mark.parametrize("objective", ["next_token", "distill"])
def test_only_the_adapter_changes(tmp_path: Path, writer: Any, objective: Any) -> None:
    built, run = module(adapter=AdapterConfig(writer=writer), objective=objective), trainer(tmp_path)
    built.configure_model()
    frozen, before = {k: v.clone() for k, v in built.draft.model.state_dict().items()}, adapter(built)
    run.fit(built, loader())
    assert same(frozen, built.draft.model.state_dict())
    after = adapter(built)
    assert all(not torch.equal(before[k], after[k]) for k in before)
    optimised = {id(p) for group in run.optimizers[0].param_groups for p in group["params"]}
    assert optimised == {id(p) for p in built.draft.adapter_parameters()}
    assert all(p.grad is None for p in built.draft.model.parameters())


def test_training_lowers_its_loss(tmp_path: Path) -> None:
    batch = next(iter(loader()))
    built = module(optimizer=OptimizerConfig(lr=1e-2), adapter=AdapterConfig(writer="token"))
    built.configure_model()
    before = built.loss(batch).item()
    trainer(tmp_path, 30).fit(built, DataLoader(Rows(2), batch_size=2))
    assert built.loss(batch).item() < before - 0.1


def test_configure_model_is_idempotent() -> None:
    built = module()
    built.configure_model()
    draft = built.draft
    built.configure_model()
    assert built.draft is draft


def test_a_frozen_slot_embedding_stays(tmp_path: Path) -> None:
    built = module(adapter=AdapterConfig(train_slot_embedding=False))
    built.configure_model()
    before = built.draft.slot_embedding.clone()
    trainer(tmp_path).fit(built, loader())
    assert torch.equal(before, built.draft.slot_embedding)


def test_rows_too_short_for_a_slot_are_no_error(tmp_path: Path) -> None:
    built = module()
    built.configure_model()
    before = adapter(built)
    trainer(tmp_path, 2).fit(built, loader(length=5))
    assert same(before, adapter(built))


def test_mirrors_of_a_half_precision_backbone_are_trained_in_float32(tmp_path: Path) -> None:
    built = module(backbone=Backbone(BACKBONE.path, dtype="bfloat16", random_init=True))
    trainer(tmp_path, 2).fit(built, loader())
    assert built.draft.model.dtype == torch.bfloat16
    assert {p.dtype for p in built.draft.adapter_parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_rotary_frequencies_stay_exact_whatever_the_precision(tmp_path: Path, precision: Any) -> None:
    exact = rotary_buffers(load_backbone(BACKBONE))
    built = module()
    run = trainer(tmp_path, 2, precision=precision, val_check_interval=2)
    run.fit(built, loader(), loader(rows=2))
    found = rotary_buffers(built.draft.model)
    assert {b.dtype for b in found.values()} == {torch.float32}
    assert same(exact, found)
    assert math.isfinite(run.callback_metrics["val/loss"])


def test_mixed_precision_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bf16-mixed .* 32-true"):
        trainer(tmp_path, precision="bf16-mixed").fit(module(), loader())


# ---- gradient checkpointing --------------------------------------------------------------------------------------
@pytest.mark.parametrize("writer", ["slot", "token"])
def test_checkpointing_changes_no_gradient(tmp_path: Path, writer: Any) -> None:
    batch, gradients = next(iter(loader())), []
    for on in (False, True):
        built = module(gradient_checkpointing=on, adapter=AdapterConfig(writer=writer))
        trainer(tmp_path, 0).fit(built, loader())  # sets the run up, trains nothing
        built.configure_model()
        built.on_fit_start()
        assert built.draft.model.training == on  # Transformers checkpoints in training mode only
        loss = built.loss(batch)
        gradients.append(torch.autograd.grad(loss, built.draft.adapter_parameters()))
        if on:
            with torch.no_grad():  # the memory must still be heard through the checkpointed layers
                for p in built.draft.adapter_parameters():
                    p.zero_()
            assert abs(built.loss(batch).item() - loss.item()) > 1e-3
        built.on_fit_end()
        assert not built.draft.model.training
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_training_mode_brings_no_dropout(tmp_path: Path) -> None:
    shutil.copytree(BACKBONE.path, tmp_path / "model")
    config = (
        (tmp_path / "model" / "config.json").read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.5')
    )
    (tmp_path / "model" / "config.json").write_text(config)
    built = module(backbone=Backbone(str(tmp_path / "model"), random_init=True), gradient_checkpointing=True)
    built.configure_model()
    built.on_fit_start()
    batch = next(iter(loader()))
    assert built.loss(batch).item() == built.loss(batch).item()


# ---- checkpoints -------------------------------------------------------------------------------------------------
def test_a_checkpoint_holds_the_adapter_and_primitives(pretrained: Path) -> None:
    checkpoint = torch.load(pretrained / "pretrain.ckpt", weights_only=True)
    built = module()
    built.configure_model()
    assert checkpoint["state_dict"].keys() == built.draft.adapter_state_dict().keys()
    record = checkpoint["masw"]
    assert record["layout"] == {"sink": 4, "window": 6, "ratio": 3, "rollback": 16, "visibility": "written"}
    assert (record["writer"], record["mirror"], record["trained_length"]) == ("slot", ["k", "v"], 40)
    assert record["base"]["name"] == BACKBONE.path
    assert record["tokens_seen"] == 4 * 2 * 40
    assert {"torch", "transformers", "lightning"} <= record["versions"].keys()
    assert checkpoint["hyper_parameters"]["memory"]["ratio"] == 3


def test_load_from_checkpoint_rebuilds_the_module(pretrained: Path) -> None:
    for cls in (AdapterPretraining, MemoryModule):
        built = cls.load_from_checkpoint(pretrained / "pretrain.ckpt")
        assert (built.memory.ratio, built.trained_length, built.draft.trained_length) == (3, 40, 40)
        assert same(adapter(built), torch.load(pretrained / "pretrain.ckpt", weights_only=True)["state_dict"])


class Disturbance(L.Callback):
    """Draws from all global generators between steps, and notes what training reads and draws itself."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        torch.rand(3), numpy.random.rand(2), random.random()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.rand(5), random.random()


class Drawing(AdapterPretraining):
    """A module whose loss depends on all three generators."""

    drawn: list[float]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        draw = torch.rand(()).item() + float(numpy.random.rand()) + random.random()
        self.drawn = [*getattr(self, "drawn", []), draw]
        self.read = [*getattr(self, "read", []), *batch["source"]]
        return super().training_step(batch, batch_idx) * (1 + 0.1 * draw)


def documents(length: int = 32) -> LongContextDataModule:
    source = [Source(path=str(TINY / "data" / "redpajama.jsonl"), text="text", limit=8)]
    return LongContextDataModule(train=source, val_documents=2, sequence_length=length, batch_size=2)


def test_twenty_steps_are_ten_and_ten_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parents[1])

    def fit(steps: int, resume: Path | None) -> tuple[Drawing, L.Trainer]:
        L.seed_everything(7 if resume is None else 99)  # a resumed process starts with other generators
        built = module(Drawing, schedule=ScheduleConfig(warmup_steps=3, total_steps=20), objective="distill")
        run = trainer(tmp_path, steps, val_check_interval=4, callbacks=[Disturbance()], limit_val_batches=1)
        run.fit(built, datamodule=documents(), ckpt_path=resume)
        return built, run  # type: ignore[return-value]

    whole, long_run = fit(20, None)
    long_run.save_checkpoint(tmp_path / "whole.ckpt")
    half, half_run = fit(10, None)
    half_run.save_checkpoint(tmp_path / "half.ckpt")
    rest, rest_run = fit(20, tmp_path / "half.ckpt")
    rest_run.save_checkpoint(tmp_path / "rest.ckpt")
    assert len(rest.drawn) == 10
    assert half.read + rest.read == whole.read  # type: ignore[operator]
    assert half.drawn + rest.drawn == whole.drawn
    a, b = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "rest"))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "generators", "masw", "global_step"):
        assert same(a[key], b[key]), key


def test_a_checkpoint_written_within_a_run_resumes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks write before the module's own end-of-batch hook and before the loop counts the batch as done."""
    monkeypatch.chdir(TINY.parents[1])

    class Mid(Checkpoint):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    def fit(resume: Path | None) -> Drawing:
        L.seed_everything(3 if resume is None else 4)
        built, settings = module(Drawing), {"val_check_interval": 4, "limit_val_batches": 1}
        callbacks = [Disturbance(), *([] if resume else [Mid()])]
        run = trainer(tmp_path, 8, callbacks=callbacks, enable_checkpointing=True, **settings)
        run.fit(built, datamodule=documents(), ckpt_path=resume)
        return built  # type: ignore[return-value]

    whole, rest = fit(None), fit(tmp_path / "mid.ckpt")
    assert (whole.read[8:], whole.drawn[4:], whole.tokens_seen) == (rest.read, rest.drawn, rest.tokens_seen)  # type: ignore[index]
    assert same(adapter(whole), adapter(rest))


def test_an_epoch_boundary_resumes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parents[1])
    data = documents(128)
    run = trainer(tmp_path, 1)
    run.fit(module(Drawing), datamodule=data)
    epoch = len(data.train_dataloader())
    assert epoch >= 2

    def fit(steps: int, resume: Path | None) -> Drawing:
        L.seed_everything(3 if resume is None else 4)
        built, run = module(Drawing, schedule=ScheduleConfig(total_steps=99)), trainer(tmp_path, steps)
        run.fit(built, datamodule=documents(128), ckpt_path=resume)
        run.save_checkpoint(tmp_path / "step.ckpt")
        return built  # type: ignore[return-value]

    whole = fit(2 * epoch + 1, None)
    half = fit(epoch, None)
    rest = fit(2 * epoch + 1, tmp_path / "step.ckpt")
    assert half.read + rest.read == whole.read  # type: ignore[operator]
    assert half.drawn + rest.drawn == whole.drawn
    assert same(adapter(whole), adapter(rest))


def resume_with(pretrained: Path, tmp_path: Path, built: MemoryModule, name: Path | None = None) -> None:
    trainer(tmp_path, 6).fit(built, loader(), ckpt_path=name or pretrained / "pretrain.ckpt")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"memory": MemoryLayout(4, 6, 2)}, "memory ratio=3, and this run asks for ratio=2"),
        ({"memory": MemoryLayout(4, 8, 3)}, "memory window=6, and this run asks for window=8"),
        ({"memory": MemoryLayout(4, 6, 3, visibility="evicted")}, "visibility=written"),
        ({"adapter": AdapterConfig(writer="token")}, "writer=slot, and this run asks for writer=token"),
        (
            {"adapter": AdapterConfig(slot_input="repeat")},
            "slot_input=learned, .* slot_input=repeat",
        ),
        ({"adapter": AdapterConfig(mirror=("v",))}, r"mirror=\['k', 'v'\], and this run asks for mirror=\['v'\]"),
    ],
)
def test_a_checkpoint_of_another_memory_is_refused(
    pretrained: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        resume_with(pretrained, tmp_path, module(**changes))
    for name in ("pretrain.ckpt", "adapter"):
        with pytest.raises(UserError, match=told):
            module(init_from=str(pretrained / name), **changes).configure_model()


def test_another_rollback_is_no_other_memory(pretrained: Path, tmp_path: Path) -> None:
    resume_with(pretrained, tmp_path, module(memory=MemoryLayout(4, 6, 3, rollback=8)))


def test_another_base_is_refused(pretrained: Path, tmp_path: Path) -> None:
    model = load_backbone(BACKBONE)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BACKBONE.path) / name, tmp_path / "other")
    other = Backbone(str(tmp_path / "other"))
    with pytest.raises(UserError, match="other"):
        resume_with(pretrained, tmp_path, module(backbone=other))
    for name in ("pretrain.ckpt", "adapter"):
        with pytest.raises(UserError, match="other"):
            module(backbone=other, init_from=str(pretrained / name)).configure_model()


@pytest.mark.parametrize("change", ["missing", "surplus", "misshapen"])
def test_weights_that_do_not_fit_are_errors(pretrained: Path, tmp_path: Path, change: str) -> None:
    checkpoint = torch.load(pretrained / "pretrain.ckpt", weights_only=True)
    state = checkpoint["state_dict"]
    name = next(k for k in state if "k_proj" in k)
    if change == "missing":
        del state[name]
    elif change == "surplus":
        state["mirrors.9.k_proj.weight"] = state[name]
    else:
        state[name] = state[name][:-1]
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    with pytest.raises(UserError, match="k_proj"):
        resume_with(pretrained, tmp_path, module(), tmp_path / "bad.ckpt")
    with pytest.raises(UserError, match="k_proj"):
        module(init_from=str(tmp_path / "bad.ckpt")).configure_model()


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, tmp_path / "foreign.ckpt")
    for name, told in (
        ("text", "is not a checkpoint"),
        ("foreign", "holds no memory adapter"),
        ("none", "no checkpoint"),
    ):
        with pytest.raises(UserError, match=told):
            module(init_from=str(tmp_path / f"{name}.ckpt")).configure_model()
    with pytest.raises(UserError, match="holds no memory adapter"):
        trainer(tmp_path).fit(module(), loader(), ckpt_path=tmp_path / "foreign.ckpt")


# ---- from pretraining to fine-tuning -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["pretrain.ckpt", "adapter"])
def test_sft_starts_from_pretrained_weights_alone(pretrained: Path, tmp_path: Path, name: str) -> None:
    built, run = module(SupervisedFinetuning, init_from=str(pretrained / name)), trainer(tmp_path, 2)
    built.configure_model()
    assert same(adapter(built), torch.load(pretrained / "pretrain.ckpt", weights_only=True)["state_dict"])
    assert built.trained_length == 40
    run.fit(built, loader(length=30, unsupervised=20))
    assert (run.global_step, built.tokens_seen, built.trained_length) == (2, 2 * 2 * 30, 40)


def test_sft_resumes_without_the_pretraining_file(pretrained: Path, tmp_path: Path) -> None:
    shutil.copy(pretrained / "pretrain.ckpt", tmp_path / "start.ckpt")
    built, run = module(SupervisedFinetuning, init_from=str(tmp_path / "start.ckpt")), trainer(tmp_path, 2)
    run.fit(built, loader())
    run.save_checkpoint(tmp_path / "sft.ckpt")
    (tmp_path / "start.ckpt").unlink()
    again = module(SupervisedFinetuning, init_from=str(tmp_path / "start.ckpt"))
    trainer(tmp_path, 3).fit(again, loader(), ckpt_path=tmp_path / "sft.ckpt")
    assert same(adapter(SupervisedFinetuning.load_from_checkpoint(tmp_path / "sft.ckpt")), adapter(built))


def test_a_missing_start_stops_every_stage(tmp_path: Path) -> None:
    for run in ("fit", "validate", "predict"):
        with pytest.raises(UserError, match=r"no checkpoint at 'missing\.ckpt'"):
            getattr(trainer(tmp_path), run)(module(SupervisedFinetuning, init_from="missing.ckpt"), loader())


def test_sft_does_not_resume_a_pretraining_run(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"AdapterPretraining.*init_from"):
        resume_with(pretrained, tmp_path, module(SupervisedFinetuning))


def test_sft_learns_from_answers_only(tmp_path: Path) -> None:
    """Labels outside the answer have no influence; those inside do."""
    batch = next(iter(loader(unsupervised=25)))
    built = module(SupervisedFinetuning)
    built.configure_model()
    loss = built.loss(batch)
    hidden = built.draft.hidden_states(batch["input_ids"])
    answers = built.draft.logits(hidden)[:, 24:-1].reshape(-1, 320)
    expected = torch.nn.functional.cross_entropy(answers, batch["input_ids"][:, 25:].reshape(-1))
    torch.testing.assert_close(loss, expected)


def test_a_batch_without_answers_names_its_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"step 0, file\.jsonl, line 1, file\.jsonl, line 2: .*no supervised token"):
        trainer(tmp_path).fit(module(SupervisedFinetuning), loader(unsupervised=40))


class Poison(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            with torch.no_grad():
                pl_module.draft.adapter_parameters()[-1].fill_(float("nan"))


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"loss is nan at step 2 on file\.jsonl, line 5, file\.jsonl, line 6"):
        trainer(tmp_path, callbacks=[Poison()]).fit(module(), loader())


# ---- teachers ----------------------------------------------------------------------------------------------------
def test_distilling_from_another_model_of_the_same_vocabulary(tmp_path: Path) -> None:
    teacher = load_backbone(BACKBONE)
    teacher.resize_token_embeddings(328, mean_resizing=False)  # padded, as some releases are
    teacher.save_pretrained(tmp_path / "teacher")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BACKBONE.path) / name, tmp_path / "teacher")
    built = module(objective="distill", teacher=Backbone(str(tmp_path / "teacher")))
    trainer(tmp_path, 2).fit(built, loader())
    own = module(objective="distill")
    own.configure_model()
    own.draft.load_adapter_state_dict(adapter(built))
    batch = next(iter(loader()))
    torch.testing.assert_close(built.loss(batch), own.loss(batch))  # the same weights teach the same
    assert not any(name.startswith("teacher") for name in built.state_dict())


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(BACKBONE.path, tmp_path / "teacher")
    content = json.loads((tmp_path / "teacher" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(content))
    built = module(objective="distill", teacher=Backbone(str(tmp_path / "teacher"), random_init=True))
    with pytest.raises(UserError, match=r"teacher .* different tokenizers"):
        built.configure_model()


def test_a_teacher_is_for_distillation() -> None:
    with pytest.raises(UserError, match="distill"):
        module(teacher=BACKBONE)


# ---- validation --------------------------------------------------------------------------------------------------
def test_everything_is_logged(tmp_path: Path) -> None:
    run = trainer(tmp_path, 4, logger=TensorBoardLogger(tmp_path, "", ""), log_every_n_steps=1, val_check_interval=2)
    run.fit(module(), loader(), loader(rows=4))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {
        *("train/loss", "train/grad_norm", "lr", "train/tokens_per_s", "train/tokens_seen"),
        *("val/loss", "val/loss_full", "val/loss_window", "val/agreement", "val/agreement_window"),
        *("val/overlap", "val/overlap_window"),
        *("val/tokens_per_iteration", "val/tokens_per_iteration_window"),
    } <= set(events.Tags()["scalars"])
    assert [e.value for e in events.Scalars("train/tokens_seen")] == [80, 160, 240, 320]
    assert len(events.Scalars("val/loss")) == 2
    assert all(e.value > 0 for name in ("train/tokens_per_s", "train/grad_norm") for e in events.Scalars(name))


@pytest.mark.parametrize("writer", ["slot", "token"])
def test_validation_measures_what_it_says(tmp_path: Path, writer: Any) -> None:
    built, run = module(adapter=AdapterConfig(writer=writer)), trainer(tmp_path)
    data = loader(rows=4)
    found = run.validate(built, data, verbose=False)[0]
    draft, model = built.draft, built.draft.model
    rows = Rows(4)
    ids = torch.stack([rows[i]["input_ids"] for i in range(4)])
    with torch.no_grad():
        logits = {"loss": draft(ids).logits, "loss_full": model(ids).logits}
        logits["loss_window"] = draft.logits(draft.window_hidden_states(ids))
    for name, value in logits.items():
        expected = torch.nn.functional.cross_entropy(value[:, :-1].reshape(-1, 320), ids[:, 1:].reshape(-1))
        assert found[f"val/{name}"] == pytest.approx(expected.item(), abs=1e-4)
    choices = {name: value[:, :-1].argmax(-1) for name, value in logits.items()}
    assert found["val/agreement"] == pytest.approx((choices["loss"] == choices["loss_full"]).float().mean().item())
    odds = {name: value[:, :-1].softmax(-1) for name, value in logits.items()}
    for name, ours in (("overlap", odds["loss"]), ("overlap_window", odds["loss_window"])):
        distance = (ours - odds["loss_full"]).abs().sum(-1).mean().item() / 2  # total variation
        assert found[f"val/{name}"] == pytest.approx(1 - distance, abs=1e-5)
    emitted = iterations = 0
    for row in ids[:2]:
        decoded = generate(
            model, row[None, :20], MemorySlotDraft(draft), num_draft_tokens=3, max_new_tokens=10
        )  # what the metric predicts
        emitted += len(decoded.tokens[0]) - 1
        iterations += decoded.iterations[0]
    assert found["val/tokens_per_iteration"] == pytest.approx(emitted / iterations)


def test_greedy_texts_are_made_once_and_never_saved(tmp_path: Path) -> None:
    built, run = module(), trainer(tmp_path, 4, val_check_interval=2)
    run.fit(built, loader(), loader(rows=4))
    texts = built.validation.texts
    assert len(texts) == 2
    run.validate(built, loader(rows=4), verbose=False)
    assert built.validation.texts is texts and len(texts) == 2
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert "texts" not in str(torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"])


def test_without_prompts_there_is_no_such_metric(tmp_path: Path) -> None:
    found = trainer(tmp_path).validate(module(validation=ValidationConfig(prompts=0)), loader(rows=2), verbose=False)[0]
    assert "val/loss" in found
    assert "val/tokens_per_iteration" not in found


def test_a_saved_adapter_says_how_long_its_texts_were(pretrained: Path) -> None:
    assert load_memory(load_backbone(BACKBONE), pretrained / "adapter").trained_length == 40
