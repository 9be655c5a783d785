"""``python -m fft.cli`` is ``fft``."""

from __future__ import annotations

from fft.cli import app

if __name__ == "__main__":
    app()
