"""torchft's own test suites, as its wheel ships them, with ``fft.ManagerFFT`` for its Manager.

    python -m tests.compat [pytest's options, such as -k local_sgd]

Each test has a job of its own: a bus, and a folder of traces that is audited when the test has
passed. What differs by design is in `differences.py`: it must fail, by the error named there.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torchft.manager

import fft
from fft.bus import serve_tcp
from fft.trace.audit import audit_dir
from tests.compat.differences import BUGS, DIFFERENCES

REPOSITORY = Path(__file__).parents[2]
SUITES = (
    "manager_integ_test",
    "local_sgd_integ_test",
    "diloco_regression_test",
    "manager_test",
    "ddp_test",
    "fsdp_test",
    "local_sgd_test",
    "optim_test",
    "_test.managed_work_test",
    "data_test",
)


class Suites:
    """Plugin: a bus for each test, what must fail, and what the traces say."""

    def __init__(self) -> None:
        self.bus_url = ""
        self.traces = Path()
        self.is_alone = False
        plugin = self

        class Manager(fft.ManagerFFT):
            """What the suites find as ``torchft.manager.Manager``.

            Some tests empty the environment, so bus and traces are arguments. Those for a manager
            alone have it wait for a mate that never comes: not for a minute.
            """

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                given: dict[str, Any] = {"bus": plugin.bus_url, "trace_dir": plugin.traces}
                if plugin.is_alone:
                    given["timeouts"] = {"quorum": 2.0}
                super().__init__(*args, **{**given, **kwargs})

        torchft.manager.Manager = Manager
        torchft.Manager = Manager

    @pytest.fixture(autouse=True)
    def job(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        """A job of its own for the test."""
        for name in [name for name in os.environ if name.startswith("FFT_")]:
            monkeypatch.delenv(name)
        if hasattr(request.module, "handle_fixture"):  # results kept in files that are in no wheel:
            # without them its tests compare with what they compute themselves
            monkeypatch.setattr(request.module, "handle_fixture", lambda name, results: None)
        self.is_alone = request.module.__name__ == "torchft.manager_test"
        with tempfile.TemporaryDirectory(prefix="fft-compat-") as folder, serve_tcp() as server:
            self.bus_url, self.traces = server.url, Path(folder)
            yield
            if any(self.traces.iterdir()):
                report = audit_dir(self.traces)
                assert report.ok, report.render()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Mark what must fail."""
        known = {**DIFFERENCES, **BUGS}
        for item in items:
            name = "::".join([item.path.name, *item.nodeid.split("::")[-2:]])
            if (why := known.pop(name, None)) is not None:
                mark = pytest.mark.xfail(reason=why.reason, raises=why.raises, strict=why.always)
                item.add_marker(mark)
        if known:
            raise pytest.UsageError(
                f"differences.py names tests that torchft does not have: {known}"
            )


def main(arguments: list[str]) -> int:
    """Run the suites; the exit status is pytest's."""
    plugin = Suites()
    named = [importlib.import_module(f"torchft.{suite}").__file__ for suite in SUITES]
    settings = [f"--rootdir={REPOSITORY}", "-c", str(REPOSITORY / "pyproject.toml")]
    settings += ["-p", "no:cacheprovider"]
    return int(pytest.main([*settings, *map(str, named), *arguments], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
