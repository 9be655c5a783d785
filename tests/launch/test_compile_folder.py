"""Tests of the folder for compiled code: its owner, its place, and its removal with the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from forked_run import running
from waiting import wait_until

from fft.checkpoints.plan import Checkpointing
from fft.launch.resuming import FOLDER, SETTING, compile_cache
from fft.launch.supervisor import RunConfig, SupervisorError

LIMIT_S = 60.0


def config(place: str | Path | None = None) -> RunConfig:
    kept = None if place is None else Checkpointing(place)
    return RunConfig(["script.py"], 1, 1, Path("traces"), checkpoint=kept)


def test_a_users_own_is_left_alone() -> None:
    with compile_cache(config(), False, {SETTING: "/mine"}) as found:
        assert found is None


@pytest.mark.parametrize(("place", "joins"), [(None, False), ("memory://a", False), ("kept", True)])
def test_compile_cache_without_a_disk_is_temporary_and_private(
    tmp_path: Path, place: str | None, joins: bool
) -> None:
    where = tmp_path / place if place == "kept" else place
    with compile_cache(config(where), joins, {}) as found:
        assert found is not None and not found.is_relative_to(tmp_path / "kept")
        assert found.stat().st_mode & 0o777 == 0o700
        (found / "deep" / "er").mkdir(parents=True)
        (found / "deep" / "er" / "file").write_text("compiled")
    assert not found.exists()


def test_compile_cache_beside_checkpoints_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        with compile_cache(config(tmp_path), False, {}) as found:
            assert found is not None
            (found / "file").write_text("compiled")
    assert found.parent == tmp_path / FOLDER and (found / "file").exists()
    assert found.stat().st_mode & 0o777 == found.parent.stat().st_mode & 0o777 == 0o700


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with (
        pytest.raises(SupervisorError, match=f"(?s){tmp_path / FOLDER}.*{SETTING}"),
        compile_cache(config(tmp_path), False, {}),
    ):
        pass


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("how", ["symlink", "owner", "group", "others"])
def test_a_folder_that_another_user_may_have_filled_is_refused(
    tmp_path: Path, how: str, inner: bool
) -> None:
    with compile_cache(config(tmp_path), False, {}) as made:
        assert made is not None
    bad = made if inner else made.parent
    if how == "symlink":
        bad.rename(tmp_path / "elsewhere")
        bad.symlink_to(tmp_path / "elsewhere")
    elif how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(bad, 12345, -1)
    else:
        bad.chmod(0o720 if how == "group" else 0o702)
    expected = {"symlink": "symlink", "owner": "12345", "group": "0720", "others": "0702"}[how]
    with (
        pytest.raises(SupervisorError, match=f"(?s){bad}.*{expected}.*remove it.*{SETTING}"),
        compile_cache(config(tmp_path), False, {}),
    ):
        pass
    bad.unlink() if how == "symlink" else bad.rename(tmp_path / "removed")
    with compile_cache(config(tmp_path), False, {}) as again:
        assert again == made


@pytest.mark.multiprocess
def test_compile_cache_is_removed_when_fft_run_is_killed(tmp_path: Path) -> None:
    script, printed = tmp_path / "script.py", tmp_path / "told"
    script.write_text(
        "import os, time, pathlib\n"
        f"path = os.environ['{SETTING}']\n"
        "open(path + '/file', 'w').write('compiled')\n"
        f"new = pathlib.Path({str(printed)!r} + '.new')\n"
        "new.write_text(path)\n"
        f"new.rename({str(printed)!r})\n"
        "time.sleep(600)\n"
    )
    command = ["run", "--no-progress", "--trace-dir", str(tmp_path / "traces"), str(script)]
    env: dict[str, str | None] = {**os.environ, SETTING: None}
    with running(*command, folder=tmp_path, env=env) as process:
        wait_until(printed.exists, "the script has begun", LIMIT_S)
        folder = Path(printed.read_text())
        assert (folder / "file").exists()
        process.signal(signal.SIGKILL)
        process.wait(LIMIT_S)
        wait_until(lambda: not folder.exists(), "the folder is removed", LIMIT_S)
