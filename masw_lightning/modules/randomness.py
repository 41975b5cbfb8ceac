"""Random generator states that survive a checkpoint, so that a resumed run continues bit for bit.

Lightning restores loops and optimizers but no generator. Knows torch, NumPy and Python generators; no model, no data.
"""

import random
from typing import Any, cast

import numpy
import torch


def generator_states() -> dict[str, Any]:
    """States of all global generators as tensors and primitives (loadable with ``weights_only=True``)."""
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "python": _plain(random.getstate()),
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Puts ``generator_states()`` back. Devices that are not there any more are left out."""
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
    name, keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state((name, keys.cpu().numpy().astype("uint32"), position, has_gauss, cached))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))


class TrainingStream:
    """Keeps the random numbers of training apart from whatever runs between two steps.

    Validation, data loaders and callbacks draw from the same global generators, and after a resume they draw at other
    moments. So each step starts with the states in which the step before it ended, and those are what a checkpoint
    holds, wherever between two steps it is written.
    """

    def __init__(self) -> None:
        self._between: dict[str, Any] | None = None  # None: inside a step, or before the first one

    def step_starts(self) -> None:
        """To be called right before a training step."""
        if self._between is not None:
            restore_generators(self._between)
        self._between = None

    def step_ends(self) -> None:
        """To be called right after a training step."""
        self._between = generator_states()

    def state_dict(self) -> dict[str, Any]:
        """The states in which the last step ended."""
        return self._between if self._between is not None else generator_states()

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """The next step starts from ``states``."""
        self._between = states


def _plain(state: tuple[Any, ...]) -> list[Any]:
    version, internal, gauss = state
    return [version, list(internal), gauss]
