"""Prompts: LongBench's tasks, exact budgets, unique ids, true continuations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from masw_lightning.data import PromptSource, check_prompt_fits
from masw_lightning.data.longbench import TASKS, Prompts, collate
from masw_lightning.errors import UserError

Make = Callable[..., PreTrainedTokenizerFast]
Write = Callable[..., Path]


def words(first: int, count: int) -> str:
    return " ".join(f"w{(first + i) % 100}" for i in range(count))


def longbench(dataset: str, context: str, question: str = "", answers: list[str] | None = None) -> dict:
    """A row in LongBench's own schema."""
    row = {"input": question, "context": context, "answers": answers or ["w1 w2"], "length": 9, "dataset": dataset}
    return row | {"language": "en", "all_classes": None, "_id": "0a1b"}


def test_prompts_are_longbenchs_and_read_as_they_should() -> None:
    assert TASKS["gov_report"].prompt.startswith("You are given a report by a government agency.")
    assert TASKS["qmsum"].prompt.endswith("\n\nQuery: {input}\nAnswer:")
    assert "Write a one-page summary of all news. \n\nNews:\n{context}" in TASKS["multi_news"].prompt  # its own space
    assert {TASKS[name].max_new_tokens for name in ("gov_report", "qmsum", "multi_news")} == {512}


def test_longbench_rows_are_asked_by_their_own_task(write_rows: Write, make_tokenizer: Make) -> None:
    path = write_rows(
        "lb.jsonl",
        [
            longbench("qmsum", "w1 w2", "w3 w4", ["w5", "w6"]),
            longbench("gov_report", "w7"),
            longbench("qmsum", "w8", "w9"),
        ],
    )
    tokenizer = make_tokenizer(unk_token="<unk>")
    prompts = Prompts([PromptSource(path=str(path))], tokenizer)
    assert [prompt.id for prompt in prompts.prompts] == ["qmsum/0", "gov_report/0", "qmsum/1"]
    expected = TASKS["qmsum"].prompt.replace("{context}", "w1 w2").replace("{input}", "w3 w4")
    assert prompts[0].input_ids.tolist() == tokenizer(expected).input_ids
    assert prompts[0].references == ["w5", "w6"]
    assert prompts[0].max_new_tokens == 512
    limited = Prompts([PromptSource(path=str(path), limit=1, max_new_tokens=9)], tokenizer)
    assert [(prompt.id, prompt.max_new_tokens) for prompt in limited.prompts] == [("qmsum/0", 9), ("gov_report/0", 9)]


def test_every_row_at_every_budget_with_exact_lengths(write_rows: Write, make_tokenizer: Make) -> None:
    path = write_rows("rows.jsonl", [{"context": words(0, n), "question": "w99"} for n in (30, 12)])
    source = PromptSource(path=str(path), task="w98 {context} {question}")
    tokenizer = make_tokenizer(bos=True)
    prompts = Prompts([source], tokenizer, budgets=[20, 8, 40])
    lengths = {prompt.id: len(prompt.input_ids) for prompt in prompts.prompts}
    # 33 and 15 tokens; the smallest budget that holds a prompt whole is the last one
    assert lengths == {"rows/0@8": 8, "rows/0@20": 20, "rows/0@40": 33, "rows/1@8": 8, "rows/1@20": 15}
    first = next(prompt for prompt in prompts.prompts if prompt.id == "rows/0@8")
    assert tokenizer.decode(first.input_ids) == "<bos> w98 w0 w1 w27 w28 w29 w99"  # both ends, BOS among them
    assert first.references == []
    assert first.max_new_tokens is None


def test_full_budgets_only(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("rows.jsonl", [{"text": words(0, n)} for n in (30, 12, 25, 40)])
    source = PromptSource(path=str(path), task="{text}", limit=2)
    prompts = Prompts([source], tokenizer, budgets=[10, 20], require_full_budget=True)
    assert [prompt.id for prompt in prompts.prompts] == ["rows/0@10", "rows/0@20", "rows/2@10", "rows/2@20"]
    assert [len(prompt.input_ids) for prompt in prompts.prompts] == [10, 20, 10, 20]
    with pytest.raises(UserError, match=r"no prompt of 50 tokens .its longest has 40 tokens"):
        Prompts([source], tokenizer, budgets=[50], require_full_budget=True)


def test_continuation_is_the_documents_own(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = tmp_path / "novels"
    folder.mkdir()
    (folder / "a.txt").write_text(words(0, 30))
    (folder / "b.txt").write_text(words(50, 12))
    prompts = Prompts([PromptSource(path=str(folder), task="continue", max_new_tokens=5)], tokenizer, budgets=[10, 20])
    found = {prompt.id: (tokenizer.decode(prompt.input_ids), prompt.references) for prompt in prompts.prompts}
    assert found == {
        "novels/0@10": (words(0, 10), [words(10, 5)]),
        "novels/0@20": (words(0, 20), [words(20, 5)]),
        "novels/1@10": (words(50, 10), [words(60, 2)]),
        "novels/1@20": (words(50, 12), []),
    }
    uncut = Prompts([PromptSource(path=str(folder / "a.txt"))], tokenizer)  # auto: a text is continued
    assert (uncut[0].id, len(uncut[0].input_ids), uncut[0].references) == ("novels/0", 30, [])


def test_chapters_and_own_templates(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("b.jsonl", [{"chapter": "w1", "summary_text": "w2", "refs": ["w3", "w4"]}])
    assert Prompts([PromptSource(path=str(path), task="booksum")], tokenizer)[0].references == ["w2"]
    own = PromptSource(path=str(path), task="w9 {chapter}", answers="refs", name="mine")
    assert Prompts([own], tokenizer)[0].references == ["w3", "w4"]
    assert Prompts([own], tokenizer)[0].id == "mine/0"


def test_ids_stay_unique_over_sources(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("a.jsonl", [{"text": "w1 w2"}, {"text": "w3"}])
    sources = [
        PromptSource(path=str(path)),
        PromptSource(path=str(path), limit=1),
        PromptSource(path=str(path), name="b"),
    ]
    assert [p.id for p in Prompts(sources, tokenizer).prompts] == ["a/0", "a/1", "a/2", "b/0", "b/1"]


def test_chat_template(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("a.jsonl", [{"text": words(0, 9)}])
    dressed = Prompts([PromptSource(path=str(path), task="{text}")], tokenizer, budgets=[6], chat_template=True)
    assert tokenizer.decode(dressed[0].input_ids) == "<user> w0 w1 w7 w8 <model>"  # the budget holds with the dress
    plain = Prompts([PromptSource(path=str(path), task="continue")], tokenizer, budgets=[6], chat_template=True)
    assert tokenizer.decode(plain[0].input_ids) == words(0, 6)


def test_batch_of_one(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = Prompts([PromptSource(path=str(write_rows("a.jsonl", [longbench("qmsum", "w1", "w2")])))], tokenizer)
    batch = collate([prompts[0]])
    assert torch.equal(batch.pop("input_ids"), prompts[0].input_ids[None])  # type: ignore[arg-type]
    assert batch == {
        "id": ["qmsum/0"],
        "dataset": ["qmsum"],
        "prompt_tokens": [len(prompts[0].input_ids)],
        "references": [["w1 w2"]],
        "max_new_tokens": [512],
    }
    with pytest.raises(ValueError, match="one at a time"):
        collate([prompts[0], prompts[0]])


@pytest.mark.parametrize(
    ("row", "source", "message"),
    [
        ({"text": "w1"}, {"task": "hotpot"}, "There is no task 'hotpot'; choose one of auto, gov_report"),
        ({"context": "w1", "dataset": "lcc"}, {}, "a.jsonl, line 1 names no known task in its 'dataset' field"),
        ({"context": "w1"}, {"task": "qmsum"}, "a.jsonl, line 1 has no field 'input'"),
        ({"chapter": "w1"}, {"task": "booksum"}, "the field 'summary_text' holds no reference"),
        ({"text": "w1", "a": [1]}, {"answers": "a"}, "the field 'a' holds no reference"),
        ({"text": None}, {"task": "continue"}, "a field of the prompt is null"),
        ({"text": ""}, {"task": "continue"}, "the prompt has no tokens"),
    ],
)
def test_bad_rows(write_rows: Write, tokenizer: PreTrainedTokenizerFast, row: dict, source: dict, message: str) -> None:
    path = write_rows("a.jsonl", [row])
    with pytest.raises(UserError, match=re.escape(message)):
        Prompts([PromptSource(path=str(path), **source)], tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budgets": [0]}, "at least 1 token, not [0]"),
        ({"budgets": [4, 4]}, "name one length twice"),
        ({"require_full_budget": True}, "require_full_budget needs budgets"),
    ],
)
def test_bad_budgets(write_rows: Write, tokenizer: PreTrainedTokenizerFast, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Prompts([PromptSource(path=str(write_rows("a.jsonl", [{"text": "w1"}])))], tokenizer, **settings)


def test_prompt_must_fit_the_model() -> None:
    check_prompt_fits(100, 28, 128, "a/0")
    with pytest.raises(
        UserError, match=r"The prompt qmsum/3@2048 has 2048 tokens and 512 more .* has 2304 positions; lower"
    ):
        check_prompt_fits(2048, 512, 2304, "qmsum/3@2048")
