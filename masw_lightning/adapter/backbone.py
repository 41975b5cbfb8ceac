"""Loads the frozen backbone and its tokenizer: from a hub name, a local folder or a GGUF file.

Knows nothing about memories or training. Everything else in the house receives the plain Hugging Face model made here:
in eval mode, without gradients, in the asked dtype, with its rotary frequencies in float32 whatever that dtype is.

Shapes: V vocabulary rows of the model (may be padded beyond the tokenizer's).
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from masw_lightning.errors import UserError

_PROBE = "The year 1984: naïve café — def f(x):\n\treturn x**2  # 你好 🙂\n\n  'quoted', 3.14"
_INITIAL_SEED = 0


@dataclass(frozen=True)
class Backbone:
    """Where a causal language model comes from.

    Args:
        path: a Hugging Face hub name, a local folder, or a ``.gguf`` file.
        dtype: the dtype of the frozen weights.
        gguf_file: name of a GGUF file inside the folder or hub repository ``path`` (not if ``path`` is the file).
        revision: hub revision.
        rope_factor: stretches the positions the model can address by this factor (YaRN); 1 leaves RoPE alone.
        random_init: build the model from its ``config.json`` with random weights (fixed seed) and load no weights:
            for tests and ablations.
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    gguf_file: str | None = None
    revision: str | None = None
    rope_factor: float = 1.0
    random_init: bool = False


def load_backbone(backbone: Backbone) -> PreTrainedModel:
    """The model of ``backbone``: eval mode, frozen, rotary buffers float32, GGUF weights unpacked.

    Raises:
        UserError: nothing usable at ``path``, or ``rope_factor`` below 1.
    """
    source, gguf_file = _locate(backbone.path, backbone.gguf_file)
    dtype = getattr(torch, backbone.dtype)
    where = {"revision": backbone.revision, **({"gguf_file": gguf_file} if gguf_file else {})}
    # Some precision plugins change the default dtype while a model is built: the backbone's own dtype is to hold.
    with _quietly(gguf_file), _default_dtype(torch.float32), _named_failure(backbone.path, "model"):
        config = AutoConfig.from_pretrained(source, **where)
        _stretch_positions(config, backbone.rope_factor)
        if backbone.random_init:
            # On the CPU whatever the default device is: one seed must give one model everywhere.
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                torch.manual_seed(_INITIAL_SEED)
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            # Packed GGUF layers have no weight to copy into a mirror, so they are unpacked to dense ones.
            packs = gguf_file and hasattr(transformers, "GgufConfig")  # older releases always unpack
            unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packs else {}
            model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, **where, **unpack)
    if gguf_file:
        _forget_quantisation(model)
    return model.eval().requires_grad_(False)


def load_tokenizer(path: str, gguf_file: str | None = None, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub name, a local folder or a ``.gguf`` file.

    Raises:
        UserError: nothing usable at ``path``.
    """
    source, gguf_file = _locate(path, gguf_file)
    where = {"revision": revision, **({"gguf_file": gguf_file} if gguf_file else {})}
    with _quietly(gguf_file), _named_failure(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    # Long documents are cut by the data room and checked against the model by the caller, with better sentences.
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def check_same_tokenizer(
    a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase, names: tuple[str, str] = ("target", "draft")
) -> None:
    """Checks that two tokenizers give a text the same ids. Reserved tokens added at the end of one are no difference.

    Raises:
        UserError: a shared token has two ids, an extra token stands among the other's, or a probe text differs.
    """
    vocab_a, vocab_b = a.get_vocab(), b.get_vocab()
    small, large = sorted((vocab_a, vocab_b), key=len)
    extra = [i for token, i in large.items() if token not in small]
    agree = all(large.get(token) == i for token, i in small.items())
    appended = not extra or min(extra) > max(small.values(), default=-1)
    # Equal tables may still cut a text differently (other merges, another normaliser), so a text is cut by both.
    ids = sorted(small.values())
    probe = _PROBE + a.decode(ids[:: max(1, len(ids) // 512)])
    if agree and appended and a(probe).input_ids == b(probe).input_ids:
        return
    clash = next(((token, i, large.get(token)) for token, i in small.items() if large.get(token) != i), None)
    detail = f", for example {clash[0]!r}" if clash else ", a probe text is cut differently"
    raise UserError(
        f"{names[0]} ({len(vocab_a)} tokens) and {names[1]} ({len(vocab_b)} tokens) have different tokenizers{detail}: "
        "speculative decoding needs a draft and a target of one family."
    )


def max_positions(model: PreTrainedModel) -> int | None:
    """Positions the model can address (``max_position_embeddings``), or ``None`` if it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def rotary_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The rotary frequency buffers inside ``module`` by full name (Gemma 3 has one pair per layer type)."""
    return {name: buffer for name, buffer in module.named_buffers() if name.rsplit(".", 1)[-1].endswith("inv_freq")}


@contextlib.contextmanager
def exact_rotary(module: nn.Module) -> Iterator[None]:
    """Lets the rotary buffers follow a ``.to()`` to another device inside the block, but never to another dtype.

    ``precision: bf16-true`` casts every buffer of a module; with frequencies in bfloat16 the rotary cosine is off by
    0.15 at position 1,000 and by 1.3 at 8,000.
    """
    before = rotary_buffers(module)
    yield
    for name, buffer in rotary_buffers(module).items():
        owner = module.get_submodule(name.rpartition(".")[0])
        if buffer.dtype != before[name].dtype:
            setattr(owner, name.rpartition(".")[2], before[name].to(buffer.device))


# ---- loading, the parts nobody wants to read -------------------------------------------------------------------------
def _locate(path: str, gguf_file: str | None) -> tuple[str, str | None]:
    """``(folder or hub name, GGUF file name or None)``."""
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise UserError(f"no GGUF file at {path!r}: check the path, or download the model first.")
        return str(local.parent), local.name
    if local.is_file():
        raise UserError(f"{path!r} is a file but not a .gguf one: give a model folder, a hub name or a .gguf file.")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not local.is_dir():
        raise UserError(f"no model folder at {path!r}: check the path, or download the model first.")
    if gguf_file and local.is_dir() and not (local / gguf_file).is_file():
        raise UserError(f"no GGUF file {gguf_file!r} in {path!r}: check gguf_file.")
    return (str(local) if local.is_dir() else path), gguf_file


def _stretch_positions(config: transformers.PretrainedConfig, factor: float) -> None:
    if factor == 1.0:
        return
    if factor < 1.0:
        raise UserError(f"rope_factor={factor} is below 1: give the factor by which the context is to grow.")
    text = config.get_text_config()
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if "rope_theta" not in rope or rope.get("rope_type", "default") != "default":
        raise UserError(
            f"rope_factor={factor} needs a model with plain RoPE, and {text.model_type} has {rope or 'none'}: "
            "leave rope_factor at 1."
        )
    original = text.max_position_embeddings
    text.rope_parameters = rope | {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": original,
    }
    text.max_position_embeddings = int(original * factor)


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Weights are dense by now; a left-over quantisation config would make ``save_pretrained`` refuse the model."""
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.hf_quantizer = None
    model.is_quantized = False


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _named_failure(path: str, what: str) -> Iterator[None]:
    """Turns the libraries' many ways of not finding a model into one sentence."""
    try:
        yield
    except (UserError, RuntimeError):  # the latter: out of memory, and bugs
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"cannot load the {what} at {path!r} ({reason[:200]}): give a hub name, a model folder or a .gguf file."
        ) from error


@contextlib.contextmanager
def _quietly(gguf_file: str | None) -> Iterator[None]:
    """Loading bars and notes of transformers say nothing that helps here; errors and downloads still show."""
    chatter = transformers.utils.logging
    verbosity, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity(logging.ERROR)
    chatter.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            if gguf_file:  # its conversion draws a bar of its own that no setting turns off
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        chatter.set_verbosity(verbosity)
        if bars:
            chatter.enable_progress_bar()
