"""A shorter way between peers of one machine.

Between two processes of one machine a message through libp2p is encrypted, sent through both daemons and decrypted
again, which costs several times what the processes themselves spend on it. So a caller that has reached a peer through
libp2p, which proves who both are, asks it once for a shortcut: the path of a unix socket in the peer's private runtime
directory, and a ticket that the peer made for this caller. Streams over that socket begin with the ticket and are
then like any other: same frames, same token, same limits. Where the machine is another, or the path cannot be opened
(containers), calls stay with libp2p.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_swarm.swarm.errors import ProtocolError
from lightning_swarm.swarm.messages import Message

METHOD = "_shortcut"
SOCKET = "direct.sock"
DIRECTORY = "lightning-swarm-"
_SEAL_BYTES = 32


def machine() -> str:
    """Names this boot of this machine, without giving away more."""
    try:
        return hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()
    except OSError:
        return secrets.token_hex()


@dataclass(frozen=True)
class Shortcut(Message):
    """Where to go and what to show there."""

    path: str
    ticket: bytes

    def check(self, peer: str) -> None:
        """Raises `ProtocolError` for what is no shortcut for ``peer``.

        A liar must not make this process open other programs' sockets, or say to them what the liar wants.
        """
        path = Path(self.path)
        if path.name != SOCKET or not path.parent.name.startswith(DIRECTORY) or ".." in path.parts:
            raise ProtocolError(f"{self.path[:200]!r} is no socket of a peer.")
        if len(self.ticket) != _SEAL_BYTES + len(peer) or self.ticket[_SEAL_BYTES:] != peer.encode():
            raise ProtocolError("The ticket is not for this peer.")


class Tickets:
    """Makes tickets and knows its own; keeps nothing.

    Args:
        path: Of the unix socket that they are for.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._machine = machine()
        self._key = secrets.token_bytes(32)

    def answer(self, caller: str, header: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request for the shortcut: empty when the caller is elsewhere."""
        if header.get("machine") != self._machine:
            return {}
        name = caller.encode()
        return Shortcut(self._path, self._seal(name) + name).to_dict()

    def peer(self, ticket: bytes) -> str:
        """Whose ticket this is; raises `ProtocolError` when it is not one of ours."""
        seal, name = ticket[:_SEAL_BYTES], ticket[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(name)):
            raise ProtocolError("It came by the shortcut without a ticket.")
        return name.decode()

    def _seal(self, name: bytes) -> bytes:
        return hmac.digest(self._key, name, hashlib.sha256)
