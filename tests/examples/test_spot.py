"""The files for spot machines are well-formed, and the command understands what they call it with."""

import configparser
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_swarm.cli import _parser
from lightning_swarm.notices import UrlNotice

SPOT = Path(__file__).parents[2] / "examples" / "spot"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    text = (SPOT / "lightning-swarm.service").read_text()
    parser.read_string(re.sub(r"\\\n\s*", "", text))
    return parser


def cloud_init() -> dict[str, Any]:
    text = (SPOT / "cloud-init.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    return yaml.safe_load(text)


def environment() -> dict[str, str]:
    """What cloud-init.yaml writes for the unit."""
    (file,) = [file for file in cloud_init()["write_files"] if file["path"] == "/etc/lightning-swarm/env"]
    lines = [line for line in file["content"].splitlines() if not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_unit_calls_the_command_with_what_cloud_init_writes() -> None:
    service = unit()["Service"]
    assert service["EnvironmentFile"] == "/etc/lightning-swarm/env" and service["KillMode"] == "mixed"
    settings = environment()
    words = []
    for word in shlex.split(service["ExecStart"]):
        if word.startswith("$") and not word.startswith("${"):
            words += settings.get(word[1:], "").split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: settings[found[1]], word))
    assert words[0] == "/opt/train/.venv/bin/lightning-swarm"
    options = _parser().parse_args(words[1:])
    assert options.role == "worker" and options.restart == 5 and str(options.script) == "train.py"
    assert options.arguments == ["--stages", "4", "--workers", "0"]
    assert options.initial_peers == [settings["INITIAL_PEERS"]]
    UrlNotice(options.notice_url)
    (secret,) = [file for file in cloud_init()["write_files"] if file["path"] == str(options.secret_file)]
    assert int(secret["permissions"], 8) & 0o077 == 0 and secret["owner"].startswith(service["User"])


@pytest.mark.parametrize(("drained", "slept"), [(75, True), (0, False), (1, False)])
def test_the_job_sleeps_after_a_drain_and_ends_otherwise(tmp_path: Path, drained: int, slept: bool) -> None:
    task = yaml.safe_load((SPOT / "sky.yaml").read_text())
    assert task["resources"]["use_spot"] and f"tcp/{task['resources']['ports']}" in task["run"]
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    fakes = {
        commands / "lightning-swarm": f'printf "%s\\n" "$@" > called; ls -l secret > mode; exit {drained}',
        tmp_path / "curl": 'echo "$@" >> asked; echo 192.0.2.9',
        tmp_path / "sleep": 'echo "$@" > slept',
    }
    for path, text in fakes.items():
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    values = {"RUN_ID": "mine", "INITIAL_PEERS": "/ip4/x", "SWARM_SECRET": "swordfish"}
    values["SCRIPT"] = task["envs"]["SCRIPT"]
    done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env={"PATH": path, **values}, timeout=15)
    assert done.returncode == drained
    assert (tmp_path / "slept").exists() == slept
    options = _parser().parse_args((tmp_path / "called").read_text().splitlines())
    assert options.announce_maddrs == ["/ip4/192.0.2.9/tcp/31338"] and options.drained_code == 75
    assert options.arguments == ["--stages", "4", "--workers", "0"]
    assert (tmp_path / "secret").read_text() == "swordfish"
    assert (tmp_path / "mode").read_text().startswith("-rw------- ")
