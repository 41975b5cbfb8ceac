"""Giving freed memory back to the system between the layers of a training step on a CPU. Knows no memory, no data.

PyTorch asks glibc for aligned blocks, a little more than it uses; small objects settle in the remainders, so a freed
block often does not fit the next tensor of its size. A step's heap then grows to almost three times what its tensors
need. Trimming it every few layers keeps it near that, for some percent of the time; mapping every large block by itself
does the same and costs a third of the time, in page faults (``docs/results/speed_notes.md``).
"""

import ctypes
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

EVERY = 3  # layers, in the forward pass and again where the backward pass replays them

_handles: "WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = WeakKeyDictionary()


def trim_between_layers(model: nn.Module, layers: list[nn.Module], on: bool) -> None:
    """Returns the heap's free pages before every third of ``layers`` runs with gradients, or ends that.

    Nothing happens where the C library has no ``malloc_trim`` (it is glibc's).
    """
    for handle in _handles.pop(model, []):
        handle.remove()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if not on or trim is None:
        return

    def before(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            trim(0)

    _handles[model] = [layer.register_forward_pre_hook(before) for layer in layers[::EVERY]]
