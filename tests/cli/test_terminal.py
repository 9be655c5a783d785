"""Tests of texts on their way to a terminal: foreign texts are shown, and not obeyed."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from waiting import wait_until

import fft
from fft.bus.token import JobToken
from fft.launch.supervisor.claims import _CLAIMS, Claim
from fft.operate.client import JobClient
from fft.operate.job_file import JobFile
from fft.util.terminal import printable

LIMIT_S = 60.0
HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\x9b1;1H\rfft: complete\u202e"
SHOWN = "evil\u241b]0;owned\u2407\u241b[2J\ufffd1;1H\u240dfft: complete\ufffd"
SOURCE = Path(fft.__file__).parent
OTHER_WAYS = re.compile(
    r"(?<![\w.])print\(|sys\.__?std|sys\.std(out|err)\.write|\b[cs]?echo\(|traceback\.print"
    r"|(?<!Safe)\bConsole\(|StreamHandler|basicConfig|os\.write\([12],|\bpprint\b"
)
SCRIPT = f"""
import os, time
from pathlib import Path

for _ in range(600):
    if Path(__file__).with_name("go").exists():
        raise ValueError({HOSTILE!r})
    time.sleep(0.1)
"""


def test_controls_of_a_text_become_signs() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("a\tb\n… é 漢\u00a0🚀\x7f\0") == "a\tb\n… é 漢\u00a0🚀\u2421\u2400"
    assert printable(os.fsdecode(b"step-\xff")) == "step-\ufffd"


def test_all_controls_and_marks_of_direction_become_signs() -> None:
    """By Unicode's own tables: controls, surrogates, separators of lines, and marks that change the
    direction of a line."""
    directed = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for each in map(chr, range(sys.maxunicode + 1)):
        kind, direction = unicodedata.category(each), unicodedata.bidirectional(each)
        is_obeyed = kind in ("Cc", "Cs", "Zl", "Zp") or direction in directed
        is_obeyed |= each in "\u061c\u200e\u200f"
        assert (printable(each) != each) == (is_obeyed and each not in "\t\n"), f"{ord(each):#x}"


def test_source_has_one_way_to_a_terminal() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if OTHER_WAYS.search(line)
    }
    own = {each for each in found if each.startswith("util/terminal.py: ")}
    # standard error of a rank, which the supervisor reads
    ranks = {each for each in found if each.startswith("launch/script_runner.py: sys.stderr")}
    # a part of a program for an interpreter without FFT, whose output is a pipe
    waker = {'train/guard/injector.py: os.write(1, b"!")'}
    safe = {"trace/display.py: class SafeConsole(Console):"}
    assert found - own - ranks - waker - safe == set()
    assert len(own) == 3, "the search finds what it is for"


def test_log_records_of_fft_are_printable_in_handlers_of_the_script(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        logging.getLogger("fft.bus").exception("a listener failed: %s", error)
        logging.getLogger("fft.bus").exception("%s failed", "a listener")
        logging.getLogger("others").warning("coloured: %s", "\x1b[31m")
    ours, plain, theirs = caplog.records
    assert ours.getMessage() == f"a listener failed: {SHOWN}"
    assert caplog.text.count(f"ValueError: {SHOWN}") == 2
    assert plain.args == ("a listener",), "printable as it is"
    assert theirs.args == ("\x1b[31m",), "the script's own"


def test_run_shows_foreign_texts_as_signs(tmp_path: Path) -> None:
    """A supervisor of another host asks for a group, and then sends what is no message; an error of
    the script ends the job."""
    script, traces = tmp_path / "script.py", tmp_path / "traces"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fft.cli", "run", "--no-lighthouse", "--no-auto-resume"]
    command += ["--max-restarts", "0", "--trace-dir", str(traces), str(script)]
    with (tmp_path / "said").open("w") as caught:
        process = subprocess.Popen(command, stdout=caught, stderr=caught)

    def text() -> str:
        return (tmp_path / "said").read_text()

    try:
        wait_until(lambda: "fft watch" in text(), "the job begins", LIMIT_S)
        job = JobFile.read(traces)
        assert job is not None
        token = JobToken.from_file(Path(job.settings["FFT_TOKEN_FILE"]))
        with JobClient(job.settings["FFT_BUS"], token=token) as client:
            wait_until(lambda: "0" in client.supervisors(), "the group is held", LIMIT_S)
            inbox = f"supervisor/{client.supervisors()['0'].id}"
            client.bus.send(inbox, _CLAIMS.encode(Claim("12345678", ("0",), HOSTILE)))
            client.bus.send(inbox, rb'{"id": "12345678", "groups": [], "by": "", "\u001b[2J": 1}')
            wait_until(lambda: "not in FFT's format" in text(), "both are read", LIMIT_S)
        (tmp_path / "go").touch()
        process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert f"{SHOWN} wants group 0, and was refused" in text()
    assert f"ValueError: {SHOWN}" in text()
    assert "\u241b[2J" in text().partition("not in FFT's format")[2].partition("\n")[0]
    assert {one for one in text() if not one.isprintable()} == {"\n"}


def test_error_of_a_command_shows_a_file_name_as_signs(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "")
    command = [sys.executable, "-m", "fft.cli", "report", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert SHOWN in done.stderr and "\x1b" not in done.stderr + done.stdout
