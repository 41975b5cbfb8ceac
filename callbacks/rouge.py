"""ROUGE of a decoded answer against its references, with nothing downloaded.

Strings in, F-measures out; knows no records. Only `rouge1`, `rouge2` and `rougeL`: torchmetrics' `rougeLsum` would
fetch an nltk sentence splitter.
"""

from collections.abc import Sequence

from torchmetrics.functional.text import rouge_score

KEYS = ("rouge1", "rouge2", "rougeL")


def rouge(text: str, references: Sequence[str]) -> dict[str, float | None]:
    """F-measures (0 to 1) of the best matching reference, LongBench's rule; None for each without a reference."""
    known = [reference for reference in references if reference.strip()]
    if not known:
        return dict.fromkeys(KEYS)
    scores = [rouge_score(text, reference, rouge_keys=KEYS) for reference in known]
    return {key: max(float(score[f"{key}_fmeasure"]) for score in scores) for key in KEYS}
