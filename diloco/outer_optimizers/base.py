"""What an outer optimizer is. torch only."""

from typing import Mapping, Protocol

from torch import Tensor


class OuterOptimizer(Protocol):
    """One step on an anchor, elementwise, so that blocks may be stepped in any order and give the same bits.

    All members compute it, and have to agree to the bit. So it only adds, multiplies, divides and takes roots (numpy's, as
    torch's may be off in the last bit), each rounded by itself and in a fixed order; whatever else it needs is plain Python
    arithmetic on numbers that members agree on.

    Attributes:
        lr: the learning rate of a round whose rate no schedule changes.
        state_names: of its state tensors, each shaped like the anchor and zero at the start.
    """

    lr: float
    state_names: tuple[str, ...]

    def step(
        self,
        anchor: Tensor,
        pseudo_gradient: Tensor,
        state: Mapping[str, Tensor],
        height: int,
        lr: float,
        out_anchor: Tensor,
        out_state: Mapping[str, Tensor],
    ) -> None:
        """Write the next anchor and state into ``out_*``, which may be the inputs themselves; else those are left as they are.

        Args:
            height: rounds of this fragment that were committed before (0 at the first).
            lr: the learning rate of this round (:class:`diloco.outer_lr.OuterLr`).
        """
