"""The first layers of a model under its own final norm and head, as a model that shares every weight.

Only the list of layers is new: modules, parameters, hooks and configuration are the original's own objects, so nothing
is copied and the original is not touched. Knows no cache and no policy.
"""

import copy
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from masw_lightning.attention.interface import text_config
from masw_lightning.errors import UserError

Module = TypeVar("Module", bound=nn.Module)


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A view of ``model`` that runs its first ``layers`` layers only. Its configuration still counts them all.

    Raises:
        UserError: fewer than one layer, more than the model has, or a model without one plain stack of layers.
    """
    total = int(text_config(model).num_hidden_layers)
    if not 1 <= layers <= total:
        raise UserError(f"layers={layers} is out of range: the model has {total} layers, give 1 to {total}.")
    base = model.base_model
    stack = getattr(base, "layers", None)
    if base is model or not isinstance(stack, nn.ModuleList) or len(stack) != total:
        raise UserError(f"{type(model).__name__} has no plain stack of {total} layers to take the first {layers} of.")
    return _with(model, model.base_model_prefix, _with(base, "layers", stack[:layers]))


def _with(module: Module, name: str, child: nn.Module) -> Module:
    """A shallow copy of ``module`` in which only the child ``name`` is another one."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    view._modules[name] = child
    return view
