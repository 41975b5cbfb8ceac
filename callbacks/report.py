"""The report of a prediction run: summary.json, summary.md, PNG figures, TensorBoard, and the table on the screen.

Takes records and writes files; knows no models. `python -m callbacks.report FOLDER` rebuilds everything from the
folder's predictions alone (the environment is then kept from the summary.json that is there, if any).
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

from callbacks.figures import draw, points
from callbacks.predictions import REFERENCE, Json, Prediction, Settings, read_predictions
from callbacks.summary import Row, Summary, summarise
from masw_lightning.errors import UserError

HEADER = (
    "Method",
    "Tok./Iter",
    "tokens/s",
    "Speedup",
    "End-to-end",
    "Draft KV MiB",
    "TTFT s",
    "ROUGE-L",
    "Output identical",
)
LEGEND = """\
* **Tok./Iter**: tokens emitted per target forward; prefill's first token is not counted. Autoregressive decoding is 1.
* **tokens/s**: tokens after the first one per second of decoding, prefill excluded.
* **Speedup**: tokens/s over autoregressive tokens/s on the same prompts.
* **End-to-end**: the same with prefill included, all new tokens over all seconds.
* **Draft KV**: bytes allocated for the draft's keys and values, mean over prompts.
* **TTFT**: time to first token, that is, the prefill of the target and of the draft.
* **ROUGE-L**: F-measure against the dataset's references, where there are any.
* **Output identical**: token for token the same as autoregressive decoding (checked at temperature 0 only).
  In reduced precision a difference is legitimate only at a near tie: its margin is the gap between the target's two
  best logits there.
"""
SCALARS = (
    "tokens_per_iteration",
    "tokens_per_s",
    "speedup",
    "speedup_end_to_end",
    "draft_kv_mib",
    "time_to_first_token_s",
    "rougeL",
)


def write_report(
    folder: str | Path,
    records: Sequence[Prediction],
    run: Settings,
    buckets: Sequence[int] | None = None,
    writers: Sequence[SummaryWriter] = (),
) -> Summary:
    """Summarise `records` and write everything into `folder`; figures and scalars go to TensorBoard `writers` too.

    Args:
        folder: receives summary.json, summary.md and one PNG per figure.
        records: of one run, complete or not.
        run: environment and settings, kept under "run" in summary.json.
        buckets: prefix lengths to group by; None takes powers of two.
        writers: TensorBoard writers; the step of a scalar is the prefix length, so curves are drawn against it.
    """
    folder = Path(folder)
    summary = summarise(records, buckets)
    document = {**summary, "bucket_sizes": list(buckets) if buckets else None, "run": run}
    _replace(folder / "summary.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    figures = draw(summary)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=110)
    _replace(folder / "summary.md", markdown(summary, run, list(figures)))
    for writer in writers:
        _to_tensorboard(writer, summary, figures)
    return summary


def sections(summary: Summary) -> list[tuple[str, list[tuple[str, Row]]]]:
    """`(title, rows)` of the table's parts: one per prefix length, shortest first, then all prompts together."""
    labels = sorted(summary["buckets"], key=lambda label: summary["buckets"][label])
    parts: list[tuple[str, list[tuple[str, Row]]]] = []
    for label in labels:
        rows = [(name, m["buckets"][label]) for name, m in summary["methods"].items() if label in m["buckets"]]
        parts.append((_title(f"{label} prompt tokens", rows), rows))
    if len(labels) != 1:
        overall = [(name, m["overall"]) for name, m in summary["methods"].items()]
        parts.append((_title("All lengths", overall), overall))
    return parts


def _title(what: str, rows: Sequence[tuple[str, Row]]) -> str:
    """How many prompts stand behind a part of the table, and how long they really are."""
    if not rows:
        return what
    most = max((row for _, row in rows), key=lambda row: row["prompts"])
    count = f"{most['prompts']} prompt" + ("s" if most["prompts"] > 1 else "")
    return f"{what} ({count}, {most['prompt_tokens']:.0f} tokens on average)"


def cells(name: str, row: Row) -> tuple[str, ...]:
    """One row of the table as text, in the order of `HEADER`; "–" where there is nothing to say."""
    return (
        name,
        _number(row["tokens_per_iteration"], 2),
        _number(row["tokens_per_s"], 1),
        _number(row["speedup"], 2, "x"),
        _number(row["speedup_end_to_end"], 2, "x"),
        _number(row["draft_kv_mib"], 1 if row["draft_kv_mib"] >= 10 else 2),
        _number(row["time_to_first_token_s"], 2),
        _number(row["rougeL"], 3),
        _identical(name, row),
    )


def markdown(summary: Summary, run: Settings, figures: Sequence[str] = ()) -> str:
    """summary.md: what was run, the tables, what the columns mean, the figures, the environment."""
    lines = ["# Speculative decoding: every method on the same prompts", ""]
    lines += [sentence for sentence in (_what_was_run(run),) if sentence]
    if not summary["complete"]:
        lines += ["", "**Incomplete run:** the methods have not all decoded the same prompts yet."]
    for title, rows in sections(summary):
        lines += ["", f"## {title}", ""]
        lines += ["| " + " | ".join(HEADER) + " |", "|---" + "|--:" * (len(HEADER) - 1) + "|"]
        lines += ["| " + " | ".join(cells(name.replace("|", "\\|"), row)) + " |" for name, row in rows]
    lines += ["", "## Columns", "", LEGEND]
    lines += _methods(run)
    lines += [f"![{name.replace('_', ' ')}]({name}.png)" for name in figures]
    environment = {key: value for key, value in run.items() if key != "config"}
    lines += ["", "## Environment", "", *(f"* {key}: {_plain(value)}" for key, value in environment.items())]
    return "\n".join(lines) + "\n"


def print_table(summary: Summary, console: Console) -> None:
    """The same table on the screen."""
    for title, rows in sections(summary):
        table = Table(title=escape(title), title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
        for column, name in enumerate(HEADER):
            table.add_column(name, justify="left" if column == 0 else "right", no_wrap=column == 0)
        for name, row in rows:
            table.add_row(*map(escape, cells(name, row)))
        console.print(table, "")


def rebuild(folder: str | Path, console: Console) -> Summary:
    """Write the report of `folder` again from its predictions, and print the table.

    Raises:
        UserError: there are no predictions.
    """
    records = read_predictions(folder)
    if not records:
        raise UserError(f"no predictions in '{folder}': name the output_dir of a prediction run.")
    before = Path(folder) / "summary.json"
    document = json.loads(before.read_text(encoding="utf-8")) if before.exists() else {}
    summary = write_report(folder, records, document.get("run", {}), document.get("bucket_sizes"))
    print_table(summary, console)
    return summary


def wide_console() -> Console:
    """A console that does not fold the table when the output is a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def _to_tensorboard(writer: SummaryWriter, summary: Summary, figures: dict[str, Figure]) -> None:
    for method in summary["methods"]:
        for key in SCALARS:
            for size, value in points(summary, method, key):
                writer.add_scalar(f"predict/{key}/{method}", value, global_step=size)
    for name, figure in figures.items():
        writer.add_figure(f"predict/{name}", figure, close=False)
    writer.flush()


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _identical(name: str, row: Row) -> str:
    if row["identical"] is None:
        return "–"
    if name == REFERENCE:
        return "reference"
    if row["identical"]:
        return "yes"
    margin = row["largest_margin_at_difference"]
    missed = row["prompts_checked"] - row["prompts_identical"]
    return f"no ({missed} of {row['prompts_checked']}, margin ≤ {_number(margin, 4)})"


def _what_was_run(run: Settings) -> str:
    config = run.get("config")
    if not isinstance(config, dict):
        return ""
    return "; ".join(f"{key}: {_plain(value)}" for key, value in config.items() if key != "methods") + "."


def _methods(run: Settings) -> list[str]:
    config = run.get("config")
    methods = config.get("methods") if isinstance(config, dict) else None
    if not isinstance(methods, dict):
        return []
    return ["## Methods", "", *(f"* **{name}**: {_plain(settings)}" for name, settings in methods.items()), ""]


def _plain(value: Json) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _replace(path: Path, text: str) -> None:
    """Write through a temporary file: a reader or a crash never meets half a summary."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def main(arguments: list[str]) -> None:
    """`python -m callbacks.report OUTPUT_DIR`; leaves with one sentence on stderr when that cannot be done."""
    if len(arguments) != 1:
        sys.exit("usage: python -m callbacks.report OUTPUT_DIR")
    try:
        rebuild(arguments[0], wide_console())
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
