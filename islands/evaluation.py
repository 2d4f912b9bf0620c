"""The loss on held-out text: the same sequences for every island, grid and time of a run."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from islands.config_file import ConfigError
from islands.data.base import num_samples, windows
from islands.strategies.fsdp import reshard
from islands.train_step import IGNORED, cross_entropy_sum


class Evaluation:
    """Mean cross-entropy a token over ``sequences`` held-out sequences, spread evenly over the text.

    Args:
        data_group: the ranks that share the work.
        batch_size: sequences in one forward pass of one rank.

    Raises:
        ConfigError: the held-out text is too short for them.
    """

    def __init__(
        self, held_out: np.ndarray, seq_len: int, sequences: int, batch_size: int, data_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        available = num_samples(held_out, seq_len)
        if available < sequences:
            raise ConfigError(
                f"train.eval_sequences: {sequences} sequences of data.seq_len={seq_len} are more than the {available} in the "
                "held-out text; lower either, or raise data.held_out"
            )
        ranks = data_group.size()
        rows = np.arange(-(-sequences // ranks) * ranks)  # padded: every rank runs equally many forward passes
        inputs, targets = windows(held_out, rows % sequences * (available // sequences), seq_len)
        targets[rows >= sequences] = IGNORED
        mine = slice(data_group.rank(), None, ranks)
        self._inputs, self._targets = inputs[mine].to(device), targets[mine].to(device)
        self._batch_size, self._group = batch_size, data_group

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        """The loss of ``model`` as it is, equal on all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self._inputs.device)  # summed loss, tokens
        for x, y in zip(self._inputs.split(self._batch_size), self._targets.split(self._batch_size), strict=True):
            total += torch.stack([cross_entropy_sum(model(x), y).double(), (y != IGNORED).sum().double()])
        reshard(model)
        dist.all_reduce(total, group=self._group)
        return float(total[0] / total[1])
