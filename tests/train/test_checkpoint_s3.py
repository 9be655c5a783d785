"""Tests of checkpoints on a real S3 server (moto's) in its own process."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchft
from checkpoint_files import manifest_of, published, written
from s3_server import bucket_at, served

import fft
from fft.checkpoints.files import Checkpoints, DamagedCheckpoint
from fft.checkpoints.stores import MANIFEST, StoreError, UrlStore, open_store


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    yield from served()


@pytest.fixture
def place(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The URL in a bucket for this test."""
    return f"s3://{bucket_at(server, request.node.name, monkeypatch)}/jobs/run7"


@pytest.mark.long
def test_published_checkpoint_is_read_and_pruned(place: str) -> None:
    store = open_store(place)
    assert isinstance(store, UrlStore)
    store.prepare()
    published(store, 2, 4, 6)
    again = Checkpoints(open_store(place))  # as another process
    newest, problems = again.newest()
    assert newest is not None and newest.step == 6 and not problems
    assert again.prune(2) == ["step-2"]
    assert [e.step for e in again.found()] == [4, 6]
    with again.store.reading("step-6/g0r1.safetensors") as path:
        assert isinstance(path, Path) and path.stat().st_size > 256


@pytest.mark.long
def test_truncated_or_damaged_object_is_never_chosen(place: str) -> None:
    store = open_store(place)
    found = published(store, 2, 4)
    written(store, 6)  # its writer died before publishing
    directory = written(store, 5)  # this writer died while publishing: the manifest comes last
    manifest_of(store, directory, "a1", 5)
    store.write("step-5/g0r0.json", b"{}")
    data = bytearray(store.read("step-4/g1r1.safetensors"))
    data[-1] ^= 4
    store.write("step-4/g1r1.safetensors", bytes(data))
    newest, problems = found.newest()
    assert newest is not None and newest.step == 2
    assert [p.partition(":")[0] for p in problems] == ["step-5", "step-4/g1r1.safetensors"]
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        found.manifest(5)


def test_a_bucket_that_is_not_there_and_a_server_that_is_not(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # accepts connections, and never answers
        port = nobody.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = open_store(place)
    with pytest.raises(StoreError, match="no checkpoints can be written to s3://"):
        store.prepare()
    with pytest.raises(OSError, match=r"s3://|Connect"):
        Checkpoints(store).found()


def check_keys_after(server: str, requests: bytes) -> None:
    """Let the server refuse unknown keys after a number of requests."""
    plain = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{server}/moto-api/reset-auth", requests, plain)
    urllib.request.urlopen(request, timeout=30).close()


def test_credentials_that_are_renewed_in_a_file_are_read_again(
    place: str, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import boto3  # type: ignore[import-untyped]

    iam, file = boto3.client("iam"), tmp_path / "credentials"
    iam.create_user(UserName="writer")
    allow = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
    iam.put_user_policy(UserName="writer", PolicyName="all", PolicyDocument=policy)
    old, new = (iam.create_access_key(UserName="writer")["AccessKey"] for _ in range(2))

    def renew(key: dict[str, str]) -> None:
        file.write_text(
            f"[default]\naws_access_key_id={key['AccessKeyId']}\n"
            f"aws_secret_access_key={key['SecretAccessKey']}\n"
        )

    renew(old)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(place)
    check_keys_after(server, b"0")
    try:
        store.prepare()
        published(store, 2)
        check_keys_after(server, b"inf")
        iam.delete_access_key(UserName="writer", AccessKeyId=old["AccessKeyId"])
        check_keys_after(server, b"0")
        with pytest.raises(PermissionError):
            store.read(f"step-2/{MANIFEST}")  # the old key is refused, and the file has no other
        renew(new)
        found = published(store, 4)
        assert [each.step for each in found.found()] == [2, 4]
    finally:
        check_keys_after(server, b"inf")


def train(traces: Path, steps: int, seed: int, place: str | None) -> tuple[str, int]:
    """Train a job of one process; return its final state and the number of steps that it made
    itself."""
    torch.manual_seed(seed)
    plan = None if place is None else fft.Checkpointing(place, every=4, resume=True)
    manager = fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        trace_dir=traces,
        checkpoint=plan,
    )
    model = torch.nn.Linear(4, 1)
    manager.register(model, torch.optim.AdamW(model.parameters()))
    manager.sync_gradients(model)
    made = 0
    try:
        loader = fft.CursorLoader(torch.sin(torch.arange(256.0)).reshape(64, 4), batch_size=4)
        for txn in manager.transactions(loader, max_steps=steps):
            with txn:
                model(txn.batch).square().mean().backward()
            made += 1
        return manager.digest(), made
    finally:
        manager.shutdown()


@pytest.mark.long
def test_a_job_goes_on_from_there(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FFT_BUS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    whole, _ = train(tmp_path / "whole", 9, 3, None)
    train(tmp_path / "a", 6, 3, place)
    assert train(tmp_path / "b", 9, 55, place) == (whole, 3)
