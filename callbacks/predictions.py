"""One JSON line per (prompt, method): the record, the file it is appended to, and what a second run may reuse.

Knows nothing about models, tokenizers or Lightning: numbers, strings and files only. A line is written and flushed as
soon as it exists, so a killed run loses at most the line it was writing; `PredictionFile.repair` drops that half line
and the next run continues behind it. Each record carries the settings it was made with (`config`); a run with other
settings is refused, because one table must not mix two experiments.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from masw_lightning.errors import UserError

FILE_NAME = "predictions.jsonl"
REFERENCE = "autoregressive"

Json = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
Settings = dict[str, Json]


@dataclass
class Prediction:
    """What one method did with one prompt; the fields, in this order, are the keys of a line. Times are in seconds.

    `new_tokens` counts prefill's first token, `iterations` are target forwards after it, and `accepted` holds the
    accepted draft tokens of each iteration. `tokens_per_iteration = (new_tokens - 1) / iterations` and
    `tokens_per_s = (new_tokens - 1) / decode_s`; both are None when nothing was decoded after the first token.
    """

    id: str
    dataset: str
    method: str
    prompt_tokens: int
    new_tokens: int
    text: str
    iterations: int
    accepted: list[int]
    tokens_per_iteration: float | None
    time_to_first_token_s: float
    decode_s: float
    tokens_per_s: float | None
    draft_kv_bytes: int
    target_kv_bytes: int
    identical_to_autoregressive: bool | None = None
    first_difference: int | None = None
    margin_at_difference: float | None = None
    rouge1: float | None = None
    rouge2: float | None = None
    rougeL: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    prompt: str = ""
    config: Settings = field(default_factory=dict)

    @property
    def end_to_end_s(self) -> float:
        """Seconds from the prompt to the last token."""
        return self.time_to_first_token_s + self.decode_s

    def to_line(self) -> str:
        """The record as one line of JSON, newline included."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Prediction":
        """Parse a line; unknown keys are ignored, so that a newer file can still be summarised.

        Raises:
            ValueError: not JSON, not an object, or a required field is missing.
        """
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{key: value for key, value in row.items() if key in known})
        except TypeError as error:
            raise ValueError(str(error).replace("Prediction.__init__() ", "")) from error


class PredictionFile:
    """A file of predictions that survives being killed at any byte."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def repair(self) -> bool:
        """Cut off a half-written last line (or complete its newline). True if a line was dropped."""
        if not self.path.exists():
            return False
        data = self.path.read_bytes()
        if not data or data.endswith(b"\n"):
            return False
        start = data.rfind(b"\n") + 1
        if _parses(data[start:]):
            with self.path.open("ab") as file:
                file.write(b"\n")
            return False
        os.truncate(self.path, start)
        return True

    def read(self) -> list[Prediction]:
        """All whole lines; a last line without a newline that does not parse is taken as half-written and skipped.

        Raises:
            UserError: a line in the middle is malformed; file and line are named.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        records: list[Prediction] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip() or (number == len(lines) and not _parses(line)):
                continue
            try:
                records.append(Prediction.from_line(line.decode("utf-8")))
            except ValueError as error:
                raise UserError(
                    f"{self.path}, line {number}: not a prediction ({error}); delete that line or the file."
                ) from error
        return records

    def append(self, record: Prediction) -> None:
        """Write one line and flush it."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(record.to_line())


def _parses(line: bytes) -> bool:
    try:
        Prediction.from_line(line.decode("utf-8"))
    except ValueError:
        return False
    return True


def rank_file(folder: str | Path, rank: int, world_size: int) -> PredictionFile:
    """Where a process appends: the one file, or a file of its own when several processes predict."""
    name = FILE_NAME if world_size == 1 else f"predictions.rank{rank}.jsonl"
    return PredictionFile(Path(folder) / name)


def _files(folder: str | Path) -> list[PredictionFile]:
    ranks = sorted(Path(folder).glob("predictions.rank*.jsonl"))
    return [PredictionFile(path) for path in [Path(folder) / FILE_NAME, *ranks]]


def repair_folder(folder: str | Path) -> int:
    """Drop what a killed run left half-written, in the files of all its processes. Returns the lines dropped."""
    return sum(file.repair() for file in _files(folder))


def read_predictions(folder: str | Path) -> list[Prediction]:
    """The records of a folder, of all processes; the first of each (id, method) counts."""
    return list(_first_of_each(record for file in _files(folder) for record in file.read()))


def _first_of_each(records: Iterable[Prediction]) -> Iterator[Prediction]:
    seen: set[tuple[str, str]] = set()
    for record in records:
        if (record.id, record.method) not in seen:
            seen.add((record.id, record.method))
            yield record


def merge_ranks(folder: str | Path) -> list[Prediction]:
    """Gather every process's file into `predictions.jsonl` (replaced in one step), remove theirs, return all."""
    files = _files(folder)
    records = read_predictions(folder)
    if len(files) == 1:
        return records
    partial = Path(folder) / (FILE_NAME + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(record.to_line() for record in records)
    partial.replace(files[0].path)
    for other in files[1:]:
        other.path.unlink()
    return records


def make_folder(folder: str | Path) -> Path:
    """Create an output folder and prove that it can be written.

    Raises:
        UserError: it cannot be created or written.
    """
    path = Path(folder)
    probe = path / f".probe.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"output_dir '{path}' cannot be written ({error.strerror or error}); name another folder."
        ) from error
    return path


def fingerprint(*parts: bytes) -> str:
    """A short hash of raw bytes: of a prompt's tokens, of an adapter's weights."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def prompt_fingerprint(tokens: Sequence[int], max_new_tokens: int) -> str:
    """Identifies a prompt and its length limit, whatever its id says."""
    return fingerprint(json.dumps([list(tokens), max_new_tokens]).encode())


def differences(old: Mapping[str, Json], new: Mapping[str, Json], prefix: str = "") -> list[str]:
    """Every setting that differs, as `key: old -> new`, nested keys dotted."""
    found: list[str] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: {json.dumps(before)} -> {json.dumps(after)}")
    return found


def check_resumable(records: Iterable[Prediction], settings: Mapping[str, Settings], folder: str | Path) -> None:
    """Refuse to continue a folder that was written with other settings.

    Args:
        records: what the folder holds.
        settings: per method name, the settings of this run. A method that is in the folder but not in this run is
            compared by everything except its own part ("method").
        folder: named in the message.

    Raises:
        UserError: something differs; the message names it.
    """
    for record in records:
        old, new = dict(record.config), dict(settings.get(record.method) or next(iter(settings.values())))
        if record.method not in settings:
            old.pop("method", None)
            new.pop("method", None)
        changed = differences(old, json.loads(json.dumps(new)))
        # Weights are known by their hash; the file they lie in may have moved.
        changed = [change for change in changed if not change.startswith("method.checkpoint:")]
        if changed:
            raise UserError(
                f"{Path(folder) / FILE_NAME} was written with other settings for method '{record.method}' "
                f"({'; '.join(changed)}): use another output_dir, or delete the file to start over."
            )
