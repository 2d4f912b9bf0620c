"""The loss-per-byte study: what its runs count, that none is done twice, and what its table makes of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from loss_cells import Cell, Recipe, Size, config_of, run_cell
from rank_pool import RankPool

from islands.island import num_parameters
from islands.process import Process

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import loss_per_byte as study  # noqa: E402

MODEL = dict(hidden_size=16, num_layers=3, num_heads=2, num_kv_heads=1, intermediate_size=32)
TINY = Size(MODEL, seq_len=16, batch=2, steps=7, sync_every=3, lr=1e-3, curve_points=2, final_sequences=4)
PLAIN, DATA_PARALLEL = Recipe("plain", dict(optimizer=dict(lr=1.0, momentum=0.0))), Recipe("data-parallel", None)
TOPK = Recipe("topk", dict(codec=dict(type="topk"), error_feedback=True))
STREAMING = Recipe("3 fragments", dict(fragments=3, overlap=1))


def trained(process: Process, folder: str) -> list[Cell]:
    return [run_cell(recipe, TINY, 5, process, Path(folder)) for recipe in (PLAIN, DATA_PARALLEL, TOPK, STREAMING)]


def test_bytes_are_those_of_the_formulas_and_nothing_is_trained_twice(ranks: RankPool, tmp_path: Path) -> None:
    plain, joint, topk, streaming = ranks.run(trained, 1, str(tmp_path))[0]
    parameters = num_parameters(config_of(PLAIN, TINY, 5))
    assert plain.rounds == 3 and plain.bytes_sent == 2 * 3 * 4 * parameters  # two islands, after steps 3, 6 and 7
    assert joint.bytes_sent == 7 * 2 * 4 * parameters
    assert streaming.bytes_sent == plain.bytes_sent, "each fragment three times, each at other steps"
    assert topk.bytes_sent < plain.bytes_sent / 30 and topk.bits_per_parameter < 1
    assert plain.tokens == joint.tokens == 7 * 2 * 2 * 16
    sent = [round(3 * point[1] / plain.bytes_sent) for point in plain.curve]
    assert sent == [0, 1, 2, 3] and [point[0] for point in plain.curve] == [0, 192, 384, 448]
    first = {round(each.curve[0][2], 5) for each in (plain, joint, topk, streaming)}
    assert len(first) == 1, "not the same first parameters"
    for file in tmp_path.iterdir():
        file.write_text(json.dumps({**json.loads(file.read_text()), "eval_loss": 1.25}))
    assert {cell.eval_loss for cell in ranks.run(trained, 1, str(tmp_path))[0]} == {1.25}


def cell(name: str, seed: int, loss: float, sent: float) -> Cell:
    return Cell(name, seed, loss, sent, 1.0, 100, 3, 1.0, [(0, 0.0, 5.0), (100, sent, loss)])


def rows_of(**losses: list[float]) -> list[study.Row]:
    """Of recipes by name: the first figure tells bytes, the others the losses of the seeds."""
    cells = {
        name: [cell(name, seed, loss, sent) for seed, loss in enumerate(found)] for name, (sent, *found) in losses.items()
    }
    return study.rows_of([study.recipe(name, study.NONE) for name in losses], cells)


def test_differences_are_taken_within_a_seed() -> None:
    none, int4 = rows_of(none=[80.0, 2.0, 4.0], int4=[10.0, 2.02, 4.0])
    assert (none.difference_percent, none.difference_percent_std, none.eval_loss) == (0.0, 0.0, 3.0)
    assert int4.difference_percent == pytest.approx(0.5) and int4.difference_percent_std == pytest.approx(0.5**0.5)
    assert int4.times_fewer_than_none == 8.0 and int4.times_fewer_than_data_parallel is None


def test_targets_are_missed_where_int4_or_the_best_of_the_smallest_is_too_far_off() -> None:
    def met(**losses: list[float]) -> dict[str, Any]:
        return {name: (target["codec"], target["met"]) for name, target in study.targets_of(rows_of(**losses), 1).items()}

    rows = dict(none=[3200.0, 2.0], int4=[425.0, 2.005], statistical2=[212.0, 2.0], topk=[27.0, 2.019], tiny=[15.0, 2.03])
    assert met(**rows) == {"int4": ("int4", True), "low_bit": ("topk", True)}
    assert met(**rows | {"int4": [425.0, 2.007]}) == {"int4": ("int4", False), "low_bit": ("topk", True)}
    assert met(**rows | {"topk": [27.0, 2.021]}) == {"int4": ("int4", True), "low_bit": ("topk", False)}


def test_an_answer_is_resolved_only_where_the_spread_of_the_seeds_allows_it() -> None:
    even = rows_of(none=[3200.0, 2.0, 2.0], int4=[400.0, 2.0, 2.0001], topk=[27.0, 2.01, 2.01])
    noisy = rows_of(none=[3200.0, 2.0, 2.0], int4=[400.0, 1.97, 2.03], topk=[27.0, 1.99, 2.04])
    assert [target["resolved"] for target in study.targets_of(even, 2).values()] == [True, True]
    assert [target["resolved"] for target in study.targets_of(noisy, 2).values()] == [False, False]
    assert [target["met"] for target in study.targets_of(noisy, 2).values()] == [True, True]
