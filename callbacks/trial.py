"""One prompt, one method, one record: decode, compare with the reference, score.

Knows the decoding API and a tokenizer's `decode`; no Lightning, no files, no table. Scripts may use it as it is.
Shapes: n prompt tokens, V vocab; everything here is one row (B = 1).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from callbacks.methods import Contender
from callbacks.predictions import Prediction, Settings, prompt_fingerprint
from callbacks.rouge import rouge
from masw_lightning.decoding.engine import Decoded, PrefilledTarget, generate, prefill_target
from masw_lightning.errors import UserError

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class Decoding:
    """How every method of a run decodes.

    Raises:
        UserError: a number out of range.
    """

    num_draft_tokens: int = 5
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    eos: bool | list[int] = True
    share_target_prefill: bool = True

    def __post_init__(self) -> None:
        for name, low in (("num_draft_tokens", 1), ("max_new_tokens", 1), ("temperature", 0), ("top_k", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"{name}={value} is too small: give at least {low}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is out of range: give a probability above 0, at most 1.")

    def settings(self) -> Settings:
        """What a record says of it."""
        return asdict(self)

    def eos_token_id(self) -> list[int] | None:
        """For `generate`: None takes the model's own list, [] is none."""
        if isinstance(self.eos, bool):
            return None if self.eos else []
        return self.eos


@dataclass
class Prompt:
    """`input_ids` is `[1,n]` on the models' device; `max_new_tokens` is this prompt's limit."""

    id: str
    dataset: str
    input_ids: Tensor
    max_new_tokens: int
    references: Sequence[str] = ()

    @property
    def fingerprint(self) -> str:
        """Identifies tokens and limit, whatever the id says."""
        return prompt_fingerprint(self.input_ids[0].tolist(), self.max_new_tokens)


@dataclass
class Trial:
    """Decodes prompts with one target and turns the outcome into records."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decoding: Decoding
    rouge: bool = True

    def prefill(self, prompt: Prompt, contenders: Sequence[Contender] = ()) -> PrefilledTarget | None:
        """The target's prefill, to be shared by this prompt's methods; None if each is to do its own.

        Hidden states that a draft of the `contenders` reads are kept with it.
        """
        if not self.decoding.share_target_prefill:
            return None
        layers = {layer for c in contenders if c.policy is not None for layer in c.policy.target_layers}
        k = self.decoding.num_draft_tokens
        return prefill_target(self.target, prompt.input_ids, prompt.max_new_tokens, k, tuple(sorted(layers)))

    def decode(self, prompt: Prompt, contender: Contender, prefix: PrefilledTarget | None) -> Decoded:
        """New tokens of `prompt` by one method."""
        return generate(
            self.target,
            prompt.input_ids,
            draft=contender.policy,
            num_draft_tokens=self.decoding.num_draft_tokens,
            max_new_tokens=prompt.max_new_tokens,
            temperature=self.decoding.temperature,
            top_k=self.decoding.top_k,
            top_p=self.decoding.top_p,
            eos_token_id=self.decoding.eos_token_id(),
            seed=self.decoding.seed,
            prefix=prefix,
        )

    def warm_up(self, prompt: Prompt, contender: Contender, tokens: int) -> None:
        """A short decode that nobody records, so that first-use costs fall into no figure."""
        short = Prompt(prompt.id, prompt.dataset, prompt.input_ids[:, -tokens:], 2 * self.decoding.num_draft_tokens + 2)
        self.decode(short, contender, None)

    def record(
        self,
        prompt: Prompt,
        contender: Contender,
        prefix: PrefilledTarget | None,
        reference: Prediction | None,
        config: Settings,
    ) -> Prediction:
        """Decode and measure.

        Args:
            prefix: of `prefill`.
            reference: the autoregressive record of this prompt; None if this is it.
            config: the settings to keep in the record.
        """
        decoded = self.decode(prompt, contender, prefix)
        tokens, seconds = decoded.tokens[0], dict(decoded.seconds)
        first, new = decoded.first_token_seconds, len(tokens)
        # Decoding ends when the first token stands: everything else, overhead included, is decode time.
        decode_s = max(0.0, seconds["total"] - first)
        identical, where, margin = self.compare(prompt, tokens, reference)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Prediction(
            id=prompt.id,
            dataset=prompt.dataset,
            method=contender.name,
            prompt_tokens=prompt.input_ids.shape[1],
            new_tokens=new,
            text=text,
            iterations=decoded.iterations[0],
            accepted=list(decoded.accepted[0]),
            tokens_per_iteration=decoded.tokens_per_iteration if decoded.iterations[0] else None,
            time_to_first_token_s=first,
            decode_s=decode_s,
            tokens_per_s=(new - 1) / decode_s if new > 1 and decode_s > 0 else None,
            draft_kv_bytes=decoded.draft_kv_bytes,
            target_kv_bytes=decoded.target_kv_bytes,
            identical_to_autoregressive=identical,
            first_difference=where,
            margin_at_difference=margin,
            **rouge(text, prompt.references if self.rouge else ()),
            seconds=seconds,
            tokens=tokens,
            prompt=prompt.fingerprint,
            config=config,
        )

    def compare(
        self, prompt: Prompt, tokens: list[int], reference: Prediction | None
    ) -> tuple[bool | None, int | None, float | None]:
        """Identical to the reference, where not, and the target's margin there; None where there is nothing to say."""
        if self.decoding.temperature > 0:
            return None, None, None
        if reference is None or tokens == reference.tokens:
            return True, None, None
        where = first_difference(tokens, reference.tokens)
        return False, where, margin_after(self.target, prompt.input_ids, reference.tokens[:where])


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length if one is the other's beginning; None if equal."""
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.no_grad()
def margin_after(model: PreTrainedModel, input_ids: Tensor, tokens: Sequence[int]) -> float:
    """Gap between the model's two best logits after the prompt `[1,n]` and `tokens`, by one forward of its own.

    In reduced precision two exact ways of computing logits may choose differently where this gap is about the rounding
    error; where it is larger, a different choice is a bug.
    """
    more = torch.tensor([list(tokens)], dtype=input_ids.dtype, device=input_ids.device)
    return margin(model(input_ids=torch.cat((input_ids, more), 1), use_cache=False, logits_to_keep=1).logits[0, -1])


def margin(logits: Tensor) -> float:
    """Gap between the two best of logits `[V]`."""
    best = logits.float().topk(2).values
    return float(best[0] - best[1])
