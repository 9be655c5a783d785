"""Tests of FFTTrainerMixin with TRL's SFTTrainer: real jobs of two groups, with faults.

The final weights and the log history must be those of an undisturbed run.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked_run import fft as run_fft

from fft.trace.resumed import audit_job

MISSING = [name for name in ("trl", "datasets", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'fft-torch[hf]' trl"
    ),
]

SCRIPT = Path(__file__).with_name("trl_script.py")
LIMIT_S = 240
RAISE = {"name": "raise", "kind": "exception", "step": 2, "group": 1, "rank": 0}
TRANSIENT = [
    RAISE | {"phase": "backward"},
    {"name": "one-sided", "kind": "one_sided", "step": 4, "group": 0},
]
KILL = [
    RAISE | {"phase": "backward"},
    {"name": "kill", "kind": "kill", "step": 5, "group": 1, "phase": "backward"},
]


def train(
    folder: Path, options: dict[str, Any], faults: Any = ()
) -> tuple[bytes, list[dict[str, Any]]]:
    """Run a job of two groups and audit it. Return the final weights and the log history."""
    out, traces, plan = folder / "out", folder / "traces", folder / "plan.yaml"
    out.mkdir(parents=True)
    plan.write_text(json.dumps({"faults": list(faults)}))
    command = ["run", "--groups", "2", "--no-progress", "--no-lighthouse", "--faults", str(plan)]
    command += ["--trace-dir", str(traces), str(SCRIPT), str(out), json.dumps(options)]
    env = {"HF_HUB_OFFLINE": "1"}
    done = run_fft(*command, folder=folder, env=env, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert audit_job(traces).ok
    history = json.loads((out / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    differing = ("_runtime", "_per_second")
    kept = [{k: v for k, v in entry.items() if not k.endswith(differing)} for entry in history]
    return (out / "model.safetensors").read_bytes(), kept


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_transient_faults_change_no_bit_and_no_metric_of_sft(tmp_path: Path, packing: bool) -> None:
    options = {"packing": packing, "dropout": 0.1}
    weights, history = train(tmp_path / "whole", options)
    assert train(tmp_path / "disturbed", options, TRANSIENT) == (weights, history)
    logged = [entry for entry in history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6, 8]
    tokens = [entry["num_tokens"] for entry in logged]
    assert tokens == sorted(set(tokens)) and all("entropy" in entry for entry in logged)


@pytest.mark.long
def test_killed_group_fetches_the_metrics_of_sft(tmp_path: Path) -> None:
    options = {"packing": True, "both": True}
    assert train(tmp_path / "killed", options, KILL) == train(tmp_path / "whole", options)
