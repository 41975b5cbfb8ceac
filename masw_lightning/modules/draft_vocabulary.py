"""Which of the target's tokens a head may draft: the most frequent ones of the training data, or a given list.

Knows samples (``input_ids``, ``labels``) and files; no model and no Lightning.
Shapes: n tokens of a row, V target vocab, Vd draft vocab.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from masw_lightning.errors import UserError


def frequent_tokens(data: Any, rows: int, size: int, vocabulary: int) -> Tensor:
    """The ``size`` tokens most often supervised in ``rows`` samples spread over ``data``: ids ``[Vd]``, ascending.

    Ties, and places left when fewer tokens occur, go to the lowest ids.
    """
    count = torch.zeros(vocabulary, dtype=torch.long)
    total = len(data)
    for number in range(min(rows, total)):
        sample = data[number * total // min(rows, total)]
        row = sample if isinstance(sample, Mapping) else sample._asdict()
        ids, labels = row["input_ids"], row["labels"]
        count += torch.bincount(ids[labels != -100], minlength=vocabulary)
    return count.sort(descending=True, stable=True).indices[:size].sort().values


def listed_tokens(path: str, size: int, vocabulary: int) -> Tensor:
    """The token ids in a JSON list at ``path``: ascending ``[Vd]``.

    Raises:
        UserError: no such list, or not ``size`` different ids below ``vocabulary``.
    """
    try:
        ids = sorted({int(token) for token in json.loads(Path(path).read_text())})
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path!r} is no JSON list of token ids ({type(error).__name__}): give one.") from error
    if len(ids) != size or ids[0] < 0 or ids[-1] >= vocabulary:
        raise UserError(
            f"{path!r} lists {len(ids)} different ids where draft_vocabulary={size} ids below {vocabulary} are wanted: "
            "give a list of that many."
        )
    return torch.tensor(ids)
