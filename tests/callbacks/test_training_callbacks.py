"""Plain progress lines and the adapter's export, in a real fit."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from callbacks.adapter_export import AdapterExport
from callbacks.last_checkpoint import LastCheckpoint
from callbacks.progress_lines import ProgressLines
from masw_lightning import MemoryLayout, load_memory
from masw_lightning.adapter.backbone import Backbone, load_backbone
from masw_lightning.errors import UserError
from masw_lightning.modules import AdapterPretraining, ValidationConfig

BACKBONE = Backbone(str(Path(__file__).parents[2] / "configs" / "tiny" / "model"), random_init=True)


def batches(count: int) -> DataLoader[Any]:
    ids = torch.randint(1, 320, (count, 1, 24), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row.clone(), "source": ["here"]} for row in ids]
    return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def fit(path: Path, steps: int, *callbacks: L.Callback, **settings: Any) -> AdapterPretraining:
    built = AdapterPretraining(BACKBONE, MemoryLayout(4, 6, 3), validation=ValidationConfig(prompts=0))
    trainer = L.Trainer(
        **{"max_steps": steps, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, **settings},
        default_root_dir=path,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(built, batches(12), batches(2))
    return built


@pytest.mark.filterwarnings("ignore")
def test_lines_every_few_steps_and_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, 5, ProgressLines(every_n_steps=2), val_check_interval=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if "train/loss" in line] == ["step 2/5", "step 4/5", "step 5/5"]
    assert [line.split("  ")[0] for line in lines if "val/loss" in line] == ["step 3"]
    assert "left" in lines[0] and "train/tokens_per_s" in lines[0]


@pytest.mark.filterwarnings("ignore")
def test_one_line_per_optimizer_step_while_accumulating(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, 3, ProgressLines(every_n_steps=1), accumulate_grad_batches=4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if "train/loss" in line] == ["step 1/3", "step 2/3", "step 3/3"]


@pytest.mark.filterwarnings("ignore")
def test_the_adapter_is_exported_when_training_ends(tmp_path: Path) -> None:
    built = fit(tmp_path, 2, AdapterExport(), enable_progress_bar=False)
    loaded = load_memory(load_backbone(BACKBONE), tmp_path / "adapter")
    assert loaded.trained_length == 24
    found, expected = loaded.adapter_state_dict(), built.draft.adapter_state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in found)


@pytest.mark.filterwarnings("ignore")
def test_the_adapter_is_exported_in_half_the_bytes(tmp_path: Path) -> None:
    built = fit(tmp_path, 2, AdapterExport("half", "bfloat16"), enable_progress_bar=False)
    loaded = load_memory(load_backbone(BACKBONE), tmp_path / "half", torch.float32)
    found, expected = loaded.adapter_state_dict(), built.draft.adapter_state_dict()
    assert all(torch.equal(found[k], expected[k].bfloat16().float()) for k in expected)
    assert all(x.dtype == torch.bfloat16 for x in load_file(tmp_path / "half" / "masw.safetensors").values())


@pytest.mark.filterwarnings("ignore")
def test_the_last_checkpoint_is_the_last(tmp_path: Path) -> None:
    fit(tmp_path, 5, LastCheckpoint(every_n_steps=2), enable_progress_bar=False, enable_checkpointing=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 5


@pytest.mark.filterwarnings("ignore")
def test_a_run_out_of_time_keeps_what_it_learned(tmp_path: Path) -> None:
    settings = {"max_time": {"milliseconds": 1}, "enable_progress_bar": False, "enable_checkpointing": True}
    fit(tmp_path, 10_000, LastCheckpoint(), **settings)
    assert 1 <= torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] < 10_000


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="every_n_steps=0"):
        LastCheckpoint(every_n_steps=0)
