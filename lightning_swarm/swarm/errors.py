"""What can go wrong between peers, sorted by whose fault it is.

A policy must know whom to blame: the network and a dead peer (`PeerUnreachable`) call for another route, a peer that
breaks the protocol (`ProtocolError`) for a ban, a mistake of the caller (`CallerError`) for neither: retrying it
elsewhere would fail everywhere and ban everybody. Errors cross the wire as `pack_error`'s plain dictionary; nothing is
pickled, so what the user's code raised on a peer arrives as `RemoteError` with its type's name and traceback.
"""

import traceback
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

_TEXT_LIMIT = 32_768


NOT_NOW = 69
"""Exit code of a process that may do better when it is started again: it found no peer, or its port in use, or its
compute thread hung; sysexits.h calls it EX_UNAVAILABLE.
"""


class NotNow(MisconfigurationException):
    """A peer cannot start now, but the same call may work in a moment: none of the given peers answers, or the port is
    still in use. ``lightning-swarm run --restart`` tries it again, which it does with no other misconfiguration.
    """


class SwarmError(Exception):
    """Base of everything that the swarm raises.

    Args:
        message: What happened, why, and what to do.
        peer: The peer to blame (base58 peer id), if there is one.
    """

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.peer = peer


class PeerUnreachable(SwarmError):
    """The peer is gone, refuses connections or ended the stream before it answered: the network's fault."""


class PeerBusy(SwarmError):
    """The peer is well but takes no more work now. Not a fault; try another or later."""


class PeerStale(SwarmError):
    """The peer is well, but it or we are at another step, stage, plan or session than the call is about."""


class ProtocolError(SwarmError):
    """The peer sent what it must not send: it speaks another version, or lies, or is broken."""


class NotFinite(SwarmError):
    """The peer sent NaN where none was expected: it is broken, unless others find the same."""


class CallerError(SwarmError):
    """Our own mistake, as the peer says or as seen before sending. No other peer would do better: raise it at once."""


class DeadlineExceeded(SwarmError):
    """No answer within the call's deadline."""


class Dropped(SwarmError):
    """What was asked for was let go of, because its step is over; it will not come any more."""


class Evicted(SwarmError):
    """What was asked for was let go of to save memory; the peer can make it again from its own sources."""


class NodeClosed(SwarmError):
    """This peer's own node was closed, or its libp2p daemon ended."""


class SourceFailed(SwarmError):
    """The peer is well, but a third peer that it needed for this call failed.

    Args:
        message: What the callee saw.
        peer: The third peer: the one to blame.
        cause: Name of the error class that the callee met with at that peer, such as ``"PeerUnreachable"``.
    """

    def __init__(self, message: str, peer: str | None = None, cause: str = "SwarmError") -> None:
        super().__init__(message, peer)
        self.cause = cause


class RemoteError(SwarmError):
    """Code on the peer raised; usually the user's own.

    Args:
        type_name: Qualified name of the exception's class, such as ``"builtins.ValueError"``.
        message: ``str()`` of the exception.
        traceback: The peer's formatted traceback.
        peer: Where it happened.
    """

    def __init__(self, type_name: str, message: str, traceback: str, peer: str | None = None) -> None:
        super().__init__(f"{type_name}: {message}", peer)
        self.type_name = type_name
        self.remote_message = message
        self.traceback = traceback


_CROSSING: dict[str, type[SwarmError]] = {
    kind.__name__: kind for kind in (PeerBusy, PeerStale, CallerError, DeadlineExceeded, Dropped, Evicted, NodeClosed)
}


def pack_error(error: BaseException, caller: str) -> dict[str, str]:
    """Turns what a handler raised into what crosses to the peer that called it.

    An error that blames a peer crosses as `SourceFailed`: the callee met with it while it worked for the caller. A
    `ProtocolError` that blames nobody or the caller was found in the request, so for the caller it is a `CallerError`.

    Args:
        error: What the handler raised.
        caller: Peer id of who called the handler.
    """
    kind = type(error).__name__
    packed = {"kind": kind, "message": str(error)[:_TEXT_LIMIT]}
    if isinstance(error, RemoteError):
        packed.update(message=error.remote_message, type=error.type_name, traceback=error.traceback)
    elif isinstance(error, SourceFailed):
        packed.update(kind=SourceFailed.__name__, peer=error.peer or "", cause=error.cause)
    elif isinstance(error, ProtocolError) and error.peer in (None, caller):
        packed["kind"] = CallerError.__name__
    elif isinstance(error, SwarmError) and error.peer is not None:
        packed.update(kind=SourceFailed.__name__, peer=error.peer, cause=kind)
    elif isinstance(error, SwarmError) and kind in _CROSSING:
        pass
    else:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        packed.update(
            kind=RemoteError.__name__,
            type=f"{type(error).__module__}.{type(error).__qualname__}",
            traceback="".join(lines)[-_TEXT_LIMIT:],
        )
    return packed


def unpack_error(packed: Any, peer: str) -> SwarmError:
    """The exception to raise for what `pack_error` made on ``peer``; a malformed one gives a `ProtocolError`."""
    if not isinstance(packed, dict) or not all(isinstance(part, str) for item in packed.items() for part in item):
        return ProtocolError(f"Peer {peer} failed the call and could not say why in a valid way.", peer)
    kind, message = packed.get("kind", ""), packed.get("message", "")
    if kind == "RemoteError":
        return RemoteError(packed.get("type", "Exception"), message, packed.get("traceback", ""), peer)
    if kind == "SourceFailed":
        return SourceFailed(message, packed.get("peer") or None, packed.get("cause", "SwarmError"))
    if kind in _CROSSING:
        return _CROSSING[kind](message, peer)
    return ProtocolError(
        f"Peer {peer} failed the call with an unknown kind of error {kind!r}: {message}",
        peer,
    )
