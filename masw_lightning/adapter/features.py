"""Hidden states of a model's layers, read off while it runs: what feature-level drafts (EAGLE, EAGLE-3) learn from.

Layers are numbered as in transformers' ``hidden_states``: ``i < N`` is what *enters* decoder layer ``i`` (0-based),
``N`` is the output of the final norm. Knows models; no drafts, no caches and no loop.
Shapes: B batch, T rows of the forward, h hidden size, N layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from masw_lightning.attention.interface import attention_modules, text_config
from masw_lightning.errors import UserError


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, in order: the parents of the attention modules."""
    names = {id(module): name for name, module in model.named_modules()}
    return [model.get_submodule(names[id(a)].rpartition(".")[0]) for a in attention_modules(model)]


class HiddenStates:
    """Keeps what enters the layers ``wanted`` during a forward inside ``reading()``.

    The tensors are the forward's own, no copies: each holds ``B x T x h`` elements until the next forward or ``clear``.

    Raises:
        UserError: a layer the model does not have.
    """

    def __init__(self, model: PreTrainedModel, wanted: Sequence[int]) -> None:
        self.wanted, self.last = tuple(wanted), int(text_config(model).num_hidden_layers)
        for layer in self.wanted:
            if not 0 <= layer <= self.last:
                raise UserError(
                    f"hidden states of layer {layer} are asked for, but {type(model).__name__} has layers 0 to "
                    f"{self.last - 1} ({self.last} is the final norm's output): name one of those."
                )
        inner = sorted(set(self.wanted) - {self.last})
        layers = decoder_layers(model) if inner else []
        self._layers = {index: layers[index] for index in inner}
        self._seen: dict[int, Tensor] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Listen for the length of a block with one forward in it."""
        self._seen = {}
        with ExitStack() as stack:
            for index, layer in self._layers.items():
                handle = layer.register_forward_pre_hook(self._hook(index), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _hook(self, index: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[index] = args[0] if args else kwargs["hidden_states"]

        return keep

    def collect(self, final: Tensor) -> tuple[Tensor, ...]:
        """The states ``[B,T,h]`` in the order of ``wanted``. ``final``: the forward's own output, after the norm."""
        return tuple(final if layer == self.last else self._seen[layer] for layer in self.wanted)

    def clear(self) -> None:
        """Let go of the tensors."""
        self._seen = {}


@torch.no_grad()
def target_states(model: PreTrainedModel, input_ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, ...]:
    """Hidden states ``[B,n,h]`` of a text ``[B,n]`` at ``layers``, by the model's own forward (for training)."""
    states = HiddenStates(model, layers)
    with states.reading():
        final = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return states.collect(final)
