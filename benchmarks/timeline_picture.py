"""A generator of the picture in docs/guides/look.md: the timeline of a real run, in Chromium.

python -m benchmarks.timeline_picture TRACES
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from fft.trace.timeline import write_page

PICTURE = Path(__file__).parents[1] / "docs" / "timeline.png"
ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1200,820",
)


def main(traces: str) -> int:
    """Write the picture; return 1 if there is no browser."""
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
        page = Path(folder, "page.html")
        write_page(Path(traces), page)
        chrome = webdriver.Chrome(options=options, service=Service(driver))
        try:
            chrome.get(page.as_uri())
            chrome.save_screenshot(str(PICTURE))
        finally:
            chrome.quit()
    sys.stdout.write(f"{PICTURE}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
