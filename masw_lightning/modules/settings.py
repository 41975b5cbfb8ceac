"""Settings of a training run that are neither backbone, layout nor optimizer. Plain numbers and names only."""

from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal

from masw_lightning.errors import UserError


@dataclass(frozen=True)
class AdapterConfig:
    """What is trained beside the frozen backbone.

    Args:
        writer: ``"slot"`` (the paper's: every slot is a row of its own) or ``"token"`` (the last token of a group
            writes its slot).
        mirror: projections of slot rows that get a trainable copy; the paper's are k and v.
        init: mirrors start as copies of the frozen projections, or at random (for the ablation).
        train_slot_embedding: whether the slot rows' own input vector is trained (slot writer only).
        slot_input: a slot row starts from one ``"learned"`` vector at its boundary, or as a ``"repeat"`` of its group's
            last token at that token's place, plus such a vector (slot writer only).
        seed: seed of random mirrors.
    """

    writer: Literal["slot", "token"] = "slot"
    mirror: tuple[Literal["q", "k", "v", "o"], ...] = ("k", "v")
    init: Literal["copy", "random"] = "copy"
    train_slot_embedding: bool = True
    slot_input: Literal["learned", "repeat"] = "learned"
    seed: int = 0


@dataclass(frozen=True)
class ValidationConfig:
    """How ``val/tokens_per_iteration`` is measured: by teacher forcing along the backbone's own greedy text.

    Args:
        prompts: validation rows (over all ranks) whose start the backbone continues; 0 turns the metric off.
        prompt_tokens: most tokens of such a prompt; SFT prompts longer than that lose their middle.
        new_tokens: greedy tokens per prompt.
        num_draft_tokens: ``K``, drafted tokens per iteration.
    """

    prompts: int = 4
    prompt_tokens: int = 1024
    new_tokens: int = 64
    num_draft_tokens: int = 5

    def __post_init__(self) -> None:
        for name, low in (("prompts", 0), ("prompt_tokens", 1), ("new_tokens", 2), ("num_draft_tokens", 1)):
            if getattr(self, name) < low:
                raise UserError(f"validation {name}={getattr(self, name)} is too small: give at least {low}.")


def primitives(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings as dictionaries, lists, strings and numbers, which load with ``weights_only=True``."""
    return {key: _primitive(value) for key, value in settings.items()}


def _primitive(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return primitives(asdict(value))
    return [_primitive(v) for v in value] if isinstance(value, (tuple, list)) else value
