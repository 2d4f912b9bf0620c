"""Which of the three ways to run a configuration: one island of a swarm, replicas of one cluster, or islands that are simulated."""

from diloco.config import RunConfig


def run(config: RunConfig) -> None:
    """What ``torchrun … -m diloco CONFIG`` does on every rank.

    Raises:
        ConfigError: before anything is started.
    """
    if config.exchange.type == "process_group":
        from diloco.cluster import run_cluster

        run_cluster(config)
    elif config.exchange.type == "in_memory" and config.swarm.islands > 1:
        from diloco.simulate import run_simulation

        run_simulation(config)
    else:
        from diloco.island import run_island

        run_island(config)
