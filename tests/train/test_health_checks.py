"""Tests of the ready-made health checks, on the devices of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import fft
from fft.errors import ConfigError
from fft.train.guard.health_checks import GpuState
from fft.util.memory import available_memory


def test_disk_check_compares_the_free_space(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free / 1e9
    fft.health_checks.disk(tmp_path, free_gb=free / 2)()
    with pytest.raises(RuntimeError, match="GB free, expected at least"):
        fft.health_checks.disk(tmp_path, free_gb=2 * free + 1)()


def test_memory_check_compares_the_available_memory() -> None:
    free = available_memory() / 1e9
    fft.health_checks.memory(free_gb=free / 2)()
    with pytest.raises(RuntimeError, match="of memory are free"):
        fft.health_checks.memory(free_gb=2 * free)()


@pytest.mark.parametrize("place", ["job/step", "job", ""])
@pytest.mark.parametrize("limit", ["max", "3000"])
def test_memory_check_counts_all_control_group_limits_without_caches(
    limit: str, place: str, tmp_path: Path
) -> None:
    folder, membership = tmp_path / place, tmp_path / "cgroup"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("2900\n")
    (folder / "memory.stat").write_text("anon 900\ninactive_file 1500\nslab_reclaimable 400\n")
    membership.write_text("0::/job/step\n")
    available = available_memory(tmp_path, membership)
    assert available == 2000 if limit == "3000" else available > 3000


def test_interface_check_requires_a_link() -> None:
    fft.health_checks.network_interface("lo")()
    with pytest.raises(RuntimeError, match=r"no network interface 'ib7'; there are .*lo"):
        fft.health_checks.network_interface("ib7")()


def test_interface_check_names_an_interface_without_a_link() -> None:
    down = [path.name for path in Path("/sys/class/net").iterdir() if not _has_link(path)]
    if not down:
        pytest.skip("every network interface of this machine has a link")
    with pytest.raises(RuntimeError, match="has no link"):
        fft.health_checks.network_interface(down[0])()


def _has_link(place: Path) -> bool:
    try:
        return (place / "carrier").read_text().strip() == "1"
    except OSError:
        return False


def test_device_check_computes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fft.health_checks.device("cpu")()
    whole = torch.ones

    def damaged(*size: int, **options: object) -> torch.Tensor:
        made: torch.Tensor = whole(*size, **options)  # type: ignore[call-overload]
        made[3, 5] += 1
        return made

    monkeypatch.setattr(torch, "ones", damaged)
    with pytest.raises(RuntimeError, match="multiplies matrices incorrectly"):
        fft.health_checks.device("cpu")()


def test_gpu_check_judges_the_nvml_state() -> None:
    before = GpuState(None, 3, False, frozenset({0, 1}))
    assert not list(before.faults_since(before))
    (asks,) = before._replace(recovery=2).faults_since(before)
    assert asks == "the driver asks for a reboot (recovery action 2)"
    worse = GpuState(0, 5, True, frozenset({1}))
    assert list(worse.faults_since(before)) == [
        "2 new uncorrected memory errors",
        "a defective row of its memory could not be replaced",
        "NVLink 0 is down",
    ]


def test_gpu_check_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fft.train.guard.health_checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        fft.health_checks.gpu()
