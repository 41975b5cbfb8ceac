"""From prediction records to the table: counts, means and speedups per method and prefix length.

Pure arithmetic over `Prediction` records (no models, no files), so a table can be rebuilt from `predictions.jsonl`
alone and a partial run gives a partial table. Rates are ratios of sums (all tokens over all seconds), so that one short
prompt cannot dominate; the plain mean over prompts stands beside them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

from callbacks.predictions import REFERENCE, Prediction

MIB = 2**20


class Row(TypedDict):
    """One method over one set of prompts. None where there is nothing to measure."""

    prompts: int
    prompt_tokens: float
    new_tokens: int
    iterations: int
    accepted: int
    tokens_per_iteration: float | None
    tokens_per_iteration_mean: float | None
    tokens_per_s: float | None
    tokens_per_s_mean: float | None
    speedup: float | None
    speedup_end_to_end: float | None
    prompts_compared: int
    time_to_first_token_s: float
    draft_kv_mib: float
    target_kv_mib: float
    rouge1: float | None
    rouge2: float | None
    rougeL: float | None
    identical: bool | None
    prompts_checked: int
    prompts_identical: int
    largest_margin_at_difference: float | None
    seconds: dict[str, float]


class MethodSummary(TypedDict):
    """One method: over all prompts, and per prefix-length label."""

    overall: Row
    buckets: dict[str, Row]


class Summary(TypedDict):
    """The whole table. `buckets` maps labels to tokens; `complete` says that all methods decoded the same prompts."""

    methods: dict[str, MethodSummary]
    buckets: dict[str, int]
    complete: bool


def bucket_of(prompt_tokens: int, buckets: Sequence[int] | None = None) -> int:
    """The prefix length a prompt is counted under: the nearest of `buckets`, or of all powers of two.

    Nearest by ratio, not by difference: 1,400 tokens are closer to 1,024 than to 2,048, 1,500 are not.
    """
    exponent = math.log2(max(1, prompt_tokens))
    if buckets:
        return min(sorted(buckets), key=lambda b: abs(math.log2(b) - exponent))
    return 2 ** round(exponent)


def bucket_label(tokens: int) -> str:
    """1024 is "1K", 24576 is "24K", 1536 is "1.5K", 512 is "512"."""
    return str(tokens) if tokens < 1024 else f"{tokens / 1024:.4g}K"


def summarise(records: Iterable[Prediction], buckets: Sequence[int] | None = None) -> Summary:
    """Summarise records per method, overall and by prefix length.

    Args:
        records: of one run; methods keep the order of their first record.
        buckets: prefix lengths in tokens to group by; None takes powers of two.
    """
    records = list(records)
    references = {r.id: r for r in records if r.method == REFERENCE}
    by_method: dict[str, list[Prediction]] = {}
    for record in records:
        by_method.setdefault(record.method, []).append(record)
    sizes = sorted({bucket_of(r.prompt_tokens, buckets) for r in records})
    ids = [{r.id for r in rows} for rows in by_method.values()]
    methods: dict[str, MethodSummary] = {}
    for name, rows in by_method.items():
        grouped = {size: [r for r in rows if bucket_of(r.prompt_tokens, buckets) == size] for size in sizes}
        methods[name] = {
            "overall": summarise_rows(rows, references),
            "buckets": {bucket_label(s): summarise_rows(group, references) for s, group in grouped.items() if group},
        }
    return {
        "methods": methods,
        "buckets": {bucket_label(size): size for size in sizes},
        "complete": all(these == ids[0] for these in ids),
    }


def summarise_rows(rows: Sequence[Prediction], references: dict[str, Prediction]) -> Row:
    """One row: `rows` of one method, speedups over the autoregressive records of the same prompts."""
    pairs = [(r, references[r.id]) for r in rows if r.id in references]
    checked = [r for r in rows if r.identical_to_autoregressive is not None]
    margins = [r.margin_at_difference for r in rows if r.margin_at_difference is not None]
    decoded = [r for r in rows if r.iterations > 0]
    parts = {part for r in rows for part in r.seconds}
    return {
        "prompts": len(rows),
        "prompt_tokens": _mean([float(r.prompt_tokens) for r in rows]) or 0.0,
        "new_tokens": sum(r.new_tokens for r in rows),
        "iterations": sum(r.iterations for r in rows),
        "accepted": sum(sum(r.accepted) for r in rows),
        "tokens_per_iteration": _ratio(sum(r.new_tokens - 1 for r in decoded), sum(r.iterations for r in decoded)),
        "tokens_per_iteration_mean": _mean([r.tokens_per_iteration for r in rows]),
        "tokens_per_s": decode_rate(rows),
        "tokens_per_s_mean": _mean([r.tokens_per_s for r in rows]),
        "speedup": _speedup(pairs, decode_rate),
        "speedup_end_to_end": _speedup(pairs, end_to_end_rate),
        "prompts_compared": len(pairs),
        "time_to_first_token_s": _mean([r.time_to_first_token_s for r in rows]) or 0.0,
        "draft_kv_mib": (_mean([float(r.draft_kv_bytes) for r in rows]) or 0.0) / MIB,
        "target_kv_mib": (_mean([float(r.target_kv_bytes) for r in rows]) or 0.0) / MIB,
        "rouge1": _mean([r.rouge1 for r in rows]),
        "rouge2": _mean([r.rouge2 for r in rows]),
        "rougeL": _mean([r.rougeL for r in rows]),
        "identical": all(r.identical_to_autoregressive for r in checked) if checked else None,
        "prompts_checked": len(checked),
        "prompts_identical": sum(bool(r.identical_to_autoregressive) for r in checked),
        "largest_margin_at_difference": max(margins, default=None),
        "seconds": {part: _mean([r.seconds.get(part) for r in rows]) or 0.0 for part in sorted(parts)},
    }


def decode_rate(rows: Sequence[Prediction]) -> float | None:
    """Tokens after the first one per second of decoding, over all rows together that have such tokens."""
    decoded = [r for r in rows if r.new_tokens > 1]
    return _ratio(sum(r.new_tokens - 1 for r in decoded), sum(r.decode_s for r in decoded))


def end_to_end_rate(rows: Sequence[Prediction]) -> float | None:
    """All new tokens per second from the prompt to the last token, over all rows together."""
    return _ratio(sum(r.new_tokens for r in rows), sum(r.end_to_end_s for r in rows))


def _speedup(
    pairs: Sequence[tuple[Prediction, Prediction]], rate: Callable[[Sequence[Prediction]], float | None]
) -> float | None:
    mine, reference = rate([r for r, _ in pairs]), rate([a for _, a in pairs])
    return mine / reference if mine is not None and reference else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _mean(values: Sequence[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return math.fsum(present) / len(present) if present else None
