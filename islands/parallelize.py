"""Apply the strategies to a model, in the one order that works."""

from torch import nn

from islands.config import IslandConfig
from islands.mesh import IslandMesh
from islands.strategies import fsdp


def parallelize(model: nn.Module, mesh: IslandMesh, config: IslandConfig) -> None:
    """Turn a single-device ``model`` on the meta device into this rank's part, in place. Weights are filled afterwards."""
    fsdp.shard_model(model, mesh.root["shard"], config.train.precision)
