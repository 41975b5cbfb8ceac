"""Models whose caches already hold a long prefix: random keys and values, so that 32K tokens cost seconds, not minutes.

What a decoding step costs depends on how much a cache holds, not on what; every method is filled the same way. Nothing
here is timed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from masw_lightning import MemoryDraft, MemoryLayout, PrefilledTarget
from masw_lightning.attention.interface import output_logits
from masw_lightning.cache.base import KVShape
from masw_lightning.cache.compact import CompactCache
from masw_lightning.cache.full import FullCache
from masw_lightning.drafts.base import ChainSession, DraftPolicy, Runner
from masw_lightning.drafts.runner import FullRunner, MemoryRunner

ROOM = 256  # tokens a cache can take beyond its prefix


def fill(cache: FullCache | CompactCache, n: int) -> None:
    """Let `cache` hold `n` tokens of random keys and values."""
    for pair in cache.buffers:
        for buffer in pair:
            buffer.normal_()
    if isinstance(cache, CompactCache):
        cache.filled(n)
    else:
        cache.lengths.fill_(n)


def full_runner(model: PreTrainedModel, n: int, room: int = ROOM) -> FullRunner:
    """`model` on a full cache that holds `n` tokens."""
    runner = FullRunner(model, 1, n + room)
    fill(runner.cache, n)
    return runner


def memory_runner(
    source: MemoryDraft | PreTrainedModel, layout: MemoryLayout | None, n: int, room: int = ROOM
) -> MemoryRunner:
    """A memory (or, with a `layout` without slots, a window) that has read `n` tokens."""
    runner = MemoryRunner(source, layout, 1, n + room)
    fill(runner.cache, n)
    return runner


def cache_keyword(model: PreTrainedModel) -> str:
    """What this version of Transformers calls a forward's cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def dynamic_cache(model: PreTrainedModel, n: int) -> DynamicCache:
    """Transformers' own cache of `n` tokens."""
    shape, cache = KVShape.of(model), DynamicCache(config=model.config)
    for layer, device in enumerate(shape.devices):
        k, v = (torch.randn(1, shape.kv_heads, n, shape.head_dim, device=device).to(shape.dtype) for _ in range(2))
        cache.update(k, v, layer)
    return cache


def transformers_steps(model: PreTrainedModel, n: int, steps: int) -> Callable[[], None]:
    """`steps` tokens one by one through Transformers, on a dynamic cache that goes on growing from call to call."""
    given: dict[str, Any] = {cache_keyword(model): dynamic_cache(model, n), "use_cache": True, "logits_to_keep": 1}
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)

    def run() -> None:
        for _ in range(steps):
            model(token, **given)

    return run


def our_steps(runner: FullRunner | MemoryRunner, steps: int) -> Callable[[], None]:
    """`steps` tokens one by one (a memory writes the slots they complete), then taken back."""
    token = torch.ones(1, 1, dtype=torch.long, device=runner.model.device)

    def run() -> None:
        for _ in range(steps):
            runner.last_logits(token)
        runner.rollback(steps)

    return run


def verification(runner: FullRunner, width: int) -> Callable[[], None]:
    """One forward of `width` tokens with the logits of all of them, then taken back."""
    tokens = torch.ones(1, width, dtype=torch.long, device=runner.model.device)

    def run() -> None:
        runner.logits(tokens)
        runner.rollback(width)

    return run


class FilledTarget(PrefilledTarget):
    """A target that holds `n` random tokens and has really read only the last of its prompt."""

    def __init__(self, target: PreTrainedModel, input_ids: Tensor, room: int) -> None:
        super().__init__(target, input_ids[:, -1:], 1)  # whatever else it keeps, of one token
        self.input_ids, self.room = input_ids, room
        self.prompt_tokens, self.seconds = input_ids.shape[1], 0.0
        self.runner = full_runner(target, self.prompt_tokens - 1, room + 1)
        self.logits = output_logits(target, self.runner.hidden(input_ids[:, -1:])[:, -1])


class FilledRunner:
    """A runner whose prefill fills its cache instead of reading."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.last_logits: Callable[[Tensor], Tensor] = runner.last_logits
        self.rollback: Callable[[Tensor], None] = runner.rollback

    @property
    def nbytes(self) -> int:
        """Bytes really allocated."""
        return int(self.runner.nbytes)

    def prefill(self, input_ids: Tensor) -> Tensor:
        """Holds as many random tokens."""
        fill(self.runner.cache, input_ids.shape[1])
        return input_ids.new_zeros(())


@dataclass
class FilledDraft:
    """A chain draft `policy` whose prompt costs nothing."""

    policy: DraftPolicy
    target_layers: tuple[int, ...] = ()

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> ChainSession:
        """See `DraftPolicy`."""
        session = self.policy.open(batch, prompt_tokens, max_tokens, k)
        assert isinstance(session, ChainSession)
        runner: Runner = FilledRunner(session.runner)
        session.runner = runner
        return session


def tensor_bytes(thing: object, without: Iterable[Tensor] = ()) -> int:
    """Bytes of all tensors reachable from `thing`, each storage once, except those of `without`."""
    skip = {t.untyped_storage().data_ptr() for t in without}
    found: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[object] = [thing]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            if storage.data_ptr() not in skip:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple)):
            todo += item
        elif hasattr(item, "__dict__") and not isinstance(item, (type, torch.nn.Module)):
            todo += vars(item).values()
    return sum(found.values())
