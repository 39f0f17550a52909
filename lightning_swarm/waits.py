"""The times for which peers wait, where one must be shorter than another.

A wait that outlasts the one around it turns a moment's delay into a failure: whoever waits outside gives up first, and
what the inner wait would have brought comes to nobody. So the order is checked before anything starts.
"""

import math
from dataclasses import dataclass

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm.policies.deadlines import Deadlines
from lightning_swarm.trainer import peer as trainer_peer
from lightning_swarm.trainer import session
from lightning_swarm.worker import member
from lightning_swarm.worker import peer as worker_peer


@dataclass(frozen=True)
class _Ordered:
    """``shorter`` must be less than ``longer``, both with their seconds; ``why`` says what happens otherwise."""

    shorter: tuple[str, float]
    longer: tuple[str, float]
    why: str


def check_order(startup_timeout_s: float, trainer_timeout_s: float) -> None:
    """Whether the strategy's timeouts fit the times that are fixed, and those each other.

    Raises:
        MisconfigurationException: They do not; prints the inequality.
    """
    startup, trainer = ("startup_timeout", startup_timeout_s), ("trainer_timeout", trainer_timeout_s)
    ask = ("the deadline of a worker's question", member._ASK_DEADLINE_S)
    for name, seconds in (startup, trainer):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise MisconfigurationException(f"SwarmStrategy({name}={seconds!r}) must be a number of seconds above 0.")
    for order in (
        _Ordered(
            ("the shortest deadline of a call", Deadlines().floor_s),
            startup,
            "a stage would be given up before a worker that was given up by mistake can be back",
        ),
        _Ordered(
            ("the pause between two of a worker's heartbeats", member._PING_EVERY_S),
            trainer,
            "a worker would take a trainer for gone that it has not asked yet",
        ),
        _Ordered(
            ("the pause between two announcements", worker_peer._ANNOUNCE_EVERY_S),
            ("an announcement's lifetime", worker_peer.ANNOUNCED_FOR_S),
            "workers would vanish from the DHT between two announcements",
        ),
        _Ordered(
            ("the pause between two announcements of the trainer", trainer_peer._ANNOUNCE_EVERY_S),
            ("its announcement's lifetime", trainer_peer.ANNOUNCED_FOR_S),
            "the trainer would vanish from the DHT between two announcements",
        ),
        _Ordered(("the trainer's longest wait before it answers a join", session._JOIN_WAIT_S), ask, _UNHEARD),
        _Ordered(("the trainer's longest wait between two sessions", trainer_peer._WAIT_S), ask, _UNHEARD),
    ):
        (short, short_s), (long, long_s) = order.shorter, order.longer
        if not short_s < long_s:
            given = ", ".join(f"{name}={seconds:g}" for name, seconds in (startup, trainer) if name == long)
            raise MisconfigurationException(
                f"SwarmStrategy({given}) does not fit: {short} < {long} must hold, but {short_s:g} s < {long_s:g} s "
                f"does not; else {order.why}."
            )


_UNHEARD = "the answer would come to nobody"
