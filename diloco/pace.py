"""An island's part in adapting: it measures how fast it steps and how long rounds take, and follows what the members agree on."""

from diloco.adaptation import Pace
from diloco.config import OuterSection
from diloco.exchange.base import RoundOutcome
from diloco.flight import Flight
from diloco.outer_state import OuterState


class Pacing:
    """On rank 0. Without ``outer.adaptive.target`` it measures nothing and :attr:`periods` stays empty.

    Attributes:
        periods: by fragment, inner steps between two rounds.
    """

    def __init__(self, section: OuterSection, state: OuterState) -> None:
        self._state, self._overlap = state, section.overlap
        self._codecs = [section.codec.type, *section.adaptive.codecs]
        self._meters = [_Meter() for _ in state.fragments] if section.adaptive.target else []
        self._chosen: dict[int, tuple[int, str]] = {}
        self.periods: dict[int, int] = {}
        for fragment in range(len(self._meters)):
            self._follow(fragment)

    def stepped(self, seconds: float) -> None:
        """An inner step took so long."""
        for meter in self._meters:
            meter.stepped(seconds)

    def take(self, fragment: int) -> Pace:
        """What was measured since the last round of a fragment."""
        if not self._meters:
            return Pace()
        period = self.periods[fragment]
        return self._meters[fragment].take(period if self._overlap == "eager" else self._overlap)

    def landed(self, flight: Flight, outcome: RoundOutcome) -> str:
        """A round is over: from now on the fragment has the period and codec that its members agreed on in it.

        Returns:
            What changed, in words, or an empty string.
        """
        if not self._meters:
            return ""
        self._meters[flight.fragment].landed(flight, outcome)
        return self._follow(flight.fragment)

    def _follow(self, fragment: int) -> str:
        state = self._state.fragments[fragment]
        before, now = self._chosen.get(fragment), (state.period, self._codecs[state.codec])
        self._chosen[fragment], self.periods[fragment] = now, state.period
        if before in (None, now):
            return ""
        return f"fragment {fragment}: a round every {now[0]} inner steps as {now[1]}, before every {before[0]} as {before[1]}"


class _Meter:
    """Of one fragment."""

    def __init__(self) -> None:
        self._round_seconds = 0.0
        self._steps, self._seconds = 0, 0.0

    def stepped(self, seconds: float) -> None:
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds

    def landed(self, flight: Flight, outcome: RoundOutcome) -> None:
        """One that did not commit says nothing of the link; nor does waiting for islands that are not ready."""
        if outcome.kind == "committed":
            moving = outcome.exchange_seconds - outcome.waiting_seconds
            self._round_seconds = flight.gather_seconds + moving + flight.scatter_seconds

    def take(self, overlap: int) -> Pace:
        step = self._seconds / self._steps if self._steps else 0.0
        self._steps, self._seconds = 0, 0.0
        return Pace(step, self._round_seconds, step * overlap)
