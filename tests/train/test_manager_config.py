"""Tests of the settings that `fft.ManagerConfig` declares; they start no job."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError
from torchft.manager import Manager

import fft
from fft.train.session.settings import ManagerConfig


def test_manager_has_few_arguments_of_its_own() -> None:
    own = inspect.signature(fft.ManagerFFT).parameters.keys()
    own -= inspect.signature(Manager).parameters.keys() | {"args", "kwargs"}
    assert len(own) <= 10


def test_setting_as_an_argument_of_the_manager_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"digest= is a setting: pass config=fft\.ManagerConfig"):
        fft.ManagerFFT(digest="commit")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"check_replicas": 3}, fft.FftError, "power of 2"),
        ({"membership": "both"}, ValidationError, "'register' or 'lighthouse'"),
        ({"progress_interval": -1}, ValidationError, "greater than or equal to 0"),
        ({"digest": "always"}, ValidationError, "'never' or 'commit'"),
        ({"digset": "commit"}, ValidationError, "digset"),
    ],
)
def test_wrong_settings_are_refused(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ManagerConfig(**given)


def test_subclass_with_its_own_constructor_takes_its_own_arguments() -> None:
    class Simple(fft.ManagerFFT):
        def __init__(self, answer: int) -> None:
            self.answer = answer

    assert Simple(42).answer == 42
