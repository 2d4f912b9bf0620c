"""The loss on held-out text: the same sequences for every island, grid and time of a run."""

import numpy as np
import torch
import torch.distributed as dist

from islands.data.base import num_samples, windows
from islands.forward_backward import IGNORED, ForwardBackward


class Evaluation:
    """Mean cross-entropy a token over ``sequences`` held-out sequences, spread evenly over the text.

    Args:
        data_group: the ranks that share the work.
    """

    def __init__(
        self, held_out: np.ndarray, seq_len: int, sequences: int, data_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        available, ranks = num_samples(held_out, seq_len), data_group.size()
        rows = np.arange(-(-sequences // ranks) * ranks)  # padded: every rank runs equally many forward passes
        inputs, targets = windows(held_out, rows % sequences * (available // sequences), seq_len)
        targets[rows >= sequences] = IGNORED
        mine = slice(data_group.rank(), None, ranks)
        self._inputs, self._targets = inputs[mine].to(device), targets[mine].to(device)
        self._group = data_group

    def __call__(self, model: ForwardBackward) -> float:
        """The loss of ``model`` as it is, equal on all ranks."""
        loss = model.evaluate(self._inputs, self._targets)
        model.after_evaluation()
        total = torch.stack([loss, (self._targets != IGNORED).sum().to(loss)])
        dist.all_reduce(total, group=self._group)
        return float(total[0] / total[1])
