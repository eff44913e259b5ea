"""An HTTP client that shows everything and hides nothing: whole answers, and streams that can be left midway."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any

REQUEST_SECONDS = 180
"""Longest silence on a connection. A busy machine takes its time for the first request of an engine."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def call(port: int, method: str, path: str, body: object = None, seconds: float = REQUEST_SECONDS) -> Answer:
    """One request on a connection of its own. A `str` body is sent as it is, anything else as JSON.

    Raises `OSError` or `http.client.HTTPException` when there is no whole answer.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        response = _send(connection, method, path, body)
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read().decode(errors="replace"))
    finally:
        connection.close()


def answers(port: int, path: str) -> bool:
    """Whether `GET path` answers 200 at once."""
    try:
        return call(port, "GET", path, seconds=5).status == 200
    except (OSError, http.client.HTTPException):
        return False


def _send(connection: http.client.HTTPConnection, method: str, path: str, body: object) -> http.client.HTTPResponse:
    payload = body if body is None or isinstance(body, str) else json.dumps(body)
    connection.request(method, path, payload, {"Content-Type": "application/json"} if payload else {})
    return connection.getresponse()


class OpenRequest:
    """A POST whose answer is read piece by piece, and that its client can leave at any moment."""

    def __init__(self, port: int, path: str, body: object) -> None:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self.received = b""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=REQUEST_SECONDS)
        self._socket.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)

    def read_events(self, count: int) -> None:
        """Reads until `count` server-sent events have arrived."""
        while self.received.count(b"data: ") < count:
            if not self._read():
                raise OSError(f"the stream ended before {count} events: {self.received[-300:]!r}")

    def read_to_end(self) -> str:
        """Reads until the server ends the connection, and returns everything that came, as it went over the wire."""
        while self._read():
            pass
        return self.received.decode(errors="replace")

    def leave(self) -> None:
        """Closes the connection, as a client does that is not interested any more."""
        self._socket.close()

    def _read(self) -> bool:
        piece = self._socket.recv(65536)
        self.received += piece
        return bool(piece)
