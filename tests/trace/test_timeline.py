"""Tests of `fft report --html`, in a browser where one is installed, and of `fft.trace.Run`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browsers import browser, needs_browser
from rich.table import Table
from rich.text import Text
from traced import TracedJob, peak_of
from typer.testing import CliRunner

import fft.trace
from fft.cli import app
from fft.errors import FftError
from fft.messages.protocol import Peer
from fft.trace.display import PlainDisplay, SafeConsole
from fft.trace.timeline import _EVENTS, _SPANS, Lane, Span, page
from fft.trace.writer import TraceWriter


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two groups: 5 steps, a rollback with the cause "boom" at step 5, 3 more steps."""
    job = TracedJob(tmp_path)
    for _ in range(5):
        job.step()
    job.refuse(job.live()[1], "boom")
    job.settle()
    for _ in range(3):
        job.step()
    job.close()
    return tmp_path


def run_of(html: str) -> dict[str, Any]:
    found = re.search(r"^const run = (.*);$", html, re.MULTILINE)
    assert found is not None
    run: dict[str, Any] = json.loads(found[1])
    return run


def data_of(html: str) -> dict[str, Any]:
    run = run_of(html)
    data: dict[str, Any] = run["starts"][run["shown"]]
    return data


def test_page_has_lanes_faults_and_the_lines_of_events(traces: Path) -> None:
    data = data_of(page(traces))
    assert [lane["name"] for lane in data["lanes"]] == ["0/0", "1/0"]
    for lane in data["lanes"]:
        assert sum(span[5] for span in lane["spans"]) == 8, "commits"
        ends = [span[1] for span in lane["spans"]]
        assert ends == sorted(ends) and all(span[0] <= span[1] for span in lane["spans"])
    (fault,) = data["faults"]
    assert fault["step"] == 5 and "boom" in fault["what"] and fault["at"] < fault["end"]
    (rank, *_), *_ = data["waits"]
    assert rank in ("0/0", "1/0")
    event = next(event for event in data["events"] if "boom" in event["what"])
    lines = (traces / event["file"]).read_text().splitlines()
    assert lines[event["line"] - 1] == event["text"]


def test_page_separates_planned_departures_from_losses(tmp_path: Path) -> None:
    job = TracedJob(tmp_path, groups=3)
    job.clock += 100.0
    for _ in range(3):
        job.step()
    job.drain("1")
    for _ in range(2):
        job.step()
    job.kill_group("2")
    for _ in range(2):
        job.step()
    job.close()
    data = data_of(page(tmp_path))
    reported = [text for _, _, text in data["changes"]]
    assert reported == ["group 1 left after this commit", "group 2 was lost by a fault"]
    (fault,) = data["faults"]
    times = [at for at, *_ in data["changes"]] + [event["at"] for event in data["events"]]
    assert min(times) > 0 and max(times) < 10, "seconds since the first epoch"
    assert 0 < fault["at"] < fault["end"] < 10


def test_lane_of_a_long_run_stays_small() -> None:
    lane = Lane("0/0")
    for step in range(100_000):
        for part, kind in enumerate(("compute", "wait", "update")):
            start = step + part / 10
            lane.add(Span(start, start + 0.1, kind, step, step))
        if step % 20_000 == 19_999:
            lane.add(Span(step + 0.3, step + 0.9, "rollback", step, step))
    assert len(lane.spans) <= _SPANS
    assert sum(span.commits for span in lane.spans) == 100_000
    assert sum(span.busy for span in lane.spans) == pytest.approx(10_000)
    assert [span.step for span in lane.spans if span.kind == "rollback"] == [
        *range(19_999, 100_000, 20_000)
    ]
    churn = Lane("0/0")
    for step in range(50_000):
        churn.add(Span(step, step + 0.5, "rollback", step, step))
    assert len(churn.spans) <= _SPANS


def test_page_of_a_long_trace_needs_little_memory(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path, Peer("0", 0, 1))
    for number in range(10_000):
        trace.note("inject", {"name": f"f{number}", "kind": "kill", "filler": "x" * 1000})
    trace.close()
    (path,) = tmp_path.glob("*.jsonl")
    assert path.stat().st_size > 10e6
    made: list[str] = []
    assert peak_of(lambda: bool(made.append(page(tmp_path)) or made)) < 30e6
    data = data_of(made[0])
    assert len(data["events"]) == _EVENTS and data["left_out"] == 10_000 - _EVENTS


def test_markup_and_controls_of_an_error_stay_text(tmp_path: Path) -> None:
    text = "bad \x1b]0;owned\x07\x1b[2J\x9b1;1H\x7f <!-- <script>"
    job = TracedJob(tmp_path)
    job.step()
    job.refuse(job.live()[1], text)
    job.settle()
    job.close()
    made = page(tmp_path)
    (line,) = re.findall(r"^const run = .*$", made, re.MULTILINE)
    assert "<" not in line and json.dumps(text)[1:-1] in json.dumps(data_of(made))
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=100, color_system=None)
    table = Table("error")
    table.add_row(Text(text))
    for shown in (text, Text(text), table):
        console.print(shown, markup=False, highlight=False)
    PlainDisplay(console).write(text)
    assert "\u241b[2J" in out.getvalue() and "<!-- <script>" in out.getvalue()
    assert {one for one in out.getvalue() if not one.isprintable()} == {"\n"}


def test_command_writes_the_page(traces: Path) -> None:
    out = traces / "out.html"
    result = CliRunner().invoke(app, ["report", str(traces), "--html", str(out)])
    assert result.exit_code == 0 and "</html>" in out.read_text()
    result = CliRunner().invoke(app, ["report", str(traces), "--html", str(traces / "no" / "x")])
    assert result.exit_code == 2


@needs_browser
def test_browser_shows_a_fault_and_its_record(traces: Path) -> None:
    out = traces / "page.html"
    out.write_text(page(traces))
    fault = data_of(out.read_text())["faults"][0]
    with browser(traces) as driver:
        driver.get(out.as_uri())
        assert "goodput" in driver.find_element("id", "summary").text
        detail = driver.find_element("id", "detail")
        driver.find_element("css selector", "#faults tr.go").click()
        assert "fault at step 5" in detail.text and "boom" in detail.text
        assert driver.execute_script("return from") < fault["at"]
        driver.find_element("id", "all").click()
        x, y = driver.execute_script(f"return [xOf({(fault['at'] + fault['end']) / 2}), 20]")
        from selenium.webdriver import ActionChains

        view = driver.find_element("id", "view")
        driver.execute_script("tell('')")
        middle = view.size["width"] / 2, view.size["height"] / 2
        move = ActionChains(driver).move_to_element_with_offset(view, x - middle[0], y - middle[1])
        move.click().perform()
        assert "fault at step 5" in detail.text, "a click on the picture"
        row = driver.find_element("css selector", "#events tr.go")
        row.click()
        assert '"kind":' in detail.text and ".jsonl:" in detail.text
        assert driver.get_log("browser") == []


# --- fft.trace.Run ---------------------------------------------------------------------


def test_run_yields_steps_and_tables(traces: Path) -> None:
    run = fft.trace.Run(traces)
    steps = list(run.steps())
    assert [each.step for each in steps] == list(range(1, 9))
    assert steps[0].groups == ("0", "1") and steps == sorted(steps, key=lambda each: each.at)
    (fault,) = (row for row in run.rows("faults") if not row["is_planned"])
    assert "boom" in fault["noticed"]
    assert [row["commits"] for row in run.rows("epochs")] == [5, 3]
    assert run.summary["steps"] == 8 and run.report()["attempts_lost"] == 1
    assert [each.directory for each in run.starts] == [traces]
    assert {line["kind"] for line in run.lines()} >= {"header", "transition"}
    with pytest.raises(FftError, match="no table 'stpes'"):
        list(run.rows("stpes"))  # type: ignore[arg-type]
    with pytest.raises(FftError):
        fft.trace.Run(traces / "none")


def test_run_leaves_out_metrics_of_rolled_back_attempts(tmp_path: Path) -> None:
    job = TracedJob(tmp_path)
    job.until_running()

    def log(loss: float) -> None:
        for node in job.live():
            job.writers[node.peer].note("metrics", {"loss": loss}, node.local)

    log(1.0)
    job.step()
    log(9.0)
    job.refuse(job.live()[1], "boom")
    job.settle()
    log(2.0)
    job.step()
    job.close()
    rows = [(row["group"], row["step"], row["loss"]) for row in fft.trace.Run(tmp_path).metrics()]
    assert sorted(rows) == [("0", 1, 1.0), ("0", 2, 2.0), ("1", 1, 1.0), ("1", 2, 2.0)]


def copied(traces: Path) -> Path:
    """Return the directory of a second start, with the same traces."""
    later = traces / "start2"
    later.mkdir()
    for path in traces.glob("*.jsonl"):
        (later / path.name).write_bytes(path.read_bytes())
    (traces / "start3").mkdir()  # a start that has left no trace
    return later


def test_page_names_hosts_and_has_all_starts_of_the_job(traces: Path) -> None:
    run = run_of(page(traces))
    assert run["shown"] == 0 and len(run["starts"]) == 1
    assert all(len(lane["hosts"]) == 1 and lane["hosts"][0] for lane in run["starts"][0]["lanes"])
    later = copied(traces)
    for shown, folder in enumerate((traces, later)):
        run = run_of(page(folder))
        assert run["shown"] == shown
        assert [each["directory"] for each in run["starts"]] == [str(traces), str(later)]
        assert run["starts"][0]["summary"] == run["starts"][1]["summary"]


@needs_browser
def test_browser_switches_between_starts(traces: Path) -> None:
    from selenium.webdriver.support.select import Select

    later, out = copied(traces), traces / "page.html"
    out.write_text(page(later))
    with browser(traces) as driver:
        driver.get(out.as_uri())
        assert str(later) in driver.find_element("tag name", "h1").text
        Select(driver.find_element("id", "starts")).select_by_index(0)
        assert driver.find_element("tag name", "h1").text == f"FFT timeline of {traces}"
        assert "boom" in driver.find_element("id", "faults").text
        assert driver.get_log("browser") == []
