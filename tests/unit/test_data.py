"""Which samples a rank sees, and where the text comes from."""

import multiprocessing
import shutil
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from islands.config_file import ConfigError
from islands.data import python_stdlib, text
from islands.data.base import Batches, Corpus, Sampler, num_samples, permute, read_bytes, windows

# The order of samples.


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097, 65537])
def test_a_permutation_meets_every_index_once(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key=7)), np.arange(size))


def test_a_permutation_depends_on_its_key_alone() -> None:
    index = np.arange(5000)
    by_key = [permute(index, 5000, key) for key in (0, 1, 1 << 64, (1 << 64) | 1)]
    assert np.array_equal(by_key[0], permute(index, 5000, 0))
    for one in range(4):
        for other in range(one):  # two random permutations agree in one place on average
            assert np.sum(by_key[one] == by_key[other]) < 10


def test_a_permutation_of_one_index_is_that_of_all() -> None:
    whole = permute(np.arange(1000), 1000, key=3)
    assert [int(permute(np.array([index]), 1000, key=3)[0]) for index in (0, 17, 999)] == whole[[0, 17, 999]].tolist()
    assert np.array_equal(permute(np.arange(1000).reshape(10, 100), 1000, key=3), whole.reshape(10, 100))


def test_a_permutation_leaves_no_order_behind() -> None:
    order = permute(np.arange(10000), 10000, key=1)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05  # five standard errors of independent neighbours
    assert abs(np.corrcoef(order, np.arange(10000))[0, 1]) < 0.05


@pytest.mark.parametrize(("samples", "max_slots"), [(24, 1), (24, 4), (1000, 8), (25, 4), (7, 8)])
def test_no_two_islands_meet_a_sample_twice_in_an_epoch(samples: int, max_slots: int) -> None:
    positions = np.arange(samples // max_slots)
    seen = np.concatenate([Sampler(samples, 5, max_slots)(positions, slot) for slot in range(max_slots)])
    assert len(np.unique(seen)) == len(seen) == samples // max_slots * max_slots
    assert 0 <= min(seen, default=0) and max(seen, default=0) < samples


@pytest.mark.parametrize(("samples", "max_slots"), [(24, 4), (25, 4), (7, 8)])
def test_every_epoch_meets_every_sample_once(samples: int, max_slots: int) -> None:
    """Position p of slot s is number p x max_slots + s of all: each run of ``samples`` numbers is an epoch."""
    positions = np.arange(3 * samples)
    numbers = np.stack([Sampler(samples, 5, max_slots)(positions, slot) for slot in range(max_slots)], axis=1).ravel()
    epochs = numbers[: 3 * samples].reshape(3, samples)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(samples))
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_seed_gives_its_own_order() -> None:
    positions = np.arange(500)
    first = Sampler(500, seed=0)(positions)
    assert np.array_equal(first, Sampler(500, seed=0)(positions))
    assert np.sum(first == Sampler(500, seed=1)(positions)) < 10


# Batches.

TOKENS = np.random.default_rng(0).integers(0, 250, 1003).astype(np.uint8)


def batches(rank: int = 0, ranks: int = 1, batch_size: int = 8) -> Batches:
    samples = num_samples(TOKENS, 10)
    return Batches(TOKENS, 10, batch_size, Sampler(samples, 3, max_slots=2), rank, ranks)


def test_a_sample_is_its_tokens_and_the_one_that_follows() -> None:
    tokens = np.arange(31, dtype=np.uint8)
    assert num_samples(tokens, 10) == 3 and num_samples(tokens[:-1], 10) == 2
    inputs, targets = windows(tokens, np.array([2, 0]), 10)
    assert inputs.tolist() == [list(range(20, 30)), list(range(10))]
    assert targets.tolist() == [list(range(21, 31)), list(range(1, 11))]
    assert inputs.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize("length", [0, 1, 10])
def test_text_shorter_than_a_sample_has_none(length: int) -> None:
    assert num_samples(np.zeros(length, dtype=np.uint8), 10) == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_shares_make_the_same_global_batch(ranks: int) -> None:
    for position in (0, 43, 320):  # 320 is in a later epoch
        whole = batches().at(1, position)
        shares = [batches(rank, ranks).at(1, position) for rank in range(ranks)]
        for part in range(2):
            assert torch.equal(torch.cat([share[part] for share in shares]), whole[part])


def test_a_batch_of_another_size_continues_the_same_order() -> None:
    twice = torch.cat([batches(batch_size=4).at(0, 8)[0], batches(batch_size=4).at(0, 12)[0]])
    assert torch.equal(twice, batches(batch_size=8).at(0, 8)[0])


def test_a_restart_needs_no_replay() -> None:
    running = batches()
    through = [running.at(0, 8 * step)[0] for step in range(30)]
    assert all(torch.equal(batches().at(0, 8 * step)[0], through[step]) for step in (29, 3, 17))
    assert torch.equal(batches().at(0, 4)[0], torch.cat([through[0][4:], through[1][:4]]))  # between two batches, too
    assert not torch.equal(through[0], through[1])


def test_slots_meet_different_text() -> None:
    assert not torch.equal(batches().at(0, 0)[0], batches().at(1, 0)[0])


# Files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files, each of one letter that no other has."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(chr(ord("A") + number) * (number + 3))
    return tmp_path


def read(*paths: Path | str, held_out: float = 0.25) -> tuple[bytes, bytes]:
    corpus = text.build(text.Config(paths=[str(path) for path in paths], held_out=held_out))
    assert corpus.vocab_size == 256 and corpus.train.dtype == np.uint8
    return corpus.train.tobytes(), corpus.held_out.tobytes()


def test_train_and_held_out_share_no_file_and_hold_all_of_them(folder: Path) -> None:
    train, held_out = read(folder / "*.txt")
    assert set(train) & set(held_out) == {ord("\n")}
    assert sorted(train + held_out) == sorted(b"".join(file.read_bytes() + b"\n" for file in folder.iterdir()))
    assert 4 <= held_out.count(b"\n") <= 16  # 10 of 40 are expected


def test_files_are_read_in_the_order_of_their_names_whatever_the_order_of_the_patterns(folder: Path) -> None:
    train, held_out = read(folder / "3*.txt", folder / "*.txt", folder / "00.txt")
    assert train.splitlines() == sorted(train.splitlines())
    assert (train, held_out) == read(folder / "*.txt")


def test_a_file_named_in_two_ways_counts_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert read("*.txt", folder / "*.txt", folder / ".." / folder.name / "*.txt") == read(folder / "*.txt")


def test_a_pattern_may_cross_folders_and_skips_them(folder: Path) -> None:
    (folder / "deep" / "er.txt").mkdir(parents=True)
    (folder / "deep" / "er.txt" / "z.txt").write_text("zz")
    train, held_out = read(folder / "**" / "*.txt")
    assert b"zz\n" in train + held_out


def test_a_name_with_the_characters_of_a_pattern_is_itself(folder: Path) -> None:
    (folder / "[x].txt").write_text("only this")
    train, held_out = read(folder / "[x].txt")
    assert train + held_out == b"only this\n"


def test_a_copy_elsewhere_is_split_alike(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("other") / "copy"
    shutil.copytree(folder, elsewhere)
    assert read(elsewhere / "*.txt") == read(folder / "*.txt")


def test_of_a_single_file_the_last_part_is_held_out(folder: Path) -> None:
    (folder / "only.md").write_text("0123456789" * 10)
    train, held_out = read(folder / "only.md")
    assert train + held_out == b"0123456789" * 10 + b"\n"
    assert len(held_out) == 26  # a quarter of 101, rounded up


@pytest.mark.parametrize("held_out", [0.0001, 0.9999])
@pytest.mark.parametrize("count", [2, 3])
def test_of_few_files_one_at_least_is_on_either_side(folder: Path, held_out: float, count: int) -> None:
    parts = read(*(folder / f"0{number}.txt" for number in range(count)), held_out=held_out)
    assert sorted(part.count(b"\n") for part in parts) == [1, count - 1]


def test_an_empty_file_alone_can_not_be_split(folder: Path) -> None:
    (folder / "empty").touch()
    with pytest.raises(ConfigError, match="data.paths: 1 bytes of text leave 0 to train on and 1 held out; give more"):
        read(folder / "empty")


def test_a_pattern_without_a_file_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.paths: '.*none.\*' matches no file"):
        read(folder / "*.txt", folder / "none.*")
    (folder / "folder").mkdir()
    with pytest.raises(ConfigError, match="folder' matches no file"):
        read(folder / "folder")


def test_a_file_that_goes_away_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="data.paths: can't read .*gone: No such file"):
        read_bytes([folder / "00.txt", folder / "gone"], 0.5, key="data.paths")
    with pytest.raises(ConfigError, match="some.key: there are no files"):
        read_bytes([], 0.5, key="some.key")


# The standard library's sources.


@pytest.fixture
def small_library(folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes the place of the standard library, with a home of its own to cache in."""
    for file in folder.glob("*.txt"):
        file.rename(file.with_suffix(".py"))
    for skipped in ("test", "site-packages"):
        (folder / skipped).mkdir()
        (folder / skipped / "x.py").write_text("~" * 100)
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    return folder


def stdlib(held_out: float = 0.25) -> tuple[bytes, bytes]:
    corpus = python_stdlib.build(python_stdlib.Config(held_out=held_out))
    return corpus.train.tobytes(), corpus.held_out.tobytes()


def test_the_library_is_read_in_order_without_tests_and_installed_packages(small_library: Path) -> None:
    train, held_out = stdlib()
    assert b"~" not in train + held_out
    assert train.splitlines() == sorted(train.splitlines())
    assert (train + held_out).count(b"\n") == 40 and set(train) & set(held_out) == {ord("\n")}


def test_the_library_comes_from_the_cache_the_second_time(small_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stdlib()
    monkeypatch.setattr(python_stdlib, "read_bytes", None)
    assert stdlib() == first


def test_another_share_is_cached_apart(small_library: Path) -> None:
    assert len(stdlib(0.25)[1]) < len(stdlib(0.75)[1])


def test_a_home_that_can_not_be_written_to_does_no_harm(small_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = stdlib()
    monkeypatch.setenv("HOME", str(small_library / "00.py"))  # a file
    assert stdlib() == cached


def build_together(barrier: Barrier, answers: SimpleQueue) -> None:
    """In a process of its own: read the files, wait until the other has read them too, then write the cache."""

    def read_then_meet(*arguments: Any, **keywords: Any) -> Corpus:
        corpus = read_bytes(*arguments, **keywords)
        barrier.wait(30)
        return corpus

    with mock.patch.object(python_stdlib, "read_bytes", read_then_meet):
        corpus = python_stdlib.build(python_stdlib.Config(held_out=0.25))
    answers.put((corpus.train.tobytes(), corpus.held_out.tobytes(), isinstance(corpus.train, np.memmap)))


def test_processes_may_build_the_cache_at_once(small_library: Path) -> None:
    context = multiprocessing.get_context("fork")  # they need the replaced library, and neither torch nor threads
    barrier, answers = context.Barrier(2), context.SimpleQueue()
    builders = [context.Process(target=build_together, args=(barrier, answers)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(30)
        assert builder.exitcode == 0
    assert [answers.get() for _ in builders] == [(*stdlib(), True)] * 2
    (cached,) = (Path.home() / ".cache" / "diloco").iterdir()  # nothing half-made is left
    assert sorted(file.name for file in cached.iterdir()) == ["held_out.npy", "train.npy"]


def test_the_real_library_is_enough_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    train, held_out = stdlib(0.05)
    assert len(train) > 3_000_000
    assert 0.02 < len(held_out) / len(train) < 0.1
    assert b"def " in train and b"def " in held_out
