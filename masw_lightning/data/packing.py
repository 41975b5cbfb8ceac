"""Token arithmetic of training data: packing documents into blocks, fitting a prompt and its answer, padding a batch.

Knows lengths and token ids only: no files, no tokenizer, no Lightning. Imports torch only.

Packing lays the documents of one source end to end (each already closed by its EOS) and slices that stream into blocks
of exactly L tokens; block b holds the stream's tokens [b L, (b+1) L) and the incomplete rest is dropped. There is no
cross-document mask and no position reset on purpose: the memory runs across the whole stream, as it does when decoding.

Shapes: N documents, B rows of a batch, L tokens per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100  # the label of a token that is not supervised, as in torch's cross entropy


class BlockIndex:
    """Where the blocks of a packed stream lie in its documents.

    Args:
        lengths: int64 [N], tokens of each document in stream order, its EOS included.
        block: L, tokens per block.

    ``len()`` is the number of whole blocks, ``tokens`` the length of the stream.
    """

    def __init__(self, lengths: Tensor, block: int) -> None:
        if block < 1:
            raise ValueError(f"a block needs at least one token, not {block}")
        self.block = block
        self._ends = lengths.to(torch.int64).cumsum(0)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return self.tokens // self.block

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """The slices that make up block ``index``: ``(document, start, stop)`` triples, ``L`` tokens in all."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        position, stop = index * self.block, (index + 1) * self.block
        document = int(torch.searchsorted(self._ends, position, right=True))
        found = []
        while position < stop:
            end = int(self._ends[document])
            begin = int(self._ends[document - 1]) if document else 0
            taken = min(end, stop)
            if taken > position:  # an empty document has nothing to give
                found.append((document, position - begin, taken - begin))
            position, document = taken, document + 1
        return found


def cut_middle(ids: Tensor, budget: int) -> Tensor:
    """The first and the last tokens of ``ids [n]``, ``budget`` in all; ``ids`` itself when it is no longer than that.

    The first half is the larger one when the budget is odd, so a leading BOS always survives. Cutting token ids (rather
    than decoding the halves and encoding them again) meets the budget exactly.
    """
    if budget < 1:
        raise ValueError(f"a budget needs at least one token, not {budget}")
    if len(ids) <= budget:
        return ids
    tail = budget // 2
    return torch.cat([ids[: budget - tail], ids[len(ids) - tail :]])


def fit_pair(prompt: Tensor, answer: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """One supervised row of at most ``length`` tokens: the prompt, then the answer (its EOS included).

    Too long, the prompt is cut in the middle so that the answer survives whole. An answer that would leave no room for
    even one prompt token is cut at its end (and loses its EOS: the text does not stop there).

    Returns:
        ``input_ids [n]`` and ``labels [n]``, n <= length: the label is the token itself on the answer, -100 on the
        prompt. Labels are not shifted.
    """
    if length < 2:
        raise ValueError(f"a prompt and an answer need at least two tokens, not {length}")
    answer = answer[: length - 1 if len(prompt) else length]
    if len(prompt):
        prompt = cut_middle(prompt, length - len(answer))
    labels = torch.cat([torch.full_like(prompt, IGNORE), answer])
    return torch.cat([prompt, answer]), labels


def pad_rows(rows: list[tuple[Tensor, Tensor]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Rows of ``(input_ids [n], labels [n])`` as ``[B, L]`` twice, L the longest row.

    Padding goes to the right with label -100: under a causal mask no real token ever sees it, so no mask is needed.
    """
    longest = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    labels = torch.full((len(rows), longest), IGNORE, dtype=torch.int64)
    for row, (ids, targets) in enumerate(rows):
        input_ids[row, : len(ids)] = ids
        labels[row, : len(targets)] = targets
    return input_ids, labels
