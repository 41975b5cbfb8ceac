"""Freed tensors go back to the system while training on a CPU."""

import platform
import subprocess
import sys

import pytest

HOLES = """
import sys, torch
from pathlib import Path
from masw_lightning.modules.allocator import return_freed_blocks

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

if sys.argv[1] == "returned":
    assert return_freed_blocks()
torch.ones(7 << 20)  # 28 MiB: freeing it raises glibc's own limit
before = resident()
blocks = [torch.ones(1 << 19) for _ in range(200)]  # 2 MiB each
kept = blocks[::20]
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_holes_between_kept_tensors_are_returned():
    def left(mode):
        run = subprocess.run([sys.executable, "-c", HOLES, mode], capture_output=True, text=True, check=True)
        return float(run.stdout)

    assert left("returned") < 40  # ten tensors of 2 MiB are kept
    assert left("held") > 300
