"""The key file: made once, for its owner alone, and refused with a remedy where it is not that."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from diloco import cli
from diloco.config import SwarmSection
from diloco.swarm_key import KEY_BYTES, KeyFileError, read_key, write_new_key


def test_a_new_key_can_be_read_and_is_like_no_other(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b"):
        write_new_key(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        keys.add(read_key(str(tmp_path / name)))
    assert len(keys) == 2 and {len(key) for key in keys} == {KEY_BYTES}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("precious")
    with pytest.raises(KeyFileError, match="exists already and is left as it is"):
        write_new_key(tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError, match="exists already"):
        write_new_key(tmp_path / "link")
    assert (tmp_path / "key").read_text() == "precious" and not (tmp_path / "elsewhere").exists()


GOOD = "diloco swarm key 1\n" + "0f" * 32 + "\n"


@pytest.mark.parametrize(
    "content",
    ["", "\n\n", GOOD[:-2], GOOD + GOOD, GOOD.replace("0f", "0G"), GOOD.replace("key 1", "key 2"), "0f" * 32, "\xff\0"],
)
def test_what_is_no_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(KeyFileError, match="is not a swarm key.*Copy it again"):
        read_key(str(tmp_path / "key"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_key_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_text(GOOD)
    path.chmod(0o600)
    assert read_key(str(path)) == bytes.fromhex("0f" * 32)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}.*chmod 600"):
        read_key(str(path))


def test_it_stands_in_for_public(tmp_path: Path) -> None:
    write_new_key(tmp_path / "key")
    SwarmSection(listen="0.0.0.0:31337", key_file=str(tmp_path / "key"))
    with pytest.raises(ValidationError, match="No such file"):
        SwarmSection(listen="0.0.0.0:31337", key_file=str(tmp_path / "other"))


def test_the_command_says_what_to_do_next_and_refuses_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["key", "new"]) == 0
    printed = capsys.readouterr().out
    assert "swarm.key_file=swarm.key" in printed and read_key("swarm.key").hex() not in printed
    assert cli.main(["key", "new"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["key", "new", "no/such/folder/key"]) == 2
    assert "Give a path in a folder that exists" in capsys.readouterr().err
