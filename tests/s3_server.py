"""A real S3 server (moto's) in its own process, found through the environment as by users."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

START_S = 60.0


def served() -> Iterator[str]:
    """Yield the URL of a server that ends with the fixture that uses this generator."""
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    pytest.importorskip("moto", reason="the extra dev is not installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "moto did not start"
            time.sleep(0.05)  # a port without a listener offers no event to wait for


def bucket_at(server: str, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a bucket for one test, and set the environment in which FFT finds it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    bucket = f"bucket-{os.getpid()}-{abs(hash(name)) % 10**6}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return bucket
