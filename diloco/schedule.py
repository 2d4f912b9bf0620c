"""Which fragments launch and land after which inner step. Pure: every rank of an island gets the same answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Every fragment once in ``sync_every`` inner steps, evenly staggered, and all of them after the last step.

    Steps count from 1.
    """

    steps: int
    sync_every: int
    num_fragments: int = 1

    def launches(self, step: int) -> list[int]:
        """Fragments whose round begins after inner step ``step``."""
        if step == self.steps:
            return list(range(self.num_fragments))
        return [index for index in range(self.num_fragments) if (step + self._offset(index)) % self.sync_every == 0]

    def landings(self, step: int) -> list[int]:
        """Fragments whose round must have ended before inner step ``step + 1``."""
        return self.launches(step)

    def _offset(self, fragment: int) -> int:
        return fragment * self.sync_every // self.num_fragments
