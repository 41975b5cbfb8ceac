"""The data section of a run: its YAML, its split, its batches, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from masw_lightning.data import LongContextDataModule, PromptSource, Source
from masw_lightning.errors import UserError

Write = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:.*(args parameter is intended|No seed found|predict returned None).*")
ROOT = Path(__file__).resolve().parents[3]
PARTS = sorted([*ROOT.glob("configs/data/*.yaml"), *ROOT.glob("configs/tiny/data/*.yaml")])


class Model(LightningModule):
    """The least that Lightning trains, with a tokenizer for the data."""

    tokenizer: PreTrainedTokenizerFast | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.validated: list[str] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.weight.sum()

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.validated += batch["source"]

    def predict_step(self, batch: dict, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def make_data(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., LongContextDataModule]:
    """A data module that is set up for ``stage`` with the tokenizer of the tests, given by its folder."""
    folder = tmp_path / "tokenizer"
    tokenizer.save_pretrained(folder)

    def make(stage: str | None = "fit", **settings: object) -> LongContextDataModule:
        defaults = {
            "tokenizer": str(folder),
            "sequence_length": 6,
            "batch_size": 2,
            "cache_dir": str(tmp_path / "cache"),
        }
        data = LongContextDataModule(**(defaults | settings))
        data.setup(stage)
        return data

    return make


@pytest.fixture
def texts(write_rows: Write) -> Path:
    return write_rows("texts.jsonl", [{"text": f"w{i} w{i} w{i} w{i} w{i}"} for i in range(20)])


@pytest.fixture
def pairs(write_rows: Write) -> Path:
    return write_rows(
        "pairs.jsonl", [{"instruction": f"w{i}", "output": "w90 w91"[: 3 + 4 * (i % 2)]} for i in range(8)]
    )


def pair_source(path: Path, **settings: object) -> Source:
    return Source(path=str(path), prompt="instruction", answer="output", **settings)  # type: ignore[arg-type]


# -- batches
def test_packed_batches(make_data: Callable, texts: Path) -> None:
    batch = next(iter(make_data(train=[Source(path=str(texts))]).train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "source"}
    assert batch["input_ids"].shape == (2, 6)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert all(source.startswith(f"{texts}, line ") for source in batch["source"])


def test_pairs_are_padded_with_unsupervised_eos(
    make_data: Callable, pairs: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    data = make_data(train=[pair_source(pairs)], batch_size=8)
    batch = next(iter(data.train_dataloader()))
    rows = {
        tokenizer.decode(ids): labels.tolist().count(-100)
        for ids, labels in zip(*list(batch.values())[:2], strict=True)
    }
    assert rows["w1 w90 w91 <eos>"] == 1
    assert rows["w2 w90 <eos> <eos>"] == 2  # the second <eos> is padding


def test_one_list_may_hold_texts_and_pairs(make_data: Callable, texts: Path, pairs: Path) -> None:
    data = make_data(train=[Source(path=str(texts), weight=0.5), pair_source(pairs, weight=2.0)], batch_size=1)
    files = [batch["source"][0].partition(",")[0] for batch in data.train_dataloader()]
    assert files.count(str(texts)) == 10
    assert files.count(str(pairs)) == 16


def test_weight_zero_leaves_a_source_out_unread(make_data: Callable, texts: Path) -> None:
    data = make_data(train=[Source(path=str(texts)), Source(path="nowhere.jsonl", weight=0.0)])
    assert len(data.train_dataloader()) == 10


# -- split
def lines(loader: object) -> set[str]:
    return {source for batch in loader for source in batch["source"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("split", [{"val_fraction": 0.2}, {"val_documents": 4}], ids=str)
def test_no_validation_document_is_trained_on(make_data: Callable, texts: Path, split: dict) -> None:
    data = make_data(train=[Source(path=str(texts))], **split)
    train, val = lines(data.train_dataloader()), lines(data.val_dataloader())
    assert (len(train), len(val)) == (16, 4)
    assert not train & val
    again = make_data(train=[Source(path=str(texts))], **split)
    assert lines(again.val_dataloader()) == val
    other = make_data(train=[Source(path=str(texts))], seed=1, **split)
    assert lines(other.val_dataloader()) != val


def test_each_source_gives_to_validation(make_data: Callable, texts: Path, pairs: Path) -> None:
    data = make_data(train=[Source(path=str(texts)), pair_source(pairs)], val_fraction=0.01)
    assert sorted(source.partition(",")[0] for source in lines(data.val_dataloader())) == [str(pairs), str(texts)]


def test_validation_sources_of_their_own(make_data: Callable, texts: Path, pairs: Path) -> None:
    data = make_data(train=[Source(path=str(texts))], val=[pair_source(pairs)])
    assert len(lines(data.val_dataloader())) == 8
    assert make_data("validate", val=[pair_source(pairs)]).val_dataloader()
    assert make_data(train=[Source(path=str(texts))]).val_dataloader() == []


def test_too_few_documents_to_hold_out(make_data: Callable, write_rows: Write) -> None:
    path = write_rows("one.jsonl", [{"text": "w1 w2 w3 w4 w5 w6"}])
    with pytest.raises(UserError, match=re.escape(f"{path} has 1 documents, too few to hold out 1")):
        make_data(train=[Source(path=str(path))], val_fraction=0.1)
    path = write_rows("two.jsonl", [{"text": "w1"}, {"text": "w1 w2 w3 w4 w5 w6 w7 w8"}, {"text": "w2"}])
    with pytest.raises(UserError, match=r"The validation part of .* holds 2 tokens in 1 documents, too few"):
        make_data(train=[Source(path=str(path))], val_documents=1, seed=1)


# -- prompts, Lightning
def trainer(tmp_path: Path, *callbacks: Callback) -> Trainer:
    return Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[*callbacks],
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_predict_loop_gets_prompts_one_by_one(
    tmp_path: Path, texts: Path, tokenizer: PreTrainedTokenizerFast, workers: int
) -> None:
    class Notes(Callback):
        def on_predict_batch_end(self, trainer, module, outputs, batch, *index) -> None:  # type: ignore[no-untyped-def]
            seen.append((batch["id"], batch["input_ids"].shape, batch["prompt_tokens"]))

    seen: list = []
    model = Model()
    model.tokenizer = tokenizer
    source = PromptSource(path=str(texts), limit=2)
    data = LongContextDataModule(predict=[source], budgets=[2, 3], num_workers=workers)
    trainer(tmp_path, Notes()).predict(model, data)
    assert seen == [([f"texts/{i}@{n}"], (1, n), [n]) for i in range(2) for n in (2, 3)]


def test_fit_and_validate_with_the_models_tokenizer(
    tmp_path: Path, texts: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = Model()
    model.tokenizer = tokenizer
    data = LongContextDataModule(
        train=[Source(path=str(texts))], val_documents=3, sequence_length=6, cache_dir=str(tmp_path)
    )
    trainer(tmp_path).fit(model, data)
    assert len(set(model.validated)) == 3
    model.validated = []
    trainer(tmp_path).validate(model, data, verbose=False)
    assert len(model.validated) == 3


def test_no_tokenizer_at_all(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(UserError, match="The data has no tokenizer and the model brings none"):
        trainer(tmp_path).fit(Model(), LongContextDataModule(train=[Source(path=str(texts))]))


# -- YAML
def test_bare_yaml_is_the_data_section(
    tmp_path: Path, texts: Path, pairs: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """As the command line does it: LightningCLI, a part's file named in the run's file, one value given by hand."""
    tokenizer.save_pretrained(tmp_path / "tok")
    part = {
        "class_path": "LongContextDataModule",
        "init_args": {
            "train": [
                {"path": str(texts), "weight": 0.5},
                {"path": str(pairs), "prompt": "instruction", "answer": "output"},
            ],
            "predict": [{"path": str(texts), "task": "continue", "limit": 1}],
            "tokenizer": str(tmp_path / "tok"),
            "sequence_length": 6,
            "budgets": [2, 4],
            "cache_dir": str(tmp_path / "cache"),
        },
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part.yaml").write_text(yaml.safe_dump(part))
    (tmp_path / "run.yaml").write_text("data: data/part.yaml\n")
    cli = LightningCLI(
        Model,
        LightningDataModule,
        subclass_mode_data=True,
        run=False,
        save_config_callback=None,
        trainer_defaults={"accelerator": "cpu", "logger": False},
        args=["--config", str(tmp_path / "run.yaml"), "--data.init_args.budgets=[3]"],
    )
    data = cli.datamodule
    assert isinstance(data, LongContextDataModule)
    assert data.train == [Source(path=str(texts), weight=0.5), pair_source(pairs)]
    assert data.predict == [PromptSource(path=str(texts), task="continue", limit=1)]
    data.setup()
    assert len(data.train_dataloader()) == 10 + 8
    assert [batch["prompt_tokens"] for batch in data.predict_dataloader()] == [[3]]


def build(part: Path) -> LongContextDataModule:
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    return parser.instantiate(parser.parse_args(["--data", str(part)])).data


@pytest.mark.parametrize("part", PARTS, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_shipped_parts_build_and_are_commented(part: Path) -> None:
    data = build(part)
    assert data.train or data.predict
    content = part.read_text().splitlines()
    assert len(content) < 40
    assert all("#" in line or line.startswith(("class_path", "init_args")) for line in content), part


def test_shipped_tiny_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files beside the tiny parts are what the parts say, in the schemas of the real ones."""
    monkeypatch.chdir(ROOT)
    for name in ("pretrain", "sft", "predict"):
        data = build(ROOT / f"configs/tiny/data/{name}.yaml")
        data.cache_dir, data.tokenizer_name = str(tmp_path), "configs/tiny/model"
        data.setup("predict" if name == "predict" else "fit")
        if name == "predict":
            batches = list(data.predict_dataloader())
            assert {batch["dataset"][0] for batch in batches} == {"qmsum", "gov_report", "multi_news", "book"}
            assert [batch["prompt_tokens"][0] for batch in batches] == [64, 160] * 4
            assert all(batch["references"][0] for batch in batches)
        else:
            assert len(data.train_dataloader()) >= 8
            assert all((batch["labels"] != -100).any(1).all() for batch in data.train_dataloader())
            assert len(data.val_dataloader()) >= 2


# -- refusals
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 0}, "sequence_length must be at least 2 tokens, not 0."),
        ({"sequence_length": -8}, "sequence_length must be at least 2 tokens, not -8."),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0."),
        ({"num_workers": -1}, "num_workers must be 0 or more, not -1."),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, not 1.0."),
        ({"val_documents": -1}, "val_documents must be 0 or more, not -1."),
        ({"val_fraction": 0.1, "val_documents": 2}, "Give only one of val, val_fraction and val_documents."),
        ({"val": [Source(path="b")], "val_documents": 2}, "Give only one of val, val_fraction and val_documents."),
        ({"train": [Source(path="a", weight=-1.0)]}, "The weight of a must be 0 or more, not -1.0."),
        ({"train": [Source(path="a", weight=float("nan"))]}, "The weight of a must be 0 or more, not nan."),
        ({"train": [Source(hub="a/b", limit=0)]}, "The limit of a/b must be at least 1 row, not 0."),
    ],
    ids=str,
)
def test_bad_numbers(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        LongContextDataModule(**settings)


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        ("fit", {}, "no `train` sources of positive weight"),
        ("fit", {"train": [Source(path="a", weight=0.0)]}, "no `train` sources of positive weight"),
        ("predict", {}, "no `predict` sources"),
        ("fit", {"train": [Source(path="nowhere.jsonl")]}, "There is no file or folder nowhere.jsonl"),
    ],
)
def test_nothing_to_read(make_data: Callable, stage: str, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make_data(stage, **settings)


def test_loaders_need_their_sources(make_data: Callable, texts: Path) -> None:
    data = make_data(train=[Source(path=str(texts))])
    with pytest.raises(UserError, match="no `predict` sources"):
        data.predict_dataloader()
    with pytest.raises(UserError, match="no `train` sources"):
        make_data("validate", val=[Source(path=str(texts))]).train_dataloader()


def test_refusals_are_the_cause_of_what_the_argument_parser_raises(tmp_path: Path) -> None:
    """The parser wraps what a constructor raises; the command line finds the one sentence among the causes."""
    (tmp_path / "run.yaml").write_text("data: {class_path: LongContextDataModule, init_args: {sequence_length: 0}}\n")
    with pytest.raises(ValueError, match="sequence_length must be at least 2 tokens, not 0") as caught:
        LightningCLI(
            Model,
            LightningDataModule,
            subclass_mode_data=True,
            run=False,
            save_config_callback=None,
            args=["--config", str(tmp_path / "run.yaml")],
        )
    causes = [caught.value]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    assert any(isinstance(cause, UserError) for cause in causes)
