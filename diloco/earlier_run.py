"""What lies in the folder of a run before it starts: gone on with, or moved aside."""

import json
from dataclasses import dataclass
from pathlib import Path

from diloco.config import RunConfig
from diloco.launch_plan import LaunchPlan
from diloco.run_files import keep_run_dir, make_run_dir
from islands.checkpoint_files import BadCheckpoint, Manifest, find, read_manifest
from islands.config_changes import changes
from islands.config_file import ConfigError

_AUTO, _NEVER = "auto", "never"


@dataclass(frozen=True)
class Beginning:
    """How a run begins.

    Attributes:
        told: lines for the person who starts it.
        overrides: keys that the islands need for it.
    """

    told: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def newest(config: RunConfig) -> Manifest | None:
    """Of the newest checkpoint of the run's islands that tells what it is; None without any."""
    for folder in find(config.checkpoint_root):
        try:
            manifest = read_manifest(folder)
        except BadCheckpoint:
            continue  # the islands say so, when they choose
        if manifest.slot < config.swarm.islands:
            return manifest
    return None


def begin(config: RunConfig) -> Beginning:
    """Make ``run.dir`` ready: kept where ``train.resume=auto`` finds a run that can go on, else made anew.

    Raises:
        ConfigError: what lies there can't be gone on with, mixed with or moved.
    """
    run_dir, root, resume = Path(config.run.dir), config.checkpoint_root, config.train.resume
    if resume == _AUTO and (last := newest(config)):
        reached, steps = last.progress["lr_step"], config.train.steps
        if reached < steps:
            _refuse_harm(last, config)
            keep_run_dir(run_dir)
            return Beginning((f"going on from step {reached} of {steps}, from {root}; train.resume=never starts afresh",))
        if not _is_within(root, run_dir):
            raise ConfigError(
                f"checkpoint.dir={root} has the checkpoints of a run that is at its end: step {reached}, of train.steps={steps}. Raise "
                "train.steps to go on; set train.resume=never, or another checkpoint.dir, to start afresh"
            )
    source = None if resume in (_AUTO, _NEVER) else Path(resume).expanduser()
    if source and not source.exists():
        raise ConfigError(f"train.resume={resume}: no such file or folder. Give auto, never, or the path of a checkpoint or a run")
    moved = make_run_dir(run_dir)
    if moved is None:
        return Beginning()
    told = f"{run_dir} holds an earlier run, which is now {moved}"
    if source is None or not _is_within(source, run_dir):
        return Beginning((told,))
    source = moved / source.resolve().relative_to(run_dir.resolve())
    return Beginning((told, f"starting from {source}"), (f"train.resume={json.dumps(str(source))}",))


def command_to_go_on(plan: LaunchPlan) -> list[str]:
    """The command that goes on with a run which was started and stopped."""
    kept = [override for override in plan.overrides if not override.startswith("train.resume=")]
    resume = [] if plan.config.train.resume == _AUTO else [f"train.resume={_AUTO}"]
    restarts = ["--max-restarts", str(plan.max_restarts)] if plan.max_restarts else []
    return ["diloco", "launch", str(plan.config_file), *kept, *resume, *restarts]


def _refuse_harm(last: Manifest, config: RunConfig) -> None:
    harmful = [f"  {change}: {change.harm}" for change in changes(last.config, config.model_dump(mode="json")) if change.harm]
    if harmful:
        lines = "\n".join(harmful)
        raise ConfigError(
            f"run.dir={config.run.dir} holds an unfinished run, at step {last.step}, of another configuration:\n{lines}\n"
            "Undo these changes to go on with it; or set train.resume=never to move it aside, or run.name to another name"
        )


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
