"""How far an island is."""

from dataclasses import dataclass


@dataclass
class Progress:
    """How far an island is. The loop counts; a hook may move it, where the rest of the run went on without this island.

    Attributes:
        step: inner steps done, as rows tell them.
        slot: fixes which samples the island trains on.
        position: sequences of the slot that the island has taken.
        lr_step: where the learning rate stands, which is the step as long as the island is all there is; the end of the
            schedule is that of training.
    """

    step: int = 0
    slot: int = 0
    position: int = 0
    lr_step: int = 0


def crosses(before: int, now: int, every: int) -> bool:
    """Whether a multiple of ``every`` (0: none) lies between two steps; not every step is met, where an island follows others."""
    return every > 0 and now // every > before // every
