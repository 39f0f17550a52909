"""Spot notices are heard from every cloud, and nothing else is taken for one."""

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm.notices import FileNotice, UrlNotice, is_notice

AWS = '{"action": "terminate", "time": "2025-01-01T12:00:00Z"}'


@pytest.mark.parametrize(
    ("status", "body", "notice"),
    [
        (404, "", False),
        (200, AWS, True),
        (200, "FALSE", False),
        (200, "TRUE\n", True),
        (200, '{"DocumentIncarnation": 1, "Events": []}', False),
        (200, json.dumps({"Events": [{"EventType": "Reboot"}]}), False),
        (200, json.dumps({"Events": [{"EventType": "Reboot"}, {"EventType": "Preempt"}]}), True),
        (200, "", False),
        (500, "TRUE", False),
    ],
)
def test_each_clouds_answers_are_understood(status: int, body: str, notice: bool) -> None:
    assert is_notice(status, body) is notice


class Metadata:
    """A metadata service that wants a token, as AWS's does."""

    def __init__(self) -> None:
        self.notice, self.tokens = "", 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, status: int, body: str = "") -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def do_PUT(self) -> None:
                assert self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                outer.tokens += 1
                self.answer(200, f"token {outer.tokens}")

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") != f"token {outer.tokens}":
                    self.answer(401)
                elif outer.notice:
                    self.answer(200, outer.notice)
                else:
                    self.answer(404)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/latest/meta-data/spot/instance-action"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


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
