"""Versions of Python, torch and torchft, and the private names of them that FFT uses."""

from __future__ import annotations

import ast
import dis
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fft
from fft.cli import app
from fft.util import versions

ROOT = Path(fft.__file__).parent
FSDP = "torch.distributed.fsdp._fully_shard"
SCHEDULES = "torch.distributed.pipelining.schedules"
NAMES: dict[str, str] = {
    "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
    f"{FSDP}._fsdp_state.FSDPState": (
        "_comm_ctx _device_handle _is_root _lazy_init _modules _modules_to_run_forward _state_ctx "
        "_training_state"
    ),
    f"{FSDP}._fsdp_param_group.FSDPParamGroup": (
        "_all_gather_result _all_reduce_state _partial_reduce_output _post_forward_indices "
        "_post_reduce_event _reshard_after_forward_event _to_sharded _training_state"
    ),
    f"{FSDP}._fsdp_param.FSDPParam": "_unsharded_param",
    "torch.distributed.device_mesh.DeviceMesh": "_dim_group_names _pg_registry _thread_id",
    "torch.distributed.ProcessGroupGloo": (
        "_Options _set_default_timeout _set_sequence_number_for_group"
    ),
    "torch.distributed.ProcessGroup": (
        "_get_backend _register_backend _set_default_backend _set_group_name"
    ),
    "torch": "_foreach_copy_ _foreach_norm",
    "torch.nn.Module": "_non_persistent_buffers_set",
    "torch._C": "_current_graph_task_id _storage_Use_Count",
    "torch.UntypedStorage": "_cdata",
    "torch.Tensor": "_indices _nnz _version",
    "torch.autograd.Variable": "_execution_engine",
    "torch.amp.GradScaler": "_found_inf_per_device _per_optimizer_states",
    "torch.optim.lr_scheduler.SequentialLR": "_milestones",
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.nested._internal.nested_tensor.NestedTensor": "_ragged_idx",
    "torch.nn.parallel.DistributedDataParallel": "_comm_hooks",
    "torch.distributed.Reducer": "_remove_autograd_hooks",
    f"{SCHEDULES}.PipelineScheduleSingle": (
        "_has_backward _initialize_stage _stage _stage_forward_initialized"
    ),
    f"{SCHEDULES}.PipelineScheduleMulti": "_initialize_stages _stages _stages_forward_initialized",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": (
        "_shutdown_workers _worker_pids_set"
    ),
    "torchft.process_group.ProcessGroupWrapper": "_opts_hook _pg _run_context _timeout _wrap_work",
    "torchft.process_group.ProcessGroupGloo": (
        "_create_pg _global_ranks _group_rank _group_world_size _quorum_id _rank _replica_id"
    ),
    "torchft.manager._ManagedWork": "_managed_fut_tail",
    "torchft.manager._ManagedFuture": "_fut",
}
"""Private attributes that FFT uses, by their owner. Imports are found in the code.

An owner is a dotted path, so that a missing owner is reported like a missing attribute.
"""
_NOT_IN_TABLE = {
    *("_active", "_asdict", "_current_frames", "_DummyThread", "_exit", "_getframe"),  # Python's
    *("_fsdp_param_group", "_fsdp_param_groups"),  # of FSDP2; a release has one of the two
    *("_C", "_replace", "_on_queue_feeder_error"),
    *("_comm_hook", "_create_internal", "_managed_work", "_shared_state"),
}
"""Private names that FFT uses and `NAMES` need not have: names of Python and Accelerate, names that
not all releases have, modules, and attributes of objects in C++."""


def found_at(path: str) -> Any:
    """Return the module or attribute at a dotted path, or None."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(found_at(module), name, None) if module else None


def has(owner: Any, name: str) -> bool:
    """Whether an object of this kind has the attribute, or a method of its class sets it."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    if not inspect.isclass(owner):
        return False
    functions = (f for kind in owner.__mro__ for f in vars(kind).values() if inspect.isfunction(f))
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for function in functions
        for step in dis.get_instructions(inspect.unwrap(function))
    )


def lost_names() -> list[str]:
    """Return the private names that FFT uses and that torch and torchft do not have."""
    lost = [
        f"{path}.{name}"
        for path, names in NAMES.items()
        for name in names.split()
        if not has(found_at(path), name)
    ]
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and re.search(r"^torch(ft)?\b", node.module or ""):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            lost += [p for p in paths if "._" in p and found_at(p) is None]
    return lost


def trees() -> Iterator[ast.Module]:
    for path in ROOT.joinpath("train").rglob("*.py"):
        yield ast.parse(path.read_text())


def test_torch_and_torchft_have_every_private_name_that_fft_uses() -> None:
    lost = lost_names()
    assert not lost, f"torch {versions.found('torch')} and torchft lack {', '.join(lost)}"


@pytest.mark.parametrize(
    "path",
    [
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",  # a method that torch calls, too
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded",
        "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState",
        "torchft.process_group.ProcessGroupWrapper._wrap_work",
        "torch._foreach_norm",
    ],
)
def test_deleted_private_name_is_listed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, name = path.rpartition(".")
    monkeypatch.delattr(found_at(owner), name)
    assert path in lost_names()


def test_deleted_class_is_listed_with_each_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(found_at(f"{FSDP}._fsdp_param"), "FSDPParam")
    assert {f"{FSDP}._fsdp_param.FSDPParam{name}" for name in ("", "._unsharded_param")} <= {
        *lost_names()
    }


def test_table_of_private_names_is_complete() -> None:
    """Every private attribute that FFT uses of an object of another package is in `NAMES`."""
    own = set()
    used = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if on_self and isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
                else:
                    used.add(node.attr)
    table = {name for names in NAMES.values() for name in names.split()}
    assert sorted(used - own - table - _NOT_IN_TABLE) == []


@pytest.mark.parametrize(
    ("name", "number", "fails", "text"),
    [
        ("torch", "2.10.0", True, "torch 2.10.0 is too old, FFT needs 2.11 or newer"),
        ("torch", None, True, "torch is not installed"),
        ("torchft", None, True, "torchft is not installed: pip install 'torchft>=0.2'"),
        ("torch", "2.16.0", False, "torch 2.16.0 was not tried with this FFT, only the releases"),
        ("torch", "2.12.0a0+1f2e3d4c5b.nv26.04", False, "was not tried"),
        ("torch", "2.15.0.dev20261001", False, "was not tried"),
        ("torch", "2.15.0rc3", False, "was not tried"),
        ("torch", "2.14.0+git1f2e3d4", False, "was not tried"),
        ("torch", "2.12.0+nv26.04", False, "was not tried"),
        ("torch", "3.0.0", False, "was not tried"),
        ("torchft", "2026.10.26", False, "torchft 2026.10.26 was not tried"),
        ("Python", "3.10.13", True, "Python 3.10.13 is too old"),
        ("torch", "2.13.0+cpu", None, None),
        ("torch", "2.11.0", None, None),
        ("torch", "2.15.1+cu130", None, None),
    ],
)
def test_version_is_judged_by_the_tested_ones(
    name: str, number: str | None, fails: bool | None, text: str | None
) -> None:
    found = versions.trouble(name, number)
    assert (found and found[0]) == fails
    assert text is None or text in found[1]


def test_import_warns_of_untested_versions_and_refuses_too_old_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"Python": "3.11.7", "torch": "2.16.0", "torchft": "0.2.0"}
    monkeypatch.setattr(versions, "found", there.get)
    with pytest.warns(UserWarning, match=r"torch 2\.16\.0 was not tried"):
        versions.check()
    there["torchft"] = "0.1.1"
    with (
        pytest.warns(UserWarning, match="was not tried"),
        pytest.raises(ImportError, match=r"torchft 0\.1\.1 is too old, FFT needs 0\.2"),
    ):
        versions.check()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("import {} as there; del there.TrainingState", "cannot import name 'TrainingState' from"),
        ("import sys; sys.modules['{}'] = None", "import of {} halted"),
    ],
)
def test_import_without_a_private_name_of_torch_names_the_fix(change: str, text: str) -> None:
    """The name, or its module, is missing before FFT is imported, as in a later release."""
    module = f"{FSDP}._fsdp_common"
    code = change.format(module) + "\nimport fft; fft.ManagerFFT"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: fft: {text.format(module)}"), done.stderr
    end = f", which torch {versions.found('torch')} lacks: install torch 2.11 to 2.15 (`fft"
    assert end in error


def test_doctor_shows_versions_and_missing_features(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for text in (f"FFT      {fft.__version__}", f"torch    {versions.found('torch')}", "lacks"):
        assert text in result.output
    monkeypatch.setattr(versions, "found", {"Python": "3.11.7", "torch": "2.9.0"}.get)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "torch 2.9.0 is too old" in result.output
    assert "torchft is not installed" in result.output


@pytest.mark.parametrize(
    ("number", "works", "text"),
    [
        ("2.17.0", True, "torch 2.17.0 was not tried with this FFT, only the releases 2.11 to"),
        ("2.10.1", False, "torch 2.10.1 is too old, FFT needs 2.11 or newer"),
    ],
)
def test_import_and_doctor_of_a_process_agree_on_its_torch(
    tmp_path: Path, number: str, works: bool, text: str
) -> None:
    about = tmp_path / f"torch-{number}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {number}\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    run = partial(
        subprocess.run, env={**os.environ, **path}, capture_output=True, text=True, timeout=120
    )
    shown = run([sys.executable, "-m", "fft.cli", "doctor"])
    assert shown.returncode == (not works) and f"torch    {number} " in shown.stdout
    assert text in shown.stdout
    done = run([sys.executable, "-c", "import fft; fft.ManagerFFT; fft.CursorLoader"])
    assert done.returncode == (not works)
    assert done.stderr.count(text) == 1


def test_torchft_nightly_counts_as_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "torchft-nightly":
            return "2026.10.26"
        raise PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", version)
    assert versions.found("torchft") == "2026.10.26"
    assert versions.found("torch") is None


def test_missing_torchft_names_what_python_3_14_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    fails, text = versions.trouble("torchft", None) or (False, "")
    assert fails and "no wheel for Python 3.14" in text


def test_doctor_names_what_the_machine_and_each_extra_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, works = versions.doctor()
    there = os.path.exists("/proc/driver/nvidia/version")
    assert works and ("lacks    an NVIDIA GPU: process groups use gloo" in lines) is not there
    wanted = ["pip", "no-such-a; extra == 'hf'", 'no-such-b>=1 ; extra == "hf"', "pytest"]
    wanted += ["no-such-c; extra == 'dev'", "pytest>=8; extra == 'ray'", "no-such-d"]
    monkeypatch.setattr(versions, "requires", lambda _: wanted)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/proc/driver/nvidia/version")
    monkeypatch.setattr(sys, "platform", "darwin")
    lines, works = versions.doctor()
    assert [line for line in lines if line.startswith("lacks")] == [
        "lacks    Linux with pidfd_open (5.3), which FFT needs",
        "lacks    no-such-a, no-such-b: pip install 'fft-torch[hf]'",
    ]
    assert not works
