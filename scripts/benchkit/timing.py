"""Timers: interleaved repeats, so that a ratio is taken between runs that saw the same machine; memory peaks.

Times are wall seconds with the device brought to rest at both edges. Knows no models.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

Case = Callable[[], object]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Timing:
    """Seconds of one case, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    def scaled(self, factor: float) -> Timing:
        """Each time multiplied: per token instead of per run, say."""
        return Timing(tuple(s * factor for s in self.seconds))

    def record(self) -> dict[str, float | int]:
        """Median, extremes and count, in milliseconds."""
        ms = [1e3 * s for s in self.seconds]
        return {"median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms), "repeats": len(ms)}


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(case: Case, device: torch.device) -> float:
    """Wall seconds of one call."""
    synchronise(device)
    start = time.perf_counter()
    case()
    synchronise(device)
    return time.perf_counter() - start


def interleaved(
    cases: Mapping[str, Case],
    repeats: int,
    device: torch.device,
    warm: Mapping[str, Case] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Timing]:
    """Time all cases in turn, A B C A B C …, after one untimed round.

    Args:
        warm: what the untimed round runs instead, where a full run would be long.
    """
    for case in (cases if warm is None else warm).values():
        case()
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats):
        for name, case in cases.items():
            taken[name].append(seconds_of(case, device))
            if taken[name][-1] > 5:
                say(f"{name}, repeat {number + 1} of {repeats}: {taken[name][-1]:.1f} s")
    return {name: Timing(tuple(times)) for name, times in taken.items()}


def fit_line(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Least squares of `y = a + b x`: intercept, slope, and the share of variance explained.

    Raises:
        ValueError: fewer than two different x.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError("a line needs two different x")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    slope, intercept = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(ys)
    total = sum((y - mean) ** 2 for y in ys)
    left = sum((y - intercept - slope * x) ** 2 for x, y in points)
    return intercept, slope, 1.0 - left / total if total else 1.0


def peak_of(case: Case, device: torch.device) -> tuple[int, object]:
    """Bytes that a call needed at its peak beyond what was held before it, and what it returned."""
    gc.collect()
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = case()
        synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before, result
    if not _resettable():
        before = _kib_of_process()
        result = case()
        return 1024 * max(0, _kib_of_process() - before), result
    _return_freed_memory()
    CLEAR.write_text("5")  # the high-water mark starts again from what is resident now
    before = _status("VmRSS")
    result = case()
    return 1024 * max(0, _status("VmHWM") - before), result


def peak_source(device: torch.device) -> str:
    """How `peak_of` measures here, in words."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated beyond what was allocated before"
    if _resettable():
        return "resident-set high-water mark of the process (reset before each case) beyond what was resident before"
    return "growth of the process's resident-set high-water mark: a lower bound after the first case of a run"


def _resettable() -> bool:
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _return_freed_memory() -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # else memory freed earlier would hide what a case needs


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1])


def _kib_of_process() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
