"""Loading: from a folder, a GGUF file, a bare config; tokenizers compared; rotary frequencies kept exact."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from masw_lightning.adapter.backbone import (
    Backbone,
    check_same_tokenizer,
    exact_rotary,
    load_backbone,
    load_tokenizer,
    max_positions,
    rotary_buffers,
)
from masw_lightning.errors import UserError

TINY = Path(__file__).parents[3] / "configs" / "tiny" / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder: weights, config, tokenizer."""
    load_backbone(Backbone(str(TINY), random_init=True)).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / "model")
    return tmp_path / "model"


def edited(folder: Path, to: Path, change) -> str:
    """A copy of a tokenizer folder with ``change(tokenizer.json)`` made."""
    shutil.copytree(folder, to)
    content = json.loads((to / "tokenizer.json").read_text())
    change(content)
    (to / "tokenizer.json").write_text(json.dumps(content))
    return str(to)


def test_folder_frozen_in_eval_mode_and_in_the_asked_dtype(folder: Path) -> None:
    model = load_backbone(Backbone(str(folder), dtype="bfloat16"))
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    assert {b.dtype for b in rotary_buffers(model).values()} == {torch.float32}
    assert max_positions(model) == 2048


def test_random_init_is_the_same_model_every_time_and_moves_no_generator() -> None:
    before = torch.get_rng_state()
    a, b = (load_backbone(Backbone(str(TINY), random_init=True)) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_the_default_dtype_of_a_precision_plugin_changes_nothing(folder: Path) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = load_backbone(Backbone(str(folder)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.dtype == torch.float32
    ids = torch.arange(40)[None]
    assert torch.equal(model(ids).logits, load_backbone(Backbone(str(folder)))(ids).logits)


def test_exact_rotary_survives_a_cast(folder: Path) -> None:
    model = load_backbone(Backbone(str(folder)))
    before = {k: v.clone() for k, v in rotary_buffers(model).items()}
    assert before
    with exact_rotary(model):
        model.to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    after = rotary_buffers(model)
    assert all(after[k].dtype == torch.float32 and torch.equal(after[k], v) for k, v in before.items())


def test_gemma_has_rotary_buffers_of_two_kinds(build_model) -> None:
    model = build_model("gemma3")
    assert len(rotary_buffers(model)) == 4
    with exact_rotary(model):
        model.to(torch.bfloat16)
    assert {b.dtype for b in rotary_buffers(model).values()} == {torch.float32}


def write_gguf(path: Path, model: LlamaForCausalLM, vocab: list[str]) -> None:
    """A GGUF file of a Llama, its matrices quantised to Q8_0."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocab))
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        data = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # the file format interleaves rotary halves
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
        if data.ndim == 2 and data.shape[-1] % 32 == 0:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quantize(np.ascontiguousarray(data), kind_of)
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", packed, raw_dtype=kind_of)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_is_unpacked_quietly_and_can_be_saved(build_model, tmp_path: Path, capfd) -> None:
    model = build_model("llama", hidden_size=64, intermediate_size=64, head_dim=16)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, ["<end>", "t", "0", *(f"t{i}" for i in range(58))])
    loaded = load_backbone(Backbone(str(path)))
    assert capfd.readouterr().err == ""
    ids = torch.arange(50)[None]
    assert type(loaded.model.layers[0].self_attn.k_proj) is torch.nn.Linear
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, rtol=0, atol=0.01)  # 8 bits of at most 1.3
    loaded.save_pretrained(tmp_path / "saved")  # refused while a quantisation config is left
    again = load_backbone(Backbone(str(tmp_path / "saved")))
    assert torch.equal(again(ids).logits, loaded(ids).logits)
    named = load_backbone(Backbone(str(tmp_path), gguf_file="model.gguf"))
    assert torch.equal(named(ids).logits, loaded(ids).logits)
    assert load_tokenizer(str(path)).convert_tokens_to_ids("t7") == 10


def test_stretched_positions(folder: Path) -> None:
    model = load_backbone(Backbone(str(folder), rope_factor=4.0))
    assert max_positions(model) == 8192
    assert model.config.rope_parameters["rope_type"] == "yarn"
    plain = load_backbone(Backbone(str(folder)))
    assert not torch.equal(*(next(iter(rotary_buffers(m).values())) for m in (model, plain)))
    with pytest.raises(UserError, match=r"rope_factor=0\.5"):
        load_backbone(Backbone(str(folder), rope_factor=0.5))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/no/such/folder", "no model folder at '/no/such/folder'"),
        ("./nothing", "no model folder"),
        ("missing/model.gguf", "no GGUF file at 'missing/model.gguf'"),
        (str(TINY / "config.json"), "not a .gguf"),
        (str(TINY.parent), "cannot load the model"),
    ],
)
def test_bad_paths_are_one_sentence(path: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        load_backbone(Backbone(path))
    assert "\n" not in str(caught.value)


def test_bad_tokenizer_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model folder"):
        load_tokenizer("/no/such/folder")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match=r"no GGUF file 'x\.gguf'"):
        load_tokenizer(str(tmp_path), gguf_file="x.gguf")


def test_a_broken_gguf_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF not really")
    with pytest.raises(UserError, match="cannot load the model"):
        load_backbone(Backbone(str(tmp_path / "bad.gguf")))


def test_one_tokenizer_with_reserved_tokens_at_the_end_is_the_same(folder: Path, tmp_path: Path) -> None:
    def add(content: dict) -> None:
        size = len(content["model"]["vocab"])
        content["model"]["vocab"] |= {f"<reserved_{i}>": size + i for i in range(3)}

    a, b = load_tokenizer(str(folder)), load_tokenizer(edited(folder, tmp_path / "padded", add))
    assert len(b) == len(a) + 3
    check_same_tokenizer(a, b)
    check_same_tokenizer(b, a)
    check_same_tokenizer(a, a)


def test_other_tokenizers_are_told_apart(folder: Path, tmp_path: Path) -> None:
    def swap(content: dict) -> None:
        vocab = content["model"]["vocab"]
        x, y = list(vocab)[5], list(vocab)[9]
        vocab[x], vocab[y] = vocab[y], vocab[x]

    def merge_less(content: dict) -> None:  # the same tokens, cut differently
        content["model"]["merges"] = content["model"]["merges"][1:]

    a = load_tokenizer(str(folder))
    for name, change in (("swapped", swap), ("cut", merge_less)):
        b = load_tokenizer(edited(folder, tmp_path / name, change))
        with pytest.raises(UserError, match="different tokenizers"):
            check_same_tokenizer(a, b, ("target x", "draft y"))
