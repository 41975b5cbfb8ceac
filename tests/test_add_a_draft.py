"""The example of docs/add-a-draft.md is a draft: lossless greedily, and accepted on a text that repeats itself."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from masw_lightning import generate

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "add-a-draft.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    module = types.ModuleType("add_a_draft_example")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    block = PAGE.split("<!-- tested")[1].split("```python")[1].split("```")[0]
    exec(compile(block, "add-a-draft.md", "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads)).eval()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_example_is_lossless(example: types.ModuleType, model: LlamaForCausalLM, k: int) -> None:
    ids = torch.randint(0, 64, (1, 20)).repeat(1, 3)
    draft = example.LookupDraft(model.config.vocab_size)
    decoded = generate(model, ids, draft, num_draft_tokens=k, max_new_tokens=60, eos_token_id=[])
    assert decoded.tokens == generate(model, ids, max_new_tokens=60, eos_token_id=[]).tokens
    assert decoded.draft_kv_bytes == 0
    assert decoded.tokens_per_iteration > 1  # a random model falls into a loop, which a lookup predicts


def test_the_example_samples(example: types.ModuleType, model: LlamaForCausalLM) -> None:
    draft = example.LookupDraft(model.config.vocab_size)
    decoded = generate(model, torch.randint(0, 64, (1, 9)), draft, max_new_tokens=30, temperature=1.0, seed=1)
    assert len(decoded.tokens[0]) <= 30
