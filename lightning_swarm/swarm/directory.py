"""Who serves what: small records in the DHT, one a peer and kind, each with a lifetime.

A peer announces its record again and again, with a lifetime of a few heartbeats; one that dies vanishes when its last
record expires, one that leaves withdraws it at once. Records carry wall-clock expirations, so the clocks of a swarm's
machines must agree to within seconds. A record that is malformed is ignored and counted; who may say anything at all is
for `guard` to decide.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import TypeVar

import msgpack

from lightning_swarm._compat_hivemind import (
    DHTNode,
    get_dht_time,
)
from lightning_swarm.swarm.errors import ProtocolError
from lightning_swarm.swarm.messages import Message

_M = TypeVar("_M", bound=Message)
_WITHDRAWN = b""


class Directory:
    """The run's records. To be used on the node's event loop.

    Args:
        dht: The node's part of the DHT.
        run_id: Prefixes every key.
        peer_id: Under which name this peer announces.

    Attributes:
        ignored: How many records were ignored, by kind.
    """

    def __init__(self, dht: DHTNode, run_id: str, peer_id: str) -> None:
        self.ignored: Counter[str] = Counter()
        self._dht = dht
        self._run_id = run_id
        self._peer_id = peer_id
        self._expires: dict[str, float] = {}

    async def announce(self, kind: str, record: Message, lifetime_s: float) -> bool:
        """Publishes this peer's record of a kind, in place of its last one.

        Args:
            kind: Such as ``"worker"``.
            record: What to say; at most about 64 kB.
            lifetime_s: How long it is believed.

        Returns:
            Whether some peer took it.
        """
        return await self._store(kind, msgpack.packb(record.to_dict()), get_dht_time() + lifetime_s)

    async def withdraw(self, kind: str) -> None:
        """Takes this peer's record back, if it has one."""
        if self._expires.get(kind, 0.0) > get_dht_time():
            await self._store(kind, _WITHDRAWN, self._expires[kind])

    async def _store(self, kind: str, value: bytes, expires: float) -> bool:
        # The DHT keeps the record that expires last, so what is said later must expire later.
        self._expires[kind] = max(expires, self._expires.get(kind, 0.0) + 0.001)
        return await self._dht.store(f"{self._run_id}/{kind}", value, self._expires[kind], subkey=self._peer_id)

    async def read(self, kind: str, message: type[_M]) -> dict[str, _M]:
        """The valid records of a kind, by peer.

        Args:
            kind: Which.
            message: What they must be.
        """
        found = await self._dht.get(f"{self._run_id}/{kind}", latest=True)
        records: dict[str, _M] = {}
        if found is None or not isinstance(found.value, dict):
            return records
        for peer, entry in found.value.items():
            try:
                value = entry.value
                if value == _WITHDRAWN:
                    continue
                if not isinstance(peer, str) or not isinstance(value, bytes):
                    raise ProtocolError("not a record")
                records[peer] = message.from_dict(msgpack.unpackb(value, strict_map_key=False))
            except Exception:  # whatever a stranger's bytes provoke
                self.ignored[kind] += 1
        return records

    async def watch(self, kind: str, message: type[_M], period_s: float) -> AsyncIterator[dict[str, _M]]:
        """Reads the records again and again and yields them when they are not what they were."""
        last: dict[str, _M] | None = None
        while True:
            records = await self.read(kind, message)
            if records != last:
                last = records
                yield dict(records)
            await asyncio.sleep(period_s)
