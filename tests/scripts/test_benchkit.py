"""The arithmetic of scripts/benchkit, with numbers made by hand, and what its models and caches promise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from masw_lightning import FullKVDraft, MemoryLayout, attach_memory, generate

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))  # as it is when a script is run

from benchkit import caches, floors, models, options, results, speculate, timing

CPU = torch.device("cpu")


def test_a_line_is_fitted() -> None:
    intercept, slope, r2 = timing.fit_line([(1024, 12.0), (2048, 14.0), (4096, 18.0)])
    assert (intercept, 1024 * slope, r2) == pytest.approx((10.0, 2.0, 1.0))
    _, _, r2 = timing.fit_line([(0, 0.0), (1, 1.0), (2, 0.0), (3, 1.0)])
    assert r2 == pytest.approx(0.2)
    with pytest.raises(ValueError, match="two different"):
        timing.fit_line([(1, 1.0), (1, 2.0)])


def test_equation_1() -> None:
    # the paper's 8B target at 32K: 4.72 tokens per iteration; a draft step a quarter of the target's
    assert speculate.predicted_speedup(4.72, 5, 0.25, 1.0) == pytest.approx(4.72 / 2.25)
    assert speculate.predicted_speedup(6.0, 5, 0.0, 1.0) == pytest.approx(6.0)
    assert speculate.predicted_with_verification(4.72, 5, 0.25, 1.0, 1.5) == pytest.approx(4.72 / 2.75)
    same = speculate.predicted_with_verification(3.0, 5, 2.0, 7.0, 7.0)
    assert same == pytest.approx(speculate.predicted_speedup(3.0, 5, 2.0, 7.0))


def test_a_plan_averages_what_was_asked() -> None:
    assert speculate.planned(2.5, 4, 5) == [2, 3, 2, 3]
    assert speculate.planned(9.0, 2, 5) == [5, 5]
    assert speculate.planned(-1.0, 2, 5) == [0, 0]
    assert sum(speculate.planned(3.7, 100, 5)) == 370


def test_cases_take_turns_and_the_median_is_the_middle() -> None:
    order: list[str] = []
    times = timing.interleaved({name: (lambda name=name: order.append(name)) for name in "ab"}, 2, CPU)
    assert order == ["a", "b"] * 3 and len(times["a"].seconds) == 2
    assert timing.Timing((3.0, 1.0, 2.0)).median == 2.0
    assert timing.Timing((0.2, 0.4)).scaled(0.5).record() == pytest.approx(
        {"median_ms": 150.0, "min_ms": 100.0, "max_ms": 200.0, "repeats": 2}
    )


def test_a_peak_is_seen_after_it_is_gone() -> None:
    peak, kept = timing.peak_of(lambda: torch.ones(8_000_000).sum() and torch.ones(1), CPU)
    assert 30_000_000 < peak < 60_000_000 and isinstance(kept, torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_model_repeats_its_last_token(dtype: torch.dtype) -> None:
    model = models.random_model("tiny@1", dtype, CPU)
    assert model.config.num_hidden_layers == 1 and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    ids = models.random_ids(model, 40)
    assert generate(model, ids, max_new_tokens=4).tokens == [[int(ids[0, -1])] * 4]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("smollm2-135m", 0.1345), ("llama-3.2-3b", 3.2128), ("llama-3.1-8b", 8.0303), ("llama-3.1-70b", 70.5537)],
)
def test_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    s = models.SHAPES[name]
    kv = s["head_dim"] * s["num_key_value_heads"]
    per_layer = s["hidden_size"] * (2 * s["head_dim"] * s["num_attention_heads"] + 2 * kv)
    per_layer += 3 * s["hidden_size"] * s["intermediate_size"] + 2 * s["hidden_size"]
    tables = 1 if s.get("tie_word_embeddings") else 2
    total = s["num_hidden_layers"] * per_layer + (tables * s["vocab_size"] + 1) * s["hidden_size"]
    assert total / 1e9 == pytest.approx(billions, rel=1e-3)


def test_filled_caches_hold_their_prefix_and_give_it_back() -> None:
    model = models.random_model("tiny", torch.float32, CPU)
    memory = attach_memory(model, MemoryLayout(16, 16, 4), "token")
    for runner in (caches.full_runner(model, 90), caches.memory_runner(memory, None, 90)):
        caches.our_steps(runner, 8)()
        assert runner.cache.mark().tolist() == [90]
    memory.detach()
    stock = caches.dynamic_cache(model, 90)
    assert stock.get_seq_length() == 90
    assert caches.tensor_bytes(stock) == 2 * model.config.num_hidden_layers * 2 * 90 * 8 * 4


def test_a_scripted_draft_accepts_what_was_planned_and_changes_no_text() -> None:
    model = models.random_model("tiny", torch.float32, CPU)
    ids = models.random_ids(model, 60)
    filled = caches.FilledTarget(model, ids, 64)
    given = {"max_new_tokens": 22, "num_draft_tokens": 5, "prefix": filled}
    text = generate(model, ids, **given).tokens[0]
    draft = speculate.ScriptedDraft(caches.FilledDraft(FullKVDraft(model)), text, speculate.planned(2.5, 9, 5))
    decoded = generate(model, ids, draft, **given)
    assert decoded.tokens[0] == text and decoded.accepted[0] == [2, 3, 2, 3, 2, 3]
    shares = speculate.Shares.of(decoded)
    assert 0 < shares.rollback_share <= shares.overhead < 1 and shares.tokens == 21


def test_verdicts() -> None:
    row = floors.row("x", 0.64, floors.Floor(most=0.65), "a ÷ b")
    assert (row["floor"], row["measured"], row["verdict"]) == ("≤ 0.65", "0.640", "reached")
    assert floors.row("x", 1.4, floors.Floor(least=1.5), "")["verdict"] == "missed"
    assert floors.row("x", 0.06, floors.Floor(most=0.05), "", ".2%")["floor"] == "≤ 5.00%"
    assert floors.Floor().verdict(3.0) == "shown"


def test_a_command_names_no_folder_of_this_machine() -> None:
    given = ["--model", "/somewhere/private/m.gguf", "--out=/somewhere/out", "--prefixes", "1K"]
    said = options.command("bench_x", given)
    assert said == "python scripts/bench_x.py --model m.gguf --out=out --prefixes 1K"
    assert options.counts("1K,300") == [1024, 300]


def test_a_table_shows_dashes_where_nothing_is() -> None:
    columns = (("name", "name", ""), ("ms", "ms", ",.1f"))
    table = results.markdown_table(columns, [{"name": "a", "ms": 1234.5}, {"name": "b"}])
    assert table.splitlines()[2:] == ["| a | 1,234.5 |", "| b | – |"]
