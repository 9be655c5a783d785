"""torchft's own test suites, as its wheel ships them, with ``fft.ManagerFFT`` for its Manager.

    python -m tests.compat [pytest's options, such as -k local_sgd]

Each test has its own job: a bus, and a folder of traces that is audited when the test has passed.
Tests that differ by design are listed in `differences.py`: they must fail, with the error given
there.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torchft.manager
from torch.distributed import TCPStore

import fft
from fft.bus import serve_tcp
from fft.trace.audit import audit_dir
from fft.train.api.parts import STORE_KEY
from tests.compat.differences import DIFFERENCES

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

_ASKS_WITHIN_S = 60.0


def _publish_store() -> None:
    """Publish the address of the store for a rank 1 whose rank 0 these tests do not run."""
    if os.environ.get("RANK", "0") != "0":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        store.set(STORE_KEY, f"{host}:{port}")


class Suites:
    """A pytest plugin: a bus for each test, expected failures, and audits of the traces."""

    def __init__(self) -> None:
        self.bus_url = ""
        self.traces = Path()
        self.is_alone = False
        self.managers: list[fft.ManagerFFT] = []
        plugin = self

        class Manager(fft.ManagerFFT):
            """The class that the suites import as ``torchft.manager.Manager``.

            Some tests empty the environment, so bus and traces are arguments. Tests of a single
            manager make it wait for a mate that never comes; the wait is kept below a minute.
            """

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                given: dict[str, Any] = {"bus": plugin.bus_url, "trace_dir": plugin.traces}
                if plugin.is_alone:
                    given["timeouts"] = {"quorum": 2.0}
                    _publish_store()
                super().__init__(*args, **{**given, **kwargs})
                plugin.managers.append(self)

        torchft.manager.Manager = Manager
        torchft.Manager = Manager

    @pytest.fixture(autouse=True)
    def job(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        """Give the test its own job."""
        for name in [name for name in os.environ if name.startswith("FFT_")]:
            monkeypatch.delenv(name)
        # The suite keeps expected results in files that no wheel contains; without them its tests
        # compare with results that they compute themselves.
        if hasattr(request.module, "handle_fixture"):
            monkeypatch.setattr(request.module, "handle_fixture", lambda name, results: None)
        suite = importlib.import_module("torchft.manager_integ_test")
        monkeypatch.setattr(suite.EventInjector, "check", self._waiting(suite))
        self.is_alone = request.module.__name__ == "torchft.manager_test"
        with tempfile.TemporaryDirectory(prefix="fft-compat-") as folder, serve_tcp() as server:
            self.bus_url, self.traces = server.url, Path(folder)
            yield
            self.managers.clear()
            if any(self.traces.iterdir()):
                report = audit_dir(self.traces)
                assert report.ok, report.render()

    def _waiting(self, suite: Any) -> Callable[[Any, int, int], None]:
        """Patch ``EventInjector.check`` of the suite: a caller that has met a joiner waits until it
        asks to join.

        torchft delays the next step until all members that request a quorum are in. FFT does not
        wait for joiners, so a test that needs one by a certain step has to wait itself.
        """

        check, barrier = suite.EventInjector.check, suite.EventInjectorEvent.Barrier

        def check_and_wait(injector: Any, rank: int, step: int) -> None:
            before = injector.count[barrier]
            check(injector, rank, step)
            if injector.count[barrier] > before and step > 0:
                deadline = time.monotonic() + _ASKS_WITHIN_S
                while not self._has_asked():
                    assert time.monotonic() < deadline, "the third group never asked to come in"
                    time.sleep(0.01)  # the engine offers no event for it

        return check_and_wait

    def _has_asked(self) -> bool:
        found = [m._parts.job.local for m in self.managers]
        members = [local for local in found if local is not None and local.epoch is not None]
        return all(local.joining for local in members)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Mark the tests that must fail."""
        known = dict(DIFFERENCES)
        for item in items:
            name = "::".join([item.path.name, *item.nodeid.split("::")[-2:]])
            if (why := known.pop(name, None)) is not None:
                mark = pytest.mark.xfail(reason=why.reason, raises=why.raises, strict=True)
                item.add_marker(mark)
        if gone := [name for name, why in known.items() if not why.is_new]:
            raise pytest.UsageError(
                f"differences.py names tests that torchft does not have: {gone}"
            )


def main(arguments: list[str]) -> int:
    """Run the suites and return pytest's exit status."""
    plugin = Suites()
    named = [importlib.import_module(f"torchft.{suite}").__file__ for suite in SUITES]
    settings = [f"--rootdir={REPOSITORY}", "-c", str(REPOSITORY / "pyproject.toml")]
    settings += ["-p", "no:cacheprovider"]
    return int(pytest.main([*settings, *map(str, named), *arguments], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
