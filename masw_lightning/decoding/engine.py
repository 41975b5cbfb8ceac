"""Autoregressive and speculative decoding of a target: token ids in, token ids and counts out.

Knows no tokenizer, no Lightning and no files. The loop: the draft proposes ``K`` tokens, the target scores ``K + 1``
positions in one forward on its full cache, a rule accepts a prefix and adds one token of its own, both caches roll back
to the accepted text. Greedy output equals plain greedy decoding of the target, whatever the draft.
Shapes: B batch, n prompt tokens, K drafted tokens, T verified tokens, V vocab.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from masw_lightning.adapter.inject import check_ids
from masw_lightning.attention.interface import output_logits, text_config
from masw_lightning.decoding.sampling import GreedyChoice, SampledChoice
from masw_lightning.decoding.verification import GreedyRule, RejectionRule
from masw_lightning.drafts.base import DraftPolicy
from masw_lightning.drafts.runner import FullRunner
from masw_lightning.errors import UserError

PHASES = ("prefill_target", "prefill_draft", "draft", "verify", "rollback", "total")


@dataclass
class Decoded:
    """What one call of ``generate`` produced; every per-sequence field is a list over the batch.

    Attributes:
        tokens: new token ids, the first from the prompt's prefill, EOS included.
        accepted: accepted draft tokens of every verification, those cut by EOS or the length limit not counted; empty
            without a draft.
        tokens_per_iteration: emitted tokens / target verifications, prefill's token excluded; 0.0 without any
            verification, 1.0 for plain autoregressive decoding.
        seconds: ``prefill_target, prefill_draft, draft, verify, rollback, total``; total - the others = overhead.
        draft_kv_bytes, target_kv_bytes: bytes really allocated for keys and values.
        first_token_seconds: until target and draft have both read the prompt.
        iterations: target forwards after the prefill, per sequence.
    """

    tokens: list[list[int]]
    accepted: list[list[int]]
    tokens_per_iteration: float
    seconds: dict[str, float]
    draft_kv_bytes: int
    target_kv_bytes: int
    first_token_seconds: float
    iterations: list[int]


@dataclass
class _Clock:
    """Wall seconds per phase, with the device brought to rest at each edge."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class PrefilledTarget:
    """A target that has read a prompt; several ``generate`` calls on that prompt may share it, one at a time.

    For drafts that read the target's hidden states it keeps the prompt's, ``n x h`` elements per layer asked for (32K
    tokens of Llama-3.1-8B in bfloat16: 268 MB each, EAGLE one, EAGLE-3 three), until ``forget``.
    """

    def __init__(
        self, target: PreTrainedModel, input_ids: Tensor, room: int, target_layers: tuple[int, ...] = ()
    ) -> None:
        self.target, self.input_ids, self.room = target, input_ids, room
        b, self.prompt_tokens = input_ids.shape
        clock = _Clock(input_ids.device)
        with clock.phase("prefill_target"), torch.no_grad():
            self.runner = FullRunner(target, b, self.prompt_tokens + room)
            self.logits = self._read(target_layers)
        self.seconds = clock.seconds["prefill_target"]

    @torch.no_grad()
    def _read(self, layers: tuple[int, ...]) -> Tensor:
        self.runner.keep_states(layers)
        logits = output_logits(self.target, self.runner.prefill(self.input_ids))
        self._states = dict(zip(layers, self.runner.states, strict=True))
        self.runner.keep_states(())
        return logits

    def states(self, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The prompt's hidden states ``[B,n,h]`` at ``layers``. Those the prefill did not keep are read again, once.

        That second reading is no method's cost: a prefill told of the layers would have kept them for nothing.
        """
        if not set(layers) <= self._states.keys():
            self.runner.rollback(self.runner.cache.mark())
            self._read(tuple(sorted({*layers, *self._states})))
        return tuple(self._states[layer] for layer in layers)

    def forget(self) -> None:
        """Let go of the hidden states."""
        self._states = {}

    def rewind(self) -> None:
        """Take the cache back to the prompt."""
        self.runner.rollback(self.runner.cache.mark() - self.prompt_tokens)


def prefill_target(
    target: PreTrainedModel,
    input_ids: Tensor,
    max_new_tokens: int = 256,
    num_draft_tokens: int = 5,
    target_layers: tuple[int, ...] = (),
) -> PrefilledTarget:
    """Read ``input_ids [1,n]`` once, for several ``generate(..., prefix=...)`` calls of at most these sizes.

    ``target_layers``: all those of the drafts that will share it, so that their hidden states are kept.
    """
    _check(target, input_ids, max_new_tokens, num_draft_tokens)
    return PrefilledTarget(target, input_ids, max_new_tokens + num_draft_tokens, target_layers)


def eos_ids(target: PreTrainedModel, eos_token_id: int | list[int] | None) -> set[int]:
    """The ids that end a text: those given, else those of the target's generation config. An empty list: none."""
    if eos_token_id is None:
        config = getattr(target, "generation_config", None)
        eos_token_id = getattr(config, "eos_token_id", None)
    if eos_token_id is None:
        return set()
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.tolist()
    return {int(eos_token_id)} if isinstance(eos_token_id, int) else {int(t) for t in eos_token_id}


@torch.no_grad()
def generate(
    target: PreTrainedModel,
    input_ids: Tensor,
    draft: DraftPolicy | None = None,
    num_draft_tokens: int = 5,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | list[int] | None = None,
    seed: int | None = None,
    prefix: PrefilledTarget | None = None,
) -> Decoded:
    """Decode a continuation of ``input_ids [1,n]`` with ``target``, sped up by ``draft``.

    Args:
        draft: a draft policy; ``None`` = plain autoregressive decoding.
        num_draft_tokens: ``K``, tokens proposed per iteration.
        max_new_tokens: most new tokens, the prefill's first token included.
        temperature: 0 = greedy, exactly the target's own greedy text; else rejection sampling from its distribution.
        top_k, top_p: restrict sampling, for target and draft alike.
        eos_token_id: ids that end the text; default the target's generation config; ``[]`` = none.
        seed: of the sampling; default torch's global generator.
        prefix: the target's prefill of this prompt, to share it between calls.

    Raises:
        UserError: an argument is out of range, the batch has more than one row, or the draft does not fit.
    """
    _check(target, input_ids, max_new_tokens, num_draft_tokens)
    _check_sampling(temperature, top_k, top_p)
    k = num_draft_tokens if draft is not None else 0
    layers = tuple(draft.target_layers) if draft is not None else ()
    own = prefix is None
    if prefix is None:
        prefix = PrefilledTarget(target, input_ids, max_new_tokens + k, layers)
    _check_prefix(prefix, target, input_ids, max_new_tokens + k)
    eos = eos_ids(target, eos_token_id)
    vocab = text_config(target).vocab_size
    generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
    sampled = temperature > 0
    rule = RejectionRule(temperature, top_k, top_p, generator) if sampled else GreedyRule()
    choose = SampledChoice(temperature, top_k, top_p, generator, vocab) if sampled else GreedyChoice(vocab)

    prompt_states = prefix.states(layers)
    clock = _Clock(input_ids.device)
    clock.seconds["prefill_target"] = prefix.seconds
    with clock.phase("total"):
        prefix.rewind()
        prefix.runner.keep_states(layers)
        session = None
        if draft is not None:
            with clock.phase("prefill_draft"):
                session = draft.open(1, prefix.prompt_tokens, prefix.prompt_tokens + max_new_tokens, k)
                session.prefill(input_ids, prompt_states)
        del prompt_states
        if own:
            prefix.forget()
        next_token = rule.first(prefix.logits)
        text, accepted, iterations = [int(next_token)], [], 0
        if session is not None:
            session.commit(torch.zeros(1, dtype=torch.long), next_token)
        while len(text) < max_new_tokens and text[-1] not in eos:
            iterations += 1
            if session is None:
                with clock.phase("verify"):
                    next_token = rule.first(prefix.runner.last_logits(next_token[:, None]))
                    text.append(int(next_token))
                continue
            with clock.phase("draft"):
                proposal = session.propose(k, choose)
            with clock.phase("verify"):
                block = torch.cat((next_token[:, None], proposal.tokens), 1)
                verdict = rule(proposal, prefix.runner.logits(block))
                next_token, kept = verdict.next, int(verdict.accepted)
                new = [*proposal.tokens[0, :kept].tolist(), int(next_token)]
            with clock.phase("rollback"):
                prefix.runner.rollback(k - kept)
                session.commit(verdict.accepted.cpu(), next_token, prefix.runner.states)
            new = _cut(new, eos, max_new_tokens - len(text))
            text += new
            accepted.append(min(kept, len(new)))
    clock.seconds["total"] += prefix.seconds
    return Decoded(
        tokens=[text],
        accepted=[accepted],
        tokens_per_iteration=(len(text) - 1) / iterations if iterations else 0.0,
        seconds=clock.seconds,
        draft_kv_bytes=0 if session is None else session.nbytes,
        target_kv_bytes=prefix.runner.nbytes,
        first_token_seconds=clock.seconds["prefill_target"] + clock.seconds["prefill_draft"],
        iterations=[iterations],
    )


def _cut(new: list[int], eos: set[int], room: int) -> list[int]:
    """What of a block is emitted: up to the length limit, up to and including the first EOS."""
    for index, token in enumerate(new[:room]):
        if token in eos:
            return new[: index + 1]
    return new[:room]


def _check(target: PreTrainedModel, input_ids: Tensor, max_new_tokens: int, k: int) -> None:
    check_ids(input_ids)
    if input_ids.shape[0] != 1:
        raise UserError(f"generate decodes one sequence at a time, but input_ids has {input_ids.shape[0]} rows: loop.")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} is out of range: give at least 1.")
    if k < 1:
        raise UserError(f"num_draft_tokens={k} is out of range: give at least 1, or draft=None to decode without.")
    n, limit = input_ids.shape[1], getattr(text_config(target), "max_position_embeddings", None)
    if limit is not None and n >= limit:
        raise UserError(
            f"the prompt has {n} tokens, but the target {target.config._name_or_path or type(target).__name__} has "
            f"{limit} positions: shorten the prompt."
        )
    if limit is not None and n + max_new_tokens > limit:
        warnings.warn(
            f"prompt ({n}) and new tokens ({max_new_tokens}) exceed the target's {limit} positions.", stacklevel=3
        )


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if temperature < 0:
        raise UserError(f"temperature={temperature} is negative: use 0 for greedy decoding or a positive number.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k} is out of range: give at least 1, or null for all tokens.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p} is out of range: give a number in (0, 1].")


def _check_prefix(prefix: PrefilledTarget, target: PreTrainedModel, input_ids: Tensor, room: int) -> None:
    if prefix.target is not target or not torch.equal(prefix.input_ids, input_ids):
        raise UserError("prefix belongs to another target or prompt: call prefill_target for this one.")
    if prefix.room < room:
        raise UserError(
            f"prefix has room for {prefix.room} tokens, but max_new_tokens + num_draft_tokens is {room}: "
            "give prefill_target the larger numbers."
        )
