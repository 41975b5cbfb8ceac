"""Rows of every kind of file, and each bad input as one sentence that names the place and the remedy."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from masw_lightning.data.corpora import Location, Row, Template
from masw_lightning.data.readers import read_rows, stamps
from masw_lightning.errors import UserError


def rows(path: object, *fields: str) -> list[Row]:
    return list(read_rows(Location(path=str(path)), list(fields) or ["text"]))


def sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    """The message, after checking that it is one line that ends like a sentence."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_jsonl_rows_know_their_line_and_blank_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "ein Käse", "meta": {"x": 1}}\r\n\r\n{"text": "b", "meta": "none"}'.encode())
    assert [(row["text"], str(row)) for row in rows(path)] == [
        ("ein Käse", f"{path}, line 1"),
        ("b", f"{path}, line 3"),
    ]


def test_parquet_reads_the_needed_columns_only(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "meta": [{"x": 1}, None]}), path)
    found = rows(path)
    assert [dict(row) for row in found] == [{"text": "a"}, {"text": "b"}]
    assert str(found[1]) == f"{path}, row 2"


def test_text_file_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffChapter 1\r\n\r\nIt rained.\r\n".encode())
    assert [(dict(row), str(row)) for row in rows(path)] == [({"text": "Chapter 1\n\nIt rained.\n"}, str(path))]


def test_folders_and_globs_are_read_in_sorted_order(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    write_rows("books/sub/c.jsonl", [{"text": "c"}])
    write_rows("books/a.jsonl", [{"text": "a"}])
    (tmp_path / "books/b.txt").write_text("b")
    (tmp_path / "books/notes.md").write_text("not data")
    assert [row["text"] for row in rows(tmp_path / "books")] == ["a", "b", "c"]
    assert [row["text"] for row in rows(tmp_path / "books/**/*.jsonl")] == ["a", "c"]
    assert [row["text"] for row in rows(tmp_path / "books/[ab].*")] == ["a", "b"]


def test_relative_paths_are_relative_to_the_current_directory(
    tmp_path: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows("d/a.jsonl", [{"text": "a"}])
    monkeypatch.chdir(tmp_path)
    assert [str(row) for row in rows("d/a.jsonl")] == ["d/a.jsonl, line 1"]


def test_urls_are_opened_by_fsspec(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qmsum.jsonl", '{"text": "q"}\n')
        archive.writestr("data/other.jsonl", '{"text": "o"}\n')
    url = f"zip://data/{{}}::{tmp_path / 'data.zip'}"
    assert [row["text"] for row in rows(url.format("qmsum.jsonl"))] == ["q"]
    assert [row["text"] for row in rows(url.format("*.jsonl"))] == ["o", "q"]
    assert len(stamps(Location(path=url.format("*.jsonl")))) == 2
    with pytest.raises(UserError, match="no file or folder zip://data/nothing"):
        rows(url.format("nothing.jsonl"))
    with pytest.raises(UserError, match="Cannot read nosuch://x"):
        rows("nosuch://x/a.jsonl")


def test_hub_datasets_come_through_load_dataset(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    """A local folder is a dataset to ``load_dataset`` as well, so the same lines run without a network."""
    write_rows("set/train.jsonl", [{"text": "a", "other": 1}, {"text": "b", "other": 2}])
    location = Location(hub=str(tmp_path / "set"))
    found = list(read_rows(location, ["text", "absent"]))
    assert [(dict(row), str(row)) for row in found] == [
        ({"text": "a"}, f"{location.hub}, row 1"),
        ({"text": "b"}, f"{location.hub}, row 2"),
    ]
    assert found[0].columns == ["text", "other"]
    with pytest.raises(UserError, match=r"Cannot load the hub dataset .* split nosuch") as error:
        list(read_rows(Location(hub=str(tmp_path / "set"), split="nosuch"), ["text"]))
    sentence(error)
    with pytest.raises(UserError, match="Cannot load the hub dataset not/a/name") as error:
        list(read_rows(Location(hub="not/a/name"), ["text"]))
    sentence(error)


BAD_LINES = {
    "broken": ('{"text": "a"}\n\n{"text": \n', "line 3 is not valid JSON"),
    "cut-off": ('{"text": "a"}\n{"text": "b', "line 2 is not valid JSON"),
    "an-array": ('[{"text": "a"}]\n', "line 1 holds a list, not a JSON object"),
    "a-string": ('{"text": "a"}\n"b"\n', "line 2 holds a str, not a JSON object"),
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
}


@pytest.mark.parametrize(("content", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        rows(path)
    assert str(path) in sentence(error)


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff\xfe"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2 is not valid JSON"):
        rows(tmp_path / "bad.jsonl")
    (tmp_path / "bad.txt").write_bytes(b"fine\nfine\n\xff\n")
    with pytest.raises(UserError, match=r"bad\.txt, line 3 is not UTF-8"):
        rows(tmp_path / "bad.txt")


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "rows.csv").write_text("text\na\n")
    for name, message in {
        "missing.jsonl": "There is no file or folder",
        "missing/folder": "There is no file or folder",
        "none*.jsonl": "No file matches",
        "empty": "holds no .jsonl, .parquet, .txt file",
        "blank.txt": "is empty",
        "bad.parquet": "is not a readable parquet file",
        "rows.csv": "is not a .jsonl, .parquet, .txt file",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)) as error:
            rows(tmp_path / name)
        assert str(tmp_path / name) in sentence(error)


@pytest.mark.parametrize("location", [Location(), Location(path="a.jsonl", hub="a/b")], ids=["neither", "both"])
def test_exactly_one_of_path_and_hub(location: Location) -> None:
    with pytest.raises(UserError, match="exactly one of `path` and `hub`"):
        list(read_rows(location, ["text"]))


def row(**fields: object) -> Row:
    return Row(fields, "f.jsonl", 7, "line")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("a", "A"),
        ("{a}", "A"),
        ("x {a}\n{b c} {{y}}", "x A\nB {y}"),
        ("{a}\n\n{none?}", "A"),
        ("{a}\n\n{none?}\n\nAnswer: ", "A\n\nAnswer: "),
        ("{a}\n{empty?}{a}", "AA"),
        ("{a} {b c?}", "A B"),
        ("{braces}", "{a} {0} %s"),
    ],
)
def test_templates(spec: str, text: str) -> None:
    assert Template(spec, "prompt").fill(row(a="A", **{"b c": "B"}, empty="", braces="{a} {0} %s")) == text


def test_templates_know_their_fields() -> None:
    assert Template("{a} {b?} {{c}}", "prompt").names == ["a", "b"]
    assert Template("a", "text").names == ["a"]
    assert Template("{a}", "text").fill(row(a=None)) is None


@pytest.mark.parametrize("spec", ["{a", "a}", "{}", "{a!r}", "{a:>10}"])
def test_broken_templates(spec: str) -> None:
    with pytest.raises(UserError, match=r"The template .* of 'prompt'"):
        Template(spec, "prompt")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"content": "x", "meta": {}}, "f.jsonl, line 7 has no field 'text' (its fields: 'content', 'meta')"),
        ({"text": 5}, "f.jsonl, line 7: the field 'text' is of type int, not a string"),
        ({"text": ["a"]}, "f.jsonl, line 7: the field 'text' is of type list, not a string"),
    ],
)
def test_rows_that_do_not_fit(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        Template("text", "text").fill(row(**fields))
    assert "'text'" in sentence(error)
