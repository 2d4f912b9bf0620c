"""Checkpoints as files: what is damaged is found out, and what is kept is what was asked for."""

import json
import os
from pathlib import Path
from typing import Any, Callable

import pytest

from islands import checkpoint_files as files
from islands.checkpoint_files import BadCheckpoint, Manifest


def made(root: Path, step: int, slot: int = 0, **other: Any) -> Path:
    """A checkpoint of two small files; ``other`` are fields of its manifest."""
    hidden = files.start_folder(root, step, slot)
    for name in ("__0_0.distcp", ".metadata"):
        (hidden / name).write_bytes(os.urandom(1000))
    fields: dict[str, Any] = dict(
        format=files.FORMAT,
        version="1.2",
        step=step,
        slot=slot,
        progress=dict(step=step, slot=slot, position=8 * step, lr_step=step),
        config=dict(run=dict(seed=1), optimizer=dict(lr=0.1)),
        schema="abc",
        corpus={},
        grid="pipeline 1",
        world_size=1,
        facts={},
        files=files.describe(sorted(hidden.iterdir())),
    )
    files.write_manifest(hidden, Manifest(**fields | other))
    return files.publish(hidden, slot)


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*"))


def test_a_checkpoint_says_what_was_written(tmp_path: Path) -> None:
    folder = made(tmp_path, step=30, slot=2, facts=dict(round=7, share=0.1))
    assert folder == files.folder_of(tmp_path, 30, 2) == tmp_path / "step-00000030" / "island-2"
    manifest = files.verify(folder)
    assert manifest == files.read_manifest(folder)
    assert (manifest.step, manifest.slot, manifest.facts) == (30, 2, dict(round=7, share=0.1))
    assert manifest.num_bytes == 2000 and set(manifest.files) == {".metadata", "__0_0.distcp"}


def truncated(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 999)


def flipped(folder: Path) -> None:
    data = bytearray((folder / ".metadata").read_bytes())
    data[500] ^= 1
    (folder / ".metadata").write_bytes(data)


def missing(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def half_a_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 100)


def rewritten(change: dict[str, Any], sign: bool = False) -> Callable[[Path], None]:
    """Change the manifest, with a checksum that fits if ``sign``."""

    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        body = json.loads(path.read_text()) | change
        if sign:
            del body["checksum"]
            body["checksum"] = files._checksum(body)
        path.write_text(json.dumps(body))

    return damage


OUTSIDE = {"../secret": dict(bytes=1, sha256="")}


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncated, r"__0_0\.distcp: has 999 bytes and had 1000 when it was written"),
        (flipped, r"\.metadata: is damaged: its SHA-256 is not the one it was written with"),
        (missing, r"__0_0\.distcp: is missing"),
        (no_manifest, r"there is no manifest\.json"),
        (half_a_manifest, r"manifest\.json: can't be read \(JSONDecodeError"),
        (rewritten(dict(step=31)), r"manifest\.json: is damaged: its checksum"),
        (rewritten(dict(format=2)), r"format 2, written by version '1\.2'; this program reads format 1"),
        (rewritten(dict(more=1), sign=True), r"has other keys than format 1: .*more"),
        (rewritten(dict(files=OUTSIDE), sign=True), r"names '\.\./secret', which is outside its folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    folder = made(tmp_path, step=30)
    damage(folder)
    with pytest.raises(BadCheckpoint, match=told):
        files.verify(folder)


def test_the_newest_comes_first_and_what_is_unfinished_not_at_all(tmp_path: Path) -> None:
    for step, slot in ((9, 0), (100, 1), (20, 0), (20, 1)):
        made(tmp_path, step, slot)
    files.start_folder(tmp_path, 200, 0)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000020" / "island-0.aside-1").mkdir()
    steps = "step-00000100/island-1", "step-00000020/island-0", "step-00000020/island-1", "step-00000009/island-0"
    assert files.find(tmp_path) == [tmp_path / step for step in steps]
    assert files.find(tmp_path, 1) == [tmp_path / steps[0], tmp_path / steps[2]]
    assert files.find(tmp_path / "absent") == []


def test_one_that_is_replaced_can_be_read_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer is killed between any two renames: the old one or the new one is there."""
    first = made(tmp_path, step=30, facts=dict(number=1))
    rename = Path.rename
    for allowed in (0, 1, 2):
        left = allowed

        def killed(path: Path, target: Path) -> Path:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", killed)
        if allowed < 2:
            with pytest.raises(KeyboardInterrupt):
                made(tmp_path, step=30, facts=dict(number=2))
        else:
            made(tmp_path, step=30, facts=dict(number=2))
        monkeypatch.undo()
        (found,) = files.find(tmp_path, 0)
        assert files.verify(found).facts == dict(number=1 if allowed < 2 else 2)
        assert (found == first) == (allowed != 1)
        files.sweep(tmp_path, 0)
        assert files.find(tmp_path, 0) == [found] and len(names(tmp_path)) == 1


def test_the_newest_and_every_mth_are_kept(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        made(tmp_path, step)
        made(tmp_path, step, slot=1)
        files.prune(tmp_path, 0, step, keep=2, keep_every=30)
    kept = [files.step_of(folder) for folder in files.find(tmp_path, 0)]
    assert kept == [70, 60, 30]
    assert len(files.find(tmp_path, 1)) == 7  # another island's affair
    files.prune(tmp_path, 1, 70, keep=1, keep_every=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (30, 60, 70)]


def test_later_checkpoints_of_a_run_left_behind_do_not_count_as_newest(tmp_path: Path) -> None:
    for step in (10, 20, 100):
        made(tmp_path, step)
    files.prune(tmp_path, 0, last=20, keep=1, keep_every=0)
    assert [files.step_of(folder) for folder in files.find(tmp_path)] == [100, 20]


def test_what_a_killed_writer_left_is_swept_up(tmp_path: Path) -> None:
    made(tmp_path, step=10)
    mine, other = files.start_folder(tmp_path, 20, 0), files.start_folder(tmp_path, 20, 10)
    (mine / "__0_0.distcp").write_bytes(b"half")
    files.sweep(tmp_path, 0)
    assert not mine.exists() and other.exists() and len(files.find(tmp_path)) == 1
    files.discard(other)
    assert not (tmp_path / "step-00000020").exists()  # nobody's any longer


def test_what_is_set_aside_is_not_found_and_not_lost(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        made(tmp_path, step)
    assert [path.name for path in files.set_aside(tmp_path, 0, after=10)] == ["island-0.aside-1"] * 2
    assert [files.step_of(folder) for folder in files.find(tmp_path)] == [10]
    made(tmp_path, 30)
    (again,) = files.set_aside(tmp_path, 0, after=10)
    assert again.name == "island-0.aside-2" and files.verify(again).step == 30
