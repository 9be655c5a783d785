"""Tests of the only access to torchft's private attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torchft.process_group import ProcessGroup

from fft.errors import FftError
from fft.train.guard.torchft_adapter import TorchftAdapter, configuration_of

NAMES = [name for name in vars(TorchftAdapter) if not name.startswith("__")]


def manager_without(*missing: str) -> Any:
    return SimpleNamespace(**{f"_{n}": n for n in NAMES if n not in missing})


def test_adapter_reads_and_writes_the_managers_attributes() -> None:
    manager = manager_without()
    adapter = TorchftAdapter(manager)
    assert [getattr(adapter, name) for name in NAMES] == NAMES
    adapter.step = 7
    assert manager._step == 7


def test_adapter_lists_all_attributes_that_a_torchft_release_lacks() -> None:
    with pytest.raises(FftError, match=r"has no _step, _store on its Manager"):
        TorchftAdapter(manager_without("step", "store"))


def test_group_of_a_later_torchft_is_configured_by_its_reconfigure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []
    name = "torchft.process_group.reconfigure_with_store"
    monkeypatch.setattr(name, lambda *call: calls.append(call), raising=False)
    group = Mock(spec=["reconfigure"])
    group.__class__ = ProcessGroup
    configuration_of(group)("host:1/prefix", "group", 1, 2, 7, None, None, None)
    assert calls == [(group, "host:1/prefix", 1, 2)]
    group.configure = calls.append
    configuration_of(group)("address")
    assert calls[1] == "address"
