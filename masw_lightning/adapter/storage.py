"""A memory on disk: ``masw.safetensors`` (only our tensors) and ``masw_config.json`` (what they belong to).

Loading checks the layout, the base model and every tensor. Knows nothing of Lightning checkpoints (see ``modules``),
which store the same ``describe`` record.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from masw_lightning.adapter.inject import MemoryDraft, SlotInput, attach_memory
from masw_lightning.attention.interface import attention_modules, text_config
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout

WEIGHTS, CONFIG, FORMAT = "masw.safetensors", "masw_config.json", 1
BASE_NUMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def describe_base(model: PreTrainedModel, name: str | None = None) -> dict[str, Any]:
    """What identifies a base model: its family, its sizes and 64 of its weights (name is for people only)."""
    config = text_config(model)
    weight = getattr(attention_modules(model)[-1].k_proj, "weight", torch.zeros(1))
    step = max(1, weight.numel() // 64)
    sample = weight.detach().reshape(-1)[::step][:64].float().tolist()
    return {
        "name": name or getattr(config, "_name_or_path", "") or type(model).__name__,
        "model_type": config.model_type,
        **{key: getattr(config, key) for key in BASE_NUMBERS},
        "weight_sample": sample,
    }


def check_base(model: PreTrainedModel, base: dict[str, Any], where: str) -> None:
    """Raise ``UserError`` unless ``base`` (of ``describe_base``) is this model, in whatever precision."""
    own = describe_base(model)
    for key in ("model_type", *BASE_NUMBERS):
        if own[key] != base[key]:
            raise UserError(
                f"{where} was trained for {base['name']} ({key}={base[key]}), but this backbone is {own['name']} "
                f"({key}={own[key]}): use the base model it was trained on."
            )
    theirs, ours = torch.tensor(base["weight_sample"]), torch.tensor(own["weight_sample"])
    # bfloat16 rounds to 0.4 %; a fine-tuned sibling of the base differs by more somewhere
    atol = 0.005 * float(theirs.abs().mean())
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=0.01, atol=atol):
        raise UserError(
            f"{where} was trained for {base['name']}, whose weights differ from those of {own['name']}: "
            "use the base model it was trained on."
        )


def describe(draft: MemoryDraft, trained_length: int | None = None, base: str | None = None) -> dict[str, Any]:
    """The record stored beside a memory's tensors; JSON primitives only."""
    return {
        "format": FORMAT,
        "layout": asdict(draft.layout),
        "writer": draft.writer,
        "mirror": list(draft.mirror),
        "slot_input": draft.slot_input,
        "base": describe_base(draft.model, base),
        "trained_length": trained_length or draft.trained_length,
        "versions": {"torch": str(torch.__version__), "transformers": transformers_version},
    }


def stored_slot_input(record: dict[str, Any]) -> SlotInput:
    """A record's ``slot_input``; the first records did not name it."""
    return cast(SlotInput, record.get("slot_input", "learned"))


def save_memory(
    draft: MemoryDraft,
    directory: str | Path,
    trained_length: int | None = None,
    base: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``draft``'s own tensors and its record into ``directory``.

    Args:
        trained_length: longest text, in tokens, that the memory was trained on.
        base: name of the base model, for people and error messages.
        dtype: of the tensors in the file; ``None``: as they are.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the memory to {path}: {error.strerror}; choose another folder.") from error
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in draft.adapter_state_dict().items()}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    (path / CONFIG).write_text(json.dumps(describe(draft, trained_length, base), indent=2) + "\n")


def read_record(directory: str | Path) -> dict[str, Any]:
    """The record of a saved memory, checked for completeness."""
    path = Path(directory) / CONFIG
    try:
        record = json.loads(path.read_text())
        missing = [k for k in ("layout", "writer", "mirror", "base") if k not in record]
    except FileNotFoundError:
        raise UserError(f"{directory} holds no {CONFIG}: give a folder written by save_pretrained.") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): save the memory again.") from error
    if missing or record.get("format") != FORMAT:
        raise UserError(
            f"{path} lacks {missing} or has format {record.get('format')!r} where {FORMAT} is known: "
            "save the memory again with this version."
        )
    return dict(record)


def load_memory(model: PreTrainedModel, directory: str | Path, dtype: torch.dtype | None = None) -> MemoryDraft:
    """Attach the memory saved in ``directory`` to ``model``, in the model's dtype unless ``dtype`` says otherwise.

    Raises:
        UserError: no such memory, another base model, or missing, surplus or misshapen weights; the model is then left
            as it was.
    """
    record = read_record(directory)
    return attach_stored(model, record, read_weights(directory), str(directory), dtype)


def attach_stored(
    model: PreTrainedModel,
    record: dict[str, Any],
    state: dict[str, Tensor],
    where: str,
    dtype: torch.dtype | None = None,
) -> MemoryDraft:
    """Attach a stored memory, whatever file its ``record`` (of ``describe``) and tensors came from.

    Args:
        where: that file or folder, for error messages.

    Raises:
        UserError: another base model, or missing, surplus or misshapen weights; the model is then left as it was.
    """
    check_base(model, record["base"], where)
    layout = MemoryLayout(**record["layout"])
    mirror, start = tuple(record["mirror"]), stored_slot_input(record)
    draft = attach_memory(model, layout, record["writer"], mirror, slot_input=start, dtype=dtype)
    try:
        draft.load_adapter_state_dict(state)
    except UserError as error:
        draft.detach()
        raise UserError(f"{where}: {error}") from None
    draft.trained_length = record.get("trained_length")
    return draft


def read_weights(directory: str | Path) -> dict[str, Tensor]:
    """The tensors of a saved memory."""
    path = Path(directory) / WEIGHTS
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{directory} holds no {WEIGHTS}: give a folder written by save_pretrained.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): save the memory again.") from error
