"""Attaching a trainable memory to a frozen backbone, and its teacher-forced forward.

``attach_memory`` freezes a Hugging Face causal LM, gives it mirrors and (slot writer) a slot embedding, and returns a
``MemoryDraft``. Nothing in the backbone is replaced: hooks act inside the memory's own forwards only, so the same model
object still serves as an ordinary model or as the target, and ``detach`` leaves it bit-identical.
Shapes: B batch, n raw tokens, M slots, h hidden size, V vocab, H heads, G KV heads, D head dim.
"""

from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from masw_lightning.adapter.mirror import LayerMirrors, Projection, SlotRows, check_token_writer, make_mirror, take_rows
from masw_lightning.adapter.teacher_forced import TeacherForcedMemory
from masw_lightning.attention.interface import attention_modules, output_logits, run_backbone, text_config
from masw_lightning.attention.rowwise import mlp_rows_in_cache
from masw_lightning.attention.structured import make_plan
from masw_lightning.cache.compact import CompactCache
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout, Writer, check_writer

PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o")
SlotInput = Literal["learned", "repeat"]


def check_ids(input_ids: Tensor) -> None:
    """Raise ``UserError`` unless ``input_ids`` is a non-empty integer ``[B, n]``."""
    if input_ids.dim() != 2 or input_ids.shape[1] < 1 or input_ids.is_floating_point():
        raise UserError(
            f"input_ids has shape {tuple(input_ids.shape)} and type {input_ids.dtype}: give token ids [B, n >= 1]."
        )


class MemoryDraft(nn.Module):
    """A frozen backbone that reads its history through a learned memory. Made by ``attach_memory``."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: MemoryLayout,
        writer: Writer,
        mirror: tuple[Projection, ...],
        init: Literal["copy", "random"],
        train_slot_embedding: bool,
        slot_input: SlotInput,
        seed: int,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.layout, self.writer, self.mirror = layout.resolve(writer), writer, mirror
        self.slot_input = slot_input
        self.trained_length: int | None = None
        generator = torch.Generator().manual_seed(seed)
        std = float(getattr(text_config(model), "initializer_range", 0.02))
        attention = attention_modules(model)
        layers = [
            {p: make_mirror(getattr(a, f"{p}_proj"), init, std, generator, dtype or model.dtype) for p in mirror}
            for a in attention
        ]
        self.mirrors = nn.ModuleList(LayerMirrors(m, writer) for m in layers)
        if writer == "slot":
            weight = eos_embedding(model).to(dtype or model.dtype)
            if slot_input == "repeat":  # added to the repeated token's embedding
                weight = torch.zeros_like(weight)
            self.slot_embedding = nn.Parameter(weight, requires_grad=train_slot_embedding)
        self._frozen = [(p, p.requires_grad) for p in model.parameters()]
        model.requires_grad_(False)
        self._handles: list[RemovableHandle] = []
        for a, m in zip(attention, self.mirrors, strict=True):
            self._handles += cast(LayerMirrors, m).attach(a, self)

    # ---- forwards ------------------------------------------------------------------------------------------------
    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """Teacher-forced logits through the memory: ``[B,n] -> .logits [B,n,V]``, raw positions only, ``n >= 1``."""
        return CausalLMOutput(logits=self.logits(self.hidden_states(input_ids)))

    def hidden_states(
        self, input_ids: Tensor, cache: CompactCache | None = None, model: PreTrainedModel | None = None
    ) -> Tensor:
        """``[B,n] -> [B,n,h]`` after the final norm, raw positions only. With ``cache``, a prefill that fills it.

        ``model``: a view of the backbone to run instead (``first_layers``).
        """
        check_ids(input_ids)
        if not self._handles:
            raise UserError("this memory was detached from its backbone: attach or load it again.")
        n = input_ids.shape[1]
        m, device = self.layout.num_slots(n), input_ids.device
        embeds = self.embed(input_ids)
        positions = torch.arange(n, device=device)
        rows = SlotRows(n, m)
        boundaries = torch.tensor(self.layout.boundaries(n), dtype=torch.long, device=device)
        if self.writer == "token":
            rows.written = boundaries - 1
        else:
            slots, at = self.slot_rows(embeds, boundaries - 1, boundaries)
            embeds, positions = torch.cat((embeds, slots), 1), torch.cat((positions, at))
        plan = make_plan(self.layout, self.writer, n, embeds.dtype, device)
        memory = TeacherForcedMemory(plan, rows, self, cache)
        hidden = run_backbone(model or self.model, embeds, positions[None], memory)[:, :n]
        if cache is not None:
            cache.filled(n)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # A text too short for anyone to read a slot: its gradients are zero, not an error in backward.
            nothing = torch.stack([p.sum() for p in self.adapter_parameters()]).sum() * 0.0
            hidden = hidden + nothing.to(hidden.dtype)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """``[...,h] -> [...,V]`` by the backbone's own head."""
        return output_logits(self.model, hidden)

    @torch.no_grad()
    def full_hidden_states(self, input_ids: Tensor) -> Tensor:
        """``[B,n] -> [B,n,h]`` of the untouched backbone with full attention: the teacher."""
        with mlp_rows_in_cache(self.model.base_model, input_ids.shape[1], input_ids.device):
            return cast(Tensor, self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state)

    @torch.no_grad()
    def window_hidden_states(self, input_ids: Tensor) -> Tensor:
        """``[B,n] -> [B,n,h]`` through sinks and window alone: the line the slots have to beat."""
        return window_hidden_states(self.model, input_ids, self.layout.without_slots())

    def embed(self, input_ids: Tensor) -> Tensor:
        """``[B,n] -> [B,n,h]``, with the family's own scaling."""
        return cast(Tensor, self.model.get_input_embeddings()(input_ids))

    def slot_rows(self, embeds: Tensor, last: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of slots (slot writer) and their RoPE positions.

        Args:
            embeds: raw rows ``[B,T,h]`` of this forward.
            last: which of them is the last token of each slot's group, ``[P]`` or ``[B,P]``.
            boundaries: ``b_k``, in the shape of ``last``; that token is at position ``b_k - 1``.

        Returns:
            input rows ``[B,P,h]``, positions in the shape of ``boundaries``: the learned vector at ``b_k``, or the
            repeated token plus that vector at ``b_k - 1``.
        """
        own = self.slot_embedding.to(embeds)
        if self.slot_input == "learned":
            return own.expand(len(embeds), last.shape[-1], -1), boundaries
        return take_rows(embeds, last) + own, boundaries - 1

    # ---- what is ours --------------------------------------------------------------------------------------------
    def adapter_state_dict(self) -> dict[str, Tensor]:
        """The memory's own tensors, without the backbone: what is saved, loaded, optimised and exported."""
        return {k: v for k, v in self.state_dict().items() if not k.startswith("model.")}

    def load_adapter_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load ``adapter_state_dict``; missing, surplus or misshapen tensors raise ``UserError`` and change nothing."""
        own = self.adapter_state_dict()
        for problem, names in (("lack", own.keys() - state.keys()), ("have the surplus", state.keys() - own.keys())):
            if names:
                raise UserError(
                    f"the memory's weights {problem} {', '.join(sorted(names)[:3])} ({len(names)} in all): they belong "
                    f"to another memory than writer={self.writer!r}, mirror={list(self.mirror)}."
                )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise UserError(
                    f"the memory's weight {name} has shape {list(state[name].shape)} where this backbone needs "
                    f"{list(tensor.shape)}: it was trained for another base model."
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def adapter_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters: mirrors, and the slot embedding unless it is frozen."""
        return [p for n, p in self.named_parameters() if not n.startswith("model.") and p.requires_grad]

    def save_pretrained(
        self,
        directory: str | Path,
        trained_length: int | None = None,
        base: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write ``masw.safetensors`` and ``masw_config.json`` (see ``adapter.storage``)."""
        from masw_lightning.adapter.storage import save_memory

        save_memory(self, directory, trained_length, base, dtype)

    def detach(self) -> PreTrainedModel:
        """Remove every hook, give the backbone its own ``requires_grad`` flags back, and return it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for parameter, flag in self._frozen:
            parameter.requires_grad_(flag)
        return self.model


@torch.no_grad()
def window_hidden_states(
    model: PreTrainedModel, input_ids: Tensor, layout: MemoryLayout, cache: CompactCache | None = None
) -> Tensor:
    """``[B,n] -> [B,n,h]`` of any model, without an adapter, through sinks, window and every ``r``-th older raw entry.

    ``layout.ratio=None``: through sinks and window alone.
    """
    check_ids(input_ids)
    embeds = model.get_input_embeddings()(input_ids)
    n = input_ids.shape[1]
    rows = SlotRows(n, layout.num_slots(n))
    if rows.slots:
        rows.written = torch.tensor(layout.slot_positions(n, "token"), device=embeds.device)
    plan = make_plan(layout, "token", n, embeds.dtype, embeds.device)
    memory = TeacherForcedMemory(plan, rows, None, cache)
    hidden = run_backbone(model, embeds, torch.arange(n, device=input_ids.device)[None], memory)
    if cache is not None:
        cache.filled(n)
    return hidden


def eos_embedding(model: PreTrainedModel) -> Tensor:
    """The input row ``[h]`` of the EOS token (of the BOS token, else token 0, where a model names none)."""
    config = text_config(model)
    eos = next((t for t in (config.eos_token_id, config.bos_token_id) if t is not None), 0)
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        token = torch.tensor([eos[0] if isinstance(eos, list) else eos], device=next(embedding.parameters()).device)
        return cast(Tensor, embedding(token)[0].clone())


def attach_memory(
    model: PreTrainedModel,
    layout: MemoryLayout,
    writer: Writer = "slot",
    mirror: tuple[Projection, ...] = ("k", "v"),
    init: Literal["copy", "random"] = "copy",
    train_slot_embedding: bool = True,
    slot_input: SlotInput = "learned",
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> MemoryDraft:
    """Give ``model`` a trainable memory; the model itself is frozen.

    Args:
        model: a Hugging Face causal LM whose attention layers have ``k_proj`` and ``v_proj``.
        writer: ``"slot"``: every slot is a row of its own (the paper's). ``"token"``: the last token of each group
            writes its slot beside its own keys and values.
        mirror: projections the slots get their own trainable copy of; the token writer takes ``k`` and ``v`` only.
        init: exact copies, or N(0, initializer_range) drawn from ``seed`` (for the ablation).
        train_slot_embedding: whether the slot's own input vector is trained.
        slot_input: what a slot row is given (slot writer). ``"learned"``: one vector for all slots, started from the
            EOS embedding, at position ``b_k``. ``"repeat"``: the last token of its group once more, at that token's
            position ``b_k - 1``, plus one vector that starts at zero: copied mirrors begin near a strided raw cache.
        dtype: of the memory's weights; default the model's. Train a bfloat16 backbone's mirrors in float32.

    Raises:
        UserError: no slots in the layout, an unsupported model, or an unknown option.
    """
    check_writer(writer)
    if layout.ratio is None:
        raise UserError("a memory needs slots, but the layout has ratio=null: use SlidingWindowDraft for a window.")
    if init not in ("copy", "random"):
        raise UserError(f"init={init!r} is unknown: use 'copy' or 'random'.")
    if slot_input not in ("learned", "repeat"):
        raise UserError(f"slot_input={slot_input!r} is unknown: use 'learned' or 'repeat'.")
    if writer == "token" and slot_input != "learned":
        raise UserError(f"slot_input={slot_input!r} with writer='token', which has no slot rows: use writer='slot'.")
    mirror = tuple(mirror)
    if not mirror or len(set(mirror)) != len(mirror) or any(p not in PROJECTIONS for p in mirror):
        raise UserError(f"mirror={list(mirror)} is not a choice of q, k, v, o, each at most once.")
    if writer == "token":
        if set(mirror) != {"k", "v"}:
            raise UserError(f"mirror={list(mirror)} with writer='token': its slots have keys and values only (k, v).")
        for attention in attention_modules(model):
            check_token_writer(attention)
    return MemoryDraft(model, layout, writer, mirror, init, train_slot_embedding, slot_input, seed, dtype)
