"""Where islands that share a job go on from: all of them from the same step."""

from typing import Callable

from diloco.cluster_facts import ClusterFacts
from diloco.config import RunConfig
from islands import resume
from islands.config_file import ConfigError
from islands.data.base import Corpus
from islands.process import Process, num_restarts
from islands.resume import Chosen
from islands.sharing import FirstRankSays, tell_each_other


def choose_together(
    config: RunConfig, corpus: Corpus, job: Process, process: Process, slot: int, islands: int, told: Callable[[str], None]
) -> Chosen | None:
    """The checkpoint of this island from the newest step of which all islands have a whole one; None to start afresh, as all then do.

    Called on all ranks of the job alike. The first rank of each island looks, and reads every byte of what it finds.

    Raises:
        ConfigError: it does not fit the configuration; or some islands have checkpoints and others have none.
    """
    answer = None
    if process.rank == 0:
        try:
            answer = _meet(config, corpus, job, slot, islands, told if slot == 0 else lambda line: None)
        except ConfigError as error:
            answer = error
    answer = FirstRankSays(process, "checkpoint to resume from")(answer, 2 * config.run.timeout)
    if isinstance(answer, ConfigError):
        raise answer
    return answer


def _meet(config: RunConfig, corpus: Corpus, job: Process, slot: int, islands: int, told: Callable[[str], None]) -> Chosen | None:
    """On the first rank of an island: go back until all have the same step, or nothing."""
    at_most, attempt = None, 0
    while True:
        try:
            chosen, problem = _choose(config, corpus, slot, told, at_most), ""
        except ConfigError as error:
            chosen, problem = None, str(error)
        mine = {"step": chosen.manifest.step if chosen else None, "digests": _digests(chosen), "problem": problem}
        said = _tell_others(job, attempt, slot, islands, mine)
        if problems := list(dict.fromkeys(each["problem"] for each in said if each["problem"])):
            raise ConfigError("\n".join(problems))
        steps = [each["step"] for each in said]
        if len(set(steps)) == 1:
            _check_alike(said, config)
            if at_most == -1:
                told("there is no step of which all islands have a whole checkpoint, so all start afresh")
            return chosen
        if None in steps and num_restarts() == 0:
            have, lack = ([str(index) for index, step in enumerate(steps) if (step is None) == none] for none in (False, True))
            raise ConfigError(
                f"islands {', '.join(have)} have checkpoints and islands {', '.join(lack)} have none that all could go on from; to start "
                "afresh, set train.resume=never"
            )
        at_most, attempt = -1 if None in steps else min(steps), attempt + 1  # -1: none at all


def _digests(chosen: Chosen | None) -> list[str]:
    """Of the anchors in a checkpoint."""
    facts = chosen and ClusterFacts.from_json(chosen.manifest.facts)
    return [fragment.digest for fragment in facts.fragments] if facts else []


def _check_alike(said: list[dict[str, object]], config: RunConfig) -> None:
    """Whether the islands' checkpoints of one step are of one run."""
    different = [str(island) for island, each in enumerate(said) if each["digests"] != said[0]["digests"]]
    if different:
        raise ConfigError(
            f"the checkpoints of step {said[0]['step']} in {config.checkpoint_root} are of different runs: the anchors of islands "
            f"{', '.join(different)} are not that of island 0. Remove those of one of the runs, or set train.resume=never to start afresh"
        )


def _choose(config: RunConfig, corpus: Corpus, slot: int, told: Callable[[str], None], at_most: int | None) -> Chosen | None:
    chosen = resume.choose(config, slot, told, restarted=num_restarts() > 0, at_most=at_most)
    if chosen is None:
        return None
    if ClusterFacts.from_json(chosen.manifest.facts) is None:
        raise ConfigError(
            f"{chosen.folder} is not of replicas that go by outer.sync_every={config.outer.sync_every} in one job, and has no state of "
            "their outer loop; to begin with its weights, export them (diloco export) and set model.init_from to that folder"
        )
    resume.check_corpus(chosen, corpus)
    return chosen


def _tell_others(job: Process, attempt: int, slot: int, islands: int, what: dict[str, object]) -> list[dict[str, object]]:
    """What the first ranks of all islands say, by island."""
    try:
        return tell_each_other(job, f"resume/{attempt}", slot, islands, what)
    except TimeoutError as missing:
        raise RuntimeError(
            f"islands {missing} did not say within run.timeout={job.timeout:g} s which checkpoint they have; their logs say why"
        ) from missing
