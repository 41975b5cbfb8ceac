"""Rows of local files, of URLs and of hub datasets, and every way they can be broken.

Yields rows; knows no tokens, no Lightning. Files are read here line by line rather than by the ``datasets`` readers:
those infer one schema for all columns of all files (RedPajama's ``meta`` differs from file to file) and cannot name the
line that is broken. Hub datasets come through ``datasets.load_dataset``.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from masw_lightning.data.corpora import Location, Row
from masw_lightning.errors import UserError

SUFFIXES = (".jsonl", ".parquet", ".txt")


@dataclass(frozen=True)
class DataFile:
    """One data file: the name shown to the user, and how to open it."""

    name: str
    suffix: str
    filesystem: Any = None  # of fsspec; None for a local file

    def open(self) -> IO[bytes]:
        """The file's bytes."""
        if self.filesystem is None:
            return open(self.name, "rb")
        return cast(IO[bytes], self.filesystem.open(self.name, "rb"))

    def stamp(self) -> str:
        """Changes when the file does."""
        if self.filesystem is None:
            status = os.stat(self.name)
            return f"{os.path.abspath(self.name)}:{status.st_size}:{status.st_mtime_ns}"
        return f"{self.name}:{self.filesystem.ukey(self.name)}"


def find_files(path: str) -> list[DataFile]:
    """The data files behind ``path``, sorted. Raises UserError when there is none or one of an unknown kind."""
    filesystem: Any = None
    if "://" in path:
        filesystem, names = _remote(path)
    else:
        place = os.path.expanduser(path)
        if os.path.isdir(place):
            names = [str(p) for p in Path(place).rglob("*") if p.suffix in SUFFIXES and p.is_file()]
            if not names:
                raise UserError(f"The folder {path} holds no {', '.join(SUFFIXES)} file; name another folder.")
        elif os.path.isfile(place):
            names = [place]
        else:
            names = [name for name in glob.glob(place, recursive=True) if os.path.isfile(name)]
            if not names and glob.has_magic(place):
                raise UserError(f"No file matches {path} (seen from {os.getcwd()}); correct the pattern.")
    if not names:
        raise UserError(
            f"There is no file or folder {path} (seen from {os.getcwd()}); correct the path, or give a dataset of the "
            "Hugging Face hub as `hub`."
        )
    files = [DataFile(name, os.path.splitext(name)[1].lower(), filesystem) for name in sorted(names)]
    for file in files:
        if file.suffix not in SUFFIXES:
            raise UserError(
                f"{file.name} is not a {', '.join(SUFFIXES)} file; convert it, one row per line for .jsonl."
            )
    return files


def _remote(url: str) -> tuple[Any, list[str]]:
    import fsspec  # type: ignore[import-untyped]

    try:
        filesystem, root = fsspec.url_to_fs(url)
        names = filesystem.glob(root) if glob.has_magic(root) else [root] if filesystem.exists(root) else []
    except Exception as error:  # whatever the protocol's library raises: no network, no right, no such host
        raise UserError(f"Cannot read {url} ({_first_line(error)}); check the address and the connection.") from error
    return filesystem, [str(name) for name in names]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_rows(location: Location, fields: list[str]) -> Iterator[Row]:
    """All rows of a source in a fixed order; of parquet and hub rows only ``fields``, where there.

    Raises:
        UserError: nothing there, an unknown kind of file, an empty file, a broken line (named), no such hub dataset.
    """
    if (location.path is None) == (location.hub is None):
        raise UserError(
            f"A source needs exactly one of `path` and `hub` (path={location.path!r}, hub={location.hub!r})."
        )
    if location.hub is not None:
        yield from _hub_rows(location, fields)
        return
    for file in find_files(cast(str, location.path)):
        read = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows, ".txt": _text_rows}[file.suffix]
        empty = True
        for row in read(file, fields):
            empty = False
            yield row
        if empty:
            raise UserError(f"{file.name} is empty; remove it from the source or fill it.")


def stamps(location: Location) -> list[str]:
    """What a cache of this source's rows depends on: its files' names, sizes and times, or the hub dataset's name."""
    if location.path is not None and location.hub is None:
        return [file.stamp() for file in find_files(location.path)]
    return [f"{location.hub}/{location.subset}/{location.split}@{location.revision}"]


def _jsonl_rows(file: DataFile, fields: list[str]) -> Iterator[Row]:
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
                raise UserError(
                    f"{file.name}, line {number} is not valid JSON ({_first_line(error)}); correct or remove that line."
                ) from error
            if not isinstance(value, dict):
                raise UserError(
                    f"{file.name}, line {number} holds a {type(value).__name__}, not a JSON object; write one row per "
                    "line."
                )
            yield Row(value, file.name, number, "line")


def _parquet_rows(file: DataFile, fields: list[str]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with file.open() as handle:
            table = pq.ParquetFile(handle)
            columns = table.schema_arrow.names
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[name for name in columns if name in fields]):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(value, file.name, number, "row", columns)
    except pa.ArrowException as error:
        raise UserError(f"{file.name} is not a readable parquet file ({_first_line(error)}); write it anew.") from error


def _text_rows(file: DataFile, fields: list[str]) -> Iterator[Row]:
    with file.open() as handle:
        raw = handle.read()
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError(f"{file.name}, line {line} is not UTF-8 text; convert the file.") from error
    if text.strip():
        yield Row({"text": text}, file.name, 1, "")


def _hub_rows(location: Location, fields: list[str]) -> Iterator[Row]:
    import datasets

    name = cast(str, location.hub)
    try:
        rows = datasets.load_dataset(name, location.subset, split=location.split, revision=location.revision)
    except Exception as error:  # not found, no such split, no network, a loading script: each its own class
        raise UserError(
            f"Cannot load the hub dataset {name}, subset {location.subset}, split {location.split} "
            f"({_first_line(error)}); check the name and the connection, or give its files as `path`."
        ) from error
    columns = list(rows.column_names)
    wanted = [column for column in columns if column in fields]
    for number, value in enumerate(rows.select_columns(wanted) if wanted else rows, 1):
        yield Row(value, name, number, "row", columns)
