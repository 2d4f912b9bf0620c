"""Eager updates (Kale et al., arXiv 2502.12996): a round lands when the next one is launched, and nobody waits for it.

Meanwhile the island goes on from a guess of the next anchor: the last mean, in which its own old share is replaced by what it
has done since. The guess is the island's own affair. The anchor itself, which all agree on, is only ever stepped by the mean.
"""

import torch

from diloco.outer_state import FragmentState


class EagerStart:
    """Where an island's present period of one fragment began, and what it offered at the end of the last. Flat, on rank 0.

    Args:
        state: its anchor is where the first period begins.

    Attributes:
        base: where the present period began.
        offered: what was offered at the end of the last, and has not counted yet.
    """

    def __init__(self, state: FragmentState) -> None:
        self._state = state
        self.base = state.anchor.clone()
        self.offered = torch.zeros_like(self.base)

    def restart(self) -> None:
        """The parameters were replaced by the anchor."""
        self.base.copy_(self._state.anchor)
        self.offered.zero_()

    def skipped(self) -> None:
        """What was offered has not counted: it is part of what is offered next."""
        self.base += self.offered
        self.offered.zero_()

    def left_out(self) -> None:
        """The same, and the anchor moved without this island, and the parameters with it."""
        self.skipped()
        self.base += self._state.anchor - self._state.previous_anchor

    def offer(self, share: float) -> None:
        """A period ends: make ``state.local``, which holds the parameters, as far from the anchor as they moved in it.

        Args:
            share: of this island in ``state.mean``, of which what it offered last is part: the next period begins at a guess.
                0 where there is no such mean: it begins where the island is.
        """
        state, moved = self._state, self.base - self._state.local
        if share:
            state.look_ahead(state.mean + share * (moved - self.offered), out=self.base)
        else:
            self.base.copy_(state.local)
        self.offered.copy_(moved)
        torch.sub(state.anchor, moved, out=state.local)
