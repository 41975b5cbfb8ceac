"""Memory that a training step frees goes back to the system between layers, on a CPU."""

import platform
import subprocess
import sys

import pytest
import torch

from masw_lightning.modules import allocator
from masw_lightning.modules.modes import checkpoint_activations

HOLES = """
import sys, torch
from pathlib import Path
from torch import nn
from masw_lightning.modules.allocator import trim_between_layers

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

model = nn.Sequential(nn.Identity())
trim_between_layers(model, list(model), sys.argv[1] == "returned")
torch.ones(7 << 20)  # 28 MiB: freeing it raises the size up to which glibc keeps blocks
before = resident()
blocks = [torch.ones(1 << 19) for _ in range(200)]  # 2 MiB each
kept = blocks[::20]
del blocks
model(kept[0])
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_holes_between_kept_tensors_are_returned():
    def left(mode):
        run = subprocess.run([sys.executable, "-c", HOLES, mode], capture_output=True, text=True, check=True)
        return float(run.stdout)

    assert left("returned") < 60  # ten tensors of 2 MiB are kept
    assert left("held") > 300


def test_only_training_is_touched_and_nothing_is_left_behind(build_model, monkeypatch):
    model, calls = build_model(num_hidden_layers=7), []

    class Library:
        malloc_trim = calls.append

    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Library)
    ids = torch.zeros(1, 4, dtype=torch.long)
    checkpoint_activations(model, True)
    with torch.no_grad():
        model(ids)
    assert not calls
    model(ids).logits.sum().backward()
    assert len(calls) == 6  # layers 0, 3 and 6, forward and replayed
    checkpoint_activations(model, False)
    model(ids)
    assert len(calls) == 6
    assert not any(module._forward_pre_hooks for module in model.modules())
