"""Tokenising once: what ends up in the table, how it is found again, and how samples are read from it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from masw_lightning.data import tokens
from masw_lightning.data.corpora import Source
from masw_lightning.data.samples import PackedTexts, Pairs, samples
from masw_lightning.data.tokens import TokenTable, encode_prompts, special_prefix, tokenise
from masw_lightning.errors import UserError

Make = Callable[..., PreTrainedTokenizerFast]
Write = Callable[..., Path]


def table(path: Path, tokenizer: PreTrainedTokenizerFast, chat: bool = False, **source: object) -> TokenTable:
    return tokenise(Source(path=str(path), **source), tokenizer, chat, str(path.parent / "cache"))  # type: ignore[arg-type]


def texts(found: TokenTable, tokenizer: PreTrainedTokenizerFast, column: str = "tokens") -> list[str]:
    return [tokenizer.decode(found.read(column, row)) for row in range(len(found))]


PAIR = {"prompt": "{instruction} {input?}", "answer": "output"}


def test_each_document_ends_with_eos(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("a.jsonl", [{"text": "w1 w2"}, {"text": ""}, {"text": " \n"}, {"text": "w3"}])
    found = table(path, tokenizer)
    assert texts(found, tokenizer) == ["w1 w2 <eos>", "w3 <eos>"]
    assert [found.place(row) for row in range(2)] == [f"{path}, line 1", f"{path}, line 4"]
    assert found.lengths("tokens").tolist() == [3, 2]
    assert found.read("tokens", 0).dtype == torch.int64


def test_bos_stands_first_where_the_tokenizer_puts_it(write_rows: Write, make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(bos=True)
    path = write_rows("a.jsonl", [{"text": "w1 w2", "instruction": "w3", "output": "w4"}])
    assert [tokenizer.decode(special_prefix(tokenizer)), special_prefix(make_tokenizer())] == ["<bos>", []]
    assert texts(table(path, tokenizer), tokenizer) == ["<bos> w1 w2 <eos>"]
    pair = table(path, tokenizer, **PAIR)
    assert texts(pair, tokenizer, "prompt") == ["<bos> w3"]  # no EOS behind a prompt, although the tokenizer adds one
    assert texts(pair, tokenizer, "answer") == ["w4 <eos>"]


def test_schemas_may_differ_between_the_files_of_a_source(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    write_rows("mix/a.jsonl", [{"text": "w1", "meta": {"x": 1}}, {"text": "w2", "meta": {"x": "one"}}])
    write_rows("mix/b.jsonl", [{"meta": "text", "text": "w3"}])
    folder = write_rows("mix/c.jsonl", [{"pred_label": 0.5, "text": "w4"}]).parent
    assert texts(table(folder, tokenizer), tokenizer) == ["w1 <eos>", "w2 <eos>", "w3 <eos>", "w4 <eos>"]


def test_pairs_by_field_names_and_templates(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    alpaca = write_rows(
        "alpaca.jsonl", [{"instruction": "w1", "output": "w2"}, {"instruction": "w1", "input": "w5", "output": "w2"}]
    )
    assert texts(table(alpaca, tokenizer, **PAIR), tokenizer, "prompt") == ["w1", "w1 w5"]
    booksum = write_rows("booksum.jsonl", [{"bid": 1, "chapter": "w7", "summary_text": "w8", "summary": {}}])
    found = table(booksum, tokenizer, prompt="w1 {chapter} w2", answer=" {summary_text}")
    assert texts(found, tokenizer, "prompt") == ["w1 w7 w2"]
    assert texts(found, tokenizer, "answer") == ["w8 <eos>"]


def test_chat_template_dresses_prompts_but_no_whole_texts(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows("a.jsonl", [{"instruction": "w1", "output": "w2", "text": "w3"}])
    found = table(path, tokenizer, chat=True, **PAIR)
    assert texts(found, tokenizer, "prompt") == ["<user> w1 <model>"]
    assert texts(found, tokenizer, "answer") == ["w2 <eos>"]
    assert texts(table(path, tokenizer, chat=True), tokenizer) == ["w3 <eos>"]


def test_no_chat_template_and_no_eos(write_rows: Write, make_tokenizer: Make) -> None:
    path = write_rows("a.jsonl", [{"instruction": "w1", "output": "w2", "text": "w3"}])
    with pytest.raises(UserError, match="no chat template"):
        table(path, make_tokenizer(), chat=True, **PAIR)
    with pytest.raises(UserError, match="no EOS token"):
        table(path, make_tokenizer(eos_token=None))


def test_tokenised_once_and_again_when_anything_changes(
    write_rows: Write, make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = tokens.read_rows
    monkeypatch.setattr(tokens, "read_rows", lambda *args: calls.append(args) or original(*args))
    plain, bos = make_tokenizer(), make_tokenizer(bos=True)
    path = write_rows("a.jsonl", [{"text": "w1 w2", "other": "w9"}])
    for expected, tokenizer, source in [
        (1, plain, {}),
        (1, plain, {}),
        (1, make_tokenizer(), {}),  # another object, the same tokenizer
        (2, bos, {}),
        (3, plain, {"text": "other"}),
        (4, plain, {"text": "{text}"}),
        (4, plain, {"weight": 3.0}),  # not part of what is stored
        (5, plain, {"limit": 1}),
    ]:
        assert len(table(path, tokenizer, **source)) == 1
        assert len(calls) == expected
    write_rows("a.jsonl", [{"text": "w5 w6 w7"}])
    assert texts(table(path, plain), plain) == ["w5 w6 w7 <eos>"]


def test_bad_rows_leave_no_cache_behind(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("a.jsonl", [{"text": "w1"}, {"text": 3}])
    for _ in range(2):
        with pytest.raises(UserError, match="line 2: the field 'text' is of type int"):
            table(path, tokenizer)


@pytest.mark.parametrize("answer", ["", "  \n", None], ids=["empty", "blank", "null"])
def test_answer_without_tokens(write_rows: Write, tokenizer: PreTrainedTokenizerFast, answer: object) -> None:
    path = write_rows("a.jsonl", [{"instruction": "w1", "output": "w2"}, {"instruction": "w3", "output": answer}])
    with pytest.raises(UserError, match=re.escape(f"{path}, line 2: the answer has no tokens; remove the row")):
        table(path, tokenizer, **PAIR)
    assert texts(table(path, tokenizer, on_empty="skip", **PAIR), tokenizer, "answer") == ["w2 <eos>"]


def test_null_text(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("a.jsonl", [{"text": "w1"}, {"text": None}])
    with pytest.raises(UserError, match="line 2: the text is null"):
        table(path, tokenizer)
    assert len(table(path, tokenizer, on_empty="skip")) == 1


def test_fields_that_contradict_each_other(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("a.jsonl", [{"text": "w1"}])
    with pytest.raises(UserError, match="`prompt` and `answer` come together"):
        table(path, tokenizer, prompt="a")
    with pytest.raises(UserError, match="either `text` or `prompt` and `answer`"):
        table(path, tokenizer, prompt="a", answer="b", text="c")


def test_packed_blocks_equal_the_joined_documents(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "ROWS_AT_ONCE", 3)  # several chunks on disk
    rows = [{"text": " ".join(f"w{(i * 5 + j) % 100}" for j in range(i % 6))} for i in range(40)]
    found = table(write_rows("a.jsonl", rows), tokenizer)
    assert len(found.data.data.column("tokens").chunks) > 5
    stream = torch.tensor(tokenizer(" ".join(row["text"] + " <eos>" for row in rows if row["text"])).input_ids)
    packed = PackedTexts(found, 7)
    assert len(packed) == len(stream) // 7
    assert torch.equal(torch.cat([packed[i].input_ids for i in range(len(packed))]), stream[: 7 * len(packed)])
    sample = packed[3]
    assert torch.equal(sample.input_ids, sample.labels)
    again = pickle.loads(pickle.dumps(packed))  # as a spawned worker gets it
    assert torch.equal(again[3].input_ids, sample.input_ids)


def test_samples_name_their_lines(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    write_rows("s/a.jsonl", [{"text": "w1"}, {"text": "w2"}, {"text": "w3 w4 w5 w6 w7"}])
    folder = write_rows("s/b.jsonl", [{"text": "w1"}]).parent
    packed = PackedTexts(table(folder, tokenizer), 4)
    assert [packed[i].source for i in range(3)] == [
        f"{folder}/a.jsonl, lines 1 to 2",
        f"{folder}/a.jsonl, line 3",
        f"{folder}/a.jsonl, line 3 to {folder}/b.jsonl, line 1",
    ]


def test_a_part_of_the_documents_is_packed_without_the_others(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows("a.jsonl", [{"text": f"w{i} w{i}"} for i in range(6)])
    packed = PackedTexts(table(path, tokenizer), 6, torch.tensor([1, 4]))
    assert [tokenizer.decode(packed[i].input_ids) for i in range(len(packed))] == ["w1 w1 <eos> w4 w4 <eos>"]


def test_too_small_to_fill_a_sequence(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("a.jsonl", [{"text": "w1 w2"}, {"text": "w3"}])
    with pytest.raises(
        UserError, match=re.escape(f"{path} holds 5 tokens in 2 documents, too few to fill one sequence of 8")
    ):
        samples(table(path, tokenizer), 8)


def test_golden_pair(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    """A prompt cut in the middle, and exactly these supervised tokens."""
    path = write_rows("a.jsonl", [{"instruction": "w1 w2 w3 w4 w5 w6", "output": "w7 w8"}])
    pairs = samples(table(path, tokenizer, **PAIR), 7)
    assert isinstance(pairs, Pairs)
    sample = pairs[0]
    assert tokenizer.decode(sample.input_ids) == "w1 w2 w5 w6 w7 w8 <eos>"
    supervised = sample.labels != -100
    assert supervised.tolist() == [False] * 4 + [True] * 3
    assert tokenizer.decode(sample.labels[supervised]) == "w7 w8 <eos>"
    assert sample.source == f"{path}, line 1"


def test_prompts_are_encoded_alike_for_training_and_prediction(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(bos=True)
    assert tokenizer.decode(encode_prompts(tokenizer, ["w1 w2"], False)[0]) == "<bos> w1 w2"
    assert encode_prompts(tokenizer, [], False) == []
