"""EAGLE and EAGLE-3 heads on disk, in the layout of the public checkpoints, and whether a head fits a target.

A folder: ``config.json`` beside ``model.safetensors`` or ``pytorch_model.bin``. Which head it is, and whether it has
biases, is read from the tensors' names; every missing, surplus or misshapen one is an error. What this project knows
beyond the public layout (base model, trained length) is the key ``"masw"`` of ``config.json``. Knows no Lightning
checkpoint.
Shapes: h hidden size, V target vocab, Vd draft vocab.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from masw_lightning.adapter.backbone import exact_rotary
from masw_lightning.adapter.eagle_head import DraftHead, Eagle3Head, EagleHead
from masw_lightning.adapter.storage import check_base, describe_base
from masw_lightning.attention.interface import text_config
from masw_lightning.errors import UserError

WEIGHTS, PICKLED, CONFIG, RECORD, FORMAT = "model.safetensors", "pytorch_model.bin", "config.json", "masw", 1
EMBEDDINGS = "embed_tokens.weight"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def head_config(target: PreTrainedModel, draft_vocabulary: int | None = None) -> LlamaConfig:
    """Sizes of a new head for ``target``: those of one of its layers, with plain RoPE of its base frequency."""
    config = text_config(target)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = rope.get("full_attention", rope)  # Gemma 3 has one set per layer type
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": target.get_input_embeddings().weight.shape[0],
    }
    vocabulary = {} if draft_vocabulary is None else {"draft_vocab_size": draft_vocabulary}
    return LlamaConfig(
        **sizes,
        **vocabulary,
        num_hidden_layers=1,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip


def published_config(head: DraftHead, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """What ``config.json`` says of a head: the public heads' keys, JSON primitives only."""
    config, rope = head.config, dict(head.config.rope_parameters)
    sizes = {key: getattr(config, key) for key in SIZES}
    if isinstance(head, Eagle3Head):
        sizes["draft_vocab_size"] = config.draft_vocab_size
    else:
        sizes["bias"] = cast(nn.Linear, head.fc).bias is not None
    theta, scaled = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default") != "default"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        **({"rope_scaling": rope} if scaled else {}),
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype or head.dtype).removeprefix("torch."),
    }


def describe_head(
    head: DraftHead, target: PreTrainedModel, trained_length: int | None = None, base: str | None = None
) -> dict[str, Any]:
    """What this project keeps beside a head's tensors."""
    return {
        "format": FORMAT,
        "head": head.kind,
        "base": describe_base(target, base),
        "trained_length": trained_length or head.trained_length,
        "versions": {"torch": str(torch.__version__), "transformers": transformers_version},
    }


def save_head(
    head: DraftHead,
    target: PreTrainedModel,
    directory: str | Path,
    trained_length: int | None = None,
    base: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``head`` as ``model.safetensors`` and ``config.json``; EAGLE's layout includes the target's embeddings.

    ``dtype``: of the floating-point tensors in the file; ``None``: as they are.
    """
    path = Path(directory)
    state = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    if isinstance(head, EagleHead) and EMBEDDINGS not in state:
        state[EMBEDDINGS] = target.get_input_embeddings().weight.detach()
    if dtype is not None:
        state = {name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()}
    record = published_config(head, dtype) | {RECORD: describe_head(head, target, trained_length, base)}
    try:
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in state.items()}
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        (path / CONFIG).write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write the head to {path}: {error.strerror}; choose another folder.") from error


def load_head(directory: str | Path, target: PreTrainedModel | None = None) -> EagleHead | Eagle3Head:
    """The head in a folder of the public layout: on ``target``'s device in its dtype, else on the CPU in the file's.

    Raises:
        UserError: no head there, missing, surplus or misshapen tensors, or a head of another target.
    """
    config, state = read_config(directory), read_state(directory)
    record = config.pop(RECORD, {})
    head = build_head(config, state, str(directory))
    head.trained_length = record.get("trained_length")
    if target is not None:
        fit_head(head, target, record, str(directory))
    return head


def build_head(config: dict[str, Any], state: dict[str, Tensor], where: str) -> EagleHead | Eagle3Head:
    """A head of ``config`` (as in ``config.json``) that owns the tensors of ``state``; see ``load_head`` for errors."""
    state = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
    table = state.pop(EMBEDDINGS, None)
    is_third = any(name.startswith("midlayer.") for name in state)
    if not is_third and not any(name.startswith("layers.0.") for name in state):
        raise UserError(f"{where} holds no EAGLE or EAGLE-3 head (no tensor midlayer.* or layers.0.*): give a head.")
    missing = [key for key in SIZES if key not in config]
    if missing:
        raise UserError(f"the config.json of {where} lacks {', '.join(missing)}: take the one the head came with.")
    vocabulary = state["lm_head.weight"].shape[0] if is_third and "lm_head.weight" in state else None
    settings = ({"draft_vocab_size": vocabulary} if vocabulary else {}) | config
    settings = {key: value for key, value in settings.items() if not (key == "rope_scaling" and value is None)}
    made = LlamaConfig(**settings)
    if "d2t" not in state and vocabulary == made.vocab_size:  # a whole vocabulary needs no map
        state["d2t"] = torch.zeros(made.vocab_size, dtype=torch.long)
        state["t2d"] = torch.ones(made.vocab_size, dtype=torch.bool)
    with torch.device("meta"):  # sizes only: the tensors are the file's own
        if is_third:
            head: EagleHead | Eagle3Head = Eagle3Head(made, "midlayer.self_attn.q_proj.bias" in state)
        else:
            head = EagleHead(made, "fc.bias" in state, "layers.0.self_attn.q_proj.bias" in state)
    check_state(head, state, where)
    head.load_state_dict(state, assign=True)
    head.rotary_emb = LlamaRotaryEmbedding(made)
    if table is not None:
        wanted = (made.vocab_size, made.hidden_size)
        if tuple(table.shape) != wanted:
            raise UserError(_misshapen(EMBEDDINGS, table, torch.Size(wanted), where))
        head.embed_tokens = nn.Embedding.from_pretrained(table)
    return head.requires_grad_(False).eval()


def check_state(head: DraftHead, state: dict[str, Tensor], where: str) -> None:
    """Raise ``UserError`` unless ``state`` has exactly the head's tensors in their shapes (embeddings aside)."""
    own = {name: tensor for name, tensor in head.state_dict().items() if name != EMBEDDINGS}
    for problem, names in (("lacks", own.keys() - state.keys()), ("has the surplus", state.keys() - own.keys())):
        if names:
            raise UserError(
                f"{where} {problem} {', '.join(sorted(names)[:3])} ({len(names)} in all): it is no {head.kind} head of "
                "the public layout."
            )
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise UserError(_misshapen(name, state[name], tensor.shape, where))


def _misshapen(name: str, found: Tensor, wanted: torch.Size, where: str) -> str:
    return (
        f"{name} in {where} has shape {list(found.shape)} where {list(wanted)} is wanted: it belongs to a head of "
        "other sizes than the config.json (or this run) says."
    )


def check_head_fits(head: DraftHead, target: PreTrainedModel, where: str = "the head") -> None:
    """Raise ``UserError`` unless ``head`` reads this target's hidden states and writes its vocabulary."""
    check_sizes({key: getattr(head.config, key) for key in SIZES}, target, where)


def check_sizes(config: dict[str, Any], target: PreTrainedModel, where: str) -> None:
    """``check_head_fits`` by the sizes in a head's ``config.json``."""
    own = {"hidden_size": text_config(target).hidden_size, "vocab_size": target.get_input_embeddings().weight.shape[0]}
    for key, theirs in own.items():
        if config.get(key) != theirs:
            name = target.config._name_or_path or type(target).__name__
            raise UserError(
                f"{where} was made for a target of {key}={config.get(key)}, but {name} has {key}={theirs}: "
                "use the head of this target."
            )


def fit_head(head: DraftHead, target: PreTrainedModel, record: dict[str, Any], where: str) -> None:
    """Check ``head`` against ``target`` and ``record``; give it the target's device, dtype and, if equal, embeddings.

    Raises:
        UserError: it belongs to another target.
    """
    check_head_fits(head, target, where)
    if "base" in record:
        check_base(target, record["base"], where)
    with exact_rotary(head):
        head.to(device=target.device, dtype=target.dtype)
    table = head.embed_tokens
    if table is not None and torch.equal(table.weight, target.get_input_embeddings().weight):
        head.embed_tokens = None


def read_config(directory: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a head."""
    path = Path(directory) / CONFIG
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"{directory} holds no {CONFIG}: give the folder of an EAGLE or EAGLE-3 head.") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): download or export the head again.") from error


def read_state(directory: str | Path) -> dict[str, Tensor]:
    """The tensors of a head, on the CPU."""
    folder = Path(directory)
    try:
        if (folder / WEIGHTS).is_file():
            return load_file(folder / WEIGHTS)
        return dict(torch.load(folder / PICKLED, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise UserError(f"{directory} holds neither {WEIGHTS} nor {PICKLED}: give the folder of a head.") from None
    except Exception as error:  # torch raises half a dozen kinds for files that hold no tensors
        raise UserError(
            f"the weights in {directory} cannot be read ({type(error).__name__}): get them again."
        ) from error
