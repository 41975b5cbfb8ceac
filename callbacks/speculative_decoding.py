"""The predict-time callback: every prompt with every method, one JSON line each, and a report at the end.

Ties the rooms together (module and data from Lightning, drafts from `methods`, decoding from `trial`, files from
`predictions`, the table from `report`) and decides order, resuming, progress and warnings; it computes nothing itself.
The knobs are the callback's own, because Lightning lets a checkpoint's hyperparameters win over the command line.
"""

import contextlib
import time
from dataclasses import asdict
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import PreTrainedModel

from callbacks.alarms import Alarms
from callbacks.environment import device_name, environment
from callbacks.methods import Method, Models, line_up
from callbacks.predictions import (
    REFERENCE,
    Prediction,
    Settings,
    check_resumable,
    make_folder,
    merge_ranks,
    rank_file,
    read_predictions,
    repair_folder,
)
from callbacks.report import print_table, wide_console, write_report
from callbacks.trial import DEFAULT_NEW_TOKENS, Decoding, Prompt, Trial
from masw_lightning.adapter.backbone import Backbone, check_same_tokenizer, load_backbone, load_tokenizer, max_positions
from masw_lightning.adapter.inject import MemoryDraft
from masw_lightning.data.longbench import Prompts, check_prompt_fits
from masw_lightning.errors import UserError


class SpeculativeDecoding(L.Callback):
    """Decodes the predict prompts with every method and measures.

    Args:
        methods: rows of the table. Autoregressive decoding is the reference: it always runs first, listed or not.
        output_dir: receives predictions.jsonl, summary.json, summary.md and the figures. A second run with the same
            settings continues what is there.
        target: the model that verifies; null takes the module's own backbone (one model is target and draft).
        num_draft_tokens: K, tokens drafted per iteration.
        max_new_tokens: per prompt, the first one included; null takes the dataset's own limit, else 256.
        temperature: 0 is greedy, and the output is compared with autoregressive decoding.
        top_k: sample from the k likeliest tokens only.
        top_p: sample from the smallest set of tokens with this probability only.
        seed: of sampling; the same for every prompt, so that a continued run draws what an unbroken one would.
        eos: true stops at the target's own end tokens, false never, a list at these ids.
        share_target_prefill: prefill the target once per prompt and let every method start from it; each method's time
            to first token still counts it.
        rouge: score the text against the references, where there are any.
        warmup_tokens: length of an unrecorded decode per method before the first measurement; 0 does without.
        buckets: prompt lengths to group the table by; null takes powers of two.
    """

    def __init__(
        self,
        methods: list[Method] | Method,
        output_dir: str = "runs/predict",
        target: Backbone | None = None,
        num_draft_tokens: int = 5,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos: bool | list[int] = True,
        share_target_prefill: bool = True,
        rouge: bool = True,
        warmup_tokens: int = 256,
        buckets: list[int] | None = None,
    ) -> None:
        self.methods = [methods] if isinstance(methods, Method) else list(methods)
        self.target = target
        self.decoding = Decoding(
            num_draft_tokens, max_new_tokens, temperature, top_k, top_p, seed, eos, share_target_prefill
        )
        self.output_dir, self.rouge, self.warmup_tokens, self.buckets = output_dir, rouge, warmup_tokens, buckets
        if buckets is not None and (not buckets or min(buckets) < 1):
            raise UserError(f"buckets={buckets} is no list of prompt lengths: give positive numbers, or null.")
        self.console = wide_console()
        self._models: Models | None = None
        self._decoded = 0

    # ---- start ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find out that the output folder cannot be written before a model is loaded."""
        if stage == "predict":
            make_folder(self.output_dir)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load, build and check everything, and read what an earlier run left."""
        module = cast(Any, pl_module)
        if not isinstance(getattr(module, "draft", None), MemoryDraft):
            raise UserError(
                f"{type(pl_module).__name__} has no draft with a memory: predict with AdapterPretraining or "
                "SupervisedFinetuning."
            )
        # Lightning is in inference mode here; weights made in it could never be trained again in this process.
        with torch.inference_mode(False), torch.no_grad():
            models = self._models = self._gather_models(trainer, module)
            self._contenders = line_up(self.methods, models)
        k = self.decoding.num_draft_tokens
        for contender in self._contenders:
            if contender.policy is not None:
                contender.policy.open(1, 1, k + 2, k)  # a policy refuses what it cannot do when it is opened
        self._trial = Trial(models.target, module.tokenizer, self.decoding, self.rouge)
        self._check_prompts(trainer, max_positions(models.target))
        shared: Settings = {
            "target": _described(self.target or module.backbone_config, models.target),
            "draft": _described(module.backbone_config, models.draft),
            "decoding": self.decoding.settings(),
            "device": device_name(pl_module.device),
        }
        self._run = environment(pl_module.device) | {
            "config": {**shared, "methods": {c.name: c.settings for c in self._contenders}}
        }
        self._configs = {c.name: {**shared, "method": c.settings} for c in self._contenders}
        self._file = rank_file(self.output_dir, trainer.global_rank, trainer.world_size)
        if trainer.is_global_zero and repair_folder(self.output_dir):
            self._say("the last line of the earlier run was cut off in the middle: dropped, to be decoded again")
        trainer.strategy.barrier("predictions repaired")
        found = read_predictions(self.output_dir)
        check_resumable(found, self._configs, self.output_dir)
        trainer.strategy.barrier("predictions read")
        self._done = {(r.id, r.method): r for r in found}
        names = ((self.target or module.backbone_config).path, module.backbone_config.path)
        self._alarms = Alarms(k, *names, module.tokenizer.name_or_path)
        self._warm: set[str] = set()
        self._lines = int(sum(trainer.num_predict_batches)) * len(self._contenders)
        self._line, self._decoded, self._began = 0, 0, time.monotonic()
        rows = ", ".join(c.name for c in self._contenders)
        share = f", this process's share of {trainer.world_size}," if trainer.world_size > 1 else ""
        count = self._lines // len(self._contenders)
        self._say(f"decoding {count} prompts{share} with {rows} into {self.output_dir}")
        if found:
            self._say(f"{len(found)} predictions are there already: they are kept")

    def _gather_models(self, trainer: L.Trainer, module: Any) -> Models:
        own: Backbone = module.backbone_config
        loaded: dict[Backbone, PreTrainedModel] = {own: module.draft.model}

        def load(backbone: Backbone) -> PreTrainedModel:
            if backbone not in loaded:
                theirs = load_tokenizer(backbone.path, backbone.gguf_file, backbone.revision)
                check_same_tokenizer(theirs, module.tokenizer, (backbone.path, own.path))
                loaded[backbone] = load_backbone(backbone).to(module.device)
            return loaded[backbone]

        data = getattr(trainer, "datamodule", None)
        if data is not None and getattr(data, "tokenizer_name", None):
            check_same_tokenizer(data.tokenizer, module.tokenizer, ("the data's tokenizer", own.path))
        return Models(
            target=load(self.target or own),
            draft=module.draft.model,
            memory=module.draft,
            # A training step, a checkpoint that has seen one, and init_from all leave a trace in the module.
            trained=module.trained_length is not None or module.init_from is not None,
            trained_length=module.trained_length,
            checkpoint=str(trainer.ckpt_path or module.init_from or "") or None,
            load=load,
        )

    def _check_prompts(self, trainer: L.Trainer, positions: int | None) -> None:
        """Every prompt and its new tokens fit the target's positions: known before the first is decoded."""
        loaders = trainer.predict_dataloaders
        for loader, batches in zip(loaders if isinstance(loaders, list) else [loaders], trainer.num_predict_batches):
            if positions is not None and isinstance(loader.dataset, Prompts):
                for prompt in loader.dataset.prompts[: int(batches) * trainer.world_size]:
                    limit = self._limit(prompt.max_new_tokens)
                    check_prompt_fits(len(prompt.input_ids), limit, positions, prompt.id)

    def _limit(self, of_dataset: int | None) -> int:
        return self.decoding.max_new_tokens or of_dataset or DEFAULT_NEW_TOKENS

    # ---- every prompt --------------------------------------------------------------------------------------------
    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Decode one prompt with every method that has no line for it yet; write each line as soon as it exists."""
        if len(batch["id"]) != 1:
            raise UserError(f"a predict batch holds {len(batch['id'])} prompts: decoding takes one, set batch_size 1.")
        prompt = Prompt(
            batch["id"][0],
            batch["dataset"][0],
            batch["input_ids"],
            self._limit(batch["max_new_tokens"][0]),
            batch["references"][0],
        )
        self._check_same_prompt(prompt)
        missing = [c for c in self._contenders if (prompt.id, c.name) not in self._done]
        self._line += len(self._contenders) - len(missing)
        if not missing:
            return
        cold = [c for c in missing if c.name not in self._warm and self.warmup_tokens > 0]
        if cold:
            self._say("warming up " + ", ".join(c.name for c in cold))
        for contender in cold:
            self._trial.warm_up(prompt, contender, self.warmup_tokens)
            self._warm.add(contender.name)
        prefix = self._trial.prefill(prompt, missing)
        for contender in missing:
            self._alarms.before(contender, prompt.input_ids.shape[1])
            reference = self._done.get((prompt.id, REFERENCE))
            record = self._trial.record(prompt, contender, prefix, reference, self._configs[contender.name])
            self._file.append(record)
            self._done[prompt.id, contender.name] = record
            self._progress(record)
            self._alarms.after(contender, record)

    def _check_same_prompt(self, prompt: Prompt) -> None:
        for contender in self._contenders:
            record = self._done.get((prompt.id, contender.name))
            if record is not None and record.prompt != prompt.fingerprint:
                raise UserError(
                    f"prompt '{prompt.id}' has other tokens or another length limit than the one {self.output_dir} has "
                    "under this id: give every prompt an id of its own, or use another output_dir."
                )

    # ---- end -----------------------------------------------------------------------------------------------------
    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Merge what the processes wrote, and report."""
        trainer.strategy.barrier("predictions written")
        if trainer.is_global_zero:
            self._report(trainer, merge_ranks(self.output_dir), on_screen=True)
        trainer.strategy.barrier("report written")
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Interrupted: the lines stay, and the report covers them."""
        if self._decoded and trainer.is_global_zero:
            with contextlib.suppress(OSError):  # a full disk may be the very reason
                self._report(trainer, read_predictions(self.output_dir), on_screen=False)
            self._say(f"interrupted: {self.output_dir} keeps what was decoded; the same command continues after it")
        self._close()

    def _report(self, trainer: L.Trainer, records: list[Prediction], on_screen: bool) -> None:
        # Lines of methods that this run does not have stay in the file and out of the table.
        names = [c.name for c in self._contenders]
        records = sorted((r for r in records if r.method in names), key=lambda r: names.index(r.method))
        writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        summary = write_report(self.output_dir, records, self._run, self.buckets, writers if on_screen else ())
        if on_screen:
            print_table(summary, self.console)
            self._say(f"predictions.jsonl, summary.json, summary.md and figures are in {self.output_dir}")

    def _close(self) -> None:
        if self._models is not None:
            self._models.detach()
        self._models, self._contenders, self._decoded = None, [], 0
        self.__dict__.pop("_trial", None)  # it holds the target

    # ---- what is said --------------------------------------------------------------------------------------------
    def _say(self, text: str) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            return
        self.console.print(text, markup=False, soft_wrap=True)

    def _progress(self, record: Prediction) -> None:
        self._line += 1
        self._decoded += 1
        left = (time.monotonic() - self._began) / self._decoded * (self._lines - self._line)
        same = {True: "identical", False: "DIFFERENT", None: "sampled"}[record.identical_to_autoregressive]
        if record.method == REFERENCE:
            same = "the reference"
        elif record.margin_at_difference is not None:
            same += f" from token {record.first_difference} (margin {record.margin_at_difference:.2g})"
        self._say(
            f"[{self._line}/{self._lines}] {record.id}, {record.prompt_tokens} tokens, {record.method}: "
            f"{record.tokens_per_iteration or 0:.2f} Tok./Iter, {record.tokens_per_s or 0:.1f} tokens/s, first token "
            f"{record.time_to_first_token_s:.2f} s, {same}; about {_duration(left)} left"
        )


def _described(backbone: Backbone, model: PreTrainedModel) -> Settings:
    """A model's settings, with the precision it really has (a trainer's precision may have changed it)."""
    return {**asdict(backbone), "dtype": str(model.dtype).removeprefix("torch.")}


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
