"""The data of a run: sources to train and validate on, prompts to decode, all from one YAML section.

Puts the data room together for Lightning; knows no model. What a source is decides what its samples are: whole texts
are packed, prompts with answers stand alone (see :class:`Source`), and one list may hold both.

Shapes: B rows of a batch, L tokens per row, n tokens of a prompt.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import ConcatDataset, DataLoader

from masw_lightning.data import longbench
from masw_lightning.data.corpora import Source
from masw_lightning.data.loader import EpochOrder, ResumableLoader
from masw_lightning.data.longbench import Prompt, Prompts, PromptSource
from masw_lightning.data.packing import pad_rows
from masw_lightning.data.samples import PackedTexts, Pairs, Sample, samples
from masw_lightning.data.tokens import TokenTable, end_id, tokenise
from masw_lightning.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LongContextDataModule(LightningDataModule):
    """Long texts for training, validation and prediction.

    Training and validation batches are ``dict(input_ids [B, L] int64, labels [B, L] int64, source: list[str])``: labels
    are the tokens themselves, not shifted, or -100 where not supervised; ``source`` names each row's file and line.
    Packed rows have exactly ``sequence_length`` tokens; others are padded on the right to the batch's longest.
    Predict batches are ``dict(id, dataset, input_ids [1, n] int64, prompt_tokens, references, max_new_tokens)``, the
    other values being lists of one.

    The order of training samples depends on ``seed`` and the epoch only, and a checkpoint saves the position: a resumed
    run goes on with the very next batch.

    Args:
        train: Sources to learn from.
        val: Sources to validate on; None takes ``val_fraction`` or ``val_documents`` of each training source, if set.
        predict: Sources of prompts.
        tokenizer: Name, folder or .gguf file; None takes the model's own, the attribute ``tokenizer`` of the Lightning
            module, read when the data is set up.
        sequence_length: L, tokens per packed sequence, and the most that a prompt and its answer may have together.
        batch_size: B, rows per batch and device.
        val_fraction: Part of each training source's documents that is held out (at least one). Whole documents, chosen
            by ``seed``: no text of a validation document is ever trained on.
        val_documents: The same as a number of documents per source.
        budgets: Prompt lengths in tokens: every row is asked at each, cut to that length (see :class:`Prompts`). None
            asks it once, uncut.
        require_full_budget: Ask only rows that fill the largest budget, so that each prompt has exactly its length.
        chat_template: Dress prompts (in training and prediction) by the tokenizer's chat template.
        seed: Of the order of training and of the held-out documents.
        num_workers: Processes that load batches; 0 loads in the main process.
        cache_dir: Folder of the tokenised sources; None is the ``datasets`` library's own cache.

    Raises:
        UserError: for every input that cannot be used, one sentence with the file and line, and the remedy.
    """

    def __init__(
        self,
        train: list[Source] | None = None,
        val: list[Source] | None = None,
        predict: list[PromptSource] | None = None,
        tokenizer: str | None = None,
        sequence_length: int = 8192,
        batch_size: int = 1,
        val_fraction: float = 0.0,
        val_documents: int = 0,
        budgets: list[int] | None = None,
        require_full_budget: bool = False,
        chat_template: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.train, self.val, self.predict = train, val, predict
        self.tokenizer_name = tokenizer
        self.sequence_length, self.batch_size = sequence_length, batch_size
        self.val_fraction, self.val_documents = val_fraction, val_documents
        self.budgets, self.require_full_budget, self.chat_template = budgets, require_full_budget, chat_template
        self.seed, self.num_workers, self.cache_dir = seed, num_workers, cache_dir
        self._check_numbers()
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._train: list[PackedTexts | Pairs] = []
        self._val: list[PackedTexts | Pairs] = []
        self._prompts: Prompts | None = None

    def _check_numbers(self) -> None:
        if self.sequence_length < 2:
            raise UserError(f"sequence_length must be at least 2 tokens, not {self.sequence_length}.")
        if self.batch_size < 1:
            raise UserError(f"batch_size must be at least 1, not {self.batch_size}.")
        if self.num_workers < 0:
            raise UserError(f"num_workers must be 0 or more, not {self.num_workers}.")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"val_fraction must be at least 0 and below 1, not {self.val_fraction}.")
        if self.val_documents < 0:
            raise UserError(f"val_documents must be 0 or more, not {self.val_documents}.")
        if sum((bool(self.val), self.val_fraction > 0, self.val_documents > 0)) > 1:
            raise UserError("Give only one of val, val_fraction and val_documents.")
        for source in self.train or []:
            if not 0 <= source.weight < float("inf"):
                raise UserError(f"The weight of {source.label} must be 0 or more, not {source.weight}.")
        for each in [*(self.train or []), *(self.val or []), *(self.predict or [])]:
            if each.limit is not None and each.limit < 1:
                raise UserError(f"The limit of {each.label} must be at least 1 row, not {each.limit}.")

    # -- set-up
    def prepare_data(self) -> None:
        """With several processes, tokenise in one of them first: the others then find the cache."""
        if self.trainer is not None and self.trainer.world_size > 1 and self.trainer.state.fn is not None:
            self.setup(self.trainer.state.fn.value)

    def setup(self, stage: str | None = None) -> None:
        """Tokenise what ``stage`` needs, or find it in the cache; None is all that was given."""
        self._tokenizer = self._find_tokenizer()
        if stage in ("fit", "validate") or (stage is None and self.train):
            self._train, self._val = self._training_data()
        if stage == "predict" or (stage is None and self.predict):
            if not self.predict:
                raise UserError("The data has no `predict` sources; name the prompts to decode.")
            self._prompts = Prompts(
                self.predict, self._tokenizer, self.budgets, self.require_full_budget, self.chat_template
            )

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer in use, after ``setup``."""
        if self._tokenizer is None:
            self._tokenizer = self._find_tokenizer()
        return self._tokenizer

    def _find_tokenizer(self) -> "PreTrainedTokenizerBase":
        if self.tokenizer_name is not None:
            from masw_lightning.adapter.backbone import load_tokenizer

            return load_tokenizer(self.tokenizer_name)
        module = self.trainer.lightning_module if self.trainer is not None else None
        found = getattr(module, "tokenizer", None)
        if found is None:
            raise UserError("The data has no tokenizer and the model brings none; name one in the data's `tokenizer`.")
        return found

    def _training_data(self) -> tuple[list[PackedTexts | Pairs], list[PackedTexts | Pairs]]:
        train: list[PackedTexts | Pairs] = []
        val: list[PackedTexts | Pairs] = []
        sources = [source for source in self.train or [] if source.weight > 0]
        if not sources and not self.val:
            raise UserError("The data has no `train` sources of positive weight; name something to learn from.")
        for number, source in enumerate(sources):
            table = self._tokenised(source)
            kept, held_out = self._split(table, number)
            train.append(samples(table, self.sequence_length, kept))
            if len(held_out):
                val.append(samples(table, self.sequence_length, held_out, "The validation part of"))
        for source in self.val or []:
            val.append(samples(self._tokenised(source), self.sequence_length, None, "The validation source"))
        return train, val

    def _tokenised(self, source: Source) -> TokenTable:
        return tokenise(source, self.tokenizer, self.chat_template, self.cache_dir)

    def _split(self, table: TokenTable, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows to train on and rows held out, each in the table's order."""
        documents = len(table)
        held_out = self.val_documents
        if self.val_fraction > 0:
            held_out = max(1, round(self.val_fraction * documents))
        if held_out >= documents > 0 and held_out > 0:
            raise UserError(
                f"{table.label} has {documents} documents, too few to hold out {held_out} for validation; give `val` "
                "sources of their own."
            )
        chosen = EpochOrder([max(1, documents)], [1.0], self.seed + 7919 * (number + 1)).indices(0)[:held_out]
        mask = torch.zeros(documents, dtype=torch.bool)
        mask[chosen] = True
        return torch.arange(documents)[~mask], torch.arange(documents)[mask]

    # -- loaders
    def train_dataloader(self) -> ResumableLoader:
        """Batches in the order of ``seed`` and epoch, each rank its own rows."""
        if not self._train:
            raise UserError("The data has no `train` sources of positive weight; name something to learn from.")
        weights = [source.weight for source in self.train or [] if source.weight > 0]
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0  # Lightning's: the same batches again and again
        return ResumableLoader(
            ConcatDataset(self._train),
            EpochOrder([len(part) for part in self._train], weights, self.seed, shuffle=not overfit),
            self.batch_size,
            self._collate,
            rank=self.trainer.global_rank if self.trainer is not None else 0,
            world_size=self.trainer.world_size if self.trainer is not None else 1,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            limit=self.trainer.limit_train_batches if self.trainer is not None else 1.0,
        )

    def val_dataloader(self) -> DataLoader[Sample] | list[DataLoader[Sample]]:
        """The held-out samples in order, all of them; no loader when nothing is held out."""
        if not self._val:
            return []
        return DataLoader(
            ConcatDataset(self._val),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=self._collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # keeps validation from moving the global random state
        )

    def predict_dataloader(self) -> DataLoader[Prompt]:
        """The prompts in order, one at a time."""
        if self._prompts is None:
            raise UserError("The data has no `predict` sources; name the prompts to decode.")
        return DataLoader(
            self._prompts,
            batch_size=1,
            collate_fn=longbench.collate,
            num_workers=self.num_workers,
            generator=torch.Generator(),
        )

    def _collate(self, rows: Sequence[Sample]) -> dict[str, object]:
        pad = self.tokenizer.pad_token_id
        pairs = [(row.input_ids, row.labels) for row in rows]
        input_ids, labels = pad_rows(pairs, end_id(self.tokenizer) if pad is None else int(pad))
        return {"input_ids": input_ids, "labels": labels, "source": [row.source for row in rows]}
