"""The member list as something that is agreed on: pure values, compared and extended by one rule."""

import hashlib
from dataclasses import dataclass
from typing import Iterable, Mapping

from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.messages import Entry, Hello


@dataclass(frozen=True)
class Roster:
    """Who has which slot, after ``height`` grants.

    A slot is a lease with an epoch: whoever gets it after another island has the next epoch, and what the earlier one
    offers under the old epoch counts no more.
    """

    height: int
    lineage: bytes
    entries: tuple[Entry, ...]

    @staticmethod
    def first(entries: Iterable[Entry]) -> "Roster":
        """Of the islands that were there when the run began."""
        ordered = tuple(sorted(entries, key=lambda entry: entry.slot))
        return Roster(0, _hash(b"", ordered), ordered)

    @staticmethod
    def of(message: messages.Roster) -> "Roster":
        """As another member tells it."""
        return Roster(message.height, message.lineage, message.entries)

    def to_message(self) -> messages.Roster:
        """For telling it."""
        return messages.Roster(height=self.height, lineage=self.lineage, entries=self.entries)

    def after(self, entry: Entry) -> "Roster":
        """With one more grant. An island has one slot: where it had another one before, that is free again."""
        others = [old for old in self.entries if old.slot != entry.slot and old.peer != entry.peer]
        ordered = tuple(sorted([*others, entry], key=lambda each: each.slot))
        return Roster(self.height + 1, _hash(self.lineage, ordered), ordered)

    def comes_before(self, height: int, lineage: bytes) -> bool:
        """Whether a roster of that height and lineage replaces this one: more grants, then the lower hash."""
        return (height, _negated(lineage)) > (self.height, _negated(self.lineage))

    def of_slot(self, slot: int) -> Entry | None:
        """Who has it."""
        return next((entry for entry in self.entries if entry.slot == slot), None)

    def of_ticket(self, ticket: bytes) -> Entry | None:
        """The entry of one trainer process."""
        return next((entry for entry in self.entries if entry.ticket == ticket), None)


def next_entry(
    roster: Roster, peer: str, hello: Hello, max_slots: int, silent_seconds: Mapping[int, float], lease_seconds: float
) -> Entry | str:
    """The entry to propose for a newcomer, or in words why there is none.

    The one that it asks for; its own, where it had one before; the one that it prefers; one that nobody had yet; else the one whose
    holder is silent for longest, if that is longer than a lease lasts.

    Args:
        silent_seconds: of the slots whose holder is not there (left: infinite), for how long.
    """
    own = next((entry.slot for entry in roster.entries if entry.peer == peer), None)
    taken = {entry.slot for entry in roster.entries}
    expired = [slot for slot, seconds in silent_seconds.items() if seconds > lease_seconds]
    if hello.slot >= max_slots:
        return f"there is no slot {hello.slot}: swarm.max_slots={max_slots}, the last slot is {max_slots - 1}"
    if hello.slot >= 0 and hello.slot != own and hello.slot in taken and hello.slot not in silent_seconds:
        return f"slot {hello.slot} is taken by {_where(roster.of_slot(hello.slot))}; " + (
            "set swarm.slot to another one, or to -1 for any free one"
        )
    preferred = 0 <= hello.prefers < max_slots and (hello.prefers not in taken or hello.prefers in silent_seconds)
    choices = [
        *([hello.slot] if hello.slot >= 0 else []),
        *([own] if own is not None else []),
        *([hello.prefers] if preferred else []),
        *(slot for slot in range(max_slots) if slot not in taken),
        *sorted(expired, key=lambda slot: -silent_seconds[slot]),
    ]
    if not choices:
        return (
            f"all {max_slots} slots are taken (swarm.max_slots); one is free again when its island has left, or was silent "
            f"for {lease_seconds:g} s"
        )
    before = roster.of_slot(choices[0])
    return Entry(
        slot=choices[0],
        epoch=before.epoch + 1 if before else 0,
        peer=peer,
        addresses=hello.addresses,
        ticket=hello.ticket,
        since=roster.height + 1,
    )


def _where(entry: Entry | None) -> str:
    return entry.addresses[0] if entry and entry.addresses else entry.peer if entry else "nobody"


def _negated(lineage: bytes) -> bytes:
    return bytes(255 - byte for byte in lineage)


def _hash(parent: bytes, entries: tuple[Entry, ...]) -> bytes:
    lines = (f"{entry.slot} {entry.epoch} {entry.peer} {entry.ticket.hex()} {entry.since}" for entry in entries)
    return hashlib.sha256(parent + "\n".join(lines).encode()).digest()
