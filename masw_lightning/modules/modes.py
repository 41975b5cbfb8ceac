"""Train and eval modes of a frozen backbone, set on purpose. Knows modules, no Lightning and no memory.

Transformers checkpoints activations in training mode only, and a loaded backbone is in eval mode, which Lightning
leaves alone. Training mode must change nothing else, so dropout is taken out.
"""

from torch import nn
from transformers import PreTrainedModel

from masw_lightning.attention.interface import attention_modules
from masw_lightning.modules.allocator import trim_between_layers


def checkpoint_activations(model: PreTrainedModel, on: bool) -> None:
    """Makes the layers of ``model`` keep only their inputs for the backward pass, or ends that.

    On a CPU the memory that layers free goes back to the system as well.
    """
    # transformers renames these two in 5.24
    if on:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        turn_off_dropout(model)
    else:
        disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        disable()
    model.train(on)
    if model.device.type == "cpu":
        trim_between_layers(model, attention_modules(model), on)


def turn_off_dropout(model: nn.Module) -> None:
    """Sets every dropout rate inside ``model`` to zero; a frozen backbone has no use for it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
