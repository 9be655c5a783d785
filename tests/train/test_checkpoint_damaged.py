"""Tests with 200 damaged checkpoints: each is reported, and the one before it is chosen."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import published

from fft.checkpoints.files import Checkpoints, DamagedCheckpoint
from fft.checkpoints.stores import open_store

GOOD, BAD = 4, 8
DAMAGES = 200

Damage = Callable[[Path, Path, random.Random], str]
"""A function that damages the second directory, using the first, and describes the damage."""


def pick(bad: Path, dice: random.Random, ending: str = "") -> Path:
    """Pick one of the files that the manifest lists, or the manifest."""
    names = [f["name"] for f in json.loads((bad / "manifest.json").read_text())["files"]]
    return bad / dice.choice([n for n in [*names, "manifest.json"] if n.endswith(ending)])


def truncated(good: Path, bad: Path, dice: random.Random) -> str:
    path = pick(bad, dice)
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data))])
    return path.name


def bit_flipped(good: Path, bad: Path, dice: random.Random) -> str:
    path = pick(bad, dice)
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    return path.name


def missing(good: Path, bad: Path, dice: random.Random) -> str:
    path = pick(bad, dice)
    path.unlink()
    return path.name


def longer(good: Path, bad: Path, dice: random.Random) -> str:
    path = pick(bad, dice, ".safetensors")
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randrange(1, 64)))
    return path.name


def mixed(good: Path, bad: Path, dice: random.Random) -> str:
    """Replace a file by that of the step before."""
    path = pick(bad, dice)
    shutil.copy(good / path.name, path)
    return path.name


def exchanged(good: Path, bad: Path, dice: random.Random) -> str:
    """Exchange the files of two ranks."""
    one, other = bad / "g0r0.safetensors", bad / "g0r1.safetensors"
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    return one.name


def edited(good: Path, bad: Path, dice: random.Random) -> str:
    """Edit the manifest by hand."""
    path = bad / "manifest.json"
    found: dict[str, Any] = json.loads(path.read_text())
    changes: list[tuple[str, Any]] = [
        ("step", GOOD),
        ("cursor", found["cursor"] + 1),
        ("lineage", "another"),
        ("batches", 0),
        ("writer", "1"),
        ("ranks", 1),
        ("groups", ["0"]),
        ("files", found["files"][:-1]),
        ("returned", [1]),
        ("unknown", 1),
    ]
    name, value = dice.choice(changes)
    path.write_text(json.dumps({**found, name: value}))
    return path.name


def sealed_anew(good: Path, bad: Path, dice: random.Random) -> str:
    """Edit the manifest and update its digest, as an attacker would."""
    path = bad / "manifest.json"
    found: dict[str, Any] = json.loads(path.read_text())
    del found["sha256"]
    file = dice.choice(found["files"])
    changes: list[dict[str, Any]] = [
        {"files": [f for f in found["files"] if f is not file]},
        {"files": [*found["files"], file]},
        {"files": [*found["files"], {**file, "name": "../../etc/passwd"}]},
        {"files": [*found["files"], {**file, "name": "g0r0.pt"}]},
        {"step": GOOD},
        {"ranks": 3},
        {"writer": "7"},
        {"format": 2},
        {"cursor": -1},
        {"cursor": "8"},
        {"unknown": 1},
    ]
    found |= dice.choice(changes)
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**found, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    return path.name


class Evil:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("/tmp/fft-was-unpickled").touch, ()


def pickled(good: Path, bad: Path, dice: random.Random) -> str:
    """Replace a tensor file by a pickle, half of the time of the same length."""
    path = pick(bad, dice, ".safetensors")
    size, data = path.stat().st_size, pickle.dumps(Evil())
    path.write_bytes(data.ljust(size, b"\0") if dice.random() < 0.5 else data)
    return path.name


def no_json(good: Path, bad: Path, dice: random.Random) -> str:
    path = bad / "manifest.json"
    texts = [b"", b"[]", b"null", b'"text"', b"[" * 100_000, b"\xff\xfe", b'{"a":' * 50_000]
    path.write_bytes(dice.choice(texts))
    return path.name


def a_directory(good: Path, bad: Path, dice: random.Random) -> str:
    path = pick(bad, dice, ".safetensors")
    path.unlink()
    path.mkdir()
    return path.name


def from_another_step(good: Path, bad: Path, dice: random.Random) -> str:
    """Replace all files by those of another checkpoint, under this name."""
    shutil.rmtree(bad)
    shutil.copytree(good, bad)
    return "manifest.json"


KINDS: list[Damage] = [
    *(truncated, bit_flipped, missing, longer, mixed, exchanged, edited, sealed_anew),
    *(pickled, no_json, a_directory, from_another_step),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two whole checkpoints."""
    root = tmp_path_factory.mktemp("store")
    published(open_store(str(root)), GOOD, BAD)
    assert Checkpoints(open_store(str(root))).newest()[0].step == BAD  # type: ignore[union-attr]
    return root


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_none_that_is_damaged_is_chosen_and_each_is_named(
    kind: Damage, template: Path, tmp_path: Path
) -> None:
    mark = Path("/tmp/fft-was-unpickled")
    mark.unlink(missing_ok=True)
    for seed in range(-(-DAMAGES // len(KINDS))):
        root = tmp_path / str(seed)
        shutil.copytree(template, root)
        good, bad = root / f"step-{GOOD}", root / f"step-{BAD}"
        file = kind(good, bad, random.Random(seed))
        found = Checkpoints(open_store(str(root)))
        chosen, problems = found.newest()
        assert chosen is not None and chosen.step == GOOD, (seed, file)
        assert len(problems) == 1 and problems[0].startswith(f"step-{BAD}"), problems
        if kind in (truncated, bit_flipped, missing, longer, pickled):
            assert file in problems[0]
        with pytest.raises(DamagedCheckpoint, match=f"step-{BAD}"):
            found.verify(BAD)
        shutil.rmtree(root)
    assert not mark.exists()
