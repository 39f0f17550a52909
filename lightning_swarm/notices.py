"""Spot notices: how a cloud says that it will take a machine back, and how ``lightning-swarm run`` hears it.

A notice is a file that appears, or what an address on the machine's own metadata service answers. Nothing here knows
about processes; `supervisor` acts on a notice.

==========  ====================================================================================  ===============
cloud       address                                                                               seconds of notice
==========  ====================================================================================  ===============
AWS         ``http://169.254.169.254/latest/meta-data/spot/instance-action``                      120
GCP         ``http://metadata.google.internal/computeMetadata/v1/instance/preempted``             30
Azure       ``http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01``            30 or more
==========  ====================================================================================  ===============

Azure's list tells every machine of a scale set of all of them, so it is compared with the machine's own name, which the
same service knows.
"""

import json
import logging
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException

__all__ = ["FileNotice", "Notice", "UrlNotice", "is_notice"]

log = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 2.0
_MOST_BYTES = 65_536
# Services refuse who does not send these, so that no web page can make a browser ask.
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
_TOKEN_PATH = "/latest/api/token"
_TOKEN_TTL = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
_TOKEN = "X-aws-ec2-metadata-token"
_FORGET_TOKEN = (401, 403)
_NAME_PATH, _NAME_QUERY = "/metadata/instance/compute/name", "api-version=2021-02-01&format=text"


class Notice(Protocol):
    """Something to look at every few seconds."""

    def given(self) -> str | None:
        """What the notice says, ``None`` while there is none."""
        ...


class FileNotice:
    """A file that appears when the machine is to be given back.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def given(self) -> str | None:
        """Whether it is there."""
        return f"{self._path} has appeared" if self._path.exists() else None


class UrlNotice:
    """An address of a metadata service.

    Args:
        url: The address. What counts as a notice there, see :func:`is_notice`.

    Raises:
        MisconfigurationException: It is no http address.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise MisconfigurationException(f"--notice-url {url!r} must be an address that begins with http://.")
        self._url = url
        self._token_url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, _TOKEN_PATH, "", ""))
        self._token: str | None = None
        self._name_url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, _NAME_PATH, _NAME_QUERY, ""))
        self._name = ""
        self._silent = False
        # A proxy for the internet does not lead to the machine's own metadata service.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def given(self) -> str | None:
        """Ask once; a service that does not answer has said nothing, which is logged once."""
        try:
            status, body = self._get()
            noticed = is_notice(status, body, self._machine)
        except (OSError, ValueError) as error:
            if not self._silent:
                log.warning("%s does not answer, so no spot notice will be seen there: %s", self._url, error)
            self._silent = True
            return None
        if self._silent:
            log.warning("%s answers again.", self._url)
        self._silent = False
        return f"{self._url} says {body.strip()[:200]!r}" if noticed else None

    def _machine(self) -> str:
        if not self._name:
            status, body = self._request("GET", self._name_url, {})
            if status != 200 or not body.strip():
                raise OSError(f"whose notice this is cannot be told, {self._name_url} answers with status {status}")
            self._name = body.strip()
        return self._name

    def _get(self) -> tuple[int, str]:
        status, body = self._request("GET", self._url, {_TOKEN: self._token} if self._token else {})
        if status in _FORGET_TOKEN:
            # Version 2 of AWS's service wants a token that it has given itself.
            granted, token = self._request("PUT", self._token_url, _TOKEN_TTL)
            self._token = token.strip() if granted == 200 else None
            if self._token:
                status, body = self._request("GET", self._url, {_TOKEN: self._token})
        return status, body

    def _request(self, method: str, url: str, headers: dict[str, str]) -> tuple[int, str]:
        request = urllib.request.Request(url, method=method, headers={**_HEADERS, **headers})
        try:
            with self._opener.open(request, timeout=_ANSWER_WITHIN_S) as answer:
                return answer.status, answer.read(_MOST_BYTES).decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""


def is_notice(status: int, body: str, machine: Callable[[], str]) -> bool:
    """Whether an answer says that the machine will be taken back.

    AWS answers 404 until there is a notice; GCP always answers, ``FALSE`` or ``TRUE``; Azure always lists what is
    scheduled for this machine and its neighbours, and a ``Preempt`` among it that names this machine is the notice. Any
    other service: whatever it answers with status 200.

    Args:
        status: The answer's.
        body: What it says.
        machine: Gives this machine's name; called only when some machine is to be preempted.
    """
    text = body.strip()
    if status != 200 or not text or text.upper() == "FALSE":
        return False
    try:
        content = json.loads(text)
    except ValueError:
        return True
    if not isinstance(content, dict) or not isinstance(content.get("Events"), list):
        return True
    names = [name for event in content["Events"] for name in _preempted(event)]
    return bool(names) and machine().casefold() in names


def _preempted(event: object) -> list[str]:
    """The names of the machines that will be taken back by one of Azure's events."""
    if not isinstance(event, dict) or event.get("EventType") != "Preempt":
        return []
    names = event.get("Resources")
    return [str(name).casefold() for name in names] if isinstance(names, list) else []
