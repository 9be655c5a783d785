"""`fft run --metrics` with a script that logs its steps: the figures equal those of the report, and
each committed step is logged once, although the rank that writes is killed."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from fft.trace import Run

FFT = (sys.executable, "-m", "fft.cli")
WAIT_S = 120.0
STEPS = 30

SCRIPT = """
import os, sys, time
import torch
import torchft
import fft
from fft.integrations.loggers import logged

manager = fft.ManagerFFT(
    pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1
)
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
model = torch.nn.Linear(8, 1)
manager.register(model, torch.optim.SGD(model.parameters(), lr=0.01))
manager.sync_gradients(model)
loader = fft.CursorLoader(dataset, batch_size=8)
for txn in logged(manager.transactions(loader, max_steps=STEPS), manager):
    with txn:
        until = time.monotonic() + 100
        while txn.step == STEPS - 1 and not os.path.exists(sys.argv[1]):
            assert time.monotonic() < until
            time.sleep(0.05)
        x, y = txn.batch
        loss = torch.nn.functional.mse_loss(model(x), y)
        txn.log(loss=loss.item())
        loss.backward()
"""
PLAN = """
faults:
  - {name: error, kind: exception, step: 10, group: 1, rank: 0, phase: backward}
  - {name: kill, kind: kill, step: 15, group: 0, rank: 0, phase: backward}
"""


def text_at(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def is_refused(url: str) -> bool:
    try:
        text_at(url)
    except urllib.error.URLError:
        return True
    return False


@pytest.mark.long
@pytest.mark.multiprocess
def test_metrics_equal_the_report_and_each_step_is_logged_once(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    script, plan, traces, go = (tmp_path / name for name in ("s.py", "plan.yaml", "traces", "go"))
    script.write_text(textwrap.dedent(SCRIPT).replace("STEPS", str(STEPS)))
    plan.write_text(PLAN)
    command = [*FFT, "run", "--metrics", "0", "--groups", "2", "--faults", str(plan)]
    command += ["--no-lighthouse", "--trace-dir", str(traces), str(script), str(go)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as job:
        assert job.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/metrics", job.stderr.readline().decode())
        assert found is not None
        url = found[0]
        wait_until(lambda: f"fft_step {STEPS - 1}.0" in text_at(url), "the last step", WAIT_S)
        families = list(text_string_to_metric_families(text_at(url)))
        report = [*FFT, "report", "--json", str(traces)]
        figures = json.loads(subprocess.run(report, capture_output=True, check=True).stdout)
        go.touch()
        job.stderr.read()
        assert job.wait(WAIT_S) == 0
    assert is_refused(url)
    causes = figures["figures"]["rollbacks"]
    assert causes["step_failed"] == 1 and causes.keys() & {"died", "collective_failed"}
    traced = list(Run(traces).metrics())
    with (traces / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        losses = {
            each["group"]: each["loss"] for each in traced if each["step"] == int(row["step"])
        }
        writers = {"0"} if int(row["step"]) <= 15 else losses.keys()
        assert float(row["loss"]) in [losses[writer] for writer in writers]
    for family in families:
        expected: Any = figures["figures"][family.name.removeprefix("fft_")]
        for sample in family.samples:
            labels = "/".join(sample.labels.values())
            value = expected if not labels else expected.get(labels, 0)
            assert sample.value == pytest.approx(value, abs=0.01), sample.name
