"""Whole decodes with a given acceptance, what equation (1) says of them, and Transformers' assisted generation.

A scripted draft pays for every step of the real one, but proposes what the target is known to say up to a planned
length and something else after it. So speed can be measured at any acceptance without a trained memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from masw_lightning import Decoded
from masw_lightning.drafts.base import Choose, DraftPolicy, DraftSession, Proposal


def predicted_speedup(emitted: float, k: int, draft: float, target: float) -> float:
    """Equation (1): `Lemit / (K t_d / t_t + 1)`."""
    return emitted / (k * draft / target + 1.0)


def predicted_with_verification(emitted: float, k: int, draft: float, target: float, verify: float) -> float:
    """The same without its assumption that verifying `K + 1` tokens costs one target step."""
    return emitted * target / (k * draft + verify)


def planned(length: float, iterations: int, k: int) -> list[int]:
    """Accepted draft tokens per iteration, whole numbers that average `length` (at most `k`)."""
    length = min(max(length, 0.0), float(k))
    marks = [int(i * length + 1e-9) for i in range(iterations + 1)]
    return [b - a for a, b in pairwise(marks)]


@dataclass
class ScriptedDraft:
    """`policy`, whose proposals are overwritten so that a planned number of them is right.

    Args:
        text: what the target says after the prompt, its first token included.
        accepted: the plan of `planned`.
    """

    policy: DraftPolicy
    text: list[int]
    accepted: list[int]
    target_layers: tuple[int, ...] = ()

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> ScriptedSession:
        """See `DraftPolicy`."""
        return ScriptedSession(self.policy.open(batch, prompt_tokens, max_tokens, k), self.text, self.accepted)


@dataclass
class ScriptedSession:
    """One generation of a `ScriptedDraft`."""

    inner: DraftSession
    text: list[int]
    plan: list[int]
    emitted: int = 0
    iteration: int = 0

    @property
    def nbytes(self) -> int:
        """See `DraftSession`."""
        return self.inner.nbytes

    def prefill(self, input_ids: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        """See `DraftSession`."""
        self.inner.prefill(input_ids, hidden)

    def propose(self, k: int, choose: Choose) -> Proposal:
        """The real proposal, paid for, with its tokens replaced."""
        proposal = self.inner.propose(k, choose)
        right = self.plan[self.iteration] if self.iteration < len(self.plan) else 0
        known = self.text[self.emitted : self.emitted + k]
        row = [*known, *[0] * (k - len(known))]
        row = [token if i < right else (token + 1) % max(2, max(self.text) + 1) for i, token in enumerate(row)]
        proposal.tokens.copy_(torch.tensor([row]))  # in place: the session itself reads its proposal on commit
        return proposal

    def commit(self, accepted: Tensor, next_token: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        """See `DraftSession`."""
        if self.emitted:
            self.iteration += 1
        self.emitted += int(accepted.max()) + 1
        self.inner.commit(accepted, next_token, hidden)


@dataclass(frozen=True)
class Shares:
    """Where the time of a decode went: seconds without the prefills, and parts of them."""

    decode: float
    draft: float
    verify: float
    rollback: float
    tokens: int

    @classmethod
    def of(cls, decoded: Decoded) -> Shares:
        """From the engine's own clock."""
        s = decoded.seconds
        wall = s["total"] - s["prefill_target"] - s["prefill_draft"]
        return cls(wall, s["draft"], s["verify"], s["rollback"], len(decoded.tokens[0]) - 1)

    @property
    def tokens_per_s(self) -> float:
        """After the first token."""
        return self.tokens / self.decode

    @property
    def overhead(self) -> float:
        """Share of the wall time that is neither drafting nor verifying; rollback is in it."""
        return (self.decode - self.draft - self.verify) / self.decode

    @property
    def rollback_share(self) -> float:
        """Share of the iterations' time."""
        return self.rollback / self.decode


@dataclass
class _Timeline(StoppingCriteria):
    """When each round of a generation ended, and how long the text was then."""

    marks: list[tuple[int, float]] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.marks.append((input_ids.shape[1], time.perf_counter()))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def assisted_tokens_per_s(
    target: PreTrainedModel, assistant: PreTrainedModel, ids: Tensor, k: int, new_tokens: int
) -> tuple[float, float]:
    """Transformers' assisted generation with a constant schedule: tokens/s and tokens per round.

    Counted from the end of its first round, which contains both prefills. Give a multiple of `k + 1` new tokens, so
    that a fully accepted last round is not cut short.
    """
    timeline = _Timeline()
    with _constant_schedule(assistant, k):
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=assistant,
            do_sample=False,
            max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([timeline]),
        )
    (first, start), (last, stop) = timeline.marks[0], timeline.marks[-1]
    return (last - first) / (stop - start), (last - first) / (len(timeline.marks) - 1)


@contextmanager
def _constant_schedule(assistant: PreTrainedModel, k: int) -> Iterator[None]:
    config = assistant.generation_config
    wanted = {
        "num_assistant_tokens": k,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    before = {key: getattr(config, key, None) for key in wanted}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its assistant passes arguments that it warns of itself
    config.update(**wanted)
    try:
        yield
    finally:
        config.update(**before)
        logging.set_verbosity(verbosity)
