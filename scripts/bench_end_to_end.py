"""Decode after real text of growing length: methods beside autoregressive decoding, and where MASW passes it.

    python scripts/bench_end_to_end.py --model .cache/quickstart/SmolLM2-135M-Instruct \\
        --adapter runs/quickstart/sft/token/adapter

Prompts are whole texts cut to each length; prefill is real and reported apart. Without --adapter the memories are
untrained and their rows say so; the default model is the quickstart's. A model asked for more positions than it was
made for gets its RoPE stretched. In bfloat16 a text may differ from the autoregressive one at a near tie: the largest
gap between the target's two best logits, where texts part, stands beside it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchkit.decode import FULL
from benchkit.models import Loaded, random_ids
from benchkit.options import Bench, count, parser, run
from benchkit.results import Column, Panel, Report, Row, series
from benchkit.speculate import Shares
from callbacks.methods import attach_checkpoint
from callbacks.trial import first_difference, margin
from masw_lightning import (
    Decoded,
    FullKVDraft,
    MemoryDraft,
    MemorySlotDraft,
    PrefilledTarget,
    SlidingWindowDraft,
    generate,
    prefill_target,
)
from masw_lightning.adapter.backbone import load_tokenizer
from masw_lightning.drafts.base import DraftPolicy
from masw_lightning.errors import UserError

NAME = "bench_end_to_end"
MODEL, TEXT = ".cache/quickstart/SmolLM2-135M-Instruct", ".cache/quickstart/data/books_valid.jsonl"
REFERENCE = "autoregressive"
COLUMNS: tuple[Column, ...] = (
    ("model", "model", ""),
    ("dtype", "dtype", ""),
    ("prefix", "prefix", ",d"),
    ("method", "method", ""),
    ("Tok./Iter", "emitted", ".2f"),
    ("tokens/s", "tokens_per_s", ",.2f"),
    ("speedup", "speedup", ".3f"),
    ("prefill, s", "prefill_s", ",.2f"),
    ("end to end, s", "total_s", ",.2f"),
    ("speedup end to end", "speedup_end_to_end", ".3f"),
    ("draft KV, MiB", "kv_mib", ",.1f"),
    ("same text", "identical", ""),
)
CROSSINGS: tuple[Column, ...] = (
    ("model", "model", ""),
    ("dtype", "dtype", ""),
    ("method", "method", ""),
    ("passes 1.0 at", "where", ""),
)


def texts(path: str) -> list[str]:
    """The texts of a folder of .txt files, of a .txt file, or of a .jsonl file (its `text`, else `context`).

    Raises:
        UserError: nothing there.
    """
    where = Path(path)
    try:
        if where.suffix == ".jsonl":
            rows = [json.loads(line) for line in where.read_text(encoding="utf-8").splitlines() if line.strip()]
            found = [str(row.get("text") or row.get("context") or "") for row in rows]
        else:
            files = sorted(where.glob("*.txt")) if where.is_dir() else [where]
            found = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"cannot read texts at {path} ({type(error).__name__}): give a folder, .txt or .jsonl."
        ) from None
    found = [text for text in found if text]
    if not found:
        raise UserError(f"there is no text at {path}: give a folder of .txt files or a .jsonl with a text field.")
    return found


def prompts(tokenizer: PreTrainedTokenizerBase, given: list[str], longest: int, number: int) -> list[Tensor]:
    """`number` prompts `[1, longest]`, each from one text, or from several where one is too short.

    Raises:
        UserError: not enough text.
    """
    found: list[Tensor] = []
    held: list[int] = []
    for text in given:
        held += tokenizer(text).input_ids
        if len(held) >= longest:
            found.append(torch.tensor([held[:longest]]))
            held = []
        if len(found) == number:
            return found
    raise UserError(
        f"the texts give {len(found)} prompts of {longest} tokens, {number} were asked for: give more text."
    )


def crossover(points: list[tuple[float, float]]) -> str:
    """The prefix from which a speedup stays above 1.0, between measured ones by a straight line over log2(prefix)."""
    points = sorted(points)
    above = len(points)
    while above and points[above - 1][1] >= 1.0:
        above -= 1
    if above == len(points):
        return f"not up to {points[-1][0]:,.0f}" if points else "not measured"
    if above == 0:
        return f"at or below {points[0][0]:,.0f}"
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    at = 2 ** (math.log2(x0) + (1.0 - y0) / (y1 - y0) * (math.log2(x1) - math.log2(x0)))
    return f"about {at:,.0f}"


def body(bench: Bench) -> None:
    """All models, prompts and prefixes."""
    chosen = bench.chosen
    if chosen.shapes is None and chosen.model is None:
        chosen.model = MODEL
    report = Report(NAME, "End to end by prefix", bench)
    report.note("Speedup: decoding alone. End to end: prefill of target and draft, one after the other, and decoding.")

    def measure(dtype: str, draft: Loaded, target: Loaded) -> None:
        report.note(*draft.notes, *target.notes)
        given = given_prompts(bench, draft)
        memories = adapters(bench, draft)
        policies: dict[str, DraftPolicy] = {FULL: FullKVDraft(draft.model)}
        policies[f"window {chosen.swa}"] = SlidingWindowDraft(draft.model, window=chosen.swa, sink=4)
        first = next(iter(memories.values()))
        policies["window, as many entries"] = SlidingWindowDraft(draft.model, match=first.layout)
        policies |= {name: MemorySlotDraft(memory) for name, memory in memories.items()}
        for prefix in chosen.prefixes:
            found: dict[str, list[Decoded]] = {}
            margins: dict[str, list[float]] = {}
            for number, ids in enumerate(given, 1):
                bench.say(f"{draft.name}, {dtype}, {prefix} tokens, prompt {number} of {len(given)}")
                for name, decoded, gap in decode_all(bench, target, ids[:, :prefix].to(bench.device), policies):
                    found.setdefault(name, []).append(decoded)
                    margins.setdefault(name, []).extend([] if gap is None else [gap])
            about: Row = {"model": draft.name, "target": target.name, "dtype": dtype, "prefix": prefix}
            report.rows += rows_of(found, margins, chosen.repeats, about)
            publish(report)
        for memory in memories.values():
            memory.detach()

    bench.each(max(chosen.prefixes) + chosen.new_tokens, measure)


def given_prompts(bench: Bench, draft: Loaded) -> list[Tensor]:
    """Real text, or random ids for random weights, which know no words."""
    longest, number = max(bench.chosen.prefixes), bench.chosen.prompts
    if bench.chosen.model is None:
        return [random_ids(draft.model, longest, bench.chosen.seed + i) for i in range(number)]
    return prompts(load_tokenizer(bench.chosen.model), texts(bench.chosen.text), longest, number)


def adapters(bench: Bench, draft: Loaded) -> dict[str, MemoryDraft]:
    """The trained memories asked for, by name; without any, untrained ones."""
    if not bench.chosen.adapter:
        return {f"{name} (untrained)": memory for name, memory in bench.memories(draft).items()}
    found: dict[str, MemoryDraft] = {}
    for path in bench.chosen.adapter:
        memory = attach_checkpoint(draft.model, path)
        name = f"masw {memory.layout.ratio}x {memory.writer}"
        found[name if name not in found else f"{name} #{len(found) + 1}"] = memory
    return found


def decode_all(
    bench: Bench, target: Loaded, ids: Tensor, policies: dict[str, DraftPolicy]
) -> list[tuple[str, Decoded, float | None]]:
    """Every method on one prompt, in turn, on one prefill of the target; with the margin where a text differs."""
    chosen = bench.chosen
    k = chosen.draft_tokens
    prefix = prefill_target(target.model, ids, chosen.new_tokens, k)
    found: list[tuple[str, Decoded, float | None]] = []
    methods: list[tuple[str, DraftPolicy | None]] = [(REFERENCE, None), *policies.items()]
    for _ in range(chosen.repeats):
        for name, policy in methods:
            decoded = generate(target.model, ids, policy, k, chosen.new_tokens, eos_token_id=[], prefix=prefix)
            text = found[0][1].tokens[0] if found else decoded.tokens[0]
            where = first_difference(decoded.tokens[0], text)
            found.append((name, decoded, None if where is None else margin_after(prefix, text[:where])))
    return found


@torch.no_grad()
def margin_after(prefix: PrefilledTarget, tokens: list[int]) -> float:
    """As `callbacks.trial.margin_after`, by one forward on the prompt's cache instead of over the whole text."""
    prefix.rewind()
    logits = prefix.runner.last_logits(torch.tensor([tokens], device=prefix.input_ids.device))
    prefix.rewind()
    return margin(logits[0])


def rows_of(found: dict[str, list[Decoded]], margins: dict[str, list[float]], repeats: int, about: Row) -> list[Row]:
    """Medians over prompts and repeats."""
    rows, plain = [], found[REFERENCE]
    middle = statistics.median
    rate = middle(Shares.of(d).tokens_per_s for d in plain)
    total = middle(d.seconds["total"] for d in plain)
    for name, decodes in found.items():
        speed = middle(Shares.of(d).tokens_per_s for d in decodes)
        whole = middle(d.seconds["total"] for d in decodes)
        same = sum(d.tokens == p.tokens for d, p in zip(decodes, plain, strict=True))
        apart = f", margin ≤ {max(margins[name]):.2g}" if margins[name] else ""
        rows.append(
            about
            | {"method": name, "emitted": middle(d.tokens_per_iteration for d in decodes), "tokens_per_s": speed}
            | {"speedup": speed / rate, "total_s": whole, "speedup_end_to_end": total / whole}
            | {"prefill_s": middle(d.first_token_seconds for d in decodes)}
            | {"kv_mib": middle(d.draft_kv_bytes for d in decodes) / 2**20}
            | {"identical": f"{same // repeats} of {len(decodes) // repeats}{apart}", "decodes": len(decodes)}
            | {"margins": margins[name]}
        )
    return rows


def publish(report: Report) -> None:
    """Tables and plots of the rows so far, the crossing marked."""
    drawn = [
        r | {"label": f"{r['model']} {r['dtype']}: {r['method']}"} for r in report.rows if r["method"] != REFERENCE
    ]
    crossings = []
    for line in series(drawn, "label", "prefix", "speedup"):
        head, _, method = line.label.partition(": ")
        model, _, dtype = head.rpartition(" ")
        crossings.append({"model": model, "dtype": dtype, "method": method, "where": crossover(line.points)})
    where = {f"{c['model']} {c['dtype']}: {c['method']}": c["where"] for c in crossings}
    marked = [r | {"label": f"{r['label']} (1.0: {where[r['label']]})"} for r in drawn]
    report.extra["crossover"] = crossings
    report.tables = [("", COLUMNS, report.rows), ("Where decoding is faster than autoregressive", CROSSINGS, crossings)]
    report.panels = [
        Panel("Decoding", "prompt tokens", "times autoregressive", series(marked, "label", "prefix", "speedup")),
        Panel("End to end", "prompt tokens", "times", series(drawn, "label", "prefix", "speedup_end_to_end")),
    ]
    for panel in report.panels:
        panel.baseline = 1.0
    report.save()


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr."""
    made = parser(__doc__, NAME, "4K,8K,16K,32K", 1)
    made.set_defaults(shapes=None, ratios=[4], writers=["token"])
    more = made.add_argument_group("end to end")
    more.add_argument("--text", default=TEXT, help="folder of .txt, a .txt or a .jsonl; default the quickstart's books")
    more.add_argument("--adapter", action="append", help="a trained memory (.ckpt or folder); may be given repeatedly")
    more.add_argument("--prompts", type=count, default=2, help="texts per prefix, default 2")
    more.add_argument("--draft-tokens", type=count, default=5, help="K, default 5")
    more.add_argument("--new-tokens", type=count, default=64, help="decoded per prompt, default 64")
    more.add_argument("--swa", type=count, default=1024, help="window of the sliding-window draft, default 1024")
    return run(NAME, made, body, arguments)


if __name__ == "__main__":
    sys.exit(main())
