"""Prompts to decode: LongBench's tasks, chapter summaries, continuations of books, or any template over a row.

Turns rows into prompts of an exact number of tokens; knows no model and no decoding. LongBench's own protocol: greedy,
at most so many new tokens per task, an over-long prompt keeps its first and its last half.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from masw_lightning.data.corpora import Location, Row, Template
from masw_lightning.data.packing import cut_middle
from masw_lightning.data.readers import read_rows
from masw_lightning.data.tokens import encode_prompts
from masw_lightning.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """How rows of one kind are asked.

    Args:
        prompt: Template over the row's fields.
        answers: Field with the reference text, or a list of them; None: there is none.
        max_new_tokens: Output length; None leaves it to the caller.
        cut: What an over-long prompt keeps: its two ends, or its head (the text goes on behind it: the true
            continuation is the reference).
    """

    prompt: str
    answers: str | None
    max_new_tokens: int | None
    cut: Literal["middle", "head"] = "middle"


# The prompts of gov_report, qmsum and multi_news and their output length are LongBench's, word for word
# (github.com/THUDM/LongBench, dataset2prompt.json and dataset2maxlen.json, MIT License, Copyright (c) 2023 THU-KEG).
TASKS: dict[str, Task] = {
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\n"
        "Now, write a one-page summary of the report.\n\nSummary:",
        answers="answers",
        max_new_tokens=512,
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\n"
        "Transcript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        answers="answers",
        max_new_tokens=512,
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        answers="answers",
        max_new_tokens=512,
    ),
    "booksum": Task(
        "Here is a chapter of a book. Read it, then tell in a few paragraphs what happens in it.\n\n"
        "Chapter:\n{chapter}\n\n"
        "Tell in a few paragraphs what happens in this chapter.\n\nSummary:",
        answers="summary_text",
        max_new_tokens=512,
    ),
    "continue": Task("{text}", answers=None, max_new_tokens=256, cut="head"),
}


@dataclass
class PromptSource(Location):
    """Rows to ask the model about.

    Args:
        task: One of :data:`TASKS` (gov_report, qmsum, multi_news, booksum, continue), or a template with ``{fields}``.
            "auto": the task that the row's own ``dataset`` field names, else "continue" for a row with a ``text``.
        answers: Field with the reference, or references; None is the task's own (a template of yours has none).
        name: The data set's name in ids and tables; None: the row's ``dataset`` field, else the file's name (for text
            files their folder's).
        max_new_tokens: Output length; None is the task's own.
    """

    split: str = "test"
    task: str = "auto"
    answers: str | None = None
    name: str | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Prompt:
    """One prompt: its unique id such as "qmsum/3@2048", its data set, ids ``[n]`` int64, and what a good answer is."""

    id: str
    dataset: str
    input_ids: Tensor
    references: list[str]
    max_new_tokens: int | None


class Prompts(Dataset[Prompt]):
    """All prompts of a run, in order: row by row, each row at every budget.

    Args:
        sources: What to ask.
        tokenizer: The target's; what it puts first (BOS) counts in every budget.
        budgets: Prompt lengths in tokens; each row is asked once per budget, a longer prompt cut to exactly that many
            tokens. The smallest budget that holds a prompt whole is the last one it is asked at. None: once, uncut.
        require_full_budget: Leave out rows that do not fill the largest budget, so that the same rows are asked at
            every length and every prompt has exactly that length.
        chat_template: Dress prompts by the tokenizer's chat template, except those of "continue".

    Raises:
        UserError: bad rows or files, an unknown task, no row left.
    """

    def __init__(
        self,
        sources: list[PromptSource],
        tokenizer: "PreTrainedTokenizerBase",
        budgets: list[int] | None = None,
        require_full_budget: bool = False,
        chat_template: bool = False,
    ) -> None:
        if any(budget < 1 for budget in budgets or []):
            raise UserError(f"Every prompt budget must be at least 1 token, not {budgets}.")
        if budgets is not None and len(set(budgets)) != len(budgets):
            raise UserError(f"The prompt budgets {budgets} name one length twice; list each once.")
        if require_full_budget and not budgets:
            raise UserError("require_full_budget needs budgets; list the prompt lengths.")
        self._tokenizer = tokenizer
        self._budgets: list[int] | list[None] = sorted(budgets) if budgets else [None]
        self._full = max(budgets) if budgets and require_full_budget else 0
        self._chat = chat_template
        self._rows_of: dict[str, int] = {}  # rows met so far per data set: the number in the ids
        self.prompts = [prompt for source in sources for prompt in self._of(source)]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def _of(self, source: PromptSource) -> Iterator[Prompt]:
        kept: dict[str, int] = {}
        longest = 0
        for row in read_rows(source, _fields(source)):
            name = source.name or _dataset_of(row)
            number = self._rows_of.get(name, 0)
            self._rows_of[name] = number + 1
            if source.limit is not None and kept.get(name, 0) >= source.limit:
                continue
            task = _task_of(source, row)
            text = Template(task.prompt, "task").fill(row)
            if text is None:
                raise UserError(f"{row}: a field of the prompt is null; remove the row.")
            chat = self._chat and task.cut == "middle"
            ids = torch.tensor(encode_prompts(self._tokenizer, [text], chat)[0], dtype=torch.int64)
            if not len(ids):
                raise UserError(f"{row}: the prompt has no tokens; remove the row.")
            longest = max(longest, len(ids))
            if len(ids) < self._full:
                continue
            kept[name] = kept.get(name, 0) + 1
            references = _references(task, row)
            for budget in self._budgets:
                yield self._prompt(name, number, ids, budget, references, task)
                if budget is not None and len(ids) <= budget:
                    break  # at a larger budget it would be the same prompt
        if not kept:
            wanted = f"of {self._full} tokens" if self._full else "at all"
            raise UserError(
                f"{source.label} has no prompt {wanted} (its longest has {longest} tokens); lower the budgets or name "
                "other rows."
            )

    def _prompt(
        self, name: str, number: int, ids: Tensor, budget: int | None, references: list[str], task: Task
    ) -> Prompt:
        unique = f"{name}/{number}" + (f"@{budget}" if budget else "")
        if budget is not None and task.cut == "head":
            rest = ids[budget : budget + (task.max_new_tokens or 0)]
            if not references and len(rest):
                references = [str(self._tokenizer.decode(rest.tolist(), skip_special_tokens=True))]
            ids = ids[:budget]
        elif budget is not None:
            ids = cut_middle(ids, budget)
        return Prompt(unique, name, ids, references, task.max_new_tokens)


def collate(prompts: list[Prompt]) -> dict[str, object]:
    """A predict batch: lists of one, and ``input_ids [1, n]``."""
    if len(prompts) != 1:
        raise ValueError(f"prompts are decoded one at a time, not {len(prompts)}")
    return {
        "id": [prompt.id for prompt in prompts],
        "dataset": [prompt.dataset for prompt in prompts],
        "input_ids": prompts[0].input_ids[None],
        "prompt_tokens": [len(prompt.input_ids) for prompt in prompts],
        "references": [prompt.references for prompt in prompts],
        "max_new_tokens": [prompt.max_new_tokens for prompt in prompts],
    }


def check_prompt_fits(prompt_tokens: int, new_tokens: int, max_positions: int, id: str) -> None:
    """Raise UserError when a prompt and its answer need more positions than the model has."""
    if prompt_tokens + new_tokens > max_positions:
        raise UserError(
            f"The prompt {id} has {prompt_tokens} tokens and {new_tokens} more are asked for, but the model has "
            f"{max_positions} positions; lower the prompt budgets or max_new_tokens."
        )


def _task_of(source: PromptSource, row: Row) -> Task:
    if source.task in TASKS:
        task = TASKS[source.task]
    elif "{" in source.task:
        task = Task(source.task, source.answers, source.max_new_tokens)
    elif source.task != "auto":
        raise UserError(
            f"There is no task {source.task!r}; choose one of auto, {', '.join(TASKS)}, or give a template."
        )
    elif row.get("dataset") in TASKS:
        task = TASKS[str(row["dataset"])]
    elif isinstance(row.get("text"), str):
        task = TASKS["continue"]
    else:
        raise UserError(
            f"{row} names no known task in its 'dataset' field and has no 'text'; give the source a `task`: one of "
            f"{', '.join(TASKS)}, or a template."
        )
    return Task(
        task.prompt,
        source.answers or task.answers,
        task.max_new_tokens if source.max_new_tokens is None else source.max_new_tokens,
        task.cut,
    )


def _fields(source: PromptSource) -> list[str]:
    """Every field that a row of this source might be asked for."""
    tasks = [*TASKS.values()] if source.task not in TASKS else [TASKS[source.task]]
    templates = [task.prompt for task in tasks] + ([source.task] if "{" in source.task else [])
    names = [name for template in templates for name in Template(template, "task").names]
    return [*names, *(task.answers for task in tasks if task.answers), *filter(None, [source.answers]), "dataset"]


def _dataset_of(row: Row) -> str:
    if isinstance(row.get("dataset"), str):
        return str(row["dataset"])
    folder, _, file = row.file.replace("\\", "/").rpartition("/")
    if row.unit:  # a file of rows, or a hub dataset
        return file.rpartition(".")[0] or file
    return folder.rpartition("/")[2] or "text"


def _references(task: Task, row: Row) -> list[str]:
    if task.answers is None:
        return []
    value = row.get(task.answers)
    references = [value] if isinstance(value, str) else value
    if not isinstance(references, list) or not all(isinstance(each, str) for each in references):
        raise UserError(
            f"{row}: the field {task.answers!r} holds no reference text or list of texts; name another one in "
            "`answers`."
        )
    return references
