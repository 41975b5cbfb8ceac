"""Tokenised documents on disk: each source is tokenised once into a memory-mapped Arrow table, then only read.

The table is a ``datasets.Dataset`` in the datasets cache, found again by a fingerprint of the source's files, its
templates and the tokenizer. Reading slices the mapped memory, so neither the corpus nor its tokens are ever in RAM.
Knows no batches, no order, no Lightning.

A whole text becomes ``[what the tokenizer puts first, such as BOS] text EOS``; an empty text becomes nothing. A pair
becomes a prompt ``[BOS] prompt`` and an answer ``answer EOS``, tokenised apart because at prediction the prompt stands
alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from masw_lightning.data.corpora import Row, Source, Template
from masw_lightning.data.readers import read_rows, stamps
from masw_lightning.errors import UserError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

FORMAT = "masw-tokens-1"  # changes when the stored table would
ROWS_AT_ONCE = 128  # tokenised together (fast tokenizers use their threads) and written together


# -- tokenizing
def special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids this tokenizer puts before a text (usually nothing or BOS), learnt from what it does with a letter."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(dressed) - len(plain) + 1):
        if dressed[start : start + len(plain)] == plain:
            return list(dressed[:start])
    return []


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens and without any cut."""
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)
    return list(encoded["input_ids"])


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list[str], chat_template: bool) -> list[list[int]]:
    """Token ids of each prompt as a model is to see it: after BOS, or dressed by the tokenizer's chat template.

    Raises:
        UserError: ``chat_template`` is asked for and the tokenizer has none.
    """
    if not chat_template:
        prefix = special_prefix(tokenizer)
        return [prefix + ids for ids in encode(tokenizer, prompts)]
    if not tokenizer.chat_template:
        raise UserError(
            "This tokenizer has no chat template; set chat_template to false or use an instruction-tuned model."
        )
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    dressed = [str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)) for turn in turns]
    return encode(tokenizer, dressed)


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of EOS. Raises UserError when there is none."""
    if tokenizer.eos_token_id is None:
        raise UserError("This tokenizer has no EOS token, which closes every document; set its eos_token.")
    return int(tokenizer.eos_token_id)


def _tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        known = backend.to_str()
    else:  # a tokenizer without a Rust backend
        known = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    return f"{known}|{special_prefix(tokenizer)}|{tokenizer.eos_token_id}"


# -- tokenised tables
class TokenTable:
    """The documents of one source: ``len()`` rows, each with one or two columns of token ids, memory-mapped.

    Args:
        data: The Arrow-backed dataset with columns ``source`` and ``tokens``, or ``source``, ``prompt`` and ``answer``.
        label: The source's name for messages.
    """

    def __init__(self, data: datasets.Dataset, label: str) -> None:
        self.data, self.label = data, label
        self.is_pair = "answer" in data.column_names
        self._columns: dict[str, tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]] = {}

    def __len__(self) -> int:
        return len(self.data)

    def __getstate__(self) -> dict[str, Any]:
        # a worker process maps the file itself: views of mapped memory would be pickled as copies
        return {**self.__dict__, "_columns": {}}

    def _views(self, column: str) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """First row, offsets and values of each chunk of a column, without copying any token."""
        if column not in self._columns:
            chunks = [chunk for chunk in self.data.data.column(column).chunks if len(chunk)]
            starts = np.cumsum([0] + [len(chunk) for chunk in chunks])
            offsets = [chunk.offsets.to_numpy() for chunk in chunks]
            self._columns[column] = (starts, offsets, [chunk.values.to_numpy() for chunk in chunks])
        return self._columns[column]

    def lengths(self, column: str) -> Tensor:
        """Tokens of each row, int64 [N]."""
        _, offsets, _ = self._views(column)
        counts = [np.diff(each) for each in offsets] or [np.zeros(0)]
        return torch.from_numpy(np.concatenate(counts).astype(np.int64))

    def read(self, column: str, row: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Tokens ``start:stop`` of a row, int64 [n], a copy."""
        starts, offsets, values = self._views(column)
        chunk = int(np.searchsorted(starts, row, side="right")) - 1
        begin, end = offsets[chunk][row - starts[chunk] : row - starts[chunk] + 2]
        stop = end - begin if stop is None else min(stop, end - begin)
        return torch.from_numpy(values[chunk][begin + start : begin + stop].astype(np.int64))

    def place(self, row: int) -> str:
        """Where a row stands: file and line."""
        return str(self.data.data.column("source")[row].as_py())


def tokenise(
    source: Source, tokenizer: PreTrainedTokenizerBase, chat_template: bool = False, cache_dir: str | None = None
) -> TokenTable:
    """Tokenise a source, or find it tokenised in the cache.

    Args:
        source: What to read.
        tokenizer: Its EOS closes each document and each answer.
        chat_template: Dress prompts (never whole texts) by the tokenizer's chat template.
        cache_dir: Folder of the cache; None is the ``datasets`` library's own.

    Raises:
        UserError: whatever is wrong with the source, see :mod:`masw_lightning.data.corpora`, or with a row's answer.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError

    templates = _templates(source)
    end_id(tokenizer)
    columns = ["prompt", "answer"] if "answer" in templates else ["tokens"]
    ids = datasets.Sequence(datasets.Value("int32"))
    features = datasets.Features({"source": datasets.Value("string")} | dict.fromkeys(columns, ids))
    parts = [FORMAT, _tokenizer_key(tokenizer), source.limit, source.on_empty, *stamps(source)]
    parts += [f"{column}={template.spec}" for column, template in templates.items()]
    parts += [tokenizer.chat_template if chat_template and "answer" in templates else None]
    fingerprint = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]
    try:
        data = datasets.Dataset.from_generator(
            lambda: _tokenised(source, templates, tokenizer, chat_template),
            features=features,
            cache_dir=cache_dir,
            fingerprint=fingerprint,
            writer_batch_size=ROWS_AT_ONCE,
        )
    except DatasetGenerationError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        raise (cause or error) from None
    return TokenTable(data, source.label)


def _templates(source: Source) -> dict[str, Template]:
    if (source.prompt is None) != (source.answer is None):
        raise UserError(f"{source.label}: `prompt` and `answer` come together; give both, or `text` alone.")
    if source.prompt is None or source.answer is None:
        return {"text": Template(source.text or "text", "text")}
    if source.text is not None:
        raise UserError(f"{source.label}: give either `text` or `prompt` and `answer`, not all of them.")
    return {"prompt": Template(source.prompt, "prompt"), "answer": Template(source.answer, "answer")}


def _tokenised(
    source: Source, templates: dict[str, Template], tokenizer: PreTrainedTokenizerBase, chat_template: bool
) -> Iterator[dict[str, Any]]:
    names = [name for template in templates.values() for name in template.names]
    rows = islice(read_rows(source, names), source.limit)
    filled = _filled(rows, list(templates.values()), source.on_empty)
    prefix, end = special_prefix(tokenizer), end_id(tokenizer)
    while batch := list(islice(filled, ROWS_AT_ONCE)):
        places, texts = [str(row) for row, _ in batch], [text for _, text in batch]
        if "answer" not in templates:
            for place, ids in zip(places, encode(tokenizer, [text[0] for text in texts]), strict=True):
                if ids:
                    yield {"source": place, "tokens": np.array(prefix + ids + [end], dtype=np.int32)}
            continue
        prompts = encode_prompts(tokenizer, [text[0] for text in texts], chat_template)
        answers = encode(tokenizer, [text[1] for text in texts])
        for place, prompt, answer in zip(places, prompts, answers, strict=True):
            if not answer:
                raise UserError(f"{place}: the answer has no tokens; remove the row or set on_empty to skip.")
            arrays = {"prompt": prompt, "answer": [*answer, end]}
            yield {"source": place} | {name: np.array(ids, dtype=np.int32) for name, ids in arrays.items()}


def _filled(rows: Iterable[Row], templates: list[Template], on_empty: str) -> Iterator[tuple[Row, list[str]]]:
    """Each row with the texts of its templates; ``on_empty`` decides about null values and blank answers."""
    for row in rows:
        texts = [template.fill(row) for template in templates]
        missing = [template.option for template, text in zip(templates, texts, strict=True) if text is None]
        if len(templates) == 2 and not (texts[1] or "").strip():
            missing = ["answer"]
        if not missing:
            yield row, [text for text in texts if text is not None]
        elif on_empty == "error":
            what = "the answer has no tokens" if missing == ["answer"] else f"the {missing[0]} is null"
            raise UserError(f"{row}: {what}; remove the row or set on_empty to skip.")
