"""Rank 0 tells the others what it learned outside."""

import time

import pytest
import torch.distributed as dist
from rank_pool import RankError, RankPool

from islands.process import Process
from islands.sharing import FirstRankSays


def three_values(process: Process) -> list[object]:
    say, heard = FirstRankSays(process, "test"), []
    for number in range(3):
        if process.rank == 0:
            time.sleep(0.1 * number)
        heard.append(say({"number": number} if process.rank == 0 else None, seconds=10.0))
        dist.barrier()
    return heard


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_hear_what_rank_0_says(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(three_values, world_size) == [[{"number": number} for number in range(3)]] * world_size


def silence(process: Process) -> None:
    if process.rank == 1:
        FirstRankSays(process, "news")(None, seconds=0.3)


def test_a_silent_rank_0_is_an_error_that_says_what_was_waited_for(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 waited 0.3 s for rank 0 to tell the news"):
        ranks.run(silence, 2)
