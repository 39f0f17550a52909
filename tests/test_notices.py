"""Spot notices are heard from every cloud, and nothing else is taken for one."""

import json
import logging
import threading
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm.notices import FileNotice, UrlNotice, is_notice

AWS = '{"action": "terminate", "time": "2025-01-01T12:00:00Z"}'


def azure(**events: list[str]) -> str:
    """What Azure lists: machines by what is to happen to them."""
    return json.dumps({"Events": [{"EventType": kind, "Resources": names} for kind, names in events.items()]})


@pytest.mark.parametrize(
    ("status", "body", "notice"),
    [
        (404, "", False),
        (200, AWS, True),
        (200, "FALSE", False),
        (200, "TRUE\n", True),
        (200, '{"DocumentIncarnation": 1, "Events": []}', False),
        (200, azure(Reboot=["worker_1"]), False),
        (200, azure(Reboot=["worker_0"], Preempt=["worker_1"]), True),
        (200, azure(Preempt=["worker_0", "WORKER_1"]), True),
        (200, azure(Preempt=["worker_0", "worker_10"]), False),
        (200, azure(Preempt=[]), False),
        (200, json.dumps({"Events": [{"EventType": "Preempt"}]}), False),
        (200, "", False),
        (500, "TRUE", False),
    ],
)
def test_each_clouds_answers_are_understood(status: int, body: str, notice: bool) -> None:
    assert is_notice(status, body, lambda: "worker_1") is notice


class Service:
    """Answers at an address of this machine."""

    path = ""

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = outer.answer(self.command, self.path, self.headers)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            do_PUT = do_GET

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}{self.path}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, method: str, path: str, headers: Message) -> tuple[int, str]:
        raise NotImplementedError

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Metadata(Service):
    """A metadata service that wants a token, as AWS's does."""

    path = "/latest/meta-data/spot/instance-action"
    notice, tokens = "", 0

    def answer(self, method: str, path: str, headers: Message) -> tuple[int, str]:
        if method == "PUT":
            assert path == "/latest/api/token" and headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self.tokens += 1
            return 200, f"token {self.tokens}"
        if headers.get("X-aws-ec2-metadata-token") != f"token {self.tokens}":
            return 401, ""
        return (200, self.notice) if self.notice else (404, "")


class Azure(Service):
    """Lists events of all machines of a scale set, and knows which of them this one is."""

    path = "/metadata/scheduledevents?api-version=2020-07-01"
    events, name, named = azure(), "", 0

    def answer(self, method: str, path: str, headers: Message) -> tuple[int, str]:
        assert method == "GET" and headers["Metadata"] == "true"
        if path == self.path:
            return 200, self.events
        assert path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        self.named += 1
        return (200, self.name) if self.name else (500, "")


@pytest.fixture
def scale_set() -> Iterator[Azure]:
    service = Azure()
    yield service
    service.close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    service = Metadata()
    yield service
    service.close()


def test_a_service_that_wants_a_token_gets_one(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    notice = UrlNotice(metadata.url)
    assert notice.given() is None and notice.given() is None
    assert metadata.tokens == 1
    metadata.notice = AWS
    assert notice.given() == f"{metadata.url} says {AWS!r}"
    assert metadata.tokens == 1
    metadata.tokens += 1
    assert notice.given() is not None, "the old token has expired"


def test_the_preemption_of_another_machine_of_the_scale_set_is_no_notice(
    scale_set: Azure, caplog: pytest.LogCaptureFixture
) -> None:
    notice = UrlNotice(scale_set.url)
    assert notice.given() is None and scale_set.named == 0
    scale_set.events = azure(Preempt=["worker_1"])
    with caplog.at_level(logging.WARNING):
        assert notice.given() is None, "it is not known yet which machine this is"
    assert "whose notice this is cannot be told" in caplog.text
    scale_set.name = "worker_0"
    assert notice.given() is None and notice.given() is None
    assert scale_set.named == 2, "the name is asked for until it is known"
    scale_set.events = azure(Preempt=["worker_1", "worker_0"])
    assert notice.given() == f"{scale_set.url} says {scale_set.events!r}"


def test_a_service_that_does_not_answer_is_no_notice_and_said_once(
    metadata: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    url = metadata.url
    metadata.close()
    notice = UrlNotice(url)
    with caplog.at_level(logging.WARNING):
        assert notice.given() is None and notice.given() is None
    assert caplog.text.count("does not answer, so no spot notice will be seen there") == 1


@pytest.mark.parametrize("url", ["", "169.254.169.254/latest", "ftp://cloud/notice", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(MisconfigurationException, match="--notice-url '.*' must be an address that begins with http"):
        UrlNotice(url)


def test_a_file_is_a_notice_when_it_appears(tmp_path: Path) -> None:
    notice = FileNotice(tmp_path / "gone")
    assert notice.given() is None
    (tmp_path / "gone").touch()
    assert notice.given() == f"{tmp_path / 'gone'} has appeared"
