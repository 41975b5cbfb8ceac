"""Prompts of exactly the asked length: long rows are cut in the middle, short ones filled there with other rows.

Both ends of a prompt stay what they are: the instruction at the front, the question and the chat template's last turn
at the back, the row's own reference. Knows no models.
Shapes: n prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from masw_lightning.data.longbench import Prompt, Prompts, PromptSource
from masw_lightning.errors import UserError


def exact_prompts(
    sources: Sequence[PromptSource],
    tokenizer: PreTrainedTokenizerBase,
    prefixes: Sequence[int],
    chat_template: bool = False,
    rows: int | None = None,
) -> list[Prompt]:
    """Every row at every prefix, shortest prefix first; each prompt has exactly as many tokens.

    Args:
        rows: of each data set; None leaves it to the sources' limits. Any row of a source may serve as filling.

    Raises:
        UserError: bad rows or files, or no row at all.
    """
    asked = [replace(source, limit=rows or source.limit) for source in sources]
    prompts = [
        p for prefix in sorted(prefixes) for p in Prompts(asked, tokenizer, [prefix], False, chat_template).prompts
    ]
    lengths = {prompt.id: int(prompt.id.rpartition("@")[2]) for prompt in prompts}
    if all(len(prompt.input_ids) == lengths[prompt.id] for prompt in prompts):
        return prompts
    whole = Prompts([replace(source, limit=None) for source in sources], tokenizer).prompts
    special = torch.tensor(sorted(tokenizer.all_special_ids), dtype=torch.int64)
    return [_filled(prompt, whole, lengths[prompt.id], special) for prompt in prompts]


def _filled(prompt: Prompt, whole: Sequence[Prompt], length: int, special: Tensor) -> Prompt:
    ids = prompt.input_ids
    if len(ids) == length:
        return prompt
    same = [other for other in whole if other.dataset == prompt.dataset]
    own = [other.id for other in same].index(prompt.id.rpartition("@")[0])
    pieces = [_body(other.input_ids, special) for other in [*same[own + 1 :], *same[: own + 1]]]
    return replace(prompt, input_ids=fill_middle(ids, pieces, length))


def _body(ids: Tensor, special: Tensor) -> Tensor:
    """Without BOS and the like, which may not stand in the middle of a prompt."""
    return ids[~torch.isin(ids, special)]


def fill_middle(ids: Tensor, pieces: Sequence[Tensor], length: int) -> Tensor:
    """`ids [n]` with the pieces, in turn and again, between its halves: `[length]`, the opposite of `cut_middle`.

    Raises:
        UserError: the pieces are empty.
    """
    missing = length - len(ids)
    if missing <= 0:
        return ids
    if not any(len(piece) for piece in pieces):
        raise UserError(f"there is no text to fill a prompt of {len(ids)} tokens up to {length}: give longer rows.")
    taken: list[Tensor] = []
    for piece in chain.from_iterable(repeat(list(pieces))):
        taken.append(piece[: missing - sum(map(len, taken))])
        if sum(map(len, taken)) == missing:
            break
    half = len(ids) - len(ids) // 2
    return torch.cat([ids[:half], *taken, ids[half:]])
