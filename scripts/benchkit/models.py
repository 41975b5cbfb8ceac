"""The models a benchmark runs on: random weights of a named shape, or real ones from a path.

A random model has the exact sizes of its namesake and costs what it costs, but is built so that every token predicts
itself by a wide margin (large embeddings, small output projections). So greedy text is the same in every dtype and with
every kernel, drafts of one vocabulary agree with their target, and acceptance can be set on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from masw_lightning.adapter.backbone import Backbone, load_backbone, max_positions
from masw_lightning.errors import UserError

POSITIONS = 2**17  # random weights have no length they were trained for
LLAMA_3 = {"head_dim": 128, "vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": LLAMA_3
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": LLAMA_3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3.1-70b": LLAMA_3
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}


@dataclass
class Loaded:
    """A model, what tables call it, and what a reader has to know about it."""

    name: str
    model: PreTrainedModel
    notes: list[str] = field(default_factory=list)


def load(name: str, path: str | None, dtype: torch.dtype, device: torch.device, longest: int) -> Loaded:
    """The model at `path` if one is given, else random weights of shape `name`.

    Args:
        longest: most positions the benchmark will address; beyond a real model's own, RoPE is stretched and a note says
            so.
    """
    if path is None:
        return Loaded(name, random_model(name, dtype, device), [f"{name}: random weights of that shape."])
    kind = str(dtype).removeprefix("torch.")
    model = load_backbone(Backbone(path, dtype=kind))  # type: ignore[arg-type]
    notes = []
    limit = max_positions(model)
    if limit is not None and longest > limit:
        factor = float(-(-longest // limit))
        model = load_backbone(Backbone(path, dtype=kind, rope_factor=factor))  # type: ignore[arg-type]
        notes.append(
            f"{name} was made for {limit} positions; to address {longest} its RoPE is stretched {factor:g}x (YaRN), in "
            "every row alike. Texts beyond its own length are a test of speed more than of quality."
        )
    return Loaded(name, model.to(device), notes)


def random_model(name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Random weights of shape `name`; `name@N` takes the first N layers of it.

    Raises:
        UserError: no such shape.
    """
    base, _, layers = name.partition("@")
    if base not in SHAPES or (layers and not layers.isdigit()):
        raise UserError(f"shape {name!r} is unknown: choose from {', '.join(SHAPES)}, each also as NAME@LAYERS.")
    sizes = dict(SHAPES[base])
    rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    if layers:
        sizes["num_hidden_layers"] = int(layers)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(**sizes, **ends, rope_parameters=rope, max_position_embeddings=POSITIONS)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    rotary = model.model.rotary_emb  # its buffers are computed, not stored: a meta model has none
    model.model.rotary_emb = type(rotary)(config=config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                std = 1.0 if "embed" in key else 1e-3 if "o_proj" in key or "down_proj" in key else 0.02
                weight.normal_(0.0, std, generator=generator)
        model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.eval().requires_grad_(False)


def random_ids(model: PreTrainedModel, n: int, seed: int = 0) -> Tensor:
    """`[1, n]` token ids on the model's device."""
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (1, n), generator=torch.Generator().manual_seed(seed))
    return ids.to(model.device)


def parameters(model: PreTrainedModel) -> int:
    """Weights, tied ones once."""
    return sum(p.numel() for p in model.parameters())
