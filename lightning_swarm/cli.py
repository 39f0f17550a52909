"""``lightning-swarm``: run scripts as trainer or worker, keep a bootstrap peer alive, look at a swarm, simulate one.

lightning-swarm run [options] train.py [arguments of the script]
lightning-swarm bootstrap [options]
lightning-swarm status [options]
lightning-swarm simulate [options]
"""

import argparse
import json
import os
import runpy
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm.supervisor import NOT_NOW, USAGE
from lightning_swarm.swarm.errors import NotNow

_LOOK_EVERY_S = 2.0
_BOOTSTRAP_HOST = "/ip4/0.0.0.0/tcp/31337"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["simulate"]:
        from lightning_swarm.simulation.cli import main as simulate

        return simulate(given[1:]) or 0
    options = _parser().parse_args(given)
    commands = {"run": _run, "bootstrap": _bootstrap, "status": _status}
    try:
        return commands[options.command](options)
    except MisconfigurationException as error:
        print(f"lightning-swarm: {error}", file=sys.stderr)
        return NOT_NOW if isinstance(error, NotNow) else USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-swarm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a script as a worker or trainer",
        description="Run a script as a worker or trainer. What the script itself gives SwarmStrategy counts more than "
        "these options. SIGTERM, or the end of a spot notice, lets a worker hand over its work and exit with code 0.",
    )
    bootstrap = commands.add_parser("bootstrap", help="run a small always-on peer and print the join line")
    status = commands.add_parser("status", help="show who serves what, how fast, and what has happened")
    commands.add_parser("simulate", help="simulate a swarm (lightning-swarm simulate --help)", add_help=False)
    for command in (run, bootstrap, status):
        command.add_argument("--run-id", required=command is status, help="names the run")
        command.add_argument(
            "--secret-file",
            type=Path,
            metavar="FILE",
            help="file with the run's secret; without it, what LIGHTNING_SWARM_SECRET says",
        )
        command.add_argument(
            "--initial-peers",
            default=[],
            action="append",
            required=command is status,
            metavar="ADDRESS",
            help="any live peers of the run; several are separated by commas, or the option is repeated",
        )
    for command, port in ((run, "0"), (bootstrap, "31337")):
        command.add_argument(
            "--host-maddrs",
            action="append",
            metavar="ADDRESS",
            help=f"where to listen, /ip4/0.0.0.0/tcp/{port} for all of this machine's addresses",
        )
        command.add_argument(
            "--announce-maddrs", action="append", metavar="ADDRESS", help="what others are told instead"
        )
        command.add_argument(
            "--identity", type=Path, metavar="FILE", help="the private key, for an address that stays; made if missing"
        )
    run.add_argument("--role", choices=["trainer", "worker"], default="worker")
    run.add_argument(
        "--restart", type=int, default=0, metavar="N", help="start the script again after up to N failures in a row"
    )
    run.add_argument("--notice-file", type=Path, metavar="FILE", help="a file whose appearance is a spot notice")
    run.add_argument("--notice-url", metavar="URL", help="the cloud's metadata address that tells of a spot notice")
    run.add_argument(
        "--notice-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="how long after the notice the machine goes: the worker serves until 10 s before",
    )
    run.add_argument(
        "--drained-code",
        type=int,
        default=0,
        metavar="CODE",
        help="exit code after a spot notice or SIGTERM, for a scheduler that takes 0 for the end of the training",
    )
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    status.add_argument("--json", action="store_true", help="print one JSON document and exit")
    status.add_argument("--every", type=float, default=_LOOK_EVERY_S, metavar="S", help="seconds between two looks")
    return parser


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


def _secret(options: argparse.Namespace) -> bytes | None:
    from lightning_swarm import launcher

    found = os.environ.get(launcher.SECRET) if options.secret_file is None else read_secret(options.secret_file)
    return found.encode() if found else None


def _stopped() -> threading.Event:
    """Set by Ctrl-C and SIGTERM from now on."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def _addresses(given: Sequence[str] | None) -> list[str]:
    return [address for text in given or () for address in text.split(",") if address]


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """What the options say, as the strategy reads it."""
    from lightning_swarm import launcher

    found = {launcher.ROLE: options.role}
    if options.run_id:
        found[launcher.RUN_ID] = options.run_id
    if options.secret_file is not None:
        found[launcher.SECRET] = read_secret(options.secret_file)
    if options.identity is not None:
        found[launcher.IDENTITY] = str(options.identity.absolute())
    for name, addresses in (
        (launcher.INITIAL_PEERS, options.initial_peers),
        (launcher.HOST_MADDRS, options.host_maddrs),
        (launcher.ANNOUNCE_MADDRS, options.announce_maddrs),
    ):
        if addresses:
            found[name] = ",".join(_addresses(addresses))
    return found


def _run(options: argparse.Namespace) -> int:
    if not options.script.is_file():
        raise MisconfigurationException(f"There is no script {options.script}.")
    if options.restart < 0:
        raise MisconfigurationException(f"--restart {options.restart} must be at least 0.")
    if not options.notice_seconds >= 0:
        raise MisconfigurationException(f"--notice-seconds {options.notice_seconds:g} must be at least 0.")
    environment = _environment(options)
    if options.restart or options.notice_file or options.notice_url or options.drained_code:
        return _run_supervised(options, environment)
    return _run_here(options, environment)


def _run_here(options: argparse.Namespace, environment: dict[str, str]) -> int:
    from lightning_swarm import launcher

    os.environ.update(environment)
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.resolve().parent))
    try:
        runpy.run_path(str(options.script), run_name="__main__")
    except SystemExit as end:
        if end.code or launcher.SwarmLauncher.calls:
            raise
    if launcher.SwarmLauncher.calls:
        return 0
    print(
        f"lightning-swarm: {options.script} ended without calling trainer.fit with a SwarmStrategy, so there was "
        "nothing to do here. Make its Trainer with strategy=SwarmStrategy(...), and let every role call fit.",
        file=sys.stderr,
    )
    return USAGE


def _run_supervised(options: argparse.Namespace, environment: dict[str, str]) -> int:
    from lightning_swarm.notices import FileNotice, Notice, UrlNotice
    from lightning_swarm.supervisor import Supervisor

    notices: list[Notice] = []
    if options.notice_file is not None:
        notices.append(FileNotice(options.notice_file))
    if options.notice_url is not None:
        notices.append(UrlNotice(options.notice_url))
    command = [sys.executable, "-m", "lightning_swarm.cli", "run", "--role", options.role, str(options.script)]
    return Supervisor(
        [*command, *options.arguments],
        {**os.environ, **environment},
        restarts=options.restart,
        notices=notices,
        notice_s=options.notice_seconds,
        drained_code=options.drained_code,
    ).run()


def _bootstrap(options: argparse.Namespace) -> int:
    from lightning_swarm import launcher
    from lightning_swarm.swarm.bootstrap import refuse_other_runs
    from lightning_swarm.swarm.node import Node

    run_id = options.run_id or secrets.token_hex(4)
    secret = _secret(options)
    initial_peers = _addresses(options.initial_peers)
    done = _stopped()
    with Node(
        run_id=run_id,
        initial_peers=initial_peers,
        host_maddrs=_addresses(options.host_maddrs) or [_BOOTSTRAP_HOST],
        announce_maddrs=_addresses(options.announce_maddrs) or None,
        identity_path=options.identity,
        secret=secret,
    ) as node:
        node.run(refuse_other_runs(node, initial_peers))
        print("Let trainer and workers join this peer with:")
        print(f"  {launcher.RUN_ID}={run_id} {launcher.INITIAL_PEERS}={','.join(node.maddrs)}")
        print(f"and with the run's secret in {launcher.SECRET}, or with:" if secret else "or with:")
        given = f"--run-id {run_id}{' --secret-file FILE' if secret else ''} --initial-peers {','.join(node.maddrs)}"
        print(f"  lightning-swarm run {given} ...", flush=True)
        while not done.wait(1.0):
            pass  # A signal that comes before a wait begins is heard only after it.
    return 0


def _status(options: argparse.Namespace) -> int:
    from lightning_swarm.status import StatusReader, show
    from lightning_swarm.swarm.bootstrap import refuse_other_runs
    from lightning_swarm.swarm.node import Node

    if not options.every > 0:
        raise MisconfigurationException(f"--every {options.every:g} must be positive.")
    secret = _secret(options)
    initial_peers = _addresses(options.initial_peers)
    with Node(run_id=options.run_id, initial_peers=initial_peers, secret=secret) as node:
        node.run(refuse_other_runs(node, initial_peers))
        reader = StatusReader(node, initial_peers)
        status = node.run(reader.read())
        if options.json:
            print(json.dumps(status.to_dict(), indent=2))
            return 0 if status.alive else 1
        from rich.live import Live

        done = _stopped()
        with Live(show(status), auto_refresh=False) as live:
            while not done.wait(options.every):
                live.update(show(node.run(reader.read())), refresh=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
