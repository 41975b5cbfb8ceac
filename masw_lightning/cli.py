"""The command line: ``masw fit | validate | predict --config run.yaml [--any.key value]``.

``LightningCLI`` in as few lines as are right. Importing the rooms is all it knows of them: YAML files may then name
every class without its module. What the user can fix ends in one sentence on stderr and a non-zero exit status.
"""

import contextlib
import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from jsonargparse import ArgumentError
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

import masw_lightning
from masw_lightning.errors import UserError
from masw_lightning.modules.identity import read_adapter

# Advice that does not apply here: sources are read in the main process on purpose, and the backbone is meant to be in
# eval mode while its adapter is trained.
IRRELEVANT = (
    ".*does not have many workers.*",
    ".*module.*in eval mode.*",
    ".*litlogger.*",
    ".*litmodels.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*isinstance.treespec, LeafSpec.*",
    ".*weights_only.*was not set.*",
)


ROOMS = (
    "masw_lightning.modules",
    "masw_lightning.data",
    "callbacks.adapter_export",
    "callbacks.last_checkpoint",
    "callbacks.methods_compressed",
    "callbacks.methods_heads",
    "callbacks.progress_lines",
    "callbacks.speculative_decoding",
)


PARSER_NOISE = (
    "Does not validate against any of the Union",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Given value",
)


class MaswCLI(LightningCLI):
    """``LightningCLI`` whose configuration is the YAML files and the command line, and nothing else."""

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        import_rooms()
        super().__init__(
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"default_root_dir": "runs/masw", "log_every_n_steps": 10, "enable_model_summary": False},
            seed_everything_default=0,
            parser_kwargs={"exit_on_error": False, **{name: {"exit_on_error": False} for name in self.subcommands()}},
            auto_configure_optimizers=False,  # modules build their own from plain numbers
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """``fit``, ``validate`` and ``predict``."""
        return {name: skip for name, skip in LightningCLI.subcommands().items() if name != "test"}

    def setup_parser(self, add_subcommands: bool, *args: Any) -> None:
        """Adds this project's defaults to Lightning's."""
        super().setup_parser(add_subcommands, *args)
        if add_subcommands:
            # Results are written batch by batch; collecting them would keep every one in memory.
            self._subcommand_parsers["predict"].set_defaults({"return_predictions": False})

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses ``args``, or ``sys.argv`` if there are none, without a warning when tests give both."""
        given = sys.argv[1:] if args is None else cast(list[str], args)
        self.config = parser.parse_args(whole_data_files(given))

    def _parse_ckpt_path(self) -> None:
        """Does nothing, where Lightning lets a checkpoint's hyperparameters override YAML and command line."""

    def before_instantiate_classes(self) -> None:
        """Looks at the checkpoint before anything large is loaded."""
        path = self._get(self.config, "ckpt_path")
        if path and path not in ("last", "best", "hpc") and not Path(path).is_dir() and "://" not in path:
            read_adapter(path)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Logs to TensorBoard in ``default_root_dir`` itself, so that a run's files stand where its YAML says."""
        trainer = self._get(self.config_init, "trainer")
        root = check_writable(trainer["default_root_dir"])
        if trainer["logger"] in (None, True):
            kwargs["logger"] = TensorBoardLogger(save_dir=root, name="", version="")
        return super().instantiate_trainer(**kwargs)


def main(args: list[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: the command line after ``masw``; ``None`` reads ``sys.argv``.

    Raises:
        SystemExit: 1 after an error the user can fix, 2 after a wrong command line or YAML, 130 after Ctrl-C; each with
            one sentence on stderr.
    """
    try:
        with _calm():
            MaswCLI(args)
    except ArgumentError as error:
        _stop(_shorten(error), 2)
    except ValueError as error:
        user_error = _user_error(error)
        if user_error is None:
            raise
        _stop(str(user_error), 1)
    except KeyboardInterrupt:
        _stop("stopped by the user.", 130)


def whole_data_files(args: list[str]) -> list[str]:
    """The command line with every ``--data file.yaml`` made to replace the data named before it.

    By itself jsonargparse merges the two files, down into the lists of sources; ``--data=null`` before it starts anew.
    """
    result = []
    for index, argument in enumerate(args):
        name, _, value = argument.partition("=")
        if name == "--data":
            value = value or (args[index + 1] if index + 1 < len(args) else "")
            if value.endswith((".yaml", ".yml")):
                result.append("--data=null")
        result.append(argument)
    return result


def import_rooms() -> None:
    """Makes every configurable class known by its bare name.

    Raises:
        UserError: Python found another package named ``callbacks`` first.
    """
    import callbacks

    ours = Path(masw_lightning.__path__[0]).resolve().parent
    found = Path(callbacks.__path__[0]).resolve().parent
    if found != ours:
        raise UserError(
            f"Python finds another package named 'callbacks' in {found} before this project's in {ours}: "
            "run masw from another folder, or call the masw script instead of python -m masw_lightning."
        )
    for room in ROOMS:
        importlib.import_module(room)


def check_writable(folder: str | os.PathLike[str]) -> str:
    """Makes ``folder`` if need be and returns it.

    Raises:
        UserError: nothing can be written there.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to the output folder {str(folder)!r} ({error.strerror}): set trainer.default_root_dir to "
            "a folder that can be written."
        ) from error
    return str(folder)


def _stop(sentence: str, status: int) -> None:
    print(f"masw: {sentence}", file=sys.stderr)
    raise SystemExit(status)


def _user_error(error: BaseException | None) -> UserError | None:
    """The user's error inside what the argument parser made of it while it built a class."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def _shorten(error: Exception) -> str:
    """One sentence out of the argument parser's report, which lists every type it has tried."""
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(PARSER_NOISE)]
    return "; ".join(told).replace(":; ", ": ")


class _OnlyNews(logging.Filter):
    """Drops Lightning's advertisements and its list of absent devices."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(word in record.getMessage() for word in ("Tip:", "TPU available", "`weights_only` was not set"))


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """Log output that says what happens in this run."""
    logger, news = logging.getLogger("lightning.pytorch.utilities.rank_zero"), _OnlyNews()
    logger.addFilter(news)
    try:
        with warnings.catch_warnings():
            for message in IRRELEVANT:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        logger.removeFilter(news)
