"""``p2pd``, libp2p's daemon, and what must be gone when we are gone.

The daemon and its unix sockets live in a runtime directory of their own. A tiny shell, the janitor, starts the daemon
and then waits for the end of a pipe that only this process holds open: when the node is closed, or this process ends in
whatever way, SIGKILL included, the janitor kills the daemon and removes the directory. Both run in a session of their
own, so that a Ctrl-C meant for the training script does not take the network away before it could say goodbye.
"""

import asyncio
import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm._compat_hivemind import P2P, Multiaddr, p2pd_path
from lightning_swarm.swarm.errors import NotNow, SwarmError
from lightning_swarm.swarm.forks import forget, let_go_in_children
from lightning_swarm.swarm.shortcut import DIRECTORY, SOCKET

_log = logging.getLogger(__name__)
_JANITOR = """
directory=$1; shift
"$@" &
trap '' HUP INT TERM
exec >/dev/null 2>&1
read -r _
kill -9 $!
wait
rm -rf "$directory"
"""
_PARENT_LIMIT = 55  # a unix socket's path has at most 107 bytes; ours add 25 for the directory and 27 for the file


class Daemon:
    """A running ``p2pd``.

    Args:
        host_maddrs: Where to listen, such as ``"/ip4/0.0.0.0/tcp/31337"``; port 0 takes a free one.
        announce_maddrs: What to tell others instead, where the host's own addresses cannot be reached from outside.
        identity_path: File with the private key; made when it does not exist. ``None`` for a new identity each time.
        directory: Where to make the runtime directory.
    """

    def __init__(
        self,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] | None = None,
        identity_path: Path | None = None,
        directory: Path | None = None,
    ) -> None:
        for maddr in host_maddrs:
            _check_free(maddr)
        self.directory = _make_directory(directory)
        self.control_path = f"{self.directory}/p2pd.sock"
        self.calls_path = f"{self.directory}/calls.sock"
        self.shortcut_path = f"{self.directory}/{SOCKET}"
        self._lease: int | None = None
        self._janitor: subprocess.Popen | None = None
        self._closed = False
        self._arguments = [
            p2pd_path(),
            f"-listen={self.control_maddr}",
            f"-hostAddrs={','.join(host_maddrs)}",
            "-dhtServer=1",
            "-connManager=1",
            "-autonat=0",
            "-natPortMap=0",
            "-relay=0",
            "-b=0",
            "-idleTimeout=30s",
            f"-f={_configuration(self.directory)}",
        ]
        if announce_maddrs:
            self._arguments.append(f"-announceAddrs={','.join(announce_maddrs)}")
        if identity_path is not None:
            if not Path(identity_path).exists():
                P2P.generate_identity(str(identity_path))
            self._arguments.append(f"-id={identity_path}")

    @property
    def control_maddr(self) -> str:
        """Where the daemon is spoken to, as it writes addresses."""
        return f"/unix{self.control_path}"

    async def start(self, on_end: Callable[[], None], timeout_s: float) -> None:
        """Starts the daemon and waits until it listens.

        Args:
            on_end: Called on the event loop when the daemon ends later without having been closed.
            timeout_s: How long to wait.

        Raises:
            SwarmError: When it does not start.
        """
        lease, self._lease = os.pipe()
        let_go_in_children(self, self._lease)
        # Not a pipe: of what is no socket, uvloop closes the descriptor twice, and by then it may be another thread's.
        ours, theirs = socket.socketpair()
        # Measured: a Go runtime with as many threads as cores spins between small messages, which costs three times the
        # CPU time; and with its default heap growth it collects garbage at every other megabyte.
        threads = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
        environment = {
            "GOLOG_LOG_LEVEL": "error",
            "GOMAXPROCS": str(threads),
            "GOGC": "400",
            **os.environ,
        }
        try:
            self._janitor = subprocess.Popen(  # noqa: ASYNC220  (asyncio cannot start one from any thread)
                [
                    "/bin/sh",
                    "-c",
                    _JANITOR,
                    "lightning-swarm-janitor",
                    self.directory,
                    *self._arguments,
                ],
                stdin=lease,
                stdout=theirs.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(lease)
            theirs.close()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        output = _Output(ready, lambda: None if self._closed else on_end())
        await loop.create_unix_connection(lambda: output, sock=ours)
        try:
            await asyncio.wait_for(ready, timeout_s)
        except asyncio.TimeoutError as error:
            raise SwarmError(f"libp2p's daemon p2pd did not start within {timeout_s:.0f} s.") from error

    def expect_end(self) -> None:
        """From now on it may end by itself, as it does when its last client lets go."""
        self._closed = True

    def _end_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            forget(self)
            os.close(lease)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the daemon and removes the runtime directory; waits for both. Idempotent."""
        self._closed = True
        self._end_lease()
        if self._janitor is not None:
            try:
                self._janitor.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _log.warning(
                    "The janitor of %s did not end in %.0f s; killing its processes.",
                    self.directory,
                    timeout_s,
                )
                os.killpg(self._janitor.pid, 9)
                self._janitor.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class _Output(asyncio.Protocol):
    """What the daemon prints: first how it started, later errors that nobody needs to see."""

    def __init__(self, ready: "asyncio.Future[None]", on_end: Callable[[], None]) -> None:
        self._ready = ready
        self._on_end = on_end
        self._text = ""

    def data_received(self, data: bytes) -> None:
        text = data.decode(errors="replace")
        _log.debug("p2pd: %s", text.rstrip())
        if not self._ready.done():
            self._text = (self._text + text)[-10_000:]
            if "Peer ID:" in self._text:
                self._ready.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ready.done():
            self._on_end()
        else:
            lines = self._text.strip().splitlines() or ["it printed nothing"]
            self._ready.set_exception(SwarmError(f"libp2p's daemon p2pd did not start: {lines[-1]}"))


def _configuration(directory: str) -> str:
    """The file that has the daemon relay for nobody.

    Without a file the daemon begins with a configuration in which it does, whatever ``-relay`` says. For that it reads
    a table of the internet's networks, which takes it as long as the rest of its start, and 18 MiB.
    """
    path = Path(directory) / "p2pd.json"
    path.write_text(json.dumps({"Relay": {"Enabled": False}}))
    return str(path)


def _make_directory(parent: Path | None) -> str:
    if parent is None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _PARENT_LIMIT:
            parent = Path("/tmp")
    elif len(str(parent)) > _PARENT_LIMIT:
        raise MisconfigurationException(
            f"runtime_dir: {parent} is too long for unix sockets; at most {_PARENT_LIMIT} bytes."
        )
    return tempfile.mkdtemp(prefix=DIRECTORY, dir=parent)


def _check_free(maddr: str) -> None:
    """Raises when a TCP address cannot be listened on. libp2p would share the port with another daemon silently."""
    try:
        parsed = Multiaddr(maddr)
        protocols = [protocol.name for protocol in parsed.protocols()]
    except Exception as error:  # the parser raises whatever its parts raise
        raise MisconfigurationException(
            f"host_maddrs: {maddr!r} is not a multiaddress like /ip4/0.0.0.0/tcp/0: {error}"
        ) from error
    if protocols[:2] not in (["ip4", "tcp"], ["ip6", "tcp"]):
        return
    family = socket.AF_INET if protocols[0] == "ip4" else socket.AF_INET6
    host, port = (
        parsed.value_for_protocol(protocols[0]),
        int(parsed.value_for_protocol("tcp")),
    )
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NotNow(
                    f"host_maddrs: {maddr} is in use by another process. Name another port, or 0 for any free one."
                ) from error
            raise MisconfigurationException(f"host_maddrs: cannot listen on {maddr}: {error.strerror}.") from error
