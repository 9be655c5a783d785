"""A generator of the pictures of pages in docs/guides/: real runs, in Chromium.

python -m tools.page_pictures timeline TRACES   # the timeline of a run, in look.md
python -m tools.page_pictures watch             # the live page of a demo, in operate.md
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fft.trace.timeline import write_page

ROOT = Path(__file__).parents[1]
ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1200,820",
)
FFT = (sys.executable, "-m", "fft.cli")
LIMIT_S = 300.0
SHOWN_STEP = 60
"""Step after which the picture of the live page is made: the demo has had its faults by then."""


def picture(url: str, out: Path, is_ready: Callable[[Any], bool] = lambda driver: True) -> int:
    """Write a picture of a page when it is ready; return 1 if there is no browser."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        sys.stderr.write("chromium or chromedriver is not installed\n")
        return 1
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    with tempfile.TemporaryDirectory() as folder:
        for argument in (*ARGUMENTS, f"--user-data-dir={folder}/profile"):
            options.add_argument(argument)
        chrome = webdriver.Chrome(options=options, service=Service(driver))
        deadline = time.monotonic() + LIMIT_S
        try:
            chrome.get(url)
            while not is_ready(chrome):
                if time.monotonic() > deadline:
                    sys.stderr.write(f"{url} was not ready within {LIMIT_S:g} s\n")
                    return 1
                time.sleep(0.5)
            chrome.save_screenshot(str(out))
        finally:
            chrome.quit()
    sys.stdout.write(f"{out}\n")
    return 0


def timeline(traces: str) -> int:
    """Draw the timeline of a run."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        write_page(Path(traces), page)
        return picture(page.as_uri(), ROOT / "docs" / "timeline.png")


def watch() -> int:
    """Draw the live page of a demo with faults."""
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder, "traces")
        plan = str(ROOT / "examples" / "hsdp_demo_faults.yaml")
        run = ["run", "--groups", "2", "--ranks", "2", "--faults", plan, "--no-progress"]
        run += [
            "--trace-dir",
            str(traces),
            "--checkpoint",
            f"{folder}/checkpoints",
            "--every",
            "20",
        ]
        script = [str(ROOT / "examples" / "hsdp_char_lm.py"), "--steps", "400"]
        with subprocess.Popen([*FFT, *run, *script], stdout=subprocess.DEVNULL) as job:
            try:
                while not (traces / "job.json").exists():
                    assert job.poll() is None, "the demo has ended"
                    time.sleep(0.1)
                return _watched(traces)
            finally:
                job.kill()


def _watched(traces: Path) -> int:
    def is_ready(chrome: Any) -> bool:
        words = chrome.find_element("id", "title").text.split()
        faults = chrome.find_elements("css selector", "#faults tr")
        return len(words) > 1 and int(words[1]) >= SHOWN_STEP and len(faults) > 2

    command = [*FFT, "watch", str(traces), "--web", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            return picture(server.stdout.readline().strip(), ROOT / "docs" / "watch.png", is_ready)
        finally:
            server.terminate()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    raise SystemExit({"timeline": timeline, "watch": watch}[kind](*rest))
