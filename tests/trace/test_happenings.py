"""Tests of the search for attempts and rollbacks in traces."""

from __future__ import annotations

from pathlib import Path

from traced import TracedJob

from fft.trace.happenings import happenings


def test_attempt_of_a_replaced_process_is_lost_when_its_trace_ends(tmp_path: Path) -> None:
    job = TracedJob(tmp_path)
    job.step()
    job.start_anew("1")
    job.step()
    job.step()
    job.close()
    steps = [each for each in happenings(tmp_path) if each.kind == "step" and each.rank == "1/0"]
    by_token = {each.token: each.outcome for each in steps}
    assert len(by_token) == len(steps) and all(each.start <= each.end for each in steps)
    first, second, *later = [by_token[token] for token in sorted(by_token)]
    assert (first, second) == ("committed", "lost") and later[0] == "committed"


def test_lost_attempt_ends_with_the_last_line_of_its_process(tmp_path: Path) -> None:
    job = TracedJob(tmp_path)
    job.step()
    job.kill_group("1")
    job.settle()
    job.clock += 10.0
    job.start_group("1")
    job.step()
    job.close()
    found = [each for each in happenings(tmp_path) if each.rank == "1/0"]
    lost = next(each for each in found if each.kind == "step" and each.outcome == "lost")
    assert lost.end - lost.start < 1.0, "not when its successor starts"
