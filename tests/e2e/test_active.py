"""Tests of the rules that choose active groups: by themselves, and in a job that loses a group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_run import fft as run_fft

import fft
from fft.protocol.active import chosen, divisible_by, max_active, whole
from tests.acceptance.live_kills import judged

SCRIPT = """\
import os, signal, torch, torchft, fft
group = int(os.environ["FFT_GROUP"])
config = fft.ManagerConfig(active=[fft.active.whole(2), fft.active.max_active(2)],
    place=f"node {group // 2}")
manager = fft.ManagerFFT(pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None,
    min_replica_size=1, config=config)
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
manager.sync_gradients(model)
data = fft.CursorLoader(torch.utils.data.TensorDataset(torch.arange(40.0).reshape(-1, 1)), 2)
counted = []
for txn in manager.transactions(data, max_steps=6):
    with txn:
        if group == 1 and txn.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        model(txn.batch[0]).mean().backward()
    counted.append(txn.committed and txn.contributes)
print(group, "contributed", *map(int, counted), model.weight.item(), flush=True)
"""


def test_rules_apply_in_order() -> None:
    groups = [(str(n), f"node {n // 3}") for n in range(8)]
    assert chosen(groups, []) == tuple("01234567")
    assert chosen(groups, [whole(3)]) == tuple("012345")
    assert chosen(groups, [whole(3), divisible_by(4)]) == tuple("0123")
    assert chosen(groups, [max_active(7), divisible_by(2)]) == tuple("012345")
    assert chosen(groups, [divisible_by(9)]) == ()
    with pytest.raises(ValueError, match=r"max_active\(0\): expected a number of at least 1"):
        fft.ManagerConfig(active=(max_active(0),))


@pytest.mark.long
@pytest.mark.multiprocess
def test_node_that_is_not_whole_is_excluded_and_spares_take_over(tmp_path: Path) -> None:
    script, traces = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ["--groups", "4", "--max-restarts", "0", "--trace-dir", str(traces)]
    done = run_fft("run", *options, str(script), folder=tmp_path, within=120)
    logs = {log.name[1]: log.read_text() for log in (traces / "logs").iterdir()}
    assert done.returncode == 0 or "1" in logs, done.stdout + done.stderr
    judged(traces)
    counted, weights = {}, set()
    for group in "023":
        (found,) = re.findall(rf"^{group} contributed ([01 ]+) (\S+)$", logs[group], re.M)
        counted[group] = found[0].split()
        weights.add(found[1])
    # step 3 has an attempt that was rolled back
    assert counted["0"] == [*"111", "0", *"000"], counted
    assert counted["2"] == counted["3"] == [*"000", "0", *"111"], counted
    assert len(weights) == 1, "spares hold the state"
