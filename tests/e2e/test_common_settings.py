"""Tests that a process with other settings than the job is refused, without harm to the job."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from stage import Member, job, records

from fft.bus.memory import MemoryBus
from fft.errors import OtherSettings
from fft.protocol.load import load_spec
from fft.train.session.settings import common_settings, refuse_other_settings
from fft.util.version import __version__

HSDP = load_spec("hsdp")


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({"min_replica_size": 2}, "min_replica_size: 2 here, 1 there"),
        ({"spec": "ddp"}, 'join: spec: "ddp" here, "hsdp" there; parameter_groups.model.ranks: '),
        ({"on_divergence": "heal"}, 'on_divergence: "heal" here, "stop" there'),
    ],
)
def test_a_group_with_other_settings_is_refused_and_the_job_goes_on(
    tmp_path: Path, odd: dict[str, object], expected: str
) -> None:
    running, tried = threading.Event(), threading.Event()

    def works(member: Member) -> None:
        def body(_: Member, txn: object) -> None:
            running.set()
            if member.manager.current_step() == 2:
                assert tried.wait(60)

        member.train(6, body=body)

    def tries(member: Member) -> None:
        assert running.wait(60)
        try:
            member.train(6)
        finally:
            tried.set()

    with job(tmp_path, 1) as made:
        first = made.member("0").start(works)
        other = made.member("1", **odd).start(tries)
        for member in (other, first):
            member.end()
    assert first.error is None
    assert isinstance(other.error, OtherSettings)
    assert expected in str(other.error)
    assert [r["step"] for r in records(tmp_path) if r["kind"] == "commit"] == [1, 2, 3, 4, 5, 6]


def test_different_rule_is_named_by_its_place(tmp_path: Path) -> None:
    raw = HSDP.model_dump(mode="json")
    raw["states"]["NORMAL"]["on"]["fault"][0]["why"] = "other words are no other rule"
    raw["timers"]["quorum"]["default"] = 61.0
    with MemoryBus("settings") as bus:
        refuse_other_settings(bus, common_settings(HSDP))
        refuse_other_settings(bus, common_settings(type(HSDP).model_validate(raw)))
        del raw["states"]["NORMAL"]["on"]["fault"]
        with pytest.raises(OtherSettings, match=r"states\.NORMAL: .* here, .* there\. Start all"):
            refuse_other_settings(bus, common_settings(type(HSDP).model_validate(raw)))


@pytest.mark.parametrize("there", ["0.9.0", None])
def test_process_with_another_version_is_refused_with_both(there: str | None) -> None:
    """A release before the check, which has not published its version, is refused as well."""
    theirs = common_settings(HSDP) | {"FFT": there}
    if there is None:
        del theirs["FFT"]
    shown = there or "0.1.0 or older"
    with MemoryBus("versions") as bus:
        bus.compare_set("settings", None, json.dumps(theirs, sort_keys=True).encode())
        with pytest.raises(OtherSettings, match=f"has FFT {__version__}, .* has FFT {shown}: inst"):
            refuse_other_settings(bus, common_settings(HSDP))
