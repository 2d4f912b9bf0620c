"""Fixtures that several folders of tests share."""

from typing import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Warm processes for ``ranks.run(function, world_size, *arguments)``."""
    pool = RankPool(8)
    yield pool
    pool.close()
