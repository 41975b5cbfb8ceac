"""The whole prediction path on a tiny random model: a real Trainer, module, data, drafts, files and report."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.methods import (
    Autoregressive,
    FullKV,
    Masw,
    Method,
    SlidingWindow,
    attach_checkpoint,
    weights_fingerprint,
)
from callbacks.predictions import FILE_NAME, Prediction, PredictionFile, read_predictions
from callbacks.speculative_decoding import SpeculativeDecoding
from callbacks.trial import Decoding, Trial, first_difference, margin_after
from masw_lightning.adapter.backbone import Backbone, load_backbone
from masw_lightning.data.datamodule import LongContextDataModule
from masw_lightning.data.longbench import PromptSource
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout
from masw_lightning.modules import AdapterPretraining

ROOT = Path(__file__).resolve().parents[2]
TINY = Backbone(str(ROOT / "configs" / "tiny" / "model"), random_init=True)
LAYOUT = MemoryLayout(sink=4, window=8, ratio=4)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"text": f"what the draft guesses, the target words again: {i} " * 12} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Predict = Callable[..., list[Prediction]]


@pytest.fixture
def predict(tmp_path: Path, prompts: Path) -> Predict:
    """Runs a Trainer's predict and returns what lies in its output folder."""

    def run(
        methods: list[Method] | None = None,
        model: AdapterPretraining | None = None,
        logger: TensorBoardLogger | bool = False,
        ckpt_path: str | None = None,
        budgets: list[int] | None = None,
        limit: int | None = None,
        **settings: object,
    ) -> list[Prediction]:
        knobs = {"output_dir": str(tmp_path / "out"), "max_new_tokens": 12, "warmup_tokens": 16} | settings
        if methods is None:
            methods = [FullKV(), SlidingWindow(match="shape"), Masw(allow_untrained=True)]
        trainer = L.Trainer(
            accelerator="cpu",
            callbacks=[SpeculativeDecoding(methods, **knobs)],  # type: ignore[arg-type]
            logger=logger,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            limit_predict_batches=limit,
        )
        data = LongContextDataModule(
            predict=[PromptSource(path=str(prompts), task="continue")], budgets=budgets or [24, 48]
        )
        model = model or AdapterPretraining(TINY, LAYOUT)
        trainer.predict(model, data, return_predictions=False, ckpt_path=ckpt_path)
        return read_predictions(str(knobs["output_dir"]))

    return run


# ---- the whole path ----------------------------------------------------------------------------------------------
def test_every_prompt_with_every_method(predict: Predict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = TensorBoardLogger(str(tmp_path / "tb"), name="", version="")
    records = predict(logger=logger)
    names = ["autoregressive", "full_kv", "window_equal", "masw (untrained)"]
    ids = [f"prompts/{row}@{budget}" for row in range(2) for budget in (24, 48)]
    assert [(r.id, r.method) for r in records] == [(i, n) for i in ids for n in names]
    for record in records:
        assert record.identical_to_autoregressive is True
        assert record.first_difference is record.margin_at_difference is None
        assert record.prompt_tokens == int(record.id.partition("@")[2])
        assert record.new_tokens == len(record.tokens) <= 12
        assert record.tokens_per_iteration == pytest.approx((record.new_tokens - 1) / record.iterations)
        assert record.tokens_per_s == pytest.approx((record.new_tokens - 1) / record.decode_s)
        assert record.seconds["total"] == pytest.approx(record.end_to_end_s)
        assert record.rougeL is not None  # "continue" prompts refer to the text that follows
        assert record.target_kv_bytes > 0
        assert record.config["method"]["class"]  # type: ignore[index,call-overload]
        if record.method == "autoregressive":
            assert (record.draft_kv_bytes, record.tokens_per_iteration, record.accepted) == (0, 1.0, [])
        else:
            assert record.draft_kv_bytes > 0
            assert len(record.accepted) == record.iterations
    # one prefill of the target per prompt, counted for each of its methods
    assert len({r.seconds["prefill_target"] for r in records}) == len(ids)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["methods"]) == names
    assert summary["buckets"] == {"32": 32, "64": 64}  # 24 and 48 by ratio
    assert summary["methods"]["full_kv"]["overall"]["identical"] is True
    assert summary["methods"]["full_kv"]["overall"]["tokens_per_iteration"] > 3
    assert summary["run"]["config"]["decoding"]["num_draft_tokens"] == 5
    assert "full_kv" in (tmp_path / "out" / "summary.md").read_text()
    tags = EventAccumulator(str(tmp_path / "tb")).Reload().Tags()
    assert "predict/tokens_per_iteration/full_kv" in tags["scalars"]
    assert "predict/speedup" in tags["images"]
    out = capsys.readouterr().out
    assert "[16/16] prompts/1@48" in out
    assert "Tok./Iter" in out


def test_nothing_is_decoded_twice_and_a_new_method_joins(
    predict: Predict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = predict([FullKV()])
    lines = (tmp_path / "out" / FILE_NAME).read_text()
    assert predict([FullKV()]) == first
    assert (tmp_path / "out" / FILE_NAME).read_text() == lines
    capsys.readouterr()
    more = predict([FullKV(), SlidingWindow(window=8)])
    assert more[: len(first)] == first
    assert [r.method for r in more[len(first) :]] == ["window_8"] * 4
    assert "full_kv:" not in capsys.readouterr().out
    assert "window_8" in json.loads((tmp_path / "out" / "summary.json").read_text())["methods"]


def test_killed_in_the_middle_then_continued(
    predict: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = predict(output_dir=str(tmp_path / "unbroken"))
    original, lines = PredictionFile.append, []

    def append(self: PredictionFile, record: Prediction) -> None:
        if len(lines) == 6:
            raise KeyboardInterrupt
        lines.append(record)
        original(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(PredictionFile, "append", append)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            predict()
    assert len(read_predictions(tmp_path / "out")) == 6
    partial = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert partial["complete"] is False
    assert "Incomplete" in (tmp_path / "out" / "summary.md").read_text()
    file = tmp_path / "out" / FILE_NAME
    file.write_bytes(file.read_bytes()[:-40])  # and the machine went down while the sixth line was written
    capsys.readouterr()
    records = predict()
    out = capsys.readouterr().out
    assert "cut off in the middle" in out
    assert "5 predictions are there already" in out
    assert [(r.id, r.method, r.tokens) for r in records] == [(r.id, r.method, r.tokens) for r in whole]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["complete"] is True


def test_other_settings_in_one_folder_are_refused(predict: Predict, tmp_path: Path) -> None:
    predict([FullKV()], limit=1)
    before = (tmp_path / "out" / FILE_NAME).read_bytes()
    with pytest.raises(UserError, match=r"decoding\.num_draft_tokens: 5 -> 3.*another output_dir"):
        predict([FullKV()], num_draft_tokens=3)
    with pytest.raises(UserError, match=r"method 'full_kv'.*method\.window: null -> 4"):
        predict([SlidingWindow(window=4, name="full_kv")])
    assert (tmp_path / "out" / FILE_NAME).read_bytes() == before


def test_another_prompt_under_a_known_id_is_refused(predict: Predict, prompts: Path) -> None:
    predict([FullKV()], limit=1)
    prompts.write_text(prompts.read_text().replace("draft", "drift"))
    with pytest.raises(UserError, match=r"prompt 'prompts/0@24' has other tokens"):
        predict([FullKV()], limit=1)


def test_own_prefill_per_method(predict: Predict) -> None:
    records = predict([FullKV()], limit=1, share_target_prefill=False)
    assert len({r.seconds["prefill_target"] for r in records}) == 2
    assert all(r.identical_to_autoregressive for r in records)


def test_sampling_compares_nothing_and_continues_as_unbroken(predict: Predict, tmp_path: Path) -> None:
    records = predict([FullKV()], temperature=1.0, top_p=0.9, seed=3)
    assert all(r.identical_to_autoregressive is None for r in records)
    again = predict([FullKV()], temperature=1.0, top_p=0.9, seed=3, output_dir=str(tmp_path / "again"))
    assert [r.tokens for r in again] == [r.tokens for r in records]
    assert "| – |" in (tmp_path / "out" / "summary.md").read_text()


def test_lengths_and_ends(predict: Predict, tmp_path: Path) -> None:
    assert {r.new_tokens for r in predict([], limit=1, max_new_tokens=1)} == {1}
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "autoregressive | – | –" in text
    tokens = predict([], limit=1, output_dir=str(tmp_path / "b"))[0].tokens
    stop = tokens[5]
    stopped = predict([FullKV()], limit=1, eos=[stop], output_dir=str(tmp_path / "c"))
    assert {tuple(r.tokens) for r in stopped} == {tuple(tokens[: tokens.index(stop) + 1])}


# ---- models ------------------------------------------------------------------------------------------------------
@pytest.fixture
def other_model(tmp_path: Path, build_model: Callable[..., torch.nn.Module]) -> Backbone:
    """Another model of the same tokenizer, its vocabulary padded, with random weights of its own."""
    path = tmp_path / "other"
    build_model(seed=7, vocab_size=352).save_pretrained(path)  # type: ignore[operator]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TINY.path) / name, path)
    return Backbone(str(path))


def test_a_target_of_its_own_and_a_draft_that_never_fits(predict: Predict, other_model: Backbone) -> None:
    with pytest.warns(UserWarning, match="drafted tokens were accepted") as warned:
        records = predict([FullKV(), SlidingWindow(window=8)], target=other_model, max_new_tokens=110, limit=1)
    assert all(r.identical_to_autoregressive for r in records)
    about = [str(w.message) for w in warned if "drafted tokens were accepted" in str(w.message)]
    assert len(about) == 2  # once per method
    assert about[0].startswith("method 'full_kv': ")
    assert all(part in about[0] for part in (other_model.path, TINY.path, "tokenizer"))


def test_a_draft_of_its_own_accepts_as_the_target(predict: Predict, other_model: Backbone) -> None:
    records = predict([FullKV(draft=other_model), FullKV(name="module")], target=other_model, limit=1)
    by_method = {r.method: r for r in records}
    assert sum(by_method["full_kv"].accepted) > sum(by_method["module"].accepted)


def test_another_tokenizer_is_refused(predict: Predict, other_model: Backbone) -> None:
    file = Path(other_model.path) / "tokenizer.json"
    file.write_text(file.read_text().replace('"he": 258', '"he": 259').replace('"\u0120the": 259', '"\u0120the": 258'))
    with pytest.raises(UserError, match="different tokenizers"):
        predict([FullKV()], target=other_model)


def trained(path: Path, writer: str, steps: bool = True) -> tuple[AdapterPretraining, Path]:
    """A module with nudged weights, as if trained, and its checkpoint in the form of a training run."""
    from masw_lightning.modules.settings import AdapterConfig

    module = AdapterPretraining(TINY, LAYOUT, AdapterConfig(writer=writer))  # type: ignore[arg-type]
    module.configure_model()
    with torch.no_grad():
        for parameter in module.draft.adapter_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    if steps:
        module._set_trained_length(16)
    checkpoint: dict[str, object] = {"state_dict": module.state_dict(), "pytorch-lightning_version": L.__version__}
    module.on_save_checkpoint(checkpoint)  # type: ignore[arg-type]
    torch.save(checkpoint, path)
    return module, path


def test_several_memories_on_one_backbone(predict: Predict, tmp_path: Path) -> None:
    slot, slot_path = trained(tmp_path / "slot.ckpt", "slot")
    token, token_path = trained(tmp_path / "token.ckpt", "token")
    token.draft.save_pretrained(tmp_path / "folder", trained_length=16)
    module = AdapterPretraining(TINY, LAYOUT)
    methods: list[Method] = [
        Masw(str(slot_path), name="slot writer"),
        Masw(str(token_path), name="token writer"),
        Masw(str(tmp_path / "folder"), name="token writer, exported"),
    ]
    with pytest.warns(UserWarning, match="was trained on texts of 16 tokens and now reads 48") as warned:
        records = predict(methods, module)
    assert len([w for w in warned if "was trained on texts" in str(w.message)]) == 3
    assert all(r.identical_to_autoregressive for r in records)
    by_method = {r.method: r.config["method"]["weights"] for r in records if r.method != "autoregressive"}  # type: ignore[index,call-overload]
    assert by_method["token writer"] == by_method["token writer, exported"] == weights_fingerprint(token.draft)
    assert by_method["slot writer"] == weights_fingerprint(slot.draft)
    accepted = {m: [r.accepted for r in records if r.method == m] for m in by_method}
    assert accepted["token writer"] == accepted["token writer, exported"]
    # every memory was taken off again: the module's own is all that is left
    module.draft.detach()
    assert not module.draft.model.model.layers[0].self_attn.k_proj._forward_hooks

    # the module's own weights by --ckpt_path give the same row
    alone = predict(
        [Masw()], AdapterPretraining(TINY, LAYOUT), ckpt_path=str(slot_path), output_dir=str(tmp_path / "b")
    )
    own = [r for r in alone if r.method == "masw"]
    assert [r.accepted for r in own] == accepted["slot writer"]
    assert own[0].config["method"]["checkpoint"] == str(slot_path)  # type: ignore[index,call-overload]


def test_a_moved_checkpoint_continues_and_a_retrained_one_does_not(predict: Predict, tmp_path: Path) -> None:
    module, path = trained(tmp_path / "a.ckpt", "slot")
    predict([Masw(str(path))], limit=1)
    moved = path.rename(tmp_path / "moved.ckpt")
    predict([Masw(str(moved))], limit=1)
    with torch.no_grad():
        module.draft.adapter_parameters()[0].mul_(1.01)
    module.draft.save_pretrained(tmp_path / "moved")
    with pytest.raises(UserError, match=r"method\.weights"):
        predict([Masw(str(tmp_path / "moved"))], limit=1)


def test_an_untrained_memory_is_never_shown_as_masw(predict: Predict, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'masw' has no trained memory: give --ckpt_path"):
        predict([Masw()])
    _, path = trained(tmp_path / "never.ckpt", "slot", steps=False)
    with pytest.raises(UserError, match="no trained memory"):
        predict([Masw()], ckpt_path=str(path))
    assert not (tmp_path / "out" / FILE_NAME).exists()


def test_what_was_attached_comes_off_after_an_error(predict: Predict, tmp_path: Path) -> None:
    _, path = trained(tmp_path / "a.ckpt", "slot")
    module = AdapterPretraining(TINY, LAYOUT)
    with pytest.raises(UserError, match="two methods are named"):
        predict([Masw(str(path)), Masw(str(path))], module)
    attention = module.draft.model.model.layers[0].self_attn
    module.draft.detach()
    assert not attention.k_proj._forward_hooks


def test_a_checkpoint_of_another_base_leaves_no_trace(other_model: Backbone, tmp_path: Path) -> None:
    _, path = trained(tmp_path / "a.ckpt", "slot")
    model = load_backbone(other_model)
    with pytest.raises(UserError, match="was trained for"):
        attach_checkpoint(model, str(path))
    assert not model.model.layers[0].self_attn.k_proj._forward_hooks
    with pytest.raises(UserError, match="no checkpoint at"):
        attach_checkpoint(model, str(tmp_path / "missing.ckpt"))


# ---- bad input ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"buckets": []}, "buckets"),
        ({"num_draft_tokens": 16}, "rollback"),
        ({"max_new_tokens": 2001}, "prompts/0@48 has 48 tokens and 2001 more"),
        ({"methods": [FullKV(), FullKV()]}, "two methods are named 'full_kv'"),
    ],
)
def test_bad_settings_are_one_sentence_before_anything_is_decoded(
    predict: Predict, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        predict(**settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / FILE_NAME).exists()


def test_a_folder_that_cannot_be_written_stops_before_the_model_is_loaded(predict: Predict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    module = AdapterPretraining(TINY, LAYOUT)
    with pytest.raises(UserError, match="cannot be written"):
        predict(model=module, output_dir=str(tmp_path / "file" / "below"))
    assert not hasattr(module, "draft")


def test_a_module_without_a_memory_is_refused(tmp_path: Path) -> None:
    class Plain(L.LightningModule):
        def predict_dataloader(self) -> list[int]:
            return [1]

        def predict_step(self, batch: int) -> None:
            raise AssertionError("reached the first batch")

    callback = SpeculativeDecoding([], output_dir=str(tmp_path / "out"))
    trainer = L.Trainer(accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match="Plain has no draft with a memory"):
        trainer.predict(Plain())


def test_a_broken_file_is_named(predict: Predict, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / FILE_NAME).write_text("{}\n{}\n")
    with pytest.raises(UserError, match=r"predictions\.jsonl, line 1: not a prediction"):
        predict([])


# ---- comparing ---------------------------------------------------------------------------------------------------
def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2


def test_the_margin_is_the_targets_own_at_the_first_difference(predict: Predict) -> None:
    reference = predict([], limit=1)[0]
    target = load_backbone(TINY)
    prompt_ids = torch.randint(1, 300, (1, 20), generator=torch.Generator().manual_seed(0))
    trial = Trial(target, None, Decoding())  # type: ignore[arg-type]
    from callbacks.trial import Prompt

    prompt = Prompt("p", "d", prompt_ids, 4)
    tokens = [5, 6, 7, 8]
    forced = [5, 6, 9, 8]
    identical, where, margin = trial.compare(prompt, forced, replace(reference, tokens=tokens))
    assert (identical, where) == (False, 2)
    with torch.no_grad():
        logits = target(torch.cat((prompt_ids, torch.tensor([[5, 6]])), 1)).logits[0, -1]
    assert margin == pytest.approx(float(logits.sort().values[-1] - logits.sort().values[-2]), abs=1e-5)
    assert margin_after(target, prompt_ids, []) > 0
    assert trial.compare(prompt, tokens, replace(reference, tokens=tokens)) == (True, None, None)
    assert trial.compare(prompt, tokens, None) == (True, None, None)


def test_the_reference_keeps_its_name_and_place(predict: Predict) -> None:
    records = predict([FullKV(), Autoregressive()], limit=1)
    assert [r.method for r in records] == ["autoregressive", "full_kv"]
