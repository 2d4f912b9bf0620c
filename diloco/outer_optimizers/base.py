"""What an outer optimizer is. torch only."""

from typing import Mapping, Protocol

from torch import Tensor


class OuterOptimizer(Protocol):
    """One step on an anchor, elementwise, so that blocks may be stepped in any order and give the same bits."""

    #: Names of its state tensors, each shaped like the anchor and zero at the start.
    state_names: tuple[str, ...]

    def step(
        self,
        anchor: Tensor,
        pseudo_gradient: Tensor,
        state: Mapping[str, Tensor],
        height: int,
        out_anchor: Tensor,
        out_state: Mapping[str, Tensor],
    ) -> None:
        """Write the next anchor and state into ``out_*``; the inputs are left as they are.

        Args:
            height: rounds of this fragment that were committed before (0 at the first).
        """
