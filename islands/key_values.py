"""What generation keeps of a sequence, so that the next token costs one position."""

import torch
from torch import Tensor


class KeyValues:
    """Keys and values of the positions that one layer has seen, (B, T, K, E) each: T positions, K heads of size E."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self._keys is None else self._keys.shape[1]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of further positions. Returns all."""
        if self._keys is not None:
            keys, values = torch.cat([self._keys, keys], dim=1), torch.cat([self._values, values], dim=1)
        self._keys, self._values = keys, values
        return keys, values
