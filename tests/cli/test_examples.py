"""Tests of the examples: real processes, real training, audited afterwards.

The script of the README is started as a user starts it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_run import fft

from benchmarks.side_by_side import nvrx
from fft.messages.fault_plans import load_plan
from fft.trace.audit import audit_dir, read_lines

ROOT = Path(__file__).parents[2]
EXAMPLES, README = ROOT / "examples", ROOT / "README.md"
LIMIT_S = 150

TRANSIENT = """
faults:
  - {name: raise, kind: exception, step: 2, group: 1, rank: 1, phase: backward}
  - {name: one-sided, kind: one_sided, step: 4, group: 0}
"""


def run(tmp_path: Path, *arguments: str, as_users_do: bool = False) -> Path:
    """Run a job to its successful end and return its trace directory."""
    traces = tmp_path / "run"
    command = ["run", "--trace-dir", str(traces), "--timeout", str(LIMIT_S - 20), *arguments]
    if as_users_do:
        done = subprocess.run(
            [sys.executable, "-m", "fft.cli", *command],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ,
        )
    else:
        done = fft(*command, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return traces


def test_the_demo_has_the_four_faults_of_its_table() -> None:
    plan = load_plan(EXAMPLES / "hsdp_demo_faults.yaml", groups=2, ranks=2)
    assert [fault.kind for fault in plan.faults] == ["exception", "one_sided", "kill", "drain"]


@pytest.mark.multiprocess
def test_readme_script_runs_unchanged(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(snippet, encoding="utf-8")
    size = ["--groups", "2", "--max-restarts", "0"]
    traces = run(tmp_path, *size, str(script), as_users_do=True)
    found = audit_dir(traces)
    assert found.ok, found.render()
    last = max(line.get("step", 0) for line in read_lines(traces))
    assert f"max_steps={last})" in snippet
    assert not any((traces / "logs").rglob("*-2.log")), "nobody was started twice"


@pytest.mark.long
@pytest.mark.multiprocess
def test_hsdp_trains_through_transient_faults_until_the_plan_is_through(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(TRANSIENT)
    size = ["--groups", "2", "--ranks", "2", "--max-restarts", "0"]
    until = ["--faults", str(plan), "--stop-after-plan", "3", "--min-steps", "10"]
    traces = run(tmp_path, *size, *until, str(EXAMPLES / "hsdp_char_lm.py"))
    found = audit_dir(traces)
    assert found.ok, found.render()
    logs = [log.read_text().splitlines()[-1] for log in sorted((traces / "logs").iterdir())]
    assert len(logs) == 4  # no process was restarted
    one, other, *rest = (
        int(line.rpartition("done at step ")[2]) for line in logs[::2] + logs[1::2]
    )
    assert rest == [one, other], "the ranks of a group leave with one commit"
    # a group that learns of the end after its vote leaves with the next commit
    assert min(one, other) >= 10 and abs(one - other) <= 1


@pytest.mark.multiprocess
@pytest.mark.parametrize("manager", ["fft", "torchft"])
def test_the_plain_loop_runs_with_either_manager(tmp_path: Path, manager: str) -> None:
    script = [str(EXAMPLES / "torchft_loop.py"), "--manager", manager, "--steps", "20"]
    size = ["--groups", "2", "--min-groups", "2", "--max-restarts", "0"]
    lighthouse = ["--lighthouse"] if manager == "torchft" else []
    traces = run(tmp_path, *size, *lighthouse, *script)
    for group in (0, 1):
        assert "step 20: loss" in (traces / "logs" / f"g{group}r0-1.log").read_text()
    if manager == "fft":
        found = audit_dir(traces)
        assert found.ok, found.render()


def results(output: str) -> list[str]:
    """Return the loss and the weights that each process of from_nvrx.py prints at its end."""
    return re.findall(r"^done: (loss \S+, weights \w+),", output, re.MULTILINE)


def results_under_fft(folder: Path, fault: str) -> list[str]:
    """Run from_nvrx.py with a fault and return the results of its processes."""
    folder.mkdir()
    example = [str(EXAMPLES / "from_nvrx.py"), str(folder / "state"), "--under", "fft"]
    traces = run(folder, "--groups", "3", *example, "--fault", fault, "--pause", "0")
    logs = "".join(log.read_text() for log in sorted((traces / "logs").iterdir()))
    assert logs.count("call 1: ") >= (fault != "none") * 2, logs
    return results(logs)


@pytest.mark.long
@pytest.mark.multiprocess
def test_restarted_function_has_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    undisturbed = results_under_fft(tmp_path / "none", "none")
    killed = results_under_fft(tmp_path / "kill", "kill")
    assert len(undisturbed) == 3
    assert len(killed) >= 2, "the killed process returns only if it is early enough"
    assert len({*undisturbed, *killed}) == 1, (undisturbed, killed)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.skipif(not nvrx.python().exists(), reason="make bench installs NVIDIA's package")
def test_either_system_restarts_the_example_after_an_exception(tmp_path: Path) -> None:
    port = nvrx.free_ports()
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [str(nvrx.python()), str(EXAMPLES / "from_nvrx.py"), str(tmp_path / "state")]
    command += ["--under", "nvrx", "--fault", "exception"]
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **place, "RANK": str(n)}
        )
        for n in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = results("".join(outputs))
    assert all("call 1: " in text for text in outputs), outputs
    under_fft = results_under_fft(tmp_path / "fft", "exception")
    assert len(under_fft) == 3 and found == under_fft
