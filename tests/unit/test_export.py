"""Weights of a run as a folder for other programs: equal logits there, which checkpoint is taken, and what is in memory."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small import VOCAB, plain_model
from torch import Tensor
from weight_folders import config_from, small_weights, write_checkpoint, write_folder

from diloco import cli, export
from diloco.saved_weights import SavedWeights, open_saved
from islands.config_file import ConfigError
from islands.huggingface import open_weights
from islands.initialize import initialize
from islands.island import meta_model
from islands.models.llama import hugging_face_name

MB = 10**6


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of two islands at steps 5 and 7. All anchors and own weights differ by a factor."""
    config, weights = small_weights(pad_vocab_to_multiple_of=4)
    for step, slot, factor in ((5, 0, 1.0), (7, 0, 2.0), (5, 1, 3.0), (7, 1, 4.0)):
        own = {name: weight * factor for name, weight in weights.items()}
        anchor = {name: weight * factor * 10 for name, weight in weights.items()}
        write_checkpoint(tmp_path / "run", config, own, anchor, step, slot)
    return tmp_path / "run"


def factor_of(folder: Path) -> float:
    """By how much the weights in an exported folder are larger than those that the run was made with."""
    _, weights = small_weights(pad_vocab_to_multiple_of=4)
    found = load_file(folder / "model.safetensors")["model.norm.weight"] / weights["norm.weight"]
    assert found.std() < 1e-4
    return round(float(found[0]), 3)


@pytest.mark.parametrize(
    "keys",
    [
        dict(),
        dict(tied_embeddings=True, pad_vocab_to_multiple_of=8),
        dict(num_kv_heads=1, rope_theta=70.0, norm_eps=1e-4, rope_scaling=dict(type="linear", factor=4.0)),
        dict(rope_scaling=dict(type="llama3", factor=8.0, original_max_position_embeddings=16)),
    ],
    ids=["plain", "tied and padded", "linear", "llama3"],
)
@torch.no_grad()
def test_transformers_loads_it_and_has_the_same_logits(tmp_path: Path, keys: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed; the extra 'test' has it")
    config, weights = small_weights(**keys)
    write_checkpoint(tmp_path, config, weights, anchor=None)
    folder = export.export(open_saved(tmp_path), tmp_path / "out", shard_bytes=40_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(theirs, transformers.LlamaForCausalLM)
    assert not any(found[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = plain_model(config)
    for name, parameter in ours.named_parameters():
        parameter.copy_(weights[name])
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = ours(ids)[..., :VOCAB]
    assert expected.std() > 0.01
    torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=1e-5)
    assert theirs.generation_config.eos_token_id is None  # a byte 2 ends nothing


def test_what_went_out_comes_in_again(tmp_path: Path) -> None:
    config, weights = small_weights(pad_vocab_to_multiple_of=4)
    write_checkpoint(tmp_path, config, weights, anchor=None)
    export.export(open_saved(tmp_path), tmp_path / "out", shard_bytes=40_000)
    again = config_from(tmp_path / "out")
    model = meta_model(again)
    initialize([model], torch.device("cpu"), torch.float32, seed=0, weights=open_weights(again.model, model))
    assert all(torch.equal(p, weights[name][: len(p)]) for name, p in model.named_parameters())
    assert model.embed_tokens.weight.shape[0] == VOCAB


@pytest.mark.parametrize(
    ("chosen", "factor", "target"),
    [
        ([], 20, "step-7"),
        (["--weights", "own"], 2, "step-7"),
        (["--island", "1"], 40, "step-7"),
        (["--step", "5", "--island", "1", "--weights", "own"], 3, "step-5"),
    ],
)
def test_which_weights_are_written(run: Path, capsys: pytest.CaptureFixture, chosen: list[str], factor: float, target: str) -> None:
    assert cli.main(["export", str(run), *chosen]) == 0
    folder = run / "export" / target
    assert factor_of(folder) == factor
    printed = capsys.readouterr().out
    assert f"wrote {folder}: " in printed and f"AutoModelForCausalLM.from_pretrained('{folder}')" in printed
    assert sorted(path.name for path in folder.parent.iterdir()) == [target]  # nothing else is left there
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {(folder / "config.json").stat().st_mode & 0o777}


def test_a_damaged_checkpoint_is_told_and_passed_over(run: Path, capsys: pytest.CaptureFixture) -> None:
    damaged = next((run / "checkpoints/step-00000007/island-0").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert cli.main(["export", str(run)]) == 0
    assert f"passed over a checkpoint: {damaged}" in capsys.readouterr().err
    assert factor_of(run / "export/step-7") == 40  # the other island's


def test_a_run_that_was_moved_and_one_whose_checkpoints_are_elsewhere(run: Path, tmp_path: Path) -> None:
    moved = run.rename(tmp_path / "elsewhere")
    assert open_saved(moved).step == 7
    (tmp_path / "run").mkdir()
    (moved / "checkpoints").rename(tmp_path / "disk")
    text = f"run: {{name: x}}\nmodel: {{}}\ncheckpoint: {{dir: {tmp_path / 'disk'}}}\nouter: {{}}\n"
    (tmp_path / "run/config.resolved.yaml").write_text(text)
    assert open_saved(tmp_path / "run").folder == tmp_path / "disk/step-00000007/island-0"


def test_an_island_that_trained_alone_has_no_anchor(tmp_path: Path) -> None:
    config, weights = small_weights()
    write_checkpoint(tmp_path, config, weights, anchor=None)
    told: list[str] = []
    assert open_saved(tmp_path, tell=told.append).source == "own"
    assert told == ["the island trained alone and has no anchor: taking its own weights"]
    with pytest.raises(ConfigError, match="has no anchor, because its island trained alone. Take its own weights"):
        open_saved(tmp_path, "anchor")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step", "6"], "there is no whole checkpoint of step 6 in"),
        (["--island", "2", "--step", "7"], "of island 2 of step 7"),
        (["--step", "6"], "there are step-00000007/island-0, step-00000007/island-1, step-00000005/island-0"),
        (["--out", "/proc/there"], "/proc/there can't be written"),
    ],
)
def test_refusals(run: Path, capsys: pytest.CaptureFixture, arguments: list[str], told: str) -> None:
    assert cli.main(["export", str(run), *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.out == ""


def test_an_existing_folder_stays_as_it_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine").mkdir()
    assert cli.main(["export", str(run), "--out", str(tmp_path / "mine")]) == 2
    assert "exists already, and stays as it is" in capsys.readouterr().err
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_failure_amid_writing_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = SavedWeights.read
    monkeypatch.setattr(SavedWeights, "read", lambda saved, name: _full_disk() if name == "norm.weight" else read(saved, name))
    with pytest.raises(ConfigError, match="can't be written: .*No space left"):
        export.export(open_saved(run), run / "export/out", shard_bytes=MB)
    assert list((run / "export").iterdir()) == []


def _full_disk() -> Tensor:
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_its_run_removes_meanwhile(run: Path) -> None:
    saved = open_saved(run, tell=lambda line: None)
    first, second, *_ = saved.shapes
    saved.read(first)
    shutil.rmtree(saved.folder)
    with pytest.raises(ConfigError, match=f"{saved.folder.name} was removed while it was being read: .* Do it again"):
        saved.read(second)


def test_checkpoints_of_another_model_than_they_say(tmp_path: Path) -> None:
    config, weights = small_weights()
    del weights["norm.weight"]
    weights["lm_head.weight"] = weights["lm_head.weight"][1:].clone()
    write_checkpoint(tmp_path, config, weights, anchor=None)
    saved = open_saved(tmp_path)
    with pytest.raises(ConfigError, match=r"has nothing for model.norm.weight, and the model of its configuration has \(32,\)"):
        saved.read("norm.weight")
    with pytest.raises(ConfigError, match=r"has \(256, 32\) for model.lm_head.weight"):
        saved.read("lm_head.weight")


# Shards.


def shard_sizes(folder: Path) -> dict[str, int]:
    """Bytes of tensors in each file."""
    return {path.name: sum(tensor.nbytes for tensor in load_file(path).values()) for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_shards_are_as_large_as_asked_and_the_index_finds_all(tmp_path: Path, dtype: export.Dtype) -> None:
    config, weights = small_weights()
    write_checkpoint(tmp_path, config, weights, anchor=None)
    most = 40_000
    folder = export.export(open_saved(tmp_path), tmp_path / "out", most, dtype)
    sizes, index = shard_sizes(folder), json.loads((folder / "model.safetensors.index.json").read_text())
    assert max(sizes.values()) <= most and sum(sizes.values()) == index["metadata"]["total_size"]
    assert list(sizes) == [f"model-{number:05d}-of-{len(sizes):05d}.safetensors" for number in range(1, len(sizes) + 1)]
    assert set(index["weight_map"].values()) == set(sizes)
    for name, weight in weights.items():
        stored = hugging_face_name(name)
        with safe_open(folder / index["weight_map"][stored], framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert torch.equal(file.get_tensor(stored), weight.to(export.DTYPES[dtype]))
    expected = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_more_than_one_shard_and_one_parameter_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: export.Dtype
) -> None:
    config, weights = small_weights(num_layers=6, pad_vocab_to_multiple_of=8)
    write_checkpoint(tmp_path, config, weights, anchor=None)
    alive: dict[int, int] = {}
    peaks: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in alive:
            alive[storage.data_ptr()] = storage.nbytes()
            weakref.finalize(tensor, alive.pop, storage.data_ptr(), None)
        peaks.append(sum(alive.values()))
        return tensor

    read, save, cut = SavedWeights.read, export.save_file, export._without_padding
    monkeypatch.setattr(SavedWeights, "read", lambda saved, name: count(read(saved, name)))
    monkeypatch.setattr(export, "_without_padding", lambda whole, rows: count(cut(whole, rows)))
    monkeypatch.setattr(export, "save_file", lambda tensors, *rest, **more: [*map(count, tensors.values()), save(tensors, *rest, **more)])
    shard, largest = 30_000, max(weight.nbytes for weight in weights.values())
    export.export(open_saved(tmp_path), tmp_path / "out", shard, dtype)
    total = sum(weight.nbytes for weight in weights.values())
    assert max(peaks) <= shard + 2 * largest < total / 2  # a parameter as it was read, and with its padding cut off
    assert max(peaks) >= largest  # it did count


# What came with the weights that a run began from.


def test_the_tokenizer_goes_along(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "folder"
    write_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | dict(eos_token_id=[2, 3])))
    _, weights = small_weights()
    write_checkpoint(tmp_path / "run", config_from(folder), weights, anchor=None)
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "generation_config.json"}
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [2, 3]
    assert "tokens are bytes" not in capsys.readouterr().out
    for path in folder.iterdir():
        path.unlink()
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "again")]) == 0  # works without it
    assert f"there is none in model.init_from={folder}" in capsys.readouterr().out


def test_a_run_on_bytes_leaves_the_tokenizer_of_its_weights_behind(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_folder(tmp_path / "folder")
    (tmp_path / "folder/tokenizer.json").write_text("{}")
    write_checkpoint(tmp_path / "run", config_from(tmp_path / "folder"), small_weights()[1], anchor=None, vocab=256)
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out/tokenizer.json").exists() and "tokens are bytes" in capsys.readouterr().out
    assert cli.main(["generate", str(tmp_path / "run"), "--prompt", "one", "--tokens", "1"]) == 0
