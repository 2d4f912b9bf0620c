"""The hook that makes slices of one job's mesh islands: they average what their shards moved by, where the shards lie.

The same rounds as :class:`~diloco.outer_round.OuterRound`, in the same order, without anything to decide: the schedule alone says what
launches and lands after which step, on all ranks of the job alike.
"""

import math
import time
from dataclasses import dataclass
from typing import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.cluster_facts import ClusterFacts, FlightFacts, FragmentFacts
from diloco.config import OuterSection
from diloco.exchange.base import RoundOutcome, Seat
from diloco.exchange.process_group import Averaged, Averager, Averaging
from diloco.flight import Flight, Logbook
from diloco.round_rows import write_round
from diloco.schedule import StepSchedule
from diloco.shard_state import ShardState
from diloco.shards import Shards
from islands.checkpoint_part import Saved
from islands.checkpoint_state import Staging
from islands.fragments import Fragment
from islands.metrics import Metrics
from islands.process import Process
from islands.progress import Progress
from islands.traffic import Traffic


@dataclass
class _Round:
    """A round under way.

    Attributes:
        own: this rank's share of its island's numbers: the square of what it moved by, and the tokens that it did so with.
    """

    flight: Flight
    own: Tensor
    averaging: Averaging | None
    averaged: Averaged | None = None

    def result(self) -> Averaged:
        """Wait for it."""
        if self.averaged is None:
            self.averaged = self.averaging.result()
        return self.averaged


class ClusterRound:
    """A :class:`~islands.train_loop.StepHook` and :class:`~islands.checkpoint_part.CheckpointPart`, on every rank of the job.

    Args:
        shards, states: of each fragment, what this rank holds.
        process: this rank among those of its island.
        islands: of the job.
    """

    def __init__(
        self,
        schedule: StepSchedule,
        section: OuterSection,
        fragments: Sequence[Fragment],
        shards: Sequence[Shards],
        states: Sequence[ShardState],
        averager: Averager,
        traffic: Traffic | None,
        metrics: Metrics,
        process: Process,
        islands: int,
    ) -> None:
        self._schedule, self._section, self._fragments = schedule, section, fragments
        self._shards, self._states, self._averager, self._traffic = shards, states, averager, traffic
        self._metrics, self._process, self._islands = metrics, process, islands
        self._log = Logbook.begin(len(fragments), Seat(slot=0))
        self._rounds: dict[int, _Round] = {}
        self._staging = Staging(process.device)
        dtype = states[0].anchor.dtype
        mine = [[averager.bytes_each_way(each.numel, dtype), averager.encoded_bytes(each.numel, dtype)] for each in shards]
        self._bytes = self._sum(torch.tensor(mine, dtype=torch.int64)).tolist()  # of the island: each way, and of its contribution
        self._digests = [""] * len(fragments)

    def start(self, progress: Progress) -> Progress:
        """Make the parameters the first anchor. Returns ``progress``."""
        self._log = Logbook.begin(len(self._fragments), Seat(slot=progress.slot, position=progress.position))
        for shards, state in zip(self._shards, self._states, strict=True):
            for piece, local in shards.pieces():
                state.anchor[piece] = local.reshape(-1)
        return progress

    def meeting_after(self, start: int, done: int) -> int:
        """Steps since ``start`` that no rank can have done before all others have done more than ``done`` of them."""
        return self._schedule.meeting_after(start + done, self._section.overlap) - start

    # -- between two inner steps ---------------------------------------------------------------------------------------

    def after_step(self, progress: Progress, tokens: int) -> float:
        """See :class:`~islands.train_loop.StepHook`."""
        started = time.monotonic()
        self._log.inner_step += 1
        for work in self._log.work:
            work.tokens += tokens
        self._land_due(progress)
        for fragment in self._schedule.launches(progress.step):
            if fragment in self._rounds:  # its round began before a checkpoint, with another period
                self._land(self._rounds[fragment], progress)
            self._launch(fragment, progress)
        self._land_due(progress)
        return time.monotonic() - started

    def _land_due(self, progress: Progress) -> None:
        for each in list(self._rounds.values()):
            if progress.step >= min(each.flight.work.step + self._section.overlap, self._schedule.steps):
                self._land(each, progress)

    def _launch(self, fragment: int, progress: Progress) -> None:
        shards, state = self._shards[fragment], self._states[fragment]
        work = self._log.work[fragment].offer(progress.position, progress.step)
        flight = Flight(fragment, self._fragments[fragment].numel, work, self._log.inner_step, progress.slot, state.height)
        moved = torch.empty(shards.numel, dtype=state.anchor.dtype, device=state.device)
        for piece, local in shards.pieces():
            torch.sub(state.anchor_at(piece), local.reshape(-1), out=moved[piece])
        square = shards.square(moved)
        own = torch.stack([square, square.new_tensor(work.tokens / self._process.world_size)])
        if self._traffic:
            self._traffic.sent_across(self._bytes[fragment][0])
        self._rounds[fragment] = _Round(flight, own, self._averager.begin(moved, own.clone()))
        flight.stall_seconds += flight.age

    def _land(self, each: _Round, progress: Progress) -> None:
        began, flight, work = time.monotonic(), each.flight, each.flight.work
        fragment, last = flight.fragment, work.step == self._schedule.steps
        averaged, state = each.result(), self._states[fragment]
        if self._process.device.type != "cpu":
            torch.accelerator.synchronize(self._process.device)  # the wait is over when the device has done it
        waited = time.monotonic() - began
        seconds = max(waited, each.averaging.seconds() if each.averaging else 0.0)
        numbers = torch.cat([each.own[:1], averaged.sums, self._shards[fragment].square(averaged.mean)[None]])
        own, everyone, tokens, mean = self._sum(numbers.cpu()).tolist()
        del self._rounds[fragment]
        if math.isfinite(mean):
            state.advance(averaged.mean, work.step, round(tokens))
            self._log.work[fragment].counted(work)
            self._merge(fragment, 0.0 if last else self._section.merge_alpha)
        elif not math.isfinite(own):
            self._merge(fragment, 0.0)  # no gradient would ever mend these parameters
            self._drop(flight, progress, f"the parameters were not finite at step {work.step}")
        elif last:
            self._drop(flight, progress, "the last round was skipped, as another island's parameters were not finite")
        flight.stall_seconds += time.monotonic() - began
        self._tell(flight, progress, seconds, (own, everyone, mean))

    def _merge(self, fragment: int, alpha: float) -> None:
        """Let the island's parameters meet the anchor: ``alpha`` is the share of their own that they keep."""
        state = self._states[fragment]
        with torch.no_grad():
            for piece, local in self._shards[fragment].pieces():
                anchor = state.anchor_at(piece).view(local.shape)
                local.lerp_(anchor, 1 - alpha) if alpha else local.copy_(anchor)

    def _drop(self, flight: Flight, progress: Progress, why: str) -> None:
        lost = progress.position - flight.work.start
        self._log.work[flight.fragment].forget(progress.position)
        self._metrics.write("event", what="dropped", detail=f"{lost} sequences of fragment {flight.fragment}: {why}")

    def _tell(self, flight: Flight, progress: Progress, seconds: float, squares: tuple[float, float, float]) -> None:
        """Write the row. Called on all ranks of the island alike.

        ``cosine`` is |mean| over the root mean square of the norms: as all contributions together have with their mean.
        """
        state, work = self._states[flight.fragment], flight.work
        own, everyone, mean = squares
        finite = math.isfinite(mean)
        if finite:
            checksum = int(self._sum(state.checksum().cpu() * (2 * self._process.rank + 1)))
            self._digests[flight.fragment] = f"{checksum & (1 << 64) - 1:016x}"
        on_wire, encoded = self._bytes[flight.fragment]
        outcome = RoundOutcome(
            "committed" if finite else "skipped",
            flight.fragment,
            state.height,
            tuple(range(self._islands)) if finite else (),
            (float(work.tokens),) * self._islands if finite else (),
            reason="" if finite else "the mean was not finite, as an island's parameters were not",
            digest=self._digests[flight.fragment] if finite else "",
            bytes_sent=on_wire,
            bytes_received=on_wire,
            exchange_seconds=seconds,
            transfer_seconds=seconds,
            pseudo_gradient_norm=own**0.5,
            cosine=(mean / (everyone / self._islands)) ** 0.5 if finite and everyone else 0.0,
            encoded_bytes=encoded,
            position=work.position if finite else work.start,
            step=work.step,
            tokens=state.tokens,
        )
        write_round(self._metrics, flight, outcome, progress.step, len(self._fragments))

    def _sum(self, values: Tensor) -> Tensor:
        """Over the ranks of the island."""
        if self._process.world_size > 1:
            dist.all_reduce(values, group=self._process.group)
        return values

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Callable[[], Saved]:
        """See :class:`~islands.checkpoint_part.CheckpointPart`. It waits for rounds in flight: what came of them is saved, too."""
        tensors, flights = self._agreed(), []
        for fragment, each in self._rounds.items():
            averaged, flight = each.result(), each.flight
            tensors |= self._named(fragment, "mean", averaged.mean)
            numbers = self._sum(torch.stack([each.own, averaged.sums]).cpu()).tolist()
            own, sums = (tuple(map(str, pair)) for pair in numbers)
            flights.append(FlightFacts(fragment, flight.work, flight.inner_step, flight.height, own, sums))
        facts = ClusterFacts(
            tuple(
                FragmentFacts(state.height, state.step, state.tokens, digest)
                for state, digest in zip(self._states, self._digests, strict=True)
            ),
            tuple((work.start, work.tokens) for work in self._log.work),
            self._log.inner_step,
            tuple(flights),
        )
        saved = Saved(facts.to_json(), self._staging.copy(tensors))
        return lambda: saved

    def go_on(self, facts: ClusterFacts, load: Callable[[dict[str, Tensor]], Progress]) -> Progress:
        """Begin where a checkpoint was made.

        Args:
            load: reads it into the parameters, and into the tensors by key that it is given; returns where in the run that is.
        """
        into, means = self._agreed(), {}
        for flight in facts.flights:
            state = self._states[flight.fragment]
            means[flight.fragment] = torch.empty(state.numel, dtype=state.anchor.dtype, device=state.device)
        for fragment, mean in means.items():
            into |= self._named(fragment, "mean", mean)
        progress = load(into)
        self._log = Logbook.begin(len(self._fragments), Seat(slot=progress.slot))
        self._log.inner_step = facts.inner_step
        for work, (start, tokens) in zip(self._log.work, facts.work, strict=True):
            work.start, work.tokens = start, tokens
        for state, told in zip(self._states, facts.fragments, strict=True):
            state.height, state.step, state.tokens = told.height, told.step, told.tokens
        self._digests = [told.digest for told in facts.fragments]
        for told in facts.flights:
            self._rounds[told.fragment] = self._landing(told, means[told.fragment], progress)
        return progress

    def _landing(self, told: FlightFacts, mean: Tensor, progress: Progress) -> _Round:
        """A round that was averaged before the checkpoint."""
        is_first = self._process.rank == 0  # the numbers are of all ranks
        pairs = [[float(text) if is_first else 0.0 for text in pair] for pair in (told.own, told.sums)]
        own, sums = mean.new_tensor(pairs, dtype=torch.float64)
        numel = self._fragments[told.fragment].numel
        flight = Flight(told.fragment, numel, told.work, told.inner_step, progress.slot, told.height)
        return _Round(flight, own, None, Averaged(mean, sums))

    def _agreed(self) -> dict[str, Tensor]:
        """Anchors and outer optimizer state, by key."""
        found: dict[str, Tensor] = {}
        for fragment, state in enumerate(self._states):
            for what, flat in state.tensors():
                found |= self._named(fragment, what, flat)
        return found

    def _named(self, fragment: int, what: str, flat: Tensor) -> dict[str, Tensor]:
        return {f"outer.{what}.{name}": part for name, part in self._shards[fragment].by_parameter(flat).items()}
