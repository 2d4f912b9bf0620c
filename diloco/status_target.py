"""What ``diloco status`` is pointed at: a run's folder, a configuration, or an island's address."""

import json
from dataclasses import dataclass
from pathlib import Path

from diloco.config import RunConfig, SwarmSection
from diloco.run_files import island_dirs, metrics_files, read_rows
from diloco.swarm_key import read_key
from islands.config import RunSection
from islands.config_file import ConfigError, Section, load_config, parse_config

_RESOLVED = "config.resolved.yaml"


class _Watched(Section):
    """The part of a configuration that watching needs; the rest may be of use on other machines only."""

    run: RunSection = RunSection()
    swarm: SwarmSection = SwarmSection()


@dataclass(frozen=True)
class Target:
    """A run, and where its islands are. ``key``: empty in a swarm without one; ``ended``: its files say that it is over."""

    run: str
    addresses: list[str]
    key: bytes = b""
    ended: bool = False


def find_target(target: str, run: str | None = None, key_file: str | None = None) -> Target:
    """Args:
        target: folder, YAML file or address.
        run: name of the run; only an address needs it.
        key_file: in place of the configured one.

    Raises:
        ConfigError: it is none of the three, or does not tell all that is needed.
    """
    if target.startswith("/") and "/p2p/" in target:
        return _from_address(target, run, key_file)
    path = Path(target)
    if path.is_dir():
        return _from_folder(path, run, key_file)
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"TARGET={target}: no such folder or file. Give the folder of a run, such as runs/quickstart; its "
            "configuration; or the address that an island printed, /ip4/…/tcp/…/p2p/…, with --run NAME"
        )
    config = _load(path, run, key_file)
    if not config.swarm.initial_peers and (Path(config.run.dir) / _RESOLVED).exists():
        return _from_folder(Path(config.run.dir), run, key_file)
    if not config.swarm.initial_peers:
        raise ConfigError(
            f"{target} names no swarm.initial_peers and there is no run in run.dir={config.run.dir}, so it doesn't tell "
            "where the islands are. Give the folder of the run, or "
            f"an address that an island printed: diloco status /ip4/…/tcp/…/p2p/… --run {config.run.name}"
        )
    return Target(config.run.name, config.swarm.initial_peers, _key(config))


def _from_address(address: str, run: str | None, key_file: str | None) -> Target:
    if not run:
        raise ConfigError(f"an address doesn't tell the name of the run: diloco status {address} --run NAME")
    raw = {"run": {"name": run}, "swarm": {"initial_peers": [address], "key_file": key_file or ""}}
    config = parse_config(_Watched, raw, source="diloco status")
    return Target(config.run.name, config.swarm.initial_peers, _key(config))


def _from_folder(folder: Path, run: str | None, key_file: str | None) -> Target:
    if not (folder / _RESOLVED).exists():
        problem = f"TARGET={folder} holds no {_RESOLVED}: it is not the folder of a run, or its islands have not joined yet"
        raise ConfigError(f"{problem}. Give one such as runs/quickstart")
    config = _load(folder / _RESOLVED, run, key_file)
    addresses, ended = list(config.swarm.initial_peers), []
    for island in island_dirs(folder):
        rows = [row for path in metrics_files(folder, island) for row in read_rows(path) if row["kind"] == "event"]
        addresses += [str(row.get("detail")) for row in rows if row.get("what") == "address"][-1:]  # where it was last
        ended.append(rows[-1:] != [] and rows[-1].get("what") == "end")
    if not addresses:
        raise ConfigError(
            f"no island in {folder} has noted an address: none has joined the others yet, or exchange.type is not "
            "hivemind. Try again when the run trains"
        )
    return Target(config.run.name, list(dict.fromkeys(addresses)), _key(config), ended=bool(ended) and all(ended))


def _load(path: Path, run: str | None, key_file: str | None) -> _Watched:
    changes = {"run.name": run, "swarm.key_file": key_file}
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items() if value]
    return load_config(_Watched, path, overrides, ignore=RunConfig.model_fields.keys() - _Watched.model_fields.keys())


def _key(config: _Watched) -> bytes:
    return read_key(config.swarm.key_file) if config.swarm.key_file else b""
