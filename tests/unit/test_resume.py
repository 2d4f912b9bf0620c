"""Which checkpoint a run goes on from, and which it refuses. None is loaded here: the files in them are noise."""

import os
from pathlib import Path
from typing import Any

import pytest
from small import small_config, small_corpus
from test_checkpoint_files import made

from diloco import island
from diloco.config import RunConfig
from islands import checkpoint_files as files
from islands.config_file import ConfigError
from islands.data.base import Corpus, fingerprint
from islands.fragments import schema_hash, schema_of
from islands.island import meta_model
from islands.resume import Chosen, check_corpus, choose, leave_behind
from islands.run import run_alone


def config_in(folder: Path, resume: str = "auto", **sections: Any) -> RunConfig:
    sections["train"] = dict(resume=resume) | sections.get("train", {})
    return small_config(run=dict(dir=str(folder / "run")), **sections)


def saved(config: RunConfig, step: int, slot: int = 0, root: Path | None = None, **other: Any) -> Path:
    """A checkpoint of a run with ``config``."""
    fields: dict[str, Any] = dict(
        config=config.model_dump(mode="json"), schema=schema_hash(schema_of(meta_model(config))), corpus=fingerprint(small_corpus())
    )
    return made(root or config.checkpoint_root, step, slot, **fields | other)


class Told(list[str]):
    """Takes lines."""

    __call__ = list.append


def test_without_a_checkpoint_a_run_starts_afresh(tmp_path: Path) -> None:
    told = Told()
    assert choose(config_in(tmp_path), 0, told) is None and told == []


def test_auto_takes_the_newest_of_the_island_or_of_any(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    for step, slot in ((10, 0), (20, 0), (30, 1)):
        saved(config, step, slot)
    chosen = choose(config, 0, Told())
    assert (chosen.manifest.step, chosen.folder) == (20, files.folder_of(config.checkpoint_root, 20, 0))
    assert choose(config, None, Told()).manifest.slot == 1


def test_a_torn_one_is_skipped_and_that_is_told(tmp_path: Path) -> None:
    config, told = config_in(tmp_path), Told()
    good, torn = saved(config, 10), saved(config, 20)
    os.truncate(torn / "__0_0.distcp", 10)
    assert choose(config, 0, told).folder == good
    assert told[0].startswith(f"skipped a checkpoint: {torn}/__0_0.distcp: has 10 bytes") and told[0].endswith(f"taking {good} instead")
    os.truncate(good / "__0_0.distcp", 10)
    told.clear()
    assert choose(config, 0, told) is None
    assert len(told) == 2 and all("and there is no other checkpoint" in line for line in told)


@pytest.mark.parametrize("what", ["island-1", "step-00000020", "checkpoints", "run"])
def test_a_path_may_be_of_one_checkpoint_or_a_step_or_all_or_the_run(tmp_path: Path, what: str) -> None:
    other = config_in(tmp_path / "other")
    for step in (10, 20, 30):
        for slot in (0, 1):
            saved(other, step, slot)
    folder = files.folder_of(other.checkpoint_root, 30 if what in ("checkpoints", "run") else 20, 1)
    path = next(each for each in (folder, *folder.parents) if each.name == what)
    assert choose(config_in(tmp_path, str(path)), 1, Told()).folder == folder


def test_a_path_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"train\.resume=.*empty: there is no whole checkpoint of island 3 there; give a folder"):
        choose(config_in(tmp_path, str(tmp_path / "empty")), 3, Told())


def test_checkpoints_of_an_earlier_run_are_set_aside_unless_it_goes_on(tmp_path: Path) -> None:
    config, told = config_in(tmp_path), Told()
    for step in (10, 20, 30):
        saved(config, step)
    saved(config, 40, slot=1)
    older = files.folder_of(config.checkpoint_root, 10, 0)
    path = config_in(tmp_path, str(older))
    chosen = choose(path, 0, told)
    assert chosen.folder == older
    leave_behind(path, 0, chosen, told, restarted=True)
    leave_behind(config, 0, chosen, told)
    assert len(files.find(config.checkpoint_root, 0)) == 3
    leave_behind(path, 0, chosen, told)
    assert sum("set aside a checkpoint of an earlier run: it is now" in line for line in told) == 2
    assert choose(config, 0, told).folder == older  # from now on that is the newest
    never = config_in(tmp_path, "never")
    assert choose(never, 0, told) is None
    leave_behind(never, 0, None, told)
    assert choose(config, 0, told) is None
    assert len(files.find(config.checkpoint_root)) == 1  # that of another island


def test_an_island_of_no_fixed_slot_leaves_an_earlier_run_behind_too(tmp_path: Path) -> None:
    config = config_in(tmp_path, "never")
    saved(config, 1000, slot=2)
    assert choose(config, None, Told()) is None
    leave_behind(config, None, None, Told())
    saved(config, 10, slot=0)
    assert choose(config, None, Told(), restarted=True).manifest.step == 10
    assert choose(config_in(tmp_path), None, Told()).manifest.step == 10


def test_ranks_that_torchrun_started_again_go_on_from_what_they_wrote(tmp_path: Path) -> None:
    before = saved(config_in(tmp_path / "other"), 100)
    for resume, first in (("never", None), (str(before), 100)):
        config = config_in(tmp_path / str(first), resume)
        chosen = choose(config, 0, Told(), restarted=True)
        assert (chosen and chosen.manifest.step) == first  # it has not written one yet
        saved(config, 110)
        assert choose(config, 0, Told(), restarted=True).manifest.step == 110


def test_harmless_changes_are_told_and_harmful_ones_refused(tmp_path: Path) -> None:
    folder, told = saved(config_in(tmp_path), 10), Told()
    chosen = choose(config_in(tmp_path, optimizer=dict(lr=1.0), train=dict(steps=9)), 0, told)
    assert chosen.event["changes"] == ["optimizer.lr: 0.003 -> 1.0", "train.steps: 5 -> 9"]
    assert told == [f"resuming from {folder}; changed since:\n  optimizer.lr: 0.003 -> 1.0\n  train.steps: 5 -> 9"]
    with pytest.raises(ConfigError) as refused:
        choose(config_in(tmp_path, data=dict(seq_len=8), model=dict(num_layers=3)), 0, told)
    for line in ("model.num_layers: 2 -> 3: the weights", "data.seq_len: 16 -> 8: the data position", "train.resume=never"):
        assert line in str(refused.value)


def test_alone_no_island_of_a_swarm_is_resumed(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = saved(config, 10, facts=dict(flights=[]))
    with pytest.raises(ConfigError, match=f"{folder} is of an island that has its samples by another rule"):
        run_alone(config)


def test_another_model_under_the_same_keys_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    saved(config, 10, schema="of something else")
    with pytest.raises(ConfigError, match="its model has other parameters than the one configured"):
        choose(config, 0, Told())


def test_an_island_whose_text_is_another_one_does_not_even_join(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    saved(config, 10, facts=dict(flights=[]))
    assert island._choose(config, small_corpus()).manifest.step == 10
    with pytest.raises(ConfigError, match="the text is another one"):
        island._choose(config, small_corpus(tokens=4001))


def test_another_text_is_refused(tmp_path: Path) -> None:
    config, text = config_in(tmp_path), small_corpus()
    saved(config, 10)
    chosen: Chosen = choose(config, 0, Told())
    check_corpus(chosen, text)
    with pytest.raises(ConfigError, match=r"the text is another one \(4000 tokens to train on and 1000 held out there, 4001 to"):
        check_corpus(chosen, small_corpus(tokens=4001))
    other = text.train.copy()
    other[1234] += 1
    with pytest.raises(ConfigError, match=r"as many tokens \(4000 tokens to train on and 1000 held out\), but others"):
        check_corpus(chosen, Corpus(other, text.held_out, text.vocab_size))
