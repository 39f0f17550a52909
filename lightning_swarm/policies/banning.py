"""Whom to leave alone, for how long and why.

A ban has a cause, and the cause decides its length, how it grows with repetition and what lifts it. The rules that past
systems lacked:

* BUSY is no fault, and a mistake of the caller is not the peer's: both ban nobody.
* Evidence that arrives while a ban runs does not lengthen it: ten tasks that were out when a peer hung are one hang.
* A ban does not end with a heartbeat. An announcement lifts only bans whose cause it refutes (the peer could not be
  reached), and only the first of a series; a restarted peer starts afresh unless it lied.
* After a ban the peer is on probation: it gets one task, and no second one before it has answered. So a hung peer
  takes at most two tasks in a ban's window.
* When all peers of a stage are banned, the bans are ignored, unless told otherwise: a doubtful worker is better than
  none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

__all__ = ["DEFAULT_RULES", "Ban", "BanList", "BanRule", "Cause", "link"]


class Cause(str, Enum):
    """Why a call failed."""

    REFUSED = "refused"
    """No connection: nobody listens there."""
    RESET = "reset"
    """The connection broke during the call: the peer died or a link went down."""
    LINK = "link"
    """A worker could not fetch from another one that the trainer reaches; ban the pair with :func:`link`."""
    TIMEOUT = "timeout"
    """The deadline passed."""
    PROTOCOL = "protocol"
    """A message that cannot be read, or wrong shapes and dtypes."""
    WRONG_RESULT = "wrong_result"
    """Readable but wrong: non-finite where others are finite, a ledger that disagrees, a bad checksum."""
    FAILED = "failed"
    """The user's code raised on the peer only (out of memory, a broken device)."""
    BUSY = "busy"
    """The peer declined for now."""
    CALLER = "caller"
    """The request itself was wrong."""


@dataclass(frozen=True, slots=True)
class BanRule:
    """Length of bans for one cause.

    Args:
        first_s: length of the first ban; 0 bans nobody.
        growth: factor for each repetition.
        longest_s: no ban is longer.
        lifted_by_announcement: whether a newer announcement refutes the cause.
        forgiven_by_restart: whether a restarted peer may be tried at once.
    """

    first_s: float
    growth: float = 2.0
    longest_s: float = 600.0
    lifted_by_announcement: bool = False
    forgiven_by_restart: bool = True


DEFAULT_RULES: Mapping[Cause, BanRule] = {
    Cause.REFUSED: BanRule(5.0, lifted_by_announcement=True),
    Cause.RESET: BanRule(2.0, lifted_by_announcement=True),
    Cause.LINK: BanRule(10.0, longest_s=300.0),
    Cause.TIMEOUT: BanRule(15.0),
    Cause.PROTOCOL: BanRule(60.0, growth=4.0, longest_s=3600.0),
    Cause.WRONG_RESULT: BanRule(300.0, growth=4.0, longest_s=86400.0, forgiven_by_restart=False),
    Cause.FAILED: BanRule(10.0),
    Cause.BUSY: BanRule(0.0),
    Cause.CALLER: BanRule(0.0),
}


@dataclass(frozen=True, slots=True)
class Ban:
    """A ban as it is logged and shown. ``repetition`` is 1 for the first of a series."""

    peer: str
    cause: Cause
    since_s: float
    until_s: float
    repetition: int


@dataclass(slots=True)
class _Record:
    ban: Ban
    active: bool = True
    proven: bool = False
    probing_until_s: float | None = None


def link(source: str, target: str) -> str:
    """Name of the link between two workers, to be banned as if it were a peer."""
    return f"{source}>{target}"


class BanList:
    """Bans of peers, by cause.

    Args:
        rules: replaces the default rule of the causes it names.
        forget_after_s: a peer that was not banned for so long starts again at the first length. Answers alone do not
            forgive: a peer that fails every other task would never be banned for long.
        when_all_banned: ``"ignore"`` the bans of a stage whose peers are all banned, or ``"wait"`` until the first of
            them is free again; for the caller to do, see :meth:`next_release_s`.

    Example:
        >>> bans = BanList()
        >>> bans.report(100.0, "a", Cause.TIMEOUT).until_s
        115.0
        >>> bans.avoid(101.0, ["a", "b"]), bans.avoid(101.0, ["a"])
        (frozenset({'a'}), frozenset())
    """

    def __init__(
        self,
        rules: Mapping[Cause, BanRule] | None = None,
        *,
        forget_after_s: float = 900.0,
        when_all_banned: Literal["ignore", "wait"] = "ignore",
    ) -> None:
        self.rules: dict[Cause, BanRule] = {**DEFAULT_RULES, **(rules or {})}
        self.forget_after_s = forget_after_s
        self.when_all_banned = when_all_banned
        self._records: dict[str, _Record] = {}

    def take_over(self, other: BanList) -> None:
        """What another list knows of peers counts here from now on."""
        self._records = {**other._records, **self._records}

    def report(self, now: float, peer: str, cause: Cause) -> Ban | None:
        """A call to the peer failed. Returns the ban that this begins or lengthens, None when it changes nothing."""
        rule = self.rules[cause]
        record = self._records.get(peer)
        if record is not None:
            record.probing_until_s = None
        if rule.first_s <= 0:
            return None
        repetition = 1
        if record is not None and now - record.ban.until_s < self.forget_after_s:
            running = record.active and now < record.ban.until_s
            repetition = record.ban.repetition + (0 if running else 1)
            longer = now + self._length_s(rule, repetition) > record.ban.until_s
            if running and (cause == record.ban.cause or not longer):
                return None
        self._forget_old(now)
        ban = Ban(peer, cause, now, now + self._length_s(rule, repetition), repetition)
        self._records[peer] = _Record(ban)
        return ban

    def succeeded(self, now: float, peer: str) -> None:
        """The peer answered as it should: probation ends. An answer to an old request does not end a running ban."""
        record = self._records.get(peer)
        if record is not None and not (record.active and now < record.ban.until_s):
            record.active = False
            record.proven = True
            record.probing_until_s = None

    def dispatched(self, now: float, peer: str) -> None:
        """A task goes to the peer. On probation it gets no other until it answers or one ban's length has passed."""
        record = self._records.get(peer)
        if record is not None and not record.proven:
            record.probing_until_s = max(now, record.ban.until_s) + max(record.ban.until_s - record.ban.since_s, 1.0)

    def withdrawn(self, peer: str) -> None:
        """The task given on probation was taken back unanswered: another may be given."""
        record = self._records.get(peer)
        if record is not None:
            record.probing_until_s = None

    def announced(self, peer: str, made_at_s: float, *, restarted: bool = False) -> bool:
        """The peer announced itself. Returns whether that lifted a ban.

        Args:
            peer: who.
            made_at_s: when, on the clock of ``now``; only an announcement newer than the ban refutes it.
            restarted: the announcement is of a new process of that peer, not a heartbeat.
        """
        record = self._records.get(peer)
        if record is None or not record.active or made_at_s <= record.ban.since_s:
            return False
        rule = self.rules[record.ban.cause]
        if restarted and rule.forgiven_by_restart:
            del self._records[peer]
            return True
        if rule.lifted_by_announcement and record.ban.repetition == 1:
            record.active = False
            return True
        return False

    def is_banned(self, now: float, peer: str) -> bool:
        """Whether the peer should get no task now."""
        record = self._records.get(peer)
        if record is None:
            return False
        if record.active and now < record.ban.until_s:
            return True
        return record.probing_until_s is not None and now < record.probing_until_s

    def avoid(self, now: float, peers: Collection[str]) -> frozenset[str]:
        """Which of a stage's peers to avoid; none of them when all are banned."""
        if not self._records:
            return frozenset()
        banned = frozenset(peer for peer in peers if self.is_banned(now, peer))
        return frozenset() if len(banned) == len(peers) else banned

    def banned(self, now: float) -> frozenset[str]:
        """All who are banned or on an unanswered probation, without the all-banned rule."""
        return frozenset(peer for peer in self._records if self.is_banned(now, peer))

    def bans(self, now: float) -> tuple[Ban, ...]:
        """The running bans, for reports."""
        return tuple(record.ban for record in self._records.values() if record.active and now < record.ban.until_s)

    def next_release_s(self, now: float, peers: Collection[str]) -> float | None:
        """When the first of these banned peers is free again: how long a caller may back off. None when one is free."""
        ends = []
        for peer in peers:
            if not self.is_banned(now, peer):
                return None
            record = self._records[peer]
            ends.append(max(record.ban.until_s if record.active else now, record.probing_until_s or now))
        return min(ends, default=None)

    def forget(self, peer: str) -> None:
        """Drop what is known of a peer that has left for good."""
        self._records.pop(peer, None)

    def _forget_old(self, now: float) -> None:
        """A machine that comes back is another peer each time: what is of no consequence any more must not pile up."""
        ends = {peer: max(r.ban.until_s, r.probing_until_s or now) for peer, r in self._records.items()}
        self._records = {p: r for p, r in self._records.items() if now - ends[p] < self.forget_after_s}

    @staticmethod
    def _length_s(rule: BanRule, repetition: int) -> float:
        return min(rule.first_s * rule.growth ** min(repetition - 1, 32), rule.longest_s)
