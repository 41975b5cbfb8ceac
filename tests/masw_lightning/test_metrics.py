"""Counting: agreement runs are the iterations of the greedy speculative loop, and metrics are ratios of sums."""

import random

import pytest
import torch

from masw_lightning import MemoryLayout, MemorySlotDraft, attach_memory, generate
from masw_lightning.metrics import Agreement, MeanPerToken, TokensPerIteration, iterations_from_agreement


def simulate(text: list[int], guesses: list[int], k: int) -> tuple[int, int]:
    """The loop itself, on integers: ``text`` is the target's; ``guesses[i]`` is the draft's guess at ``text[i]``."""
    produced, iterations = 1, 0  # the first token comes from the target's prefill
    while produced < len(text):
        proposal = guesses[produced : produced + k]
        accepted = 0
        while accepted < len(proposal) and proposal[accepted] == text[produced + accepted]:
            accepted += 1
        produced = min(produced + accepted + 1, len(text))
        iterations += 1
    return iterations, produced - 1


@pytest.mark.parametrize(
    ("agree", "k", "expected"),
    [
        ([], 5, (0, 0)),
        ([True], 5, (1, 1)),
        ([False, False, False], 5, (3, 3)),
        ([True] * 6, 5, (1, 6)),  # five accepted and the bonus
        ([True] * 7, 5, (2, 7)),
        ([True, False, True, False], 5, (2, 4)),  # [1,0,1,0]: one accepted, then the correction, twice
        ([True] * 4, 1, (2, 4)),
    ],
)
def test_golden_counts(agree: list[bool], k: int, expected: tuple[int, int]) -> None:
    assert iterations_from_agreement(torch.tensor(agree, dtype=torch.bool), k) == expected


def test_counts_equal_the_simulated_loop() -> None:
    rng = random.Random(0)
    for _ in range(500):
        length, k = rng.randint(1, 40), rng.randint(1, 8)
        text = [rng.randrange(3) for _ in range(length)]
        guesses = [t if rng.random() < 0.7 else rng.randrange(3) for t in text]
        agree = torch.tensor([a == b for a, b in zip(text[1:], guesses[1:], strict=True)], dtype=torch.bool)
        assert iterations_from_agreement(agree, k) == simulate(text, guesses, k)


@pytest.mark.parametrize("writer", ["slot", "token"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_teacher_forcing_gives_what_decoding_gives(build_model, writer: str, k: int) -> None:
    model = build_model("llama", seed=3)
    draft = attach_memory(model, MemoryLayout(4, 24, 3, rollback=8), writer=writer)
    prompt = torch.randint(0, 61, (1, 37), generator=torch.Generator().manual_seed(k))
    decoded = generate(model, prompt, MemorySlotDraft(draft), num_draft_tokens=k, max_new_tokens=40, eos_token_id=[])
    text = torch.cat((prompt[0], torch.tensor(decoded.tokens[0])))
    hidden = draft.hidden_states(text[None])[0, prompt.shape[1] : -1]
    agree = draft.logits(hidden).argmax(-1) == text[prompt.shape[1] + 1 :]
    iterations, emitted = iterations_from_agreement(agree, k)
    assert (iterations, emitted) == (decoded.iterations[0], len(decoded.tokens[0]) - 1)
    assert iterations < emitted
    assert emitted / iterations == pytest.approx(decoded.tokens_per_iteration)


def test_metrics_divide_sums_once() -> None:
    loss, agreement, speed = MeanPerToken(), Agreement(), TokensPerIteration(5)
    loss.update(torch.tensor(6.0), 2)
    loss.update(torch.tensor(0.0), 4)
    agreement.update(torch.tensor([True, False]))
    agreement.update(torch.tensor([True]))
    speed.update(torch.tensor([True] * 6))
    speed.update(torch.tensor([False, False]))
    speed.update(torch.zeros(0, dtype=torch.bool))
    assert loss.compute() == 1.0  # not the mean of 3 and 0
    assert agreement.compute() == pytest.approx(2 / 3)
    assert speed.compute() == pytest.approx(8 / 3)


def test_nothing_counted_is_nan() -> None:
    metric = TokensPerIteration(5)
    metric.update(torch.zeros(0, dtype=torch.bool))
    assert metric.compute().isnan()
