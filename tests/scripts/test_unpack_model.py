"""scripts/unpack_model.py: a GGUF file becomes a folder that loads as the same model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from masw_lightning.adapter.backbone import Backbone, load_backbone, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("unpack_model_script", ROOT / "scripts" / "unpack_model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_gguf(path: Path) -> None:
    """A real one-layer Llama in GGUF: 32 hidden, 2 heads, a vocabulary of 40 single characters."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(40)
    tokens = [chr(ord("a") + i) if i < 26 else f"<{i}>" for i in range(39)] + ["ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 26 + [3] * 13 + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(30)
    writer.add_eos_token_id(31)
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd": (40, 32),
        "output": (40, 32),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (48, 32),
        "blk.0.ffn_up": (48, 32),
        "blk.0.ffn_down": (32, 48),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32) * 0.2)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_folder_is_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    assert script().main([str(tmp_path / "tiny.gguf"), str(tmp_path / "out")]) == 0
    ids = torch.arange(20)[None]
    packed, plain = (load_backbone(Backbone(str(tmp_path / name))) for name in ("tiny.gguf", "out"))
    assert torch.equal(packed(ids).logits, plain(ids).logits)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, plain(ids).logits)
    tokenizers = [load_tokenizer(str(tmp_path / name)) for name in ("tiny.gguf", "out")]
    assert tokenizers[0]("abc").input_ids == tokenizers[1]("abc").input_ids


def test_what_cannot_be_read_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script().main([str(tmp_path / "none.gguf"), str(tmp_path / "out")]) == 1
    assert "no GGUF file" in capsys.readouterr().err
