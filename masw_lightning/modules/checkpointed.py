"""What a training checkpoint is: the adapter's tensors and its record, counters and generator states, no backbone.

Lightning adds optimizer, schedule, loops and the data's position. Loading refuses what does not belong to the run and
is strict about the adapter's tensors: none may be missing or left over. Knows a ``MemoryDraft`` and Lightning's
checkpoint hooks; no batches and no losses.
"""

from collections.abc import Mapping
from typing import Any

from lightning import LightningModule
from lightning import __version__ as lightning_version
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from masw_lightning.adapter.backbone import Backbone
from masw_lightning.adapter.inject import MemoryDraft
from masw_lightning.adapter.storage import describe
from masw_lightning.errors import UserError
from masw_lightning.modules.identity import RECORD, check_fits, read_adapter, record_of
from masw_lightning.modules.randomness import TrainingStream


class CheckpointedAdapter(LightningModule):
    """A module whose state is one adapter.

    Attributes:
        draft: the memory on its backbone, once ``configure_model`` has run.
        backbone_config: where the backbone comes from.
        trained_length: longest row the adapter was trained on, in tokens, here or before; ``None`` if it never was.
        tokens_seen: tokens of all training steps and ranks.
    """

    draft: MemoryDraft
    backbone_config: Backbone

    def __init__(self) -> None:
        super().__init__()
        self.trained_length: int | None = None
        self.tokens_seen = 0
        self._stream = TrainingStream()
        self._start_error: UserError | None = None
        # Lightning would miss the backbone's tensors; load_state_dict below is strict about ours.
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The adapter's tensors, nothing else."""
        return self.draft.adapter_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the adapter's tensors; missing, surplus or misshapen ones are errors whatever ``strict`` says."""
        self.draft.load_adapter_state_dict(dict(state_dict))
        return nn.modules.module._IncompatibleKeys([], [])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the adapter's record, counters and random generators."""
        record = self._describe()
        record["versions"]["lightning"] = lightning_version
        record |= {"trained_by": type(self).__name__, "tokens_seen": self.tokens_seen}
        checkpoint[RECORD] = record
        checkpoint["generators"] = self._stream.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another memory, base or kind of training, then restores counters and generators.

        Raises:
            UserError: it does not belong to this run.
        """
        path = (self.trainer.ckpt_path if self._trainer is not None else None) or "the checkpoint"
        record = record_of(checkpoint, str(path))
        self._check_record(record, str(path))
        fitting = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if fitting and record["trained_by"] != type(self).__name__:
            raise UserError(
                f"{path} was written by {record['trained_by']}, and {type(self).__name__} cannot resume it: start from "
                f"its weights with --model.init_args.init_from {path} instead of --ckpt_path."
            )
        self._start_error = None
        self.tokens_seen = record["tokens_seen"]
        self._set_trained_length(record["trained_length"])
        self._stream.load_state_dict(checkpoint["generators"])

    def _describe(self) -> dict[str, Any]:
        return describe(self.draft, self.trained_length, self.backbone_config.path)

    def _check_record(self, record: dict[str, Any], where: str) -> None:
        check_fits(self.draft, record, where)

    def _set_trained_length(self, length: int | None) -> None:
        """The longest of what was trained on here and before."""
        longest = max(length or 0, self.trained_length or 0)
        self.trained_length = self.draft.trained_length = longest or None

    def _start_from(self, path: str) -> None:
        """Loads weights alone; inside a trainer an error waits, since a checkpoint may follow and replace them."""
        try:
            weights, record = read_adapter(path)
            check_fits(self.draft, record, path)
            self.draft.load_adapter_state_dict(weights)
            self._set_trained_length(record.get("trained_length"))
        except UserError as error:
            if self._trainer is None:
                raise
            self._start_error = error

    def _check_start(self) -> None:
        if self._start_error is not None:
            raise self._start_error
