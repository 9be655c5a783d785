"""Tests of the places that `fft.integrations.loggers` writes to."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import pytest
from waiting import wait_until

from fft.integrations.loggers import CsvLog, StepLog, TensorBoardLog, WandbLog


def lines(log: CsvLog) -> list[str]:
    return log.path.read_text().splitlines()


def write(log: StepLog, *steps: int) -> None:
    for step in steps:
        log.write(step, {"loss": step / 4})


@pytest.mark.parametrize("start", ["", "start2"])
def test_csv_of_all_starts_is_in_the_trace_directory(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFT_TRACE_DIR", str(tmp_path / start))
    log = CsvLog()
    write(log, 1, 2)
    assert lines(log) == ["step,loss", "1,0.25", "2,0.5"] and log.path == tmp_path / "metrics.csv"


def test_csv_gets_a_column_when_a_value_is_new(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv")
    write(log, 1)
    log.write(2, {"lr": 0.125})
    write(log, 3)
    assert lines(log) == ["step,loss,lr", "1,0.25,", "2,,0.125", "3,0.75,"]


def test_csv_goes_on_when_the_writer_changes(tmp_path: Path) -> None:
    one, other = CsvLog(tmp_path / "log.csv"), CsvLog(tmp_path / "log.csv")
    write(one, 1, 2)
    write(other, 3)
    one.write(4, {"loss": 1.0, "lr": 0.5})
    write(other, 5)
    assert lines(one) == ["step,loss,lr", "1,0.25,", "2,0.5,", "3,0.75,", "4,1.0,0.5", "5,1.25,"]


def test_csv_of_a_resumed_job_has_each_step_once(tmp_path: Path) -> None:
    write(CsvLog(tmp_path / "log.csv"), 1, 2, 3, 4)
    again = CsvLog(tmp_path / "log.csv")
    write(again, 3, 4)
    assert lines(again) == ["step,loss", "1,0.25", "2,0.5", "3,0.75", "4,1.0"]


def test_csv_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    write(CsvLog(tmp_path / "log.csv"), 1)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("2,0.")
    after = CsvLog(tmp_path / "log.csv")
    write(after, 3)
    assert lines(after) == ["step,loss", "1,0.25", "3,0.75"]


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, again = TensorBoardLog(tmp_path), TensorBoardLog(tmp_path)
    write(first, 1, 2, 3, 4)
    first.close()
    write(again, 3, 4, 5)
    again.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(each.step, each.value) for each in events.Scalars("loss")]
    assert found == [(step, step / 4) for step in range(1, 6)]


def offline_steps(path: Path) -> list[tuple[int, float]]:
    """Return step and loss of each whole line of an offline run: records in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, payload, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, part = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):
            break
        payload += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # a whole record, or its last part
            record, payload = wandb_internal_pb2.Record.FromString(payload), b""
            items = record.history.item if record.WhichOneof("record_type") == "history" else ()
            values = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            found += [(values["_step"], values["loss"])] if values else []
    return found


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_has_each_step_offline(tmp_path: Path) -> None:
    log = WandbLog(mode="offline", dir=str(tmp_path), project="fft", id="one", resume="allow")
    write(log, 1, 2, 3)
    log.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-one.wandb")
    # the service process of W&B may write the file after finish() has returned
    wait_until(lambda: len(offline_steps(path)) == 3, "the file of the run", 30)
    assert offline_steps(path) == [(1, 0.25), (2, 0.5), (3, 0.75)]
