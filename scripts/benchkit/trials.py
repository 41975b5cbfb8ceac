"""Runs a grid: every prompt with every row, one JSON line each, continued where an earlier run stopped.

What `callbacks/speculative_decoding.py` does inside a Trainer, for many targets and drafts and without one: the same
trial, the same records, the same rule for what may be continued.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchkit.exact import exact_prompts
from benchkit.grid import Grid, Target
from benchkit.lineup import entries, line_up
from benchkit.options import Bench
from benchkit.results import Row
from callbacks.alarms import Alarms
from callbacks.environment import device_name
from callbacks.predictions import (
    REFERENCE,
    Prediction,
    Settings,
    check_resumable,
    make_folder,
    rank_file,
    read_predictions,
    repair_folder,
)
from callbacks.report import HEADER, cells
from callbacks.summary import bucket_label, summarise
from callbacks.trial import Prompt, Trial
from masw_lightning.adapter.backbone import Backbone, check_same_tokenizer, load_backbone, load_tokenizer, max_positions
from masw_lightning.data.longbench import check_prompt_fits
from masw_lightning.errors import UserError

PUBLISH_EVERY_S = 60.0


@dataclass
class TargetResult:
    """What one target's rows have decoded so far."""

    target: Target
    blocks: dict[str, list[str]]
    settings: dict[str, Settings]
    records: list[Prediction]

    def rows(self) -> list[Row]:
        """Per prefix, block and name: a row of `callbacks.summary` and what else a table shows."""
        order = list(self.settings)
        summary = summarise(sorted(self.records, key=lambda r: order.index(r.method)), self.target.prefixes)
        found: list[Row] = []
        for prefix in sorted(self.target.prefixes):
            label = bucket_label(prefix)
            for block, names in self.blocks.items():
                for name in names:
                    row = summary["methods"][name]["buckets"].get(label) if name in summary["methods"] else None
                    if row is None:
                        continue
                    found.append(
                        {"target": self.target.name, "model": self.target.backbone.path, "prefix": prefix}
                        | {"block": block, "method": name, "entries": entries(self.settings[name], prefix), **row}
                        | {"same_text": dict(zip(HEADER, cells(name, row), strict=True))["Output identical"]}
                        | {"accepted_length": row["accepted"] / row["iterations"] if row["iterations"] else None}
                        | {"end_to_end_s": row["seconds"].get("total")}
                    )
        return found


def run_grid(bench: Bench, grid: Grid, folder: Path, publish: Callable[[list[TargetResult]], None]) -> None:
    """All targets, one after the other; `publish` is called with all results now and then, when a target is done, and
    when the run is interrupted.

    Args:
        folder: receives one folder with `predictions.jsonl` per target.

    Raises:
        UserError: something does not fit, or the folder holds results of other settings.
    """
    results: list[TargetResult] = []
    for target in grid.targets:
        _run_target(bench, grid, target, folder / slug(target.name), results, publish)
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _run_target(
    bench: Bench,
    grid: Grid,
    target: Target,
    folder: Path,
    results: list[TargetResult],
    publish: Callable[[list[TargetResult]], None],
) -> None:
    make_folder(folder)
    bench.say(f"target {target.name}: loading models")
    tokenizer = load_tokenizer(target.backbone.path, target.backbone.gguf_file, target.backbone.revision)
    loaded: dict[Backbone, PreTrainedModel] = {}

    def load(backbone: Backbone) -> PreTrainedModel:
        if backbone not in loaded:
            theirs = load_tokenizer(backbone.path, backbone.gguf_file, backbone.revision)
            check_same_tokenizer(theirs, tokenizer, (backbone.path, target.backbone.path))
            loaded[backbone] = load_backbone(backbone).to(bench.device)
        return loaded[backbone]

    line = line_up(grid, target, load)
    try:
        prompts = [
            Prompt(p.id, p.dataset, p.input_ids[None], grid.limit(p.max_new_tokens), p.references)
            for p in exact_prompts(grid.sources, tokenizer, target.prefixes, grid.chat_template, target.rows)
        ]
        positions = min(p for p in (max_positions(m) or 2**62 for m in loaded.values()))
        for prompt in prompts:
            check_prompt_fits(prompt.input_ids.shape[1], prompt.max_new_tokens, positions, prompt.id)
        k = grid.decoding.num_draft_tokens
        for contender in line.contenders:
            if contender.policy is not None:
                contender.policy.open(1, 1, k + 2, k)  # a policy refuses what it cannot do when it is opened
        configs: dict[str, Settings] = {
            c.name: {
                "target": asdict(target.backbone),
                "draft": line.drafts[c.name],
                "decoding": grid.decoding.settings(),
                "device": device_name(bench.device),
                "method": c.settings,
            }
            for c in line.contenders
        }
        done = _continue(bench, folder, configs, prompts)
        asked = {prompt.id for prompt in prompts}
        kept = [record for record in done.values() if record.id in asked]
        result = TargetResult(target, line.blocks, {c.name: c.settings for c in line.contenders}, kept)
        results.append(result)
        trial = Trial(loaded[target.backbone], tokenizer, grid.decoding)
        alarms = Alarms(k, target.name, ", ".join(d.name for d in grid.drafts), tokenizer.name_or_path)
        warm: set[str] = set()
        published = time.monotonic()
        for number, prompt in enumerate(prompts, 1):
            missing = [c for c in line.contenders if (prompt.id, c.name) not in done]
            if not missing:
                continue
            prompt.input_ids = prompt.input_ids.to(bench.device)
            for contender in missing:
                if contender.name not in warm and grid.warmup_tokens:
                    trial.warm_up(prompt, contender, grid.warmup_tokens)
                warm.add(contender.name)
            prefix = trial.prefill(prompt, missing)
            for contender in missing:
                alarms.before(contender, prompt.input_ids.shape[1])
                reference = done.get((prompt.id, REFERENCE))
                record = trial.record(prompt, contender, prefix, reference, configs[contender.name])
                rank_file(folder, 0, 1).append(record)
                done[prompt.id, contender.name] = record
                result.records.append(record)
                alarms.after(contender, record)
                bench.say(
                    f"{target.name}, prompt {number} of {len(prompts)} ({prompt.id}), {contender.name}: "
                    f"{record.tokens_per_iteration or 0:.2f} Tok./Iter, {record.tokens_per_s or 0:.1f} tokens/s, "
                    f"identical {record.identical_to_autoregressive}"
                )
            if time.monotonic() - published > PUBLISH_EVERY_S:  # drawing takes a second
                publish(results)
                published = time.monotonic()
        publish(results)
    except KeyboardInterrupt:
        if results and results[-1].target is target and results[-1].records:
            publish(results)
        raise
    finally:
        line.detach()


def _continue(
    bench: Bench, folder: Path, configs: dict[str, Settings], prompts: list[Prompt]
) -> dict[tuple[str, str], Prediction]:
    """What an earlier run left for these rows, checked against this one's settings and prompts."""
    if repair_folder(folder):
        bench.say("the last line of the earlier run was cut off in the middle: dropped, to be decoded again")
    found = [r for r in read_predictions(folder) if r.method in configs]
    check_resumable(found, configs, folder)
    asked = {prompt.id: prompt.fingerprint for prompt in prompts}
    for record in found:
        if record.prompt != asked.get(record.id, record.prompt):
            raise UserError(
                f"prompt '{record.id}' has other tokens or another length limit than the one in {folder.name}: use "
                "another --out, or delete its predictions.jsonl to start over."
            )
    if found:
        bench.say(f"{len(found)} records are there already: they are kept")
    return {(r.id, r.method): r for r in found}


def slug(name: str) -> str:
    """A name as a folder."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-") or "target"
