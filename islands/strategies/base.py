"""What a data-parallel strategy is to the code that runs micro-batches."""

import contextlib
from typing import ContextManager

from torch import nn


class DataParallel:
    """A model whose gradients some strategy averages over ranks; this class itself is for one that needs none.

    Attributes:
        module: what is called in place of the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def micro_batch(self, is_last: bool) -> ContextManager[None]:
        """Around forward and backward of each micro-batch of a step: what may wait for the last one waits."""
        return contextlib.nullcontext()

    def evaluating(self) -> ContextManager[None]:
        """Around forwards without backward."""
        return contextlib.nullcontext()

    def after_evaluation(self) -> None:
        """After forwards without backward: leave the parameters as training expects them."""
