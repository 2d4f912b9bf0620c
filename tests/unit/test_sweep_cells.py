"""Which cells a sweep has, that they train on equal tokens, and what is refused before the first one starts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco.config import RunConfig
from diloco.sweep_cells import Cell, label, make_cells
from diloco.sweep_config import read_sweep
from islands.config_file import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def sweep_file(folder: Path, sweep: dict[str, Any], **sections: Any) -> Path:
    """A file with a model that is quickly made, and little text."""
    text = folder / "text.txt"
    text.write_text("one line of text, and another one\n" * 200)
    raw: dict[str, Any] = dict(
        run=dict(name="study"),
        model=dict(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=32),
        data=dict(type="text", paths=[str(text)], seq_len=8),
        train=dict(steps=10, global_batch_size=6, eval_sequences=2),
        outer=dict(sync_every=5),
        swarm=dict(islands=2),
        sweep={"dir": str(folder / "sweep"), **sweep},
    )
    for name, keys in sections.items():
        raw[name] = {**raw.get(name, {}), **keys}
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    return file


def cells_of(folder: Path, sweep: dict[str, Any], **sections: Any) -> list[Cell]:
    return make_cells(read_sweep(sweep_file(folder, sweep, **sections)))


def refusal(folder: Path, sweep: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        cells_of(folder, sweep, **sections)
    return str(refused.value)


def test_a_grid_is_every_combination_and_cells_are_single_ones(tmp_path: Path) -> None:
    grid = {"outer.sync_every": [1, 5], "run.seed": [0, 1]}
    cells = cells_of(tmp_path, dict(grid=grid, cells=[{"outer.codec.type": "int4"}], baseline=False))
    found = [(cell.config.outer.sync_every, cell.config.outer.codec.type, cell.config.run.seed) for cell in cells]
    assert found == [(1, "none", 0), (1, "none", 1), (5, "none", 0), (5, "none", 1), (5, "int4", 0)]
    assert len({cell.folder for cell in cells}) == 5
    assert all(cell.folder.parent == tmp_path / "sweep" / "cells" for cell in cells)
    assert [cell.folder.name.rpartition("-")[0] for cell in cells][0] == "H-1-seed-0"


def test_several_grids_follow_each_other_and_no_cell_comes_twice(tmp_path: Path) -> None:
    grids = [{"outer.sync_every": [1, 5]}, {"outer.sync_every": [5], "run.seed": [0]}, {"outer.sync_every": [1]}]
    cells = cells_of(tmp_path, dict(grid=grids, baseline=False))
    assert [cell.config.outer.sync_every for cell in cells] == [1, 5]  # seed 0 is that of the file


def test_each_seed_has_one_data_parallel_cell_with_the_batch_of_all_islands(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, dict(grid={"outer.sync_every": [1, 5], "swarm.islands": [1, 3], "run.seed": [0, 1]}))
    *islands, first, second = cells
    assert [cell.is_baseline for cell in cells] == [False] * 8 + [True, True]
    assert [first.config.run.seed, second.config.run.seed] == [0, 1]
    assert not isinstance(first.config, RunConfig) and first.config.train.global_batch_size == 12
    assert {cell.baseline for cell in islands if cell.config.run.seed == 1} == {second.digest}
    assert first.workers == 3  # the most that it is compared with


def test_what_a_data_parallel_run_has_too_gives_each_its_own(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, dict(grid={"optimizer.lr": [0.1, 0.2]}))
    assert [cell.config.optimizer.lr for cell in cells if cell.is_baseline] == [0.1, 0.2]
    assert [cell.config.optimizer.lr for cell in cells if not cell.is_baseline] == [0.1, 0.2]


def test_all_cells_train_on_as_many_tokens_whatever_the_number_of_islands(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, dict(grid={"swarm.islands": [1, 2, 4, 12]}))
    assert {cell.tokens for cell in cells} == {10 * 12 * 8}
    assert [cell.config.train.global_batch_size for cell in cells] == [12, 6, 3, 1, 12]
    assert [cell.config.swarm.max_slots for cell in cells if not cell.is_baseline] == [1, 2, 4, 12]  # no sample is nobody's


def test_a_batch_that_does_not_divide_is_refused_with_what_would(tmp_path: Path) -> None:
    told = refusal(tmp_path, dict(grid={"swarm.islands": [2, 5]}))
    assert "cell {swarm.islands: 5}: swarm.islands=5 does not divide" in told
    assert "= 12 sequences" in told and "1, 2, 3, 4, 6, 12 do" in told


def test_unlike_tokens_are_refused_unless_they_are_wanted(tmp_path: Path) -> None:
    grid = {"train.steps": [10, 20]}
    told = refusal(tmp_path, dict(grid=grid))
    assert all(part in told for part in ("{train.steps: 10}: 960\n", "{train.steps: 20}: 1,920\n", "sweep.equal_tokens: false"))
    assert len(cells_of(tmp_path, dict(grid=grid, equal_tokens=False))) == 4


def test_a_file_of_a_real_run_will_do(tmp_path: Path) -> None:
    sections = dict(exchange=dict(type="hivemind", peer_timeout=7.0), checkpoint=dict(every=3))
    cells = cells_of(tmp_path, dict(grid={"outer.sync_every": [5]}), **sections)
    assert (cells[0].config.exchange.type, cells[0].config.exchange.peer_timeout) == ("in_memory", 7.0)
    assert (cells[0].config.train.resume, cells[0].config.checkpoint.every) == ("never", 0)


def test_keys_of_a_simulation_can_be_swept_whatever_type_the_file_has(tmp_path: Path) -> None:
    script = [{"island": 1, "speed": 0.5}]
    sweep = dict(grid={"exchange.step_seconds": [1.0, 2.0], "exchange.script": [[], script]}, baseline=False)
    for exchange in ({}, dict(type="in_memory"), dict(type="process_group", offload=True)):
        cells = cells_of(tmp_path, sweep, exchange=exchange)
        assert [(cell.config.exchange.step_seconds, len(cell.config.exchange.script)) for cell in cells] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_exchange_keys_that_no_type_knows_are_refused(tmp_path: Path) -> None:
    grid = {"outer.sync_every": [5]}
    for exchange in (dict(nonsense=1), dict(type="process_group", nonsense=1)):
        assert "exchange.nonsense: unknown key" in refusal(tmp_path, dict(grid=grid), exchange=exchange)
    assert "exchange.type: 'hivemin' is not one of" in refusal(tmp_path, dict(grid=grid), exchange=dict(type="hivemin"))
    told = refusal(tmp_path, dict(grid={"exchange.offload": [True]}), exchange=dict(type="process_group"))
    assert "exchange.offload: unknown key" in told


def test_the_digest_is_that_of_what_is_run_and_not_of_where(tmp_path: Path) -> None:
    one = cells_of(tmp_path, dict(grid={"outer.sync_every": [5]}, dir=str(tmp_path / "a")))
    other = cells_of(tmp_path, dict(grid={"outer.sync_every": [5]}, dir=str(tmp_path / "b")))
    changed = cells_of(tmp_path, dict(grid={"outer.sync_every": [5]}), optimizer=dict(lr=0.5))
    assert [cell.digest for cell in one] == [cell.digest for cell in other]
    assert not {cell.digest for cell in one} & {cell.digest for cell in changed}


@pytest.mark.parametrize(
    ("sweep", "told"),
    [
        (dict(), "sweep names no cell; give sweep.grid, such as"),
        (dict(gird={}), "sweep.gird: unknown key (did you mean 'grid'?)"),
        (dict(grid={"outer.sync_every": []}), "outer.sync_every has no values"),
        (dict(grid={"outer.sync_every": 5}), "5 should be a list such as [a, b]"),
        (dict(grid={"run.dir": ["x"]}), "run.dir can't be swept: each cell has a folder of its own"),
        (dict(grid={"sweep.jobs": [1]}), "'sweep.jobs' is not a key of a run"),
        (dict(grid={"outer.sink_every": [1, 2]}), "cell {outer.sink_every: 1} and 1 more: outer.sink_every: unknown key"),
        (dict(grid={"outer.sync_every": [5], "outer.fragments": [1, 7]}), "cell {outer.sync_every: 5, outer.fragments: 7}: "),
        (dict(cells=[{"outer.sync_every": 5, "outer.fragments": 4}]), "cell {outer.sync_every: 5, outer.fragments: 4}: outer.fragments"),
        (dict(grid={"train.micro_batch_size": [4]}), "cell {train.micro_batch_size: 4}"),
        (dict(grid={"data.seq_len": [8, 9000]}), "data.seq_len: 9000"),
    ],
)
def test_what_can_not_be_used_is_refused_and_the_cell_is_named(tmp_path: Path, sweep: dict[str, Any], told: str) -> None:
    assert told in refusal(tmp_path, sweep)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    told = refusal(tmp_path, dict(cells=[{"outer.sync_every": 0}, {"outer.codec.type": "int5"}, {"swarm.islands": 7}]))
    assert all(cell in told for cell in ("{outer.sync_every: 0}", "{outer.codec.type: int5}", "{swarm.islands: 7}"))


def test_a_file_without_the_section_is_told_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {steps: 1, global_batch_size: 1}\n")
    with pytest.raises(ConfigError, match="has no section 'sweep'"):
        read_sweep(tmp_path / "run.yaml")


def test_labels_are_short() -> None:
    keys = {"outer.sync_every": 20, "outer.codec.type": "int4", "swarm.islands": 4, "optimizer.lr": 0.001}
    assert label(keys) == "H=20, codec=int4, M=4, lr=0.001"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("sweep_*.yaml")), ids=lambda path: path.stem)
def test_every_committed_sweep_can_be_run(path: Path) -> None:
    cells = make_cells(read_sweep(path, ["run.device=cpu"]))
    assert len(cells) > 4 and len({cell.tokens for cell in cells}) == 1
