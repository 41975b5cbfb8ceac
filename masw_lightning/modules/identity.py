"""Whether a trained adapter fits the run that wants it, and where its weights are read from.

A checkpoint's ``"masw"`` entry and the record beside a saved adapter are the same dictionary (``adapter.storage``):
layout, writer, mirrors, base model, trained length. An adapter only works for what it was trained for, so a mismatch is
an error that names both values. Knows records, files and memories; no Lightning.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from masw_lightning.adapter.inject import MemoryDraft
from masw_lightning.adapter.storage import check_base, read_record, read_weights, stored_slot_input
from masw_lightning.errors import UserError

RECORD = "masw"  # the key in a checkpoint


def check_fits(draft: MemoryDraft, record: dict[str, Any], where: str) -> None:
    """Compares an adapter's record with the memory it is to be loaded into.

    ``rollback`` may differ: it is a size of decoding caches, not of what was learned.

    Raises:
        UserError: layout, writer, mirrors or base model differ.
    """
    check_is_memory(record, where)
    for key, theirs, ours in (
        ("writer", record["writer"], draft.writer),
        ("mirror", sorted(record["mirror"]), sorted(draft.mirror)),
        ("slot_input", stored_slot_input(record), draft.slot_input),
    ):
        if theirs != ours:
            raise UserError(
                f"{where} was trained with adapter {key}={theirs}, and this run asks for {key}={ours}: "
                "use the same adapter settings."
            )
    for key in ("sink", "window", "ratio", "visibility"):
        theirs, ours = record["layout"][key], getattr(draft.layout, key)
        if theirs != ours:
            raise UserError(
                f"{where} was trained with memory {key}={theirs}, and this run asks for {key}={ours}: "
                "use the same memory layout."
            )
    check_base(draft.model, record["base"], where)


def check_is_memory(record: dict[str, Any], where: str) -> None:
    """Raise ``UserError`` if a record is that of a draft head (EAGLE, EAGLE-3), which has no memory's layout."""
    if "layout" not in record:
        raise UserError(f"{where} holds a draft head of kind '{record.get('head')}' and no memory: give a memory's.")


def read_adapter(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """``(adapter weights, record)`` of a training checkpoint (``.ckpt``) or of a folder written by ``save_pretrained``.

    Raises:
        UserError: there is no such file or folder, it cannot be read, or it holds no memory adapter.
    """
    if Path(path).is_dir():
        return read_weights(path), read_record(path)
    if not Path(path).is_file():
        raise UserError(f"no checkpoint at {path!r}: give the .ckpt file or the adapter folder of an earlier run.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for files that are not checkpoints
        raise UserError(f"{path!r} is not a checkpoint ({type(error).__name__}): give a .ckpt file.") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path!r} is not a training checkpoint: give a .ckpt file that masw fit wrote.")
    return checkpoint["state_dict"], record_of(checkpoint, path)


def record_of(checkpoint: dict[str, Any], where: str) -> dict[str, Any]:
    """The record inside a loaded checkpoint.

    Raises:
        UserError: it has none.
    """
    if RECORD not in checkpoint or "state_dict" not in checkpoint:
        raise UserError(f"{where} holds no memory adapter: give a .ckpt file that masw fit wrote.")
    return dict(checkpoint[RECORD])
