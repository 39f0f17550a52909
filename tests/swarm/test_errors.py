"""Whose fault it was survives the wire."""

import pytest

from lightning_swarm.swarm.errors import (
    CallerError,
    DeadlineExceeded,
    Dropped,
    NodeClosed,
    PeerBusy,
    PeerStale,
    PeerUnreachable,
    ProtocolError,
    RemoteError,
    SourceFailed,
    SwarmError,
    pack_error,
    unpack_error,
)


def crossed(error: BaseException) -> SwarmError:
    return unpack_error(pack_error(error, caller="me"), peer="worker")


@pytest.mark.parametrize("kind", [PeerBusy, PeerStale, CallerError, DeadlineExceeded, Dropped, NodeClosed])
def test_the_callees_own_answer_stays_what_it_is(kind: type[SwarmError]) -> None:
    error = crossed(kind("why"))
    assert type(error) is kind and error.peer == "worker" and str(error) == "why"


@pytest.mark.parametrize("kind", [PeerUnreachable, ProtocolError, DeadlineExceeded, PeerBusy, PeerStale, Dropped])
def test_a_failing_third_peer_is_named(kind: type[SwarmError]) -> None:
    error = crossed(kind("why", "source"))
    assert isinstance(error, SourceFailed)
    assert error.peer == "source" and error.cause == kind.__name__
    again = crossed(error)
    assert isinstance(again, SourceFailed) and again.peer == "source" and again.cause == kind.__name__


@pytest.mark.parametrize("peer", [None, "me"])
def test_what_was_wrong_with_the_request_is_the_callers_mistake(peer: str | None) -> None:
    assert type(crossed(ProtocolError("Task: field", peer))) is CallerError


def test_the_users_exception_keeps_type_message_and_traceback() -> None:
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as caught:
        error = crossed(caught)
    assert isinstance(error, RemoteError)
    assert error.type_name == "builtins.ZeroDivisionError" and error.remote_message == "by zero"
    assert "test_errors.py" in error.traceback and error.peer == "worker"
    again = crossed(error)
    assert isinstance(again, RemoteError) and again.traceback == error.traceback and str(again) == str(error)


@pytest.mark.parametrize(
    "packed", [None, [], {}, {"kind": "Nonsense"}, {"kind": 3}, {3: "x"}, {"kind": "SwarmError"}], ids=repr
)
def test_a_malformed_error_is_the_peers_fault(packed: object) -> None:
    error = unpack_error(packed, "worker")
    assert type(error) is ProtocolError and error.peer == "worker"
