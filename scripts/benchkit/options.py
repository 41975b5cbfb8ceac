"""The command line that every benchmark has, and the frame it runs in: one-sentence errors, progress lines."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchkit.models import DTYPES, Loaded, load
from masw_lightning import MemoryDraft, MemoryLayout, attach_memory
from masw_lightning.errors import UserError
from masw_lightning.layout import WRITERS, check_writer

PATHS = ("--model", "--target-model", "--out", "--text", "--adapter", "--config", "--data")


def count(text: str) -> int:
    """A number of tokens: `8192`, or `8K`."""
    try:
        value = int(text[:-1]) * 1024 if text[-1:] in "kK" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens (8192 or 8K)") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return value


def counts(text: str) -> list[int]:
    """Several of them, separated by commas."""
    return [count(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Several words, separated by commas."""
    return [part for part in text.split(",") if part]


def parser(doc: str | None, name: str, prefixes: str, repeats: int) -> argparse.ArgumentParser:
    """A parser with the shared options; `name` is the default folder of results."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0], allow_abbrev=False)
    where = made.add_argument_group("where and on what")
    where.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default cpu")
    where.add_argument("--threads", type=count, help="CPU threads of PyTorch; default its own choice")
    where.add_argument("--dtype", type=names, default=["float32"], help="float32, bfloat16 or both, with a comma")
    where.add_argument(
        "--shapes",
        type=names,
        default=["smollm2-135m"],
        help="drafts: random weights of smollm2-135m, llama-3.2-3b, llama-3.1-8b, llama-3.1-70b or tiny; NAME@LAYERS "
        "takes the first layers only; several with commas",
    )
    where.add_argument("--model", help="real weights instead: a model folder, a hub name or a .gguf file")
    where.add_argument("--target", help="shape of the target; default: the draft's own weights serve as the target")
    where.add_argument("--target-model", help="real weights of the target")
    what = made.add_argument_group("what")
    what.add_argument("--prefixes", type=counts, default=counts(prefixes), help=f"prompt tokens, default {prefixes}")
    what.add_argument("--ratios", type=counts, default=[4, 8], help="tokens per slot, default 4,8")
    what.add_argument("--writers", type=names, default=list(WRITERS), help="slot, token or both (default)")
    what.add_argument("--sink", type=count, default=128, help="S, default 128")
    what.add_argument("--window", type=count, default=128, help="W, default 128")
    what.add_argument("--repeats", type=count, default=repeats, help=f"timed repeats, default {repeats}")
    what.add_argument("--seed", type=int, default=0, help="of prompts, default 0")
    what.add_argument("--out", type=Path, default=Path("docs/results") / name, help=f"default docs/results/{name}")
    return made


def check(chosen: argparse.Namespace) -> None:
    """Refuse what argparse cannot know, and set the number of threads.

    Raises:
        UserError: an unknown dtype or writer, no CUDA device, or a folder that cannot be written.
    """
    for dtype in chosen.dtype:
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is unknown: choose from {', '.join(DTYPES)}.")
    for writer in chosen.writers:
        check_writer(writer)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available here: use --device cpu.")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write results to {chosen.out}: {error.strerror}; choose another --out.") from error


class Bench:
    """One run of a benchmark: its options, its device and its progress lines."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen, self.device = chosen, torch.device(chosen.device)
        self.begun = time.perf_counter()

    def say(self, line: str) -> None:
        """One line of progress."""
        print(f"[{time.perf_counter() - self.begun:6.1f} s] {line}", flush=True)

    def layout(self, ratio: int | None) -> MemoryLayout:
        """The memory's shape at a ratio."""
        return MemoryLayout(self.chosen.sink, self.chosen.window, ratio)

    def each(self, longest: int, body: Callable[[str, Loaded, Loaded], None]) -> None:
        """`body(dtype, draft, target)` for every dtype and shape; the target is the draft itself unless another was
        asked for. What does not fit on the device is left out, with a line that says so.
        """
        chosen = self.chosen
        shapes = [Path(chosen.model).stem] if chosen.model else chosen.shapes
        other = Path(chosen.target_model).stem if chosen.target_model else chosen.target
        for dtype in [DTYPES[name] for name in chosen.dtype]:
            for shape in shapes:
                kind = str(dtype).removeprefix("torch.")
                self.say(f"loading {shape}, {kind}")
                try:
                    draft = target = load(shape, chosen.model, dtype, self.device, longest)
                    if other and other != shape:
                        target = load(other, chosen.target_model, dtype, self.device, longest)
                    body(kind, draft, target)
                except torch.OutOfMemoryError:
                    self.say(f"{shape}, {kind}: does not fit on this device, the rest of it is left out")
                draft = target = None  # type: ignore[assignment]
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def memories(self, loaded: Loaded) -> dict[str, MemoryDraft]:
        """One memory per writer and ratio on one backbone, by the name of its row. Detach them afterwards."""
        return {
            f"masw {ratio}x {writer}": attach_memory(loaded.model, self.layout(ratio), writer)
            for writer in self.chosen.writers
            for ratio in self.chosen.ratios
        }


def command(script: str, arguments: Sequence[str]) -> str:
    """The command as it can be typed again, folders of this machine shortened to their last part."""
    shown, previous = [], ""
    for argument in arguments:
        head, sign, value = argument.partition("=")
        if previous in PATHS and Path(argument).is_absolute():
            argument = Path(argument).name
        elif sign and head in PATHS and Path(value).is_absolute():
            argument = f"{head}={Path(value).name}"
        shown.append(argument)
        previous = argument
    return shlex.join(["python", f"scripts/{script}.py", *shown])


def run(script: str, made: argparse.ArgumentParser, body: Callable[[Bench], None], given: list[str] | None) -> int:
    """Parse, check and run; 0, or 2 with one sentence on stderr."""
    arguments = sys.argv[1:] if given is None else given
    chosen = made.parse_args(arguments)
    chosen.command = command(script, arguments)
    try:
        check(chosen)
        with torch.no_grad():
            body(Bench(chosen))
    except UserError as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{script}: stopped", file=sys.stderr)
        return 130
    return 0
