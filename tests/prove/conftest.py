"""The option that rewrites the output of scenario files."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write the output of tests/scenarios anew; read the difference before you keep it",
    )
