"""Three figures against prefix length: tokens per iteration, speedup and draft memory.

Draws a `Summary`; knows no records and no files. Figures are made without pyplot, so nothing global is touched and no
display is needed.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from callbacks.predictions import REFERENCE
from callbacks.summary import Summary


def draw(summary: Summary) -> dict[str, Figure]:
    """Figures by name: `tokens_per_iteration`, `speedup`, `draft_memory` (the last two without the reference)."""
    return {
        "tokens_per_iteration": _figure(
            summary, {"tokens_per_iteration": "-"}, "tokens per target forward", "Tokens per iteration"
        ),
        "speedup": _figure(
            summary,
            {"speedup": "-", "speedup_end_to_end": ":"},
            "times autoregressive",
            "Speedup: decoding (solid), end to end with prefill (dotted)",
            baseline=1.0,
        ),
        "draft_memory": _figure(summary, {"draft_kv_mib": "-"}, "MiB", "Draft KV memory"),
    }


def points(summary: Summary, method: str, key: str) -> list[tuple[int, float]]:
    """`(prefix length, value)` of one method, where there is a value."""
    buckets = summary["methods"][method]["buckets"]
    found = [(summary["buckets"][label], row.get(key)) for label, row in buckets.items()]
    return [(size, float(value)) for size, value in found if isinstance(value, int | float)]


def _figure(summary: Summary, keys: dict[str, str], unit: str, title: str, baseline: float | None = None) -> Figure:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes: Axes = figure.add_subplot()
    methods = [m for m in summary["methods"] if m != REFERENCE]
    for colour, method in enumerate(methods):
        for key, style in keys.items():
            xy = points(summary, method, key)
            if xy:
                label = method if style == "-" else None
                axes.plot(*zip(*xy), style, marker="o", markersize=4, color=f"C{colour % 10}", label=label)
    if baseline is not None:
        axes.axhline(baseline, color="0.6", linewidth=1, zorder=0)
    sizes = sorted(summary["buckets"].values())
    if sizes:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [label for label, _ in sorted(summary["buckets"].items(), key=lambda item: item[1])])
        axes.minorticks_off()
    axes.set(xlabel="prompt tokens", ylabel=unit, title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure
