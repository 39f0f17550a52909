"""``lightning-swarm``: run scripts as trainer or worker, keep a bootstrap peer alive, simulate.

lightning-swarm run [options] train.py [arguments of the script]
lightning-swarm bootstrap [options]
lightning-swarm simulate [options]
"""

import argparse
import os
import runpy
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["simulate"]:
        from lightning_swarm.simulation.cli import main as simulate

        return simulate(given[1:]) or 0
    parser = argparse.ArgumentParser(
        prog="lightning-swarm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script as a worker or trainer")
    bootstrap = commands.add_parser("bootstrap", help="run a small always-on peer and print the join line")
    commands.add_parser("simulate", help="simulate a swarm (lightning-swarm simulate --help)", add_help=False)
    for command in (run, bootstrap):
        command.add_argument("--run-id", help="names the run")
        command.add_argument("--secret-file", type=Path, help="file with the run's secret")
        command.add_argument("--initial-peers", nargs="*", default=[], metavar="ADDRESS", help="any live peers of it")
    run.add_argument("--role", choices=["trainer", "worker"], default="worker")
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    bootstrap.add_argument("--host-maddrs", nargs="+", default=["/ip4/0.0.0.0/tcp/31337"], metavar="ADDRESS")
    bootstrap.add_argument("--announce-maddrs", nargs="+", metavar="ADDRESS", help="what others are told instead")
    bootstrap.add_argument("--identity", type=Path, help="file of the private key, for an address that stays")
    options = parser.parse_args(given)
    try:
        return _run(options) if options.command == "run" else _bootstrap(options)
    except MisconfigurationException as error:
        print(f"lightning-swarm: {error}", file=sys.stderr)
        return 2


def read_secret(file: Path) -> str:
    """The secret in a file; warns when others can read it.

    Raises:
        MisconfigurationException: There is no such file, or it is empty.
    """
    try:
        secret = file.read_text().strip()
    except OSError as error:
        raise MisconfigurationException(f"--secret-file {file} cannot be read: {error.strerror}.") from error
    if not secret:
        raise MisconfigurationException(f"--secret-file {file} is empty.")
    if file.stat().st_mode & 0o077:
        print(f"lightning-swarm: others can read {file}; chmod 600 {file}", file=sys.stderr)
    return secret


def _run(options: argparse.Namespace) -> int:
    from lightning_swarm import launcher

    if not options.script.is_file():
        raise MisconfigurationException(f"There is no script {options.script}.")
    os.environ[launcher.ROLE] = options.role
    if options.run_id:
        os.environ[launcher.RUN_ID] = options.run_id
    if options.initial_peers:
        os.environ[launcher.INITIAL_PEERS] = ",".join(options.initial_peers)
    if options.secret_file is not None:
        os.environ[launcher.SECRET] = read_secret(options.secret_file)
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.resolve().parent))
    runpy.run_path(str(options.script), run_name="__main__")
    if not launcher.SwarmLauncher.calls:
        print(
            f"lightning-swarm: {options.script} ended without calling trainer.fit with a SwarmStrategy", file=sys.stderr
        )
        return 1
    return 0


def _bootstrap(options: argparse.Namespace) -> int:
    from lightning_swarm import launcher
    from lightning_swarm.swarm.node import Node

    run_id = options.run_id or secrets.token_hex(4)
    secret = read_secret(options.secret_file).encode() if options.secret_file is not None else None
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    with Node(
        run_id=run_id,
        initial_peers=options.initial_peers,
        host_maddrs=options.host_maddrs,
        announce_maddrs=options.announce_maddrs,
        identity_path=options.identity,
        secret=secret,
    ) as node:
        print("Let trainer and workers join this peer with:")
        print(f"  {launcher.RUN_ID}={run_id} {launcher.INITIAL_PEERS}={','.join(node.maddrs)}", flush=True)
        done.wait()
    return 0
