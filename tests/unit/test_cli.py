"""The command line: what each command says, and that what is refused is one message and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diloco import cli
from diloco.exchange.base import JoinError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_overview_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name}" in printed and command.__doc__ in printed
    assert "torchrun" in printed
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: diloco {name}" in printed and f"\n  diloco {name} " in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lanch"], "'lanch' is not a command; did you mean 'launch'?"),
        (["frobnicate"], "the commands are plan, launch"),
        (["launch", "missing.yaml"], "missing.yaml: no such file"),
        (["launch", str(QUICKSTART), "train.stepz=3", "exchange.type=in_memory"], "train.stepz: unknown key"),
        (["launch", str(QUICKSTART), "--islands", "9", "exchange.type=in_memory"], "swarm.islands=9 is more than"),
        (["launch", str(QUICKSTART), "train"], "'train' is not of the form key.sub=value"),
        (["report", "missing"], "RUN_DIR=missing: no such folder"),
        (["export", "missing"], "RUN_DIR=missing: no such folder"),
        (["generate", "missing", "--prompt", "x"], "RUN_DIR=missing: no such folder"),
    ],
)
def test_refusals_are_one_message_and_exit_code_2(arguments, told, capsys):
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert told in printed.err and "Traceback" not in printed.err
    assert printed.out == ""


def test_an_island_that_can_not_join_is_told_once_and_exits_with_2(capsys, monkeypatch):
    def refuse(arguments):
        raise JoinError("no island answers at /ip4/10.0.0.1/tcp/1/p2p/Qm")

    assert cli.run_command(refuse, []) == 2
    assert capsys.readouterr().err == "no island answers at /ip4/10.0.0.1/tcp/1/p2p/Qm\n"
    monkeypatch.setenv("RANK", "1")
    assert cli.run_command(refuse, []) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["--islands", "3", "a.b=1", "c.d=2"], ["a.b=1", "--islands", "3", "c.d=2"]])
def test_overrides_may_stand_around_options(arguments, monkeypatch):
    seen = []
    monkeypatch.setattr("diloco.launch.launch", lambda *given: seen.append(given) or 0)
    assert cli.main(["launch", "run.yaml", *arguments]) == 0
    assert seen == [(Path("run.yaml"), ["a.b=1", "c.d=2"], 3, 0)]


def test_report_rewrites_the_summary(tmp_path, capsys):
    (tmp_path / "island-0").mkdir()
    (tmp_path / "summary.json").write_text("stale")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["islands"] == 1
    assert "summary.json" in capsys.readouterr().out


def test_the_module_takes_a_configuration_or_a_command():
    for arguments, told in (
        ([str(QUICKSTART), "exchange.type=in_memory", "train.stepz=3"], "train.stepz: unknown key"),
        (["report", "missing"], "RUN_DIR=missing: no such folder"),
    ):
        command = [sys.executable, "-m", "diloco", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert told in ended.stderr and "Traceback" not in ended.stderr
