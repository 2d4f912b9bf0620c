"""The launcher, with islands that are small scripts: what is started, what is shown, and that nothing is left."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator, Sequence

import pytest

from diloco import launch as launching
from diloco import launch_plan
from diloco.config import RunConfig
from diloco.earlier_run import begin
from diloco.identity import make_identity
from diloco.launch import _last_words, launch, torchrun_command
from diloco.launch_plan import LaunchPlan, make_plan
from diloco.run_files import lock_run_dir
from islands import checkpoint_files
from islands.config_file import ConfigError, load_config

#: The islands are scripts, so that no exchange is started.
NO_EXCHANGE = "exchange.type=hivemind"
ON_CPU = (NO_EXCHANGE, "run.device=cpu")

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

# argv: what to do, configuration, overrides. Tells what it was given and its processes in files beside its metrics.
FAKE_ISLAND = """
import json, os, pathlib, signal, subprocess, sys, time
what, given = sys.argv[1], dict(override.split("=", 1) for override in sys.argv[3:])
folder = pathlib.Path(json.loads(given["swarm.identity_file"])).parent
island = int(given["swarm.slot"])
pids = [os.getpid()]
if what == "ranks" and "LOCAL_RANK" not in os.environ:  # stands for torchrun
    signal.signal(signal.SIGTERM, lambda *_: print("torchrun was asked", flush=True) or os._exit(1))
    sys.exit(subprocess.call([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "0"}))
if what == "ranks":
    signal.signal(signal.SIGTERM, lambda *_: print("a rank was asked", flush=True) or os._exit(0))
    helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])  # inherits the rank's environment
    pids.append(helper.pid)
    with open(folder / "metrics.jsonl", "w") as metrics:
        print(json.dumps(dict(kind="step", island=island, time=time.time(), step=1, loss=3.0, tokens=8)), file=metrics)
    (folder / "pids.json").write_text(json.dumps(pids))
    time.sleep(60)
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "pids.json").write_text(json.dumps(pids))
    time.sleep(60)
if what == "stubborn":  # like a worker that torchrun started: a session of its own, and deaf to being asked
    code = "from signal import *; import time; signal(SIGTERM, SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    pids.append(child.pid)
seen = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
(folder / "given.json").write_text(json.dumps({"overrides": given, "environment": seen}))
(folder / "pids.part").write_text(json.dumps(pids))
(folder / "pids.part").rename(folder / "pids.json")
print("hello", flush=True)
if what == "fail" and island == 1:
    while not (folder.parent / "island-0" / "pids.json").exists():  # so that there is something to end
        time.sleep(0.02)
    print("something broke", file=sys.stderr)
    sys.exit(7)
if what in ("fail", "stubborn", "wait"):
    time.sleep(60)
with open(folder / "metrics.jsonl", "w") as metrics:
    for step in (1, 2):
        row = dict(kind="step", island=island, time=time.time(), step=step, loss=3.0, tokens=8, tokens_per_second=9.0)
        print(json.dumps(row), file=metrics)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Callable[[str], launching.IslandCommand]]:
    """Makes an island command that does as it is told."""
    script = tmp_path / "fake_island.py"
    script.write_text(FAKE_ISLAND)

    def told(what: str) -> launching.IslandCommand:
        return lambda plan, overrides: [sys.executable, "-S", str(script), what, str(plan.config_file), *overrides]

    yield told
    for pid in _pids(tmp_path / "run", islands=0):
        if _is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _pids(run_dir: Path, islands: int) -> list[int]:
    """Process ids that the fake islands wrote down, once that many have."""
    deadline = time.monotonic() + 30
    while len(found := list(run_dir.glob("island-*/pids.json"))) < islands:
        assert time.monotonic() < deadline, f"only {found} were written"
        time.sleep(0.02)
    return [pid for path in found for pid in json.loads(path.read_text())]


def _await_ends(pids: Sequence[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} live on"
        time.sleep(0.02)


def _given(run_dir: Path, island: int) -> dict[str, dict[str, str]]:
    return json.loads((run_dir / f"island-{island}" / "given.json").read_text())


def _plan(tmp_path: Path, *overrides: str, islands: int | None = None) -> LaunchPlan:
    return make_plan(QUICKSTART, [f"run.dir={tmp_path / 'run'}", NO_EXCHANGE, *overrides], islands)


def test_islands_know_the_first_one_before_it_started(tmp_path, fake, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = tmp_path / "run"
    assert launch(QUICKSTART, [f"run.dir={run}", *ON_CPU], 3, command=fake("finish")) == 0
    first = _given(run, 0)["overrides"]
    assert first["swarm.initial_peers"] == "[]"
    assert first["swarm.islands"] == "3"
    port = json.loads(first["swarm.listen"]).removeprefix("127.0.0.1:")
    for island in (1, 2):
        given = _given(run, island)
        assert given["overrides"]["swarm.slot"] == str(island)
        (address,) = json.loads(given["overrides"]["swarm.initial_peers"])
        assert address.startswith(f"/ip4/127.0.0.1/tcp/{port}/p2p/Qm")
        assert given["environment"]["OMP_NUM_THREADS"] == "1"
    assert stat.S_IMODE((run / "island-0" / "identity").stat().st_mode) == 0o600
    printed = capfd.readouterr().out
    for island in range(3):
        assert f"island {island} | hello\n" in printed
        assert f"island {island} | done 2/200 · loss 3.000" in printed
        assert (run / f"island-{island}" / "log.txt").read_text() == "hello\n"
    assert json.loads((run / "summary.json").read_text())["tokens"] == 3 * 2 * 8


def test_missing_text_is_refused_before_anything_is_made(tmp_path, capfd):
    wanted = [f"run.dir={tmp_path / 'run'}", "data.type=text", "data.paths=[nowhere.txt]", *ON_CPU]
    with pytest.raises(ConfigError, match="'nowhere.txt' matches no file"):
        launch(QUICKSTART, wanted, command=lambda *_: pytest.fail("an island was started"))
    assert not (tmp_path / "run").exists()


def test_one_failing_island_ends_all_and_gives_its_exit_code(tmp_path, fake, capfd):
    assert launch(QUICKSTART, [f"run.dir={tmp_path / 'run'}", *ON_CPU], command=fake("fail")) == 7
    told = capfd.readouterr().err
    assert "Island 1 failed with exit code 7" in told and "something broke" in told
    _await_ends(_pids(tmp_path / "run", islands=2), seconds=0.5)


TORCHRUN_SAYS = """\
E1129 17:14:55.845000 8419 .venv/lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2)
Traceback (most recent call last):
  Root Cause (first observed failure):
  [0]:
    time      : 2026-01-01_00:00:00
    exitcode  : {code} (pid: 8424)
"""


@pytest.mark.parametrize(("code", "returned", "told"), [(2, 2, "exit code 2"), (-9, 137, "SIGKILL")])
def test_the_rank_that_failed_is_told_and_not_how_torchrun_ended(tmp_path, capfd, code, returned, told):
    script = f"import sys; print('peer does not answer'); print({TORCHRUN_SAYS.format(code=code)!r}); sys.exit(1)"
    command = lambda *_: [sys.executable, "-S", "-c", script]  # noqa: E731
    assert launch(QUICKSTART, [f"run.dir={tmp_path / 'run'}", *ON_CPU], 1, command=command) == returned
    printed = capfd.readouterr()
    assert f"{told}, so all islands were ended" in printed.err and "  peer does not answer\n" in printed.err
    assert "Traceback" not in printed.err + printed.out
    assert "Traceback" in (tmp_path / "run" / "island-0" / "log.txt").read_text()


def test_of_several_attempts_the_last_words_are_those_of_the_last():
    warns = TORCHRUN_SAYS.splitlines()[0].replace("E1129", "W1129").replace("failed (exitcode: 2)", "Sending process 7 closing signal")
    fails = TORCHRUN_SAYS.splitlines()[0]
    first = ["in the first", warns, "a survivor of the first", fails]
    assert _last_words("\n".join([*first, "in the second", warns, "a survivor", fails, "Traceback"])) == ["in the second"]
    assert _last_words("\n".join([*first, "Traceback"])) == ["in the first"]
    assert _last_words("no torchrun\nat all") == ["no torchrun", "at all"]


def _start_launcher(tmp_path: Path, what: str, *overrides: str) -> subprocess.Popen[str]:
    code = (
        "import sys, pathlib; from diloco import launch, launch_processes; what, script, *rest = sys.argv[1:]; "
        "launch.GRACE_MARGIN_SECONDS, launch_processes.STOP_SECONDS = 0.2, 1.0; "
        "command = lambda plan, overrides: [sys.executable, '-S', script, what, str(plan.config_file), *overrides]; "
        "sys.exit(launch.launch(pathlib.Path(rest[0]), rest[1:], command=command))"
    )
    arguments = [what, str(tmp_path / "fake_island.py"), str(QUICKSTART), f"run.dir={tmp_path / 'run'}", *ON_CPU, *overrides]
    command = [sys.executable, "-u", "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_one_wish_stops_the_ranks_and_not_torchrun(tmp_path, fake):
    fake("ranks")
    with _start_launcher(tmp_path, "ranks", "train.resume=never") as launcher:
        pids = _pids(tmp_path / "run", islands=2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=10) == 0
        _await_ends(pids, seconds=1)  # the helper of each rank, too
        told = launcher.stdout.read()
    assert "stopping: last checkpoints are being written; Ctrl-C again ends at once" in told
    assert f"Stopped before there was a checkpoint. To go on: diloco launch {QUICKSTART} run.dir=" in told
    assert "train.resume=never" not in told and "train.resume=auto" in told
    for island in (0, 1):
        assert (tmp_path / "run" / f"island-{island}" / "log.txt").read_text() == "a rank was asked\n"


@pytest.mark.parametrize(
    "second", [pytest.param(True, id="a second wish"), pytest.param(False, id="the end of the grace", marks=pytest.mark.slow)]
)
def test_islands_that_do_not_stop_are_ended(tmp_path, fake, second):
    fake("deaf")
    with _start_launcher(tmp_path, "deaf", f"checkpoint.grace={100 if second else 0.3}") as launcher:
        pids = _pids(tmp_path / "run", islands=2)
        launcher.send_signal(signal.SIGINT)
        while "stopping: " not in launcher.stdout.readline():
            pass
        if second:
            launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=10) == 130
        _await_ends(pids, seconds=0.5)
        assert "Interrupted" in launcher.stdout.read()


def test_no_process_of_an_island_that_stopped_lives_on(tmp_path, fake):
    fake("stubborn")
    with _start_launcher(tmp_path, "stubborn") as launcher:
        pids = _pids(tmp_path / "run", islands=2)
        assert len(pids) == 4 and all(map(_is_alive, pids))
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=10) == 0  # none had begun to train
        _await_ends(pids, seconds=0.5)


def test_killing_the_launcher_ends_the_islands(tmp_path, fake):
    fake("wait")
    with _start_launcher(tmp_path, "wait") as launcher:
        pids = _pids(tmp_path / "run", islands=2)
        launcher.kill()
        _await_ends(pids, seconds=10)


def test_earlier_runs_are_moved_aside(tmp_path, fake, capfd):
    overrides = [f"run.dir={tmp_path / 'run'}", *ON_CPU]
    for _ in range(3):
        assert launch(QUICKSTART, overrides, 1, command=fake("finish")) == 0
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run.1", "run.2"]
    assert all((path / "summary.json").exists() for path in tmp_path.glob("run*"))
    assert f"which is now {tmp_path / 'run.2'}" in capfd.readouterr().out


def _checkpoint(config: RunConfig, step: int, slot: int = 0) -> Path:
    """Without tensors, which the launcher does not look at."""
    hidden = checkpoint_files.start_folder(config.checkpoint_root, step, slot)
    manifest = checkpoint_files.Manifest(
        format=checkpoint_files.FORMAT,
        version="",
        step=step,
        slot=slot,
        progress=dict(step=step, slot=slot, position=0, lr_step=step),
        config=json.loads(config.model_dump_json()),
        schema="",
        corpus={},
        grid="",
        world_size=1,
        facts={},
        files={},
    )
    checkpoint_files.write_manifest(hidden, manifest)
    return checkpoint_files.publish(hidden, slot)


def _config(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config(RunConfig, QUICKSTART, [f"run.dir={tmp_path / 'run'}", *ON_CPU, *overrides])


def test_an_unfinished_run_goes_on_in_its_folder(tmp_path, fake, capfd):
    overrides, run = [f"run.dir={tmp_path / 'run'}", *ON_CPU], tmp_path / "run"
    assert launch(QUICKSTART, overrides, command=fake("finish")) == 0
    (address,) = json.loads(_given(run, 1)["overrides"]["swarm.initial_peers"])
    _checkpoint(_config(tmp_path), 20, slot=1)
    _checkpoint(_config(tmp_path), 60)
    assert launch(QUICKSTART, overrides, command=fake("finish")) == 0
    assert f"going on from step 60 of 200, from {run / 'checkpoints'}" in capfd.readouterr().out
    (again,) = json.loads(_given(run, 1)["overrides"]["swarm.initial_peers"])
    assert again.rpartition("/")[2] == address.rpartition("/")[2]  # the same peer id
    assert (run / "island-0" / "log.1.txt").read_text() == (run / "island-0" / "log.txt").read_text() == "hello\n"
    assert not (tmp_path / "run.1").exists()


@pytest.mark.parametrize(("step", "overrides"), [(200, []), (60, ["train.resume=never"])], ids=["finished", "never"])
def test_a_run_that_is_not_to_go_on_is_moved_aside(tmp_path, step, overrides):
    _checkpoint(_config(tmp_path), step)
    beginning = begin(_config(tmp_path, *overrides))
    assert beginning.told == (f"{tmp_path / 'run'} holds an earlier run, which is now {tmp_path / 'run.1'}",)
    assert list((tmp_path / "run").iterdir()) == [] and beginning.overrides == ()


def test_more_steps_make_a_finished_run_an_unfinished_one(tmp_path):
    _checkpoint(_config(tmp_path), 200)
    (told,) = begin(_config(tmp_path, "train.steps=300")).told
    assert told.startswith("going on from step 200 of 300")


def test_a_damaged_manifest_is_passed_over(tmp_path):
    _checkpoint(_config(tmp_path), 60)
    (_checkpoint(_config(tmp_path), 80) / "manifest.json").write_text("{")
    assert begin(_config(tmp_path)).told[0].startswith("going on from step 60 ")


def test_a_run_of_which_one_island_was_done_is_not_told_to_go_on(tmp_path, capfd):
    """The command for that would move it aside and begin afresh."""
    plan = make_plan(QUICKSTART, [f"run.dir={tmp_path / 'run'}", *ON_CPU])
    (tmp_path / "run" / "island-0").mkdir(parents=True)
    for step, told in ((199, "Stopped at step 199 of 200. To go on: diloco launch"), (200, "files ")):
        _checkpoint(plan.config, step)
        assert launching._tell_ending(plan, launching._Ending("stopped")) == 0
        assert told in (printed := capfd.readouterr().out) and ("To go on" in printed) == (step < 200)


def test_a_checkpoint_inside_the_run_is_found_where_that_is_moved(tmp_path):
    folder = _checkpoint(_config(tmp_path), 60)
    beginning = begin(_config(tmp_path, f"train.resume={folder.parent}"))
    moved = tmp_path / "run.1" / "checkpoints" / "step-00000060"
    assert moved.is_dir() and beginning.overrides == (f'train.resume="{moved}"',)


def test_checkpoints_elsewhere_start_a_new_run(tmp_path):
    elsewhere = f"checkpoint.dir={tmp_path / 'elsewhere'}"
    folder = _checkpoint(_config(tmp_path, elsewhere), 60)
    assert begin(_config(tmp_path, f"train.resume={folder}")).overrides == ()
    assert begin(_config(tmp_path, elsewhere)).told[0].startswith("going on from step 60 of 200")
    with pytest.raises(ConfigError, match="is at its end: step 60, of train.steps=50"):
        begin(_config(tmp_path, elsewhere, "train.steps=50"))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.resume=missing"], "train.resume=missing: no such file or folder"),
        (["model.hidden_size=64"], r"(?s)at step 60, of another configuration.*model.hidden_size: \d+ -> 64"),
    ],
)
def test_what_can_not_be_resumed_is_refused_and_nothing_moves(tmp_path, overrides, told):
    folder = _checkpoint(_config(tmp_path), 60)
    with pytest.raises(ConfigError, match=told):
        begin(_config(tmp_path, *overrides))
    assert folder.is_dir()


def test_a_folder_in_use_is_refused(tmp_path, fake):
    with lock_run_dir(tmp_path / "run"), pytest.raises(ConfigError, match="is in use: a run goes on in it"):
        launch(QUICKSTART, [f"run.dir={tmp_path / 'run'}", *ON_CPU], command=fake("finish"))
    assert launch(QUICKSTART, [f"run.dir={tmp_path / 'run'}", *ON_CPU], command=fake("finish")) == 0


def test_torchrun_is_told_how_often_to_start_an_island_again(tmp_path):
    overrides = [f"run.dir={tmp_path / 'run'}", *ON_CPU]
    plan = make_plan(QUICKSTART, [*overrides, "checkpoint.grace=50"], max_restarts=3)
    assert "--max-restarts=3" in torchrun_command(plan, [])
    assert plan.environment(0)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "55"
    with pytest.raises(ConfigError, match="--max-restarts -1"):
        make_plan(QUICKSTART, overrides, max_restarts=-1)


def test_a_folder_that_is_no_run_stays(tmp_path, fake):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("irreplaceable")
    with pytest.raises(ConfigError, match="holds no run"):
        launch(QUICKSTART, [f"run.dir={tmp_path / 'run'}", *ON_CPU], command=fake("finish"))
    assert (tmp_path / "run" / "thesis.tex").exists()


def test_port_in_use_is_refused(tmp_path, fake):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        overrides = [f"run.dir={tmp_path / 'run'}", *ON_CPU, f"swarm.listen=127.0.0.1:{port}"]
        with pytest.raises(ConfigError, match=f"swarm.listen=127.0.0.1:{port} can't be listened on: Address"):
            launch(QUICKSTART, overrides, command=fake("finish"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "islands", "told"),
    [
        ((), 5, r"swarm.islands=5 is more than swarm.max_slots=4"),
        (("train.global_batch_size=15",), None, r"train.global_batch_size.*15"),
        (("swarm.slot=1",), None, r"swarm.slot=1: 'diloco launch' starts all islands"),
        (("swarm.initial_peers=[/ip4/10.0.0.1/tcp/1/p2p/Qm]",), None, r"swarm.initial_peers=.*Remove it"),
        (("outer.fragments=50", "outer.sync_every=60"), None, r"outer.fragments=50 asks .* the model has \d+ blocks"),
        (("exchange.type=in_memory", "parallel.data_parallel_size=1", "checkpoint.every=5"), None, r"checkpoint.every=5 does not go with"),
        (("exchange.type=in_memory", "parallel.data_parallel_size=2"), None, r"parallel.data_parallel_size=2: .* one rank. Set it to 1"),
        (("outer.sync_evry=3",), None, r"outer.sync_evry: unknown key \(did you mean 'sync_every'\?\)"),
    ],
)
def test_what_can_not_work_is_refused_before_anything_starts(tmp_path, overrides, islands, told):
    with pytest.raises(ConfigError, match=told):
        _plan(tmp_path, *overrides, islands=islands)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("num_gpus", "data_parallel_size", "ranks", "used"),
    [(0, -1, 1, 0), (1, -1, 1, 0), (2, -1, 1, 2), (8, -1, 4, 8), (3, 2, 2, 0), (4, 2, 2, 4), (5, -1, 2, 4)],
)
def test_gpus_are_divided_if_every_rank_gets_one(tmp_path, monkeypatch, num_gpus, data_parallel_size, ranks, used):
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda: tuple(map(str, range(num_gpus))))
    plan = _plan(tmp_path, f"parallel.data_parallel_size={data_parallel_size}")
    assert (plan.ranks, len(plan.gpus)) == (ranks, used)


def test_each_island_sees_its_own_gpus(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda: ("4", "5", "6", "7"))
    assert launch(QUICKSTART, [f"run.dir={tmp_path / 'run'}", NO_EXCHANGE], command=fake("finish")) == 0
    given = [_given(tmp_path / "run", island) for island in (0, 1)]
    assert [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in given] == ["4,5", "6,7"]
    assert all("run.device" not in each["overrides"] for each in given)


def test_too_few_gpus_are_refused_where_gpus_were_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda: ("0",))
    with pytest.raises(ConfigError, match="2 islands x 2 ranks = 4 ranks, and this machine has 1"):
        _plan(tmp_path, "run.device=cuda")


def test_peer_id_is_the_one_that_hivemind_reads_from_the_file(tmp_path):
    from hivemind.p2p import PeerID

    ids = [make_identity(tmp_path / str(number)) for number in range(3)]
    assert ids == [PeerID.from_identity((tmp_path / str(number)).read_bytes()).to_base58() for number in range(3)]
    assert len(set(ids)) == 3


def test_the_key_that_is_there_is_kept(tmp_path):
    first = make_identity(tmp_path / "identity")
    assert make_identity(tmp_path / "identity") == first
    (tmp_path / "identity").write_bytes(b"no key")
    with pytest.raises(ConfigError, match="is not the key of an island. Remove it"):
        make_identity(tmp_path / "identity")


@pytest.mark.parametrize(("exchange", "processes"), [("hivemind", 2), ("process_group", 4), ("in_memory", 1)])
def test_islands_that_share_a_job_are_started_as_one(tmp_path: Path, exchange: str, processes: int) -> None:
    overrides = [f"exchange.type={exchange}", "parallel.data_parallel_size=2", "run.device=cpu"]
    if exchange == "process_group":
        overrides += ["outer.codec.type=none"]
    if exchange == "in_memory":
        overrides += ["parallel.data_parallel_size=1"]
    plan = make_plan(QUICKSTART, [f"run.dir={tmp_path / 'run'}", *overrides], 2)
    assert plan.jobs == (2 if exchange == "hivemind" else 1)
    assert f"--nproc-per-node={processes}" in torchrun_command(plan, [])
