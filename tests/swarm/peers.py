"""A peer in a process of its own, for tests that end it badly.

``python peers.py RUN_ID [--fork] [INITIAL_PEER ...]`` starts a node, prints its peer id and addresses and waits for the
end of its input. With ``--fork`` it leaves a forked child behind, as a DataLoader does.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_swarm.swarm.node import Node


class PeerProcess:
    """A peer that answers ``echo`` and ``wait``.

    Attributes:
        peer_id: Its name.
        maddrs: Its addresses.
    """

    def __init__(self, run_id: str, initial_peers: Sequence[str] = (), fork: bool = False) -> None:
        command = [sys.executable, __file__, run_id, *(["--fork"] if fork else []), *initial_peers]
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line, "the peer did not start"
        self.directory, self.child = line[0], int(line[1])
        self.peer_id, self.maddrs = line[2], line[3:]

    def daemons(self) -> list[int]:
        """Processes that have the peer's runtime directory in their command line: p2pd and its janitor."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if self.directory.encode() in command:
                    found.append(int(entry.name))
        return found

    def signal(self, number: int) -> None:
        """Sends the process a signal; one that is to stop has stopped on return."""
        self.process.send_signal(number)
        threads = Path(f"/proc/{self.process.pid}/task")
        while number == signal.SIGSTOP and any(_state(thread) != "T" for thread in threads.iterdir()):
            time.sleep(0.001)

    def is_gone(self, within_s: float = 5.0) -> bool:
        """Whether its daemons and files vanish."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if not self.daemons() and not Path(self.directory).exists():
                return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        """Kills it, whatever it does."""
        self.process.kill()
        self.process.wait()
        if self.child:
            os.kill(self.child, signal.SIGKILL)


def end_daemon(node: "Node") -> None:
    """Kills a node's p2pd, as the kernel does when it is short of memory."""
    socket = node._context.control_path.encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # what is no process, or has just ended
            program, *arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if program.endswith(b"/p2pd") and any(socket in argument for argument in arguments):
                os.kill(int(entry.name), signal.SIGKILL)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(") ")[2][0]


def main() -> None:
    """The peer itself."""
    from lightning_swarm.swarm.node import Node

    run_id, *initial_peers = sys.argv[1:]
    fork = initial_peers[:1] == ["--fork"]

    async def echo(caller: str, header: dict[str, Any], tensors: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        return header, tensors

    async def wait(caller: str, header: dict[str, Any], tensors: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        await asyncio.sleep(1000)
        return {}, []

    node = Node(run_id=run_id, initial_peers=initial_peers[fork:])
    node.serve({"echo": echo, "wait": wait})
    child = os.fork() if fork else 0
    if fork and not child:
        time.sleep(1000)
        os._exit(0)
    directory = str(Path(node._context.control_path).parent)
    try:
        print(directory, child, node.peer_id, *node.maddrs, flush=True)
        sys.stdin.read()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.read()
    if run_id.endswith("abandon"):
        return
    node.close()


if __name__ == "__main__":
    import tests.scripts.light  # noqa: F401

    main()
