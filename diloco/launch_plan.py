"""What `diloco launch` will start, checked as far as it can be before a process starts."""

import ipaddress
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from diloco.config import RunConfig, SwarmSection
from islands.config_file import ConfigError, load_config


@dataclass(frozen=True)
class LaunchPlan:
    """What will be started.

    Attributes:
        ranks: processes of each island.
        gpus: ids of the GPUs to divide among the islands; empty: all compute on the CPU.
        max_restarts: how often torchrun starts the ranks of an island again, after one of them died.
    """

    config: RunConfig
    config_file: Path
    overrides: tuple[str, ...]
    ranks: int
    gpus: tuple[str, ...]
    max_restarts: int = 0

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.config.run.dir)

    @property
    def title(self) -> str:
        """The run in a few words."""
        islands, ranks = self.config.swarm.islands, self.ranks
        plural = ("" if islands == 1 else "s", "" if ranks == 1 else "s")
        device = "GPU" if self.gpus else "CPU"
        return f"{self.config.run.name}: {islands} island{plural[0]} x {ranks} rank{plural[1]} on {device}"

    @property
    def in_one_job(self) -> bool:
        """Whether all islands are one ``torchrun`` job: slices of a mesh, or simulated."""
        return self.config.exchange.type != "hivemind"

    @property
    def jobs(self) -> int:
        """How many ``torchrun`` jobs there are to start."""
        return 1 if self.in_one_job else self.config.swarm.islands

    @property
    def ranks_of_job(self) -> int:
        """Processes of each of them."""
        return self.ranks * self.config.swarm.islands if self.config.exchange.type == "process_group" else self.ranks

    def environment(self, number: int) -> dict[str, str]:
        """Of the processes of job ``number``: that of the launcher, and what it adds."""
        patience = str(math.ceil(self.config.checkpoint.grace) + 5)  # torchrun's, should it have to end ranks itself
        own = {"PYTHONUNBUFFERED": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": patience}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[number * self.ranks_of_job : (number + 1) * self.ranks_of_job])
        return environment


def make_plan(config_file: Path, overrides: Sequence[str], islands: int | None = None, max_restarts: int = 0) -> LaunchPlan:
    """Check everything that can be checked before a process starts.

    Raises:
        ConfigError: naming what can't work and what to do.
    """
    from diloco.from_config import make_fragments
    from diloco.simulate import check_simulation
    from islands.fragments import schema_of
    from islands.island import load_corpus, meta_model  # imports torch, which `diloco --help` does not need
    from islands.mesh import check_grid

    asked = [*overrides, *([] if islands is None else [f"swarm.islands={islands}"])]
    config = load_config(RunConfig, config_file, asked)
    _refuse_keys_set_by_launch(config.swarm)
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: give how often an island may be started again, 0 for never")
    gpus = visible_gpus() if config.run.device != "cpu" else ()
    ranks = _ranks_of_an_island(config, len(gpus))
    if config.exchange.type == "in_memory" and config.swarm.islands > 1:
        check_simulation(config)
    check_grid(config, ranks)
    make_fragments(config, schema_of(meta_model(config)))
    load_corpus(config)
    needed = ranks * (1 if config.exchange.type == "in_memory" else config.swarm.islands)
    if len(gpus) < needed:
        if config.run.device == "cuda":
            raise ConfigError(
                f"run.device=cuda needs a GPU for each of {config.swarm.islands} islands x {ranks} ranks = {needed} "
                f"ranks, and this machine has {len(gpus)}. Start fewer, or set run.device=auto to train on the CPU"
            )
        gpus = ()
    return LaunchPlan(config, config_file, tuple(asked), ranks, gpus[:needed], max_restarts)


def _refuse_keys_set_by_launch(swarm: SwarmSection) -> None:
    for key in ("slot", "initial_peers", "identity_file", "announce"):
        value = getattr(swarm, key)
        if value != SwarmSection.model_fields[key].default:
            raise ConfigError(
                f"swarm.{key}={value!r}: 'diloco launch' starts all islands of a run, the first one too, and sets this "
                "key for each of them. Remove it, or start one island alone: torchrun ... -m diloco CONFIG"
            )


def visible_gpus() -> tuple[str, ...]:
    """Ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    count = torch.cuda.device_count()
    named = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return tuple(named[:count]) if named else tuple(map(str, range(count)))


def _ranks_of_an_island(config: RunConfig, num_gpus: int) -> int:
    parallel = config.parallel
    model_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if parallel.data_parallel_size > 0:
        return parallel.data_parallel_size * model_ranks
    if config.exchange.type == "in_memory":
        return model_ranks
    return max(1, num_gpus // config.swarm.islands // model_ranks) * model_ranks


def founder_port(swarm: SwarmSection) -> int:
    """The port of island 0, known before it starts so that all islands can start at the same moment."""
    address, port = host_and_port(swarm.listen)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(address), port))
        except OSError as error:
            raise ConfigError(
                f"swarm.listen={swarm.listen} can't be listened on: {error.strerror}. End the program that has the "
                f"port, choose another one, or give port 0 for any that is free"
            ) from None
        return probe.getsockname()[1]


def host_and_port(listen: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """The two halves of ``swarm.listen``, which was checked before."""
    host, _, port = listen.rpartition(":")
    return ipaddress.ip_address(host.strip("[]")), int(port)
