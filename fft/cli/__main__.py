"""The entry point of ``python -m fft.cli``, which is the same as ``fft``."""

from __future__ import annotations

from fft.cli import app

if __name__ == "__main__":
    app()
