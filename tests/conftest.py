"""Tiny random models of every supported family: real Transformers code, real kernels, milliseconds."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large: sharp attention and no near ties, so that a wrong mask shows
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread_is_faster_for_tiny_models():
    torch.set_num_threads(1)


def build(family: str = "llama", seed: int = 0, **sizes: object) -> PreTrainedModel:
    """A random float32 model of ``family`` in eval mode; no EOS, so that generation runs to its limit."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**{**SIZES, **extra, **sizes}, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = model_class(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def build_model():
    return build


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    return request.param
