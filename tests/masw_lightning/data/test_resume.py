"""Training data resumes exactly: broken off at any step, a run goes on with the very next batch, in a real Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from masw_lightning.data import LongContextDataModule, Source
from masw_lightning.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*(dirpath has changed|across ranks is zero|requested to overfit).*")
WORDS = [f"w{i}" for i in range(50)]


class Probe(LightningModule):
    """Trains an embedding, with dropout, and notes what it was fed."""

    tokenizer: PreTrainedTokenizerFast  # set once by the corpus fixture

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 4)
        self.seen: list[tuple[int, str]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, " | ".join(batch["source"])))
        return nn.functional.dropout(self.embedding(batch["input_ids"]), 0.5).square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": " ".join(WORDS[(7 * i + j) % 50] for j in range(7)), "meta": {}}) for i in range(16)]
    (folder / "many.jsonl").write_text("\n".join(lines))
    Probe.tokenizer = tokenizer
    return folder


def fit(corpus: Path, folder: Path, ckpt: Path | None = None, data: dict | None = None, **trainer: object) -> Probe:
    """One run; every step leaves step=N.ckpt in ``folder``, and its end end.ckpt."""
    torch.manual_seed(0)
    module = Probe()
    source = Source(path=str(corpus / "many.jsonl"))
    options = {"val_documents": 1, "sequence_length": 8, "batch_size": 2, "seed": 3} | (data or {})
    datamodule = LongContextDataModule(train=[source], cache_dir=str(corpus / "cache"), **options)
    runner = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        **trainer,
    )
    runner.fit(module, datamodule, ckpt_path=ckpt)
    runner.save_checkpoint(folder / "end.ckpt")
    return module


def sources(module: Probe) -> list[str]:
    return [source for _, source in module.seen]


@pytest.mark.parametrize(
    "length",
    [
        {"max_epochs": 3},
        {"max_steps": 17},
        {"max_epochs": 3, "limit_train_batches": 4},
        {"max_steps": 11, "limit_train_batches": 4},
        {"max_steps": 17, "val_check_interval": 3, "check_val_every_n_epoch": None},
    ],
    ids=["epochs", "steps", "epochs-limited", "steps-limited", "steps-validated"],
)
def test_resumed_anywhere_goes_on_with_the_next_batch(corpus: Path, tmp_path: Path, length: dict) -> None:
    whole = fit(corpus, tmp_path / "whole", **length)
    assert len(whole.seen) == length.get("max_steps", 3 * length.get("limit_train_batches", 7))
    for done in range(1, len(whole.seen)):
        rest = fit(corpus, tmp_path / "rest", ckpt=tmp_path / "whole" / f"step={done}.ckpt", **length)
        assert rest.seen == whole.seen[done:], f"after {done} steps"


@pytest.mark.parametrize("steps", [3, 7, 10, 14], ids=lambda n: f"stopped-after-{n}")
def test_run_that_ended_is_continued(corpus: Path, tmp_path: Path, steps: int) -> None:
    whole = fit(corpus, tmp_path / "whole", max_steps=20)
    first = fit(corpus, tmp_path / "first", max_steps=steps)
    rest = fit(corpus, tmp_path / "rest", ckpt=tmp_path / "first" / "end.ckpt", max_steps=20)
    assert sources(first) + sources(rest) == sources(whole)


def test_more_epochs_are_added(corpus: Path, tmp_path: Path) -> None:
    whole = fit(corpus, tmp_path / "whole", max_epochs=3)
    first = fit(corpus, tmp_path / "first", max_epochs=1)
    rest = fit(corpus, tmp_path / "rest", ckpt=tmp_path / "first" / "end.ckpt", max_epochs=3)
    assert first.seen + rest.seen == whole.seen


def test_resumed_twice_with_accumulated_gradients(corpus: Path, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "max_steps": 10}
    whole = fit(corpus, tmp_path / "whole", **options)
    assert len(whole.seen) > 14
    second = fit(corpus, tmp_path / "second", ckpt=tmp_path / "whole" / "step=2.ckpt", **options)
    third = fit(corpus, tmp_path / "third", ckpt=tmp_path / "second" / "step=5.ckpt", **options)
    assert second.seen == whole.seen[4:]
    assert third.seen == whole.seen[-len(third.seen) :]
    assert len(third.seen) == len(whole.seen) - 9  # five steps: 2 + 2 + 2 + the epoch's odd last batch + 2


def test_epochs_differ_and_each_reads_every_sample_once(corpus: Path, tmp_path: Path) -> None:
    whole = fit(corpus, tmp_path, max_epochs=3, data={"batch_size": 1})
    epochs = [[source for number, source in whole.seen if number == epoch] for epoch in range(3)]
    assert all(len(epoch) == 15 for epoch in epochs)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) == sorted(set(epochs[0]))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_workers_change_neither_order_nor_random_state(corpus: Path, tmp_path: Path) -> None:
    """Dropout draws from the global random state, so equal weights prove that loading batches leaves it alone."""
    alone = fit(corpus, tmp_path / "0", max_steps=9)
    helped = fit(corpus, tmp_path / "2", max_steps=9, data={"num_workers": 2})
    unvalidated = fit(corpus, tmp_path / "v", max_steps=9, limit_val_batches=0)
    assert helped.seen == alone.seen
    assert torch.equal(helped.embedding.weight, alone.embedding.weight)
    assert torch.equal(unvalidated.embedding.weight, alone.embedding.weight)
    resumed = fit(corpus, tmp_path / "r", ckpt=tmp_path / "2" / "step=5.ckpt", max_steps=9, data={"num_workers": 2})
    assert resumed.seen == alone.seen[5:]


def test_seed_changes_the_order(corpus: Path, tmp_path: Path) -> None:
    orders = {tuple(sources(fit(corpus, tmp_path / str(seed), max_steps=7, data={"seed": seed}))) for seed in range(3)}
    assert len(orders) == 3


@pytest.mark.parametrize("data", [{"seed": 4}, {"batch_size": 1}, {"sequence_length": 4}], ids=str)
def test_other_data_refuses_the_checkpoint(corpus: Path, tmp_path: Path, data: dict) -> None:
    fit(corpus, tmp_path, max_steps=3)
    with pytest.raises(UserError, match="middle of other training data"):
        fit(corpus, tmp_path / "other", ckpt=tmp_path / "end.ckpt", max_steps=6, data=data)


def test_overfitting_repeats_the_same_batches(corpus: Path, tmp_path: Path) -> None:
    module = fit(corpus, tmp_path, max_epochs=2, overfit_batches=2)
    assert sources(module)[:2] == sources(module)[2:]


def test_run_without_validation_data(corpus: Path, tmp_path: Path) -> None:
    assert len(fit(corpus, tmp_path, max_epochs=1, data={"val_documents": 0}).seen) == 8
