"""Rotary position embedding (arXiv 2104.09864), and how its frequencies are scaled for longer contexts.

Shapes: B batch, T positions, H heads, E head size.
"""

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from islands.config_file import Section


class RopeScaling(Section):
    """Slower rotary frequencies; with the same keys and meaning as in transformers."""

    type: Literal["none", "linear", "llama3"] = Field(
        "none", description="linear: all frequencies are divided by factor; llama3: only low ones are, with a smooth passage"
    )
    factor: float = Field(1.0, ge=1, description="by which frequencies are divided")
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: what turns fewer times than this in original_max_position_embeddings is divided by factor"
    )
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: what turns more often than this stays as it is")
    original_max_position_embeddings: int = Field(8192, ge=1, description="llama3: positions that the model was first trained on")

    @model_validator(mode="after")
    def _keys_belong_together(self) -> "RopeScaling":
        if self.type == "none" and self.factor != 1:
            raise ValueError(f"factor={self.factor} belongs to type=linear or type=llama3, and type here is none; set type")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} should be more than low_freq_factor={self.low_freq_factor}; "
                "Llama 3 has 4 and 1"
            )
        return self


def frequencies(head_size: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """Radians by which each of the E/2 pairs turns from one position to the next, in fp64."""
    unscaled = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size)
    if scaling.type == "none":
        return unscaled
    if scaling.type == "linear":
        return unscaled / scaling.factor
    turns = unscaled * scaling.original_max_position_embeddings / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * unscaled + (1 - kept) * unscaled / scaling.factor


def rotary_tables(
    head_size: int, positions: int, theta: float, device: torch.device, scaling: RopeScaling = RopeScaling()
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, E/2) of the rotary angles, in fp64 so that every dtype rounds the same numbers."""
    places = torch.arange(positions, dtype=torch.float64, device=device)
    angles = torch.outer(places, frequencies(head_size, theta, scaling, device))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + E/2) of x (B, T, H, E) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[: x.shape[1], None, :], sin[: x.shape[1], None, :]  # (T, 1, E/2); tables may be longer
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
