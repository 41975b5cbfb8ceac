"""What the data tests share: a tokenizer with one token per word, and files of every schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(100)]
SPECIAL = ["<eos>", "<unk>", "<bos>", "<user>", "<model>"]
CHAT = "<user> {{ messages[0].content }} {% if add_generation_prompt %}<model>{% endif %}"


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A tokenizer where the word w7 is one token; ``bos`` puts <bos> first and, as some do, <eos> last."""

    def make(bos: bool = False, **settings: object) -> PreTrainedTokenizerFast:
        vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if bos:
            special = [("<bos>", vocabulary["<bos>"]), ("<eos>", vocabulary["<eos>"])]
            backend.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=special)
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, **({"eos_token": "<eos>", "unk_token": "<unk>"} | settings)
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer(chat_template=CHAT)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes a .jsonl file below the test's folder."""

    def write(name: str, rows: Iterable[object]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def words(first: int, count: int) -> str:
    """``count`` words from w<first> on."""
    return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(count))
