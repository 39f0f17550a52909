"""What keeps strangers out of this peer's part of the DHT.

`RecordGuard` decides which records are stored, handed on and believed; `CallGuard` which DHT calls are answered and
whose answers count. Without a secret both let everybody in, within bounds on size and lifetime.
"""

import hashlib
import hmac
import secrets
from typing import Any

from lightning_swarm._compat_hivemind import AuthorizerBase, DHTRecord, RecordValidatorBase, get_dht_time

MAX_RECORD_BYTES = 65_536
MAX_LIFETIME_S = 3600.0
_MAX_AGE_S = 60.0
_SIGNATURE_BYTES = 32


def _sign(secret: bytes, *parts: bytes) -> bytes:
    joined = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, joined, hashlib.sha256)


class RecordGuard(RecordValidatorBase):
    """Signs this peer's records and checks those of others.

    Args:
        secret: The run's.
        run_id: The run.
    """

    def __init__(self, secret: bytes | None, run_id: str) -> None:
        self._secret = secret
        self._run_id = run_id.encode()

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_RECORD_BYTES or len(record.subkey) > 1024:
            return False
        if not record.expiration_time <= get_dht_time() + MAX_LIFETIME_S:
            return False
        if self._secret is None:
            return True
        signature = record.value[-_SIGNATURE_BYTES:]
        return hmac.compare_digest(signature, self._signature(record, record.value[:-_SIGNATURE_BYTES]))

    def sign_value(self, record: DHTRecord) -> bytes:
        return record.value if self._secret is None else record.value + self._signature(record, record.value)

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value if self._secret is None else record.value[:-_SIGNATURE_BYTES]

    def _signature(self, record: DHTRecord, value: bytes) -> bytes:
        assert self._secret is not None
        expires = repr(record.expiration_time).encode()
        return _sign(self._secret, b"record", self._run_id, record.key, record.subkey, expires, value)


class CallGuard(AuthorizerBase):
    """Signs DHT calls and their answers; those without a valid signature are not answered or not listened to.

    Args:
        secret: The run's.
        run_id: The run.
    """

    def __init__(self, secret: bytes, run_id: str) -> None:
        self._secret = secret
        self._run_id = run_id.encode()

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        request.auth.time = get_dht_time()
        request.auth.nonce = secrets.token_bytes(8)
        request.auth.signature = self._signature(b"request", request)

    async def validate_request(self, request: Any) -> bool:
        return abs(get_dht_time() - request.auth.time) < _MAX_AGE_S and self._is_signed(b"request", request)

    async def sign_response(self, response: Any, request: Any) -> None:
        response.auth.nonce = request.auth.nonce
        response.auth.signature = self._signature(b"response", response)

    async def validate_response(self, response: Any, request: Any) -> bool:
        return bool(response.auth.nonce == request.auth.nonce) and self._is_signed(b"response", response)

    def _signature(self, kind: bytes, message: Any) -> bytes:
        message.auth.signature = b""
        return _sign(self._secret, kind, self._run_id, message.SerializeToString(deterministic=True))

    def _is_signed(self, kind: bytes, message: Any) -> bool:
        signature = message.auth.signature
        return hmac.compare_digest(signature, self._signature(kind, message))
