"""Heads in the public layout: names, shapes, round trips, what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from masw_lightning import UserError, load_head
from masw_lightning.adapter.eagle_head import Eagle3Head, EagleHead
from masw_lightning.adapter.head_storage import build_head, check_head_fits, head_config, save_head

# config.json and tensors of the public heads for Llama-3.1-8B
PUBLIC = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 2048,
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip


def public_shapes(kind, h, v, vd, inner, heads, kv):
    """Tensor names and shapes of the public layout."""
    width, block = (h, "layers.0") if kind == "eagle" else (2 * h, "midlayer")
    shapes = {
        f"{block}.self_attn.q_proj.weight": (heads, width),
        f"{block}.self_attn.k_proj.weight": (kv, width),
        f"{block}.self_attn.v_proj.weight": (kv, width),
        f"{block}.self_attn.o_proj.weight": (h, heads),
        f"{block}.mlp.gate_proj.weight": (inner, h),
        f"{block}.mlp.up_proj.weight": (inner, h),
        f"{block}.mlp.down_proj.weight": (h, inner),
        f"{block}.post_attention_layernorm.weight": (h,),
    }
    if kind == "eagle":
        return shapes | {"embed_tokens.weight": (v, h), "fc.weight": (h, 2 * h)}
    norms = {f"midlayer.{name}.weight": (h,) for name in ("hidden_norm", "input_layernorm")}
    rest = {"fc.weight": (h, 3 * h), "norm.weight": (h,), "lm_head.weight": (vd, h), "d2t": (vd,), "t2d": (v,)}
    return shapes | norms | rest


def public_state(kind, *sizes, device="cpu", dtype=torch.float16):
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    shapes = public_shapes(kind, *sizes)
    return {
        name: torch.empty(shape, dtype=kinds.get(name, dtype), device=device)
        if device == "meta"
        else torch.randn(shape).to(kinds.get(name, dtype))
        for name, shape in shapes.items()
    }


SMALL = (32, 61, 20, 48, 32, 16)  # of the tiny models of conftest.py
CONFIG = PUBLIC | {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None}


def write(folder, state, config, pickled=False):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_published_heads_of_llama_8b_are_what_is_expected(kind):
    """Every name and shape, without the gigabytes: a meta tensor has none."""
    config = PUBLIC | ({"rope_theta": 500000.0, "bias": False} if kind == "eagle" else {"draft_vocab_size": 32000})
    state = public_state(kind, 4096, 128256, 32000, 14336, 4096, 1024, device="meta")
    head = build_head(config, dict(state), "the public head")
    assert head.kind == kind
    assert {n: tuple(t.shape) for n, t in head.state_dict().items()} == {n: tuple(t.shape) for n, t in state.items()}
    assert head.rotary_emb.config.rope_parameters["rope_theta"] == (500000.0 if kind == "eagle" else 10000.0)
    assert head.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_round_trip(build_model, tmp_path, kind, pickled):
    config = CONFIG | ({"bias": True} if kind == "eagle" else {"draft_vocab_size": 20})
    state = public_state(kind, *SMALL)
    if kind == "eagle":
        state["fc.bias"] = torch.randn(32).half()
    state["x.rotary_emb.inv_freq"] = torch.zeros(4)  # some old files have such buffers
    head = load_head(write(tmp_path / "a", state, config, pickled))
    assert isinstance(head, EagleHead if kind == "eagle" else Eagle3Head) and head.dtype == torch.float16
    target = build_model()
    save_head(head, target, tmp_path / "b", trained_length=99, base="tiny")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    del state["x.rotary_emb.inv_freq"]
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) and saved[name].dtype == state[name].dtype for name in state)
    again = json.loads((tmp_path / "b" / "config.json").read_text())
    assert all(again[key] == config[key] for key in again.keys() & config.keys())
    loaded = load_head(tmp_path / "b", target)
    assert loaded.trained_length == 99 and loaded.dtype == torch.float32
    if kind == "eagle":  # other embeddings than the target's are kept and used
        assert torch.equal(loaded.embed_tokens.weight, state["embed_tokens.weight"].float())


def test_a_new_head_is_saved_in_the_public_layout(build_model, tmp_path):
    target = build_model("gemma3")
    for kind, head in (
        ("eagle", EagleHead(head_config(target))),
        ("eagle3", Eagle3Head(head_config(target, 20))),
    ):
        save_head(head, target, tmp_path / kind)
        found = {n: tuple(t.shape) for n, t in load_file(tmp_path / kind / "model.safetensors").items()}
        assert found == public_shapes(kind, *SMALL)
        loaded = load_head(tmp_path / kind, target)
        assert loaded.embed_tokens is None  # equal to the target's, which then serves (with Gemma's scaling)
        for name, tensor in head.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[name])


def test_a_scaled_rope_survives(build_model, tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    head = load_head(write(tmp_path / "a", public_state("eagle", *SMALL), CONFIG | {"rope_scaling": scaling}))
    save_head(head, build_model(), tmp_path / "b")
    again = load_head(tmp_path / "b")
    assert again.config.rope_parameters["rope_type"] == "linear"
    torch.testing.assert_close(again.rotary_emb.inv_freq, head.rotary_emb.inv_freq)
    plain = load_head(write(tmp_path / "c", public_state("eagle", *SMALL), CONFIG | {"rope_scaling": None}))
    torch.testing.assert_close(plain.rotary_emb.inv_freq, 4 * head.rotary_emb.inv_freq)


def test_a_whole_draft_vocabulary_needs_no_map():
    state = public_state("eagle3", *(32, 61, 61, 48, 32, 16))
    del state["d2t"], state["t2d"]
    head = build_head(CONFIG, state, "x")
    assert torch.equal(head.draft_ids, torch.arange(61)) and bool(head.t2d.all())


def test_a_head_of_another_target_is_refused(build_model):
    config = LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "torch_dtype"}, draft_vocab_size=20)
    with pytest.raises(UserError, match=r"hidden_size=32, but LlamaForCausalLM has hidden_size=64"):
        check_head_fits(EagleHead(config), build_model(hidden_size=64))
    with pytest.raises(UserError, match=r"vocab_size=61, but LlamaForCausalLM has vocab_size=50"):
        check_head_fits(Eagle3Head(config), build_model(vocab_size=50))


def test_a_head_of_another_base_is_refused(build_model, tmp_path):
    save_head(EagleHead(head_config(build_model())), build_model(), tmp_path / "a", base="tiny-1")
    with pytest.raises(UserError, match="tiny-1, whose weights differ"):
        load_head(tmp_path / "a", build_model(seed=1))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s, c: s.pop("fc.weight"), r"lacks fc\.weight"),
        (lambda s, c: s.update({"layers.1.fc.weight": torch.zeros(1)}), r"surplus layers\.1\.fc"),
        (
            lambda s, c: s.update({"fc.weight": torch.zeros(32, 96)}),
            r"fc\.weight in .* shape \[32, 96\] where \[32, 64\]",
        ),
        (lambda s, c: s.update({"embed_tokens.weight": torch.zeros(9, 32)}), r"embed_tokens\.weight .*\[61, 32\]"),
        (lambda s, c: c.pop("vocab_size"), "lacks vocab_size"),
        (lambda s, c: [s.pop(k) for k in list(s) if k.startswith("layers")], "holds no EAGLE"),
    ],
)
def test_what_does_not_fit_its_layout(tmp_path, change, told):
    state, config = public_state("eagle", *SMALL), dict(CONFIG)
    change(state, config)
    with pytest.raises(UserError, match=told):
        load_head(write(tmp_path / "a", state, config))


def test_folders_without_a_head(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_head(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        load_head(tmp_path)
