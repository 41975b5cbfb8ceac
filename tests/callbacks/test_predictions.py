"""The prediction file: what survives a kill at any byte, what a second run may reuse, what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from callbacks.predictions import (
    FILE_NAME,
    Prediction,
    PredictionFile,
    check_resumable,
    differences,
    make_folder,
    merge_ranks,
    prompt_fingerprint,
    rank_file,
    read_predictions,
    repair_folder,
)
from masw_lightning.errors import UserError

KEYS = """
    id dataset method prompt_tokens new_tokens text iterations accepted tokens_per_iteration time_to_first_token_s
    decode_s tokens_per_s draft_kv_bytes target_kv_bytes identical_to_autoregressive first_difference
    margin_at_difference rouge1 rouge2 rougeL seconds
"""


def record(name: str = "a", method: str = "masw", **changes: object) -> Prediction:
    base = Prediction(
        id=name,
        dataset="qmsum",
        method=method,
        prompt_tokens=1000,
        new_tokens=9,
        text="naïve café 你好\nnext line\u2028still one record",
        iterations=2,
        accepted=[5, 1],
        tokens_per_iteration=4.0,
        time_to_first_token_s=0.5,
        decode_s=0.25,
        tokens_per_s=32.0,
        draft_kv_bytes=1,
        target_kv_bytes=2,
        seconds={"total": 0.75},
        tokens=[1, 2, 3],
        prompt="p",
        config={"device": "cpu", "decoding": {"temperature": 0.0}, "method": {"class": method}},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_line_has_the_documented_keys_in_order_and_reads_back() -> None:
    line = record().to_line()
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert list(json.loads(line))[:21] == KEYS.split()
    assert Prediction.from_line(line) == record()
    assert record().end_to_end_s == 0.75


def test_a_line_of_a_newer_version_still_reads() -> None:
    assert Prediction.from_line(json.dumps(asdict(record()) | {"new_field": 1})) == record()


def test_killed_at_every_byte_of_the_last_line(tmp_path: Path) -> None:
    first, second = record("a").to_line().encode(), record("b").to_line().encode()
    for cut in range(len(second) + 1):
        file = PredictionFile(tmp_path / "p.jsonl")
        file.path.write_bytes(first + second[:cut])
        whole = 2 if cut >= len(second) - 1 else 1  # only the newline is missing: the record itself is whole
        assert len(file.read()) == whole
        assert file.repair() is (0 < cut < len(second) - 1)
        assert file.path.read_bytes() == first + (second if whole == 2 else b"")
        file.append(record("c"))
        assert [r.id for r in file.read()] == (["a", "b", "c"] if whole == 2 else ["a", "c"])


def test_a_malformed_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(record("a").to_line() + '{"id": "b"}\n' + record("c").to_line())
    with pytest.raises(UserError, match=r"predictions\.jsonl, line 2.*missing.*delete that line"):
        read_predictions(tmp_path)
    path.write_text("[1]\n" + record("c").to_line())
    with pytest.raises(UserError, match=r"line 1: not a prediction \(not a JSON object\)"):
        read_predictions(tmp_path)


def test_nothing_there_yet(tmp_path: Path) -> None:
    assert read_predictions(tmp_path) == []
    assert not PredictionFile(tmp_path / FILE_NAME).repair()
    (tmp_path / FILE_NAME).write_text("")
    assert not PredictionFile(tmp_path / FILE_NAME).repair()
    assert read_predictions(tmp_path) == []


def test_ranks_write_apart_and_are_merged_once(tmp_path: Path) -> None:
    assert rank_file(tmp_path, 0, 1).path.name == FILE_NAME
    rank_file(tmp_path, 0, 1).append(record("from an earlier run"))
    for rank in range(2):
        rank_file(tmp_path, rank, 2).append(record(f"rank {rank}"))
        rank_file(tmp_path, rank, 2).append(record("padded by the sampler", tokens=[rank]))
    expected = ["from an earlier run", "rank 0", "padded by the sampler", "rank 1"]
    assert [r.id for r in read_predictions(tmp_path)] == expected
    assert [r.id for r in merge_ranks(tmp_path)] == expected
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]
    assert [r.id for r in merge_ranks(tmp_path)] == expected
    assert read_predictions(tmp_path)[2].tokens == [0]


def test_half_lines_of_all_processes_are_dropped(tmp_path: Path) -> None:
    for rank in range(3):
        rank_file(tmp_path, rank, 3).append(record(f"rank {rank}"))
    for rank in (0, 2):
        with rank_file(tmp_path, rank, 3).path.open("a") as half:
            half.write('{"id": "cut')
    assert repair_folder(tmp_path) == 2
    assert repair_folder(tmp_path) == 0
    assert [r.id for r in read_predictions(tmp_path)] == ["rank 0", "rank 1", "rank 2"]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    same = {"masw": dict(record().config), "autoregressive": record(method="autoregressive").config}
    check_resumable([record(), record(method="autoregressive")], same, tmp_path)
    changed = {"masw": {"device": "cpu", "decoding": {"temperature": 0.7}, "method": {"class": "masw", "weights": "x"}}}
    with pytest.raises(UserError) as error:
        check_resumable([record()], changed, tmp_path)
    assert "'masw'" in str(error.value)
    assert "decoding.temperature: 0.0 -> 0.7" in str(error.value)
    assert 'method.weights: null -> "x"' in str(error.value)
    assert "device" not in str(error.value)
    assert "another output_dir" in str(error.value)


def test_methods_may_come_and_go_but_shared_settings_may_not(tmp_path: Path) -> None:
    check_resumable([record(method="gone")], {"masw": record().config}, tmp_path)
    other = {"masw": record().config | {"device": "gpu"}}
    with pytest.raises(UserError, match=r'device: "cpu" -> "gpu"'):
        check_resumable([record(method="gone")], other, tmp_path)


def test_settings_compare_as_json_does(tmp_path: Path) -> None:
    # a tuple becomes a list in the file: no difference
    settings = record().config | {"eos": (1, 2)}
    stored = Prediction.from_line(replace(record(), config=settings).to_line())
    check_resumable([stored], {"masw": settings}, tmp_path)
    assert differences({"a": 1}, {"b": 1}) == ["a: 1 -> null", "b: null -> 1"]


def test_a_prompt_is_known_by_its_tokens_and_limit() -> None:
    prints = {prompt_fingerprint([1, 2], 8), prompt_fingerprint([1, 2], 9), prompt_fingerprint([12], 8)}
    assert len(prints) == 3
    assert prompt_fingerprint([1, 2], 8) in prints


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    made = make_folder(tmp_path / "new" / "deep")
    assert list(made.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output_dir '.*file/below' cannot be written .*name another folder"):
        make_folder(tmp_path / "file" / "below")
    with pytest.raises(UserError, match="cannot be written"):
        make_folder(tmp_path / "file")
