"""The table, with numbers worked out by hand, and the files and curves a report is made of."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from callbacks.environment import environment
from callbacks.predictions import FILE_NAME, Prediction, PredictionFile
from callbacks.report import HEADER, cells, main, markdown, print_table, rebuild, sections, write_report
from callbacks.rouge import rouge
from callbacks.summary import MIB, bucket_label, bucket_of, summarise


def make(
    name: str, method: str, prompt: int, new: int, iterations: int, prefill: float, decode: float, **changes: object
) -> Prediction:
    rate = (new - 1) / decode if decode else None
    per_iteration = (new - 1) / iterations if iterations else None
    base = Prediction(
        name, "d", method, prompt, new, "", iterations, [], per_iteration, prefill, decode, rate, 0, 4 * MIB
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def run() -> list[Prediction]:
    """Two prompts of about 1K and one of 4K, by hand: AR decodes 10 tokens/s, masw 20, 40 and 5."""
    same = {"identical_to_autoregressive": True}
    differs = {"identical_to_autoregressive": False, "first_difference": 3, "margin_at_difference": 0.25}
    return [
        make("a", "autoregressive", 1000, 11, 10, 1.0, 1.0, **same),
        make("a", "masw", 1000, 11, 2, 1.5, 0.5, draft_kv_bytes=MIB, accepted=[4, 4], rougeL=0.5, **same),
        make("b", "autoregressive", 1100, 21, 20, 1.0, 2.0, **same),
        make("b", "masw", 1100, 21, 10, 1.5, 0.5, draft_kv_bytes=3 * MIB, accepted=[1] * 10, **differs),
        make("c", "autoregressive", 4000, 6, 5, 3.0, 0.5, **same),
        make("c", "masw", 4000, 6, 5, 4.0, 1.0, draft_kv_bytes=8 * MIB, accepted=[0] * 5, rougeL=0.25, **same),
    ]


def test_hand_made_numbers() -> None:
    summary = summarise(run())
    assert summary["buckets"] == {"1K": 1024, "4K": 4096}
    assert summary["complete"]
    row = summary["methods"]["masw"]["buckets"]["1K"]
    assert row["prompts"] == 2
    assert row["new_tokens"] == 32
    assert row["iterations"] == 12
    assert row["accepted"] == 18
    assert row["tokens_per_iteration"] == pytest.approx(30 / 12)
    assert row["tokens_per_iteration_mean"] == pytest.approx((5 + 2) / 2)
    assert row["tokens_per_s"] == pytest.approx(30 / 1.0)
    assert row["tokens_per_s_mean"] == pytest.approx((20 + 40) / 2)
    assert row["speedup"] == pytest.approx(30 / (30 / 3.0))
    assert row["speedup_end_to_end"] == pytest.approx((32 / 4.0) / (32 / 5.0))
    assert row["time_to_first_token_s"] == pytest.approx(1.5)
    assert row["draft_kv_mib"] == pytest.approx(2.0)
    assert row["target_kv_mib"] == pytest.approx(4.0)
    assert row["rougeL"] == pytest.approx(0.5)  # the one prompt that has references
    assert row["rouge1"] is None
    assert (row["identical"], row["prompts_checked"], row["prompts_identical"]) == (False, 2, 1)
    assert row["largest_margin_at_difference"] == 0.25
    assert summary["methods"]["masw"]["buckets"]["4K"]["speedup"] == pytest.approx(0.5)
    overall = summary["methods"]["masw"]["overall"]
    assert overall["tokens_per_iteration"] == pytest.approx(35 / 17)
    assert overall["speedup"] == pytest.approx((35 / 2.0) / (35 / 3.5))
    assert summary["methods"]["autoregressive"]["overall"]["speedup"] == pytest.approx(1.0)


def test_a_partial_run_compares_the_same_prompts_only() -> None:
    summary = summarise(run()[:3])  # masw has decoded "a" alone
    assert not summary["complete"]
    row = summary["methods"]["masw"]["overall"]
    assert row["speedup"] == pytest.approx(2.0)
    assert row["prompts_compared"] == 1
    alone = summarise([run()[1]])["methods"]["masw"]["overall"]
    assert alone["speedup"] is None
    assert alone["speedup_end_to_end"] is None
    assert summarise([])["methods"] == {}
    for records in (run()[:3], [run()[1]], []):
        assert "Tok./Iter" in markdown(summarise(records), {}) or not records


def test_a_prompt_whose_first_token_ends_it_divides_by_nothing() -> None:
    record = make("a", "masw", 5, 1, 0, 0.1, 0.0)
    row = summarise([record])["methods"]["masw"]["overall"]
    assert row["tokens_per_iteration"] is None
    assert row["tokens_per_s"] is None
    assert row["identical"] is None
    assert cells("masw", row)[1:4] == ("–", "–", "–")


def test_buckets_are_nearest_by_ratio() -> None:
    assert [bucket_of(n) for n in (1, 1000, 1024, 1448, 1449, 3000, 4100)] == [1, 1024, 1024, 1024, 2048, 4096, 4096]
    assert [bucket_of(n, [8192, 24576, 32768]) for n in (100, 8000, 23000, 31000, 90000)] == [
        8192,
        8192,
        24576,
        32768,
        32768,
    ]
    assert [bucket_label(n) for n in (512, 1024, 1536, 24576, 131072)] == ["512", "1K", "1.5K", "24K", "128K"]
    assert summarise(run(), [2048])["buckets"] == {"2K": 2048}


def test_cells_are_readable() -> None:
    methods = summarise(run())["methods"]
    assert cells("masw", methods["masw"]["buckets"]["1K"]) == (
        "masw",
        "2.50",
        "30.0",
        "3.00x",
        "1.25x",
        "2.00",
        "1.50",
        "0.500",
        "no (1 of 2, margin ≤ 0.2500)",
    )
    assert cells("masw", methods["masw"]["buckets"]["4K"])[-1] == "yes"
    assert cells("autoregressive", methods["autoregressive"]["overall"])[-1] == "reference"


def test_one_prefix_length_has_one_section() -> None:
    assert [title for title, _ in sections(summarise(run()))] == [
        "1K prompt tokens (2 prompts, 1050 tokens on average)",
        "4K prompt tokens (1 prompt, 4000 tokens on average)",
        "All lengths (3 prompts, 2033 tokens on average)",
    ]
    assert [title for title, _ in sections(summarise(run()[:4]))] == [
        "1K prompt tokens (2 prompts, 1050 tokens on average)"
    ]


def test_the_report_is_written_and_can_be_rebuilt(tmp_path: Path) -> None:
    settings = environment(torch.device("cpu")) | {
        "config": {"num_draft_tokens": 5, "methods": {"masw": {"class": "Masw"}}}
    }
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        write_report(tmp_path, run(), settings, [1024, 4096], [writer])
    document = json.loads((tmp_path / "summary.json").read_text())
    assert document["methods"]["masw"]["buckets"]["1K"]["speedup"] == pytest.approx(3.0)
    assert document["run"]["versions"]["torch"]
    assert document["run"]["date"]
    assert "threads" in document["run"]["device"]
    text = (tmp_path / "summary.md").read_text()
    assert "| masw | 2.50 | 30.0 | 3.00x |" in text
    assert "num_draft_tokens: 5" in text
    assert "* **masw**: class Masw" in text
    assert "Incomplete" not in text
    assert all(len(line.split("|")) == len(HEADER) + 2 for line in text.splitlines() if line.startswith("|"))
    for name in ("tokens_per_iteration", "speedup", "draft_memory"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert f"({name}.png)" in text
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    curve = events.Scalars("predict/speedup/masw")
    assert [(e.step, e.value) for e in curve] == [(1024, pytest.approx(3.0)), (4096, pytest.approx(0.5))]
    assert set(events.Tags()["images"]) == {f"predict/{n}" for n in ("tokens_per_iteration", "speedup", "draft_memory")}

    for record in run():
        PredictionFile(tmp_path / FILE_NAME).append(record)
    (tmp_path / "summary.md").unlink()
    rebuild(tmp_path, Console(quiet=True))
    assert (tmp_path / "summary.md").read_text() == text
    assert json.loads((tmp_path / "summary.json").read_text()) == document
    (tmp_path / "summary.json").unlink()
    rebuild(tmp_path, Console(quiet=True))  # from the predictions alone


def test_rebuild_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no predictions in"):
        main([str(tmp_path)])
    with pytest.raises(SystemExit, match="usage"):
        main([])
    PredictionFile(tmp_path / FILE_NAME).append(run()[0])
    main([str(tmp_path)])
    assert "autoregressive" in capsys.readouterr().out


def test_the_table_is_not_folded_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(summarise(run()), Console(width=140, highlight=False))
    out = capsys.readouterr().out
    assert any("masw" in line and "3.00x" in line and "margin" in line for line in out.splitlines())


def test_figures_of_an_empty_or_single_point_summary(tmp_path: Path) -> None:
    write_report(tmp_path, [run()[1]], {})
    write_report(tmp_path, [], {})


def test_rouge_takes_the_best_reference_and_needs_one() -> None:
    assert rouge("the cat sat", ["a dog", "the cat sat"]) == pytest.approx({"rouge1": 1, "rouge2": 1, "rougeL": 1})
    # "cat the sat" against "the cat sat": all words, no pair but none in order: longest common subsequence is 2 of 3
    assert rouge("cat the sat", ["the cat sat"]) == pytest.approx({"rouge1": 1, "rouge2": 0, "rougeL": 2 / 3})
    assert rouge("", ["x"]) == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    assert rouge("x", []) == rouge("x", ["  "]) == {"rouge1": None, "rouge2": None, "rougeL": None}
