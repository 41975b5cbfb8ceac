"""Saving and loading a memory: only what is ours, and every mismatch is an error that names it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from masw_lightning import MemoryLayout, UserError, attach_memory, load_memory

LAYOUT = MemoryLayout(3, 6, 3)
IDS = torch.arange(90).view(2, 45) % 61


@pytest.mark.parametrize(("writer", "slot_input"), [("slot", "learned"), ("slot", "repeat"), ("token", "learned")])
def test_round_trip(build_model, family, writer, slot_input, tmp_path):
    model = build_model(family)
    draft = attach_memory(model, LAYOUT, writer, init="random", slot_input=slot_input, seed=5)
    logits = draft(IDS).logits
    draft.save_pretrained(tmp_path, trained_length=45, base="a/base")
    names = load_file(tmp_path / "masw.safetensors").keys()
    assert names == draft.adapter_state_dict().keys() and not any(n.startswith("model.") for n in names)
    draft.detach()
    loaded = load_memory(model, tmp_path)
    assert torch.equal(loaded(IDS).logits, logits)
    assert (loaded.layout, loaded.writer, loaded.trained_length) == (draft.layout, writer, 45)
    record = json.loads((tmp_path / "masw_config.json").read_text())
    assert record["base"]["name"] == "a/base" and record["layout"]["ratio"] == 3 and "torch" in record["versions"]
    assert loaded.slot_input == record.pop("slot_input") == slot_input
    (tmp_path / "masw_config.json").write_text(json.dumps(record))  # the first records did not name it
    loaded.detach()
    assert load_memory(model, tmp_path).slot_input == "learned"


def saved(build_model, tmp_path, **kwargs):
    attach_memory(build_model(), LAYOUT, **kwargs).save_pretrained(tmp_path)
    return load_file(tmp_path / "masw.safetensors")


def expect(build_model, tmp_path, words, **sizes):
    model = build_model(**sizes)
    with pytest.raises(UserError, match=words):
        load_memory(model, tmp_path)
    assert not any(m._forward_hooks for m in model.modules())  # the model is left as it was


def test_missing_surplus_and_misshapen_weights(build_model, tmp_path):
    tensors = saved(build_model, tmp_path)
    file = tmp_path / "masw.safetensors"
    save_file({k: v for k, v in tensors.items() if k != "mirrors.1.v_proj.weight"}, file)
    expect(build_model, tmp_path, "lack mirrors.1.v_proj.weight")
    save_file({**tensors, "mirrors.9.k_proj.weight": torch.zeros(2)}, file)
    expect(build_model, tmp_path, "surplus mirrors.9.k_proj.weight")
    save_file({**tensors, "slot_embedding": torch.zeros(5)}, file)
    expect(build_model, tmp_path, r"slot_embedding has shape \[5\] .* \[32\]")
    file.write_bytes(b"not a safetensors file")
    expect(build_model, tmp_path, "cannot be read")
    file.unlink()
    expect(build_model, tmp_path, "holds no masw.safetensors")


def test_another_base(build_model, tmp_path):
    saved(build_model, tmp_path)
    expect(build_model, tmp_path, r"hidden_size=32.*hidden_size=16", hidden_size=16)
    expect(build_model, tmp_path, r"num_hidden_layers=2.*num_hidden_layers=3", num_hidden_layers=3)
    expect(build_model, tmp_path, r"model_type=llama.*model_type=qwen2", family="qwen2")
    expect(build_model, tmp_path, "weights differ", seed=7)
    assert load_memory(build_model().bfloat16(), tmp_path).slot_embedding.dtype == torch.bfloat16


def test_not_a_saved_memory(build_model, tmp_path):
    with pytest.raises(UserError, match=r"holds no masw_config.json"):
        load_memory(build_model(), tmp_path / "nowhere")
    (tmp_path / "masw_config.json").write_text("{")
    expect(build_model, tmp_path, "cannot be read")
    (tmp_path / "masw_config.json").write_text('{"format": 1, "writer": "slot"}')
    expect(build_model, tmp_path, "lacks")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another folder"):
        attach_memory(build_model(), LAYOUT).save_pretrained(tmp_path / "file" / "memory")
