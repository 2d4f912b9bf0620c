"""The outer learning rate of each round. Pure: it follows from what the members agreed on, so they agree on it, too."""

import math
from dataclasses import dataclass
from typing import Literal

from diloco.pseudo_gradient import agreeable

@dataclass(frozen=True)
class OuterLr:
    """A linear warmup over the first rounds, times a decay over the whole run.

    Attributes:
        lr: the highest rate.
        warmup_rounds: of a fragment; the last of them has the full rate.
        decay: from the start of the run, where it is 1, to its end, where it is ``min_lr_ratio``.
        total: inner steps, or tokens of all islands, that the run has.
        counts: which of the two tells how far the run is.
    """

    lr: float
    warmup_rounds: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = 1.0
    total: int = 1
    counts: Literal["steps", "tokens"] = "steps"

    def at(self, height: int, ledger_step: int, ledger_tokens: int) -> float:
        """Of the round that follows ``height`` committed ones, which counted so many tokens, up to so many inner steps.

        Rounded to nine digits: the last ones of a cosine differ between machines.
        """
        rate = self.lr
        if height < self.warmup_rounds:
            rate *= (height + 1) / self.warmup_rounds
        done = min(1.0, (ledger_step if self.counts == "steps" else ledger_tokens) / self.total)
        if self.decay == "linear":
            rate *= self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 - done)
        elif self.decay == "cosine":
            rate *= self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
        return agreeable(rate)
