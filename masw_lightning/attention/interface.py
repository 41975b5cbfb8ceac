"""Running a Hugging Face causal LM with attention that this project computes.

Transformers calls an attention function by name; ours hands queries, keys and values to the ``masw_memory`` object of
the current forward, which alone decides who sees whom. The model's own code does everything else (norms, biases, RoPE,
k-norm, MLP), so families differ nowhere here. The name is registered on first use and switched on only for the length
of a forward, so the model's ordinary behaviour never changes.
Shapes: B batch, T rows, H heads, G KV heads, D head dim, h hidden size, V vocab.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from masw_lightning.attention.rowwise import mlp_rows_in_cache
from masw_lightning.errors import UserError

ATTENTION_NAME = "masw"
MEMORY_KWARG = "masw_memory"


class AttentionMemory(Protocol):
    """What a forward looks at: given one layer's rows, it returns their attention output."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """``q [B,H,T,D]``, new ``k, v [B,G,T,D]`` (after RoPE) ``-> [B,H,T,D]``."""
        ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UserError(f"{type(module).__name__} caps or sinks its attention scores, which no memory here supports.")
    if kwargs.get("dropout"):
        raise UserError("attention dropout is not supported through a memory: set attention_dropout to 0.")
    scale = kwargs.get("scaling")
    out = kwargs[MEMORY_KWARG].attend(
        module, query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, kwargs.get("sliding_window")
    )
    return out.transpose(1, 2), None


@contextmanager
def memory_attention(config: Any) -> Iterator[None]:
    """Switch the attention of all modules sharing ``config`` to the memory's for the length of the block."""
    if ATTENTION_NAME not in AttentionInterface().valid_keys():
        AttentionInterface.register(ATTENTION_NAME, _attention)
    previous = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = previous


def text_config(model: PreTrainedModel) -> Any:
    """The configuration that the decoder's attention modules read."""
    return model.config.get_text_config()


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of every layer, in order.

    Raises:
        UserError: the model has no ``k_proj``/``v_proj`` attention in every layer.
    """
    found = [m for m in model.modules() if hasattr(m, "k_proj") and hasattr(m, "v_proj") and hasattr(m, "layer_idx")]
    layers = text_config(model).num_hidden_layers
    if len(found) != layers:
        raise UserError(
            f"{type(model).__name__} has {len(found)} attention modules with k_proj and v_proj for {layers} layers: "
            "use a decoder whose every layer has both (Llama, Qwen2, Qwen3, Mistral, Gemma 3)."
        )
    return sorted(found, key=lambda m: int(m.layer_idx))


def run_backbone(
    model: PreTrainedModel, inputs_embeds: Tensor, position_ids: Tensor, memory: AttentionMemory
) -> Tensor:
    """One forward of the decoder's layers through ``memory``.

    Args:
        inputs_embeds: ``[B,T,h]``.  position_ids: ``[B,T]`` or ``[1,T]``, any order: the memory decides visibility.

    Returns:
        hidden states ``[B,T,h]`` after the final norm.
    """
    # A ready 4-D mask keeps transformers from building an L x L one (and from reading jumping positions as packed
    # sequences). The memory ignores it.
    no_mask = inputs_embeds.new_zeros(1, 1, 1, 1)
    rows = mlp_rows_in_cache(model.base_model, inputs_embeds.shape[1], inputs_embeds.device)
    with memory_attention(text_config(model)), rows:
        output = model.base_model(
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            attention_mask=no_mask,
            use_cache=False,
            **{MEMORY_KWARG: memory},
        )
    return output.last_hidden_state


def output_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """``[...,h] -> [...,V]``: the model's own head, with the scalings some families apply after it."""
    config = text_config(model)
    logits: Tensor = model.get_output_embeddings()(hidden)
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return torch.tanh(logits / cap) * cap if cap else logits
