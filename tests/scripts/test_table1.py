"""scripts/table1.py and scripts/figure3a.py: a whole grid on the tiny model, continued, published, and refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from callbacks.predictions import FILE_NAME, read_predictions
from masw_lightning import MemoryLayout, attach_memory
from masw_lightning.adapter.backbone import Backbone, load_backbone, load_tokenizer
from masw_lightning.adapter.eagle_head import EagleHead
from masw_lightning.adapter.head_storage import head_config, save_head
from masw_lightning.data.longbench import PromptSource

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))  # as it is when a script is run

from benchkit import exact, grid, lineup

ROOT = Path(__file__).resolve().parents[2]
TINY = Backbone("configs/tiny/model", random_init=True)
SHORT, LONG = 96, 1900  # the rows lie between them: cut at the one, filled up to the other


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Memories that have learned nothing, kept as trained ones are."""
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for name, writer, ratio in (("slot 4x", "slot", 4), ("token 4x", "token", 4), ("token 8x", "token", 8)):
        backbone = Backbone(str(ROOT / TINY.path), random_init=True)
        memory = attach_memory(load_backbone(backbone), MemoryLayout(8, 8, ratio), writer)
        memory.save_pretrained(folder / name.replace(" ", "_"), trained_length=1024)
        found[name] = str(folder / name.replace(" ", "_"))
    return found


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An EAGLE head of the tiny target, untrained, as a method."""
    folder = tmp_path_factory.mktemp("head")
    target = load_backbone(Backbone(str(ROOT / TINY.path), random_init=True))
    torch.manual_seed(0)
    save_head(EagleHead(head_config(target)), target, folder)
    return {"class_path": "Eagle", "init_args": {"head": str(folder)}}


def write_grid(folder: Path, adapters: dict[str, str], **changes: Any) -> Path:
    masw = [{"class_path": "Masw", "init_args": {"name": n, "checkpoint": c}} for n, c in adapters.items()]
    content: dict[str, Any] = {
        "title": "A tiny table",
        "targets": [
            {
                "name": "tiny one",
                "backbone": str(ROOT / "configs/tiny/backbone.yaml"),
                "prefixes": [LONG, SHORT],
                "rows": 1,
                "methods": [{"class_path": "SelfSpeculative", "init_args": {"layers": 1}}],
            }
        ],
        "drafts": [{"name": "tiny", "backbone": None, "methods": masw}],
        "methods": [str(ROOT / "configs/draft/full_kv.yaml"), {"class_path": "SnapKV", "init_args": {"budget": 64}}],
        "sources": [{"path": "elsewhere/longbench.jsonl", "task": "auto"}],
        "decoding": {"num_draft_tokens": 3, "max_new_tokens": 10, "eos": False},
        "memory": {"sink": 8, "window": 8, "ratio": 4},
        "warmup_tokens": 16,
    }
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(content | changes), encoding="utf-8")
    return path


def arguments(config: Path, folder: Path) -> list[str]:
    return ["--config", str(config), "--data", "configs/tiny/data", "--out", str(folder / "out")]


def test_a_whole_grid_is_decoded_published_and_continued(tmp_path: Path, adapters, head, capsys) -> None:
    table1 = load("table1")
    methods = [head, {"class_path": "SelfSpeculative", "init_args": {"layers": 1}}]
    target = {"name": "tiny one", "prefixes": [LONG, SHORT], "rows": 1, "methods": methods}
    target["backbone"] = str(ROOT / "configs/tiny/backbone.yaml")
    config = write_grid(tmp_path, adapters, targets=[target])
    assert table1.main(arguments(config, tmp_path)) == 0, capsys.readouterr().err
    folder = tmp_path / "out" / "grid" / "tiny-one"
    records = read_predictions(folder)
    assert {r.prompt_tokens for r in records} == {SHORT, LONG}
    assert all(r.identical_to_autoregressive and r.new_tokens == 10 for r in records)
    assert {r.dataset for r in records} == {"qmsum", "gov_report", "multi_news"}

    held = json.loads((tmp_path / "out" / "grid.json").read_text())
    rows = {(r["prefix"], r["block"], r["method"]): r for r in held["rows"]}
    lines = ["8+8 4x: sinks + window", "8+8 4x: strided", "8+8 4x: SnapKV"]
    blocks: dict[str, list[str]] = {}
    for prefix, block, name in rows:
        if prefix == LONG:
            blocks.setdefault(block, []).append(name)
    assert blocks == {
        "baselines": ["autoregressive", "eagle", "self_first_1", "full_kv", "snapkv_64"],
        "8+8 4x": ["slot 4x", "token 4x", "8+8, no slots", *lines],
        "8+8 8x": ["token 8x", "8+8, no slots", *[line.replace("4x", "8x") for line in lines]],
    }
    many = MemoryLayout(8, 8, 4).num_entries(LONG)
    assert {rows[LONG, "8+8 4x", name]["entries"] for name in ["slot 4x", "token 4x", *lines]} == {many}
    assert (
        rows[LONG, "baselines", "self_first_1"]["entries"] == many
        and rows[LONG, "baselines", "eagle"]["entries"] is None
    )
    assert rows[LONG, "8+8 4x", "8+8, no slots"]["entries"] == 16
    assert (
        rows[LONG, "baselines", "snapkv_64"]["entries"] == 64 and rows[LONG, "baselines", "full_kv"]["entries"] == LONG
    )
    assert rows[LONG, "baselines", "full_kv"]["tokens_per_iteration"] > 2.9  # its own model, nine tokens in 3 forwards
    assert all(r["prompts"] == 3 and r["rougeL"] is not None and r["speedup"] for r in held["rows"])
    assert {"date", "device", "commit", "versions"} <= held["environment"].keys()
    page = (tmp_path / "out" / "grid.md").read_text()
    assert "--config grid.yaml" in page and str(tmp_path.parent) not in page
    assert "| 8+8 4x | slot 4x |" in page and "1,900 tokens, 3 prompts" in page and "grid.png" in page
    assert (tmp_path / "out" / "grid.png").read_bytes().startswith(b"\x89PNG")

    written = (folder / FILE_NAME).read_bytes()
    assert table1.main(arguments(config, tmp_path)) == 0
    assert (folder / FILE_NAME).read_bytes() == written  # nothing was decoded again
    (folder / FILE_NAME).write_bytes(written[:-200])  # killed while it wrote the last line
    assert table1.main(arguments(config, tmp_path)) == 0
    again = read_predictions(folder)
    assert [(r.id, r.method, r.tokens) for r in again] == [(r.id, r.method, r.tokens) for r in records]
    assert (folder / FILE_NAME).read_bytes()[: len(written) - 5000] == written[:-5000]

    decoding = {"num_draft_tokens": 2, "max_new_tokens": 10, "eos": False}
    changed = write_grid(tmp_path, adapters, targets=[target], decoding=decoding)
    capsys.readouterr()
    assert table1.main(arguments(changed, tmp_path)) == 2
    assert "num_draft_tokens: 3 -> 2" in capsys.readouterr().err


def test_two_drafts_name_their_rows_and_share_the_reference(tmp_path: Path, adapters) -> None:
    masw = [{"class_path": "Masw", "init_args": {"name": "masw", "checkpoint": adapters["token 4x"]}}]
    drafts = [
        {"name": "same", "backbone": None, "methods": masw},
        {"name": "other", "backbone": {"path": TINY.path, "random_init": True, "rope_factor": 2.0}},
    ]
    given = grid.read_grid(write_grid(tmp_path, adapters, drafts=drafts))
    models = {backbone: load_backbone(backbone) for backbone in (TINY, given.drafts[1].backbone)}
    line = lineup.line_up(given, given.targets[0], lambda backbone: models[backbone])
    names = [c.name for c in line.contenders]
    assert names[:4] == ["autoregressive", "self_first_1", "full_kv (same)", "snapkv_64 (same)"]
    assert names[-2:] == ["full_kv (other)", "snapkv_64 (other)"] and "8+8 4x: strided (same)" in names
    assert line.blocks["8+8 4x (same)"][0] == "masw (same)"
    assert line.drafts["full_kv (other)"]["rope_factor"] == 2.0
    line.detach()


def test_figure_3a_counts_accepted_tokens(tmp_path: Path, adapters) -> None:
    config = write_grid(tmp_path, {"token 4x": adapters["token 4x"]}, warmup_tokens=0)
    given = [*arguments(config, tmp_path), "--prefixes", "48,96", "--draft-tokens", "6"]
    assert load("figure3a").main(given) == 0
    held = json.loads((tmp_path / "out" / "grid.json").read_text())
    assert "autoregressive" not in {r["method"] for r in held["rows"]}
    for row in held["rows"]:
        assert 0 <= row["accepted_length"] <= 6
        assert row["accepted_length"] == pytest.approx(row["accepted"] / row["iterations"])
    assert {r["prefix"] for r in held["rows"]} == {48, 96}
    page = (tmp_path / "out" / "grid.md").read_text()
    assert "| method (prompts) | 48 (3) | 96 (3) |" in page and "K = 6" in page


def test_prompts_have_exactly_the_asked_length() -> None:
    sources = [PromptSource(path="configs/tiny/data/longbench.jsonl"), PromptSource(path="configs/tiny/data/book.txt")]
    tokenizer = load_tokenizer(TINY.path)
    whole = {p.id.partition("@")[0]: p for p in exact.Prompts(sources, tokenizer).prompts}
    found = exact.exact_prompts(sources, tokenizer, [LONG, SHORT], rows=1)
    assert [len(p.input_ids) for p in found] == [SHORT] * 4 + [LONG] * 4
    assert len({p.id for p in found}) == 8
    for prompt in found[4:7]:
        own = whole[prompt.id.partition("@")[0]].input_ids
        half = len(own) // 2
        assert len(own) < LONG
        assert torch.equal(prompt.input_ids[:half], own[:half]) and torch.equal(prompt.input_ids[-half:], own[-half:])
        assert prompt.references == whole[prompt.id.partition("@")[0]].references


def test_filling_takes_pieces_in_turn() -> None:
    ids, pieces = torch.tensor([1, 2, 3]), [torch.tensor([7]), torch.tensor([8, 9])]
    assert exact.fill_middle(ids, pieces, 8).tolist() == [1, 2, 7, 8, 9, 7, 8, 3]
    assert exact.fill_middle(ids, pieces, 3).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="no text to fill"):
        exact.fill_middle(ids, [torch.tensor([], dtype=torch.int64)], 4)


TARGET = {"name": "t", "backbone": {"path": "configs/tiny/model", "random_init": True}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"targets": [TARGET | {"prefixes": [2040]}]},
            "has 2040 tokens and 10 more are asked for",
        ),
        ({"targets": [TARGET | {"prefixes": []}]}, "prefixes=[]"),
        ({"targets": []}, "at least one"),
        ({"targets": [TARGET | {"prefixes": [64]}] * 2}, "a name of its own"),
        ({"colour": "red"}, "is no grid of a table"),
        ({"sources": "missing.yaml"}, "cannot read"),
        ({"methods": [{"class_path": "Guess"}]}, "is no grid of a table"),
        ({"methods": [{"class_path": "FullKV"}, {"class_path": "FullKV"}]}, "listed twice"),
        ({"drafts": [{"name": "x", "methods": [{"class_path": "Masw"}]}]}, "no trained memory"),
    ],
)
def test_a_mistake_is_one_sentence(changes: dict, sentence: str, tmp_path: Path, adapters, capsys) -> None:
    config = write_grid(tmp_path, {}, **changes)
    assert load("table1").main(arguments(config, tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith("table1: ") and sentence in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["cpu_smollm2", "figure3a_smollm2", "paper_gpu"])
def test_a_shipped_grid_is_read(name: str) -> None:
    given = grid.read_grid(ROOT / "configs" / "table1" / f"{name}.yaml", Path("elsewhere"))
    assert {Path(source.path or "").name for source in given.sources} == {"gov_report.jsonl", "qmsum.jsonl"}
    memories = [type(method).__name__ for draft in given.drafts for method in draft.methods]
    assert memories == ["Masw"] * (4 if name == "paper_gpu" else 6)
    assert [type(m).__name__ for m in given.targets[-1].methods] == ["Eagle", "Eagle3"]
    if name == "paper_gpu":
        assert [t.prefixes for t in given.targets] == [[8192, 16384, 24576, 32768]] * 2
        assert [d.name for d in given.drafts] == ["3B", "8B"] and "Not run on a GPU" in (given.remark or "")
    else:
        check_room(given)


def test_the_shipped_grid_of_16k_is_read() -> None:
    given = grid.read_grid(ROOT / "configs" / "table1" / "cpu_smollm2_16k.yaml", Path("elsewhere"))
    assert [target.prefixes for target in given.targets] == [[16384]]
    check_room(given)


def check_room(given: Any) -> None:
    for target in given.targets:
        assert max(target.prefixes) + given.limit(None) <= int(8192 * target.backbone.rope_factor)
