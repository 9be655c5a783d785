"""The light parts stay light: no torch until a name needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fft

LIGHT = "fft fft.bus fft.cli fft.engine.loop fft.health.detectors fft.health.monitor_client"
LIGHT += " fft.health.monitor fft.protocol.graph fft.protocol.load fft.prove.model"
LIGHT += " fft.trace.audit fft.trace.report"


def test_the_light_parts_import_no_torch() -> None:
    code = f"import sys, {LIGHT.replace(' ', ', ')}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_public_modules_can_be_imported_by_a_statement() -> None:
    code = "import sys; from fft.active import max_active; print('torch' in sys.modules); "
    code += "import fft, fft.abort; from fft.health_checks import disk; from fft import active; "
    code += "print(fft.abort.nvshmem.__name__, fft.health_checks.disk is disk, active.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "nvshmem", "True", "fft.active"], done.stderr


@pytest.mark.long
def test_nothing_but_the_nats_bus_imports_nats() -> None:
    code = f"import sys, {LIGHT.replace(' ', ', ')}, fft.train.api.manager, fft.bus.natsserver; "
    code += "print('nats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_missing_attribute_raises_attribute_error_with_its_name() -> None:
    with pytest.raises(AttributeError, match="ManagerFTT"):
        _ = fft.ManagerFTT
