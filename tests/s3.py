"""A real S3 server on loopback, and what can stand between it and a client."""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import boto3

BUCKET = "team"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key-of-the-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's server in a process of its own; yields its endpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def tamper(endpoint: str, url: str, content: bytes | None) -> None:
    """Replace or delete a file in the store, with a client of another make than ours."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=CREDENTIALS["AWS_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    bucket, key = url.removeprefix("s3://").split("/", 1)
    if content is None:
        client.delete_object(Bucket=bucket, Key=key)
    else:
        client.put_object(Bucket=bucket, Key=key, Body=content)


class Between(ThreadingHTTPServer):
    """Stands between client and server, and spoils what goes through.

    Every `period`-th request fails, in turns in three ways; from `allowed` on each is answered with 403, as a
    store does for keys it does not know, or no longer.
    """

    def __init__(self, endpoint: str, *, period: int | None = None, allowed: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = endpoint.removeprefix("http://")
        self.period = period
        self.allowed = allowed
        self.num_requests = 0
        self.num_failed = 0
        self.lock = Lock()

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve in a thread; yields the endpoint."""
        thread = Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{self.server_address[1]}"
        finally:
            self.shutdown()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Between

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            self.server.num_requests += 1
            number = self.server.num_requests
            fails = self.server.period is not None and number % self.server.period == 0
            self.server.num_failed += fails
            way = self.server.num_failed % 3
        if self.server.allowed is not None and number > self.server.allowed:
            self._answer(403, b"<Error><Code>ExpiredToken</Code></Error>", {})
            return
        if fails and way == 0:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>", {})
            return
        if fails and way == 1:
            self.close_connection = True
            return
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        if fails:  # the answer is cut off in the middle, or promises more than comes
            self.close_connection = True
            content, length = content[: len(content) // 2], str(len(content) + 1)
        self._answer(answer.status, content, {**kept, "Content-Length": length or "0"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _relay  # noqa: N815 - the names are http.server's

    def log_message(self, format: str, *args: object) -> None:
        pass


_HOP = frozenset({"content-length", "connection", "transfer-encoding", "server", "date"})
