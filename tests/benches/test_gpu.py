"""Tests of `make gpu` without a GPU: the choice of parts, the results of parts that hang, crash or
fail, the files that are written, and the trials themselves on CPU."""

from __future__ import annotations

import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fft.launch.supervisor.groups import base_env
from tests.acceptance.gpu import machine, packages, page, runner
from tests.acceptance.gpu.findings import Pen, read
from tests.acceptance.gpu.packages import needed
from tests.acceptance.gpu.part import FINDINGS
from tests.acceptance.gpu.plan import PARTS, TOTAL_S, Part, chosen

LIMIT_S = 60.0
FINDS = "from tests.acceptance.gpu.findings import Pen\n"
FINDS += "from pathlib import Path; import sys, os, time\n"
FINDS += "pen = Pen(Path(sys.argv[1]), 'a part')\n"


def part(name: str, limit_s: float = LIMIT_S, on_cpu: bool = True) -> Part:
    """Return a part whose number is the digit at the end of its name."""
    return Part(int(name[-1]), name, f"the part {name}", limit_s, on_cpu)


def run(
    folder: Path,
    scripts: dict[str, str],
    limits: dict[str, float] | None = None,
    total_s: float = LIMIT_S,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run parts that are these scripts; return the results by name, and the output."""
    runner.prepare_children()
    output: list[str] = []
    parts = [part(name, (limits or {}).get(name, LIMIT_S)) for name in scripts]

    def command(each: Part) -> list[str]:
        findings = str(folder / each.name / FINDINGS)
        return [sys.executable, "-c", FINDS + scripts[each.name], findings]

    tell = lambda result: output.append(runner.in_words(result))  # noqa: E731
    results = runner.run(parts, "cpu", True, folder, total_s, tell, command)
    return {result["part"]: result for result in results}, output


GOOD = "pen.check('it holds', True, figure=1.5)\n"


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


# --- which parts ----------------------------------------------------------------------------------


def test_parts_are_selected_by_number_and_name_in_run_order() -> None:
    assert sorted(chosen([]), key=lambda p: p.number) == list(PARTS)
    assert [p.name for p in chosen(["1", "transfer", "5"])] == ["transfer", "across_groups"]
    with pytest.raises(ValueError, match=r"no part 'nccl'; there are 1 \(across_groups\), 2"):
        chosen(["nccl"])


def test_the_plan_is_that_of_the_issue() -> None:
    assert [p.number for p in PARTS] == list(range(1, 14))
    assert all((runner.ROOT / f"tests/acceptance/gpu/parts/{p.name}.py").is_file() for p in PARTS)
    assert sum(p.limit_s for p in PARTS) <= TOTAL_S < 9 * 60, "each gets its own time"


# --- what becomes of a part -----------------------------------------------------------------------


def test_parts_that_crash_hang_and_fail_hide_no_other(tmp_path: Path) -> None:
    scripts = {
        "hangs1": GOOD + "print('it was here', flush=True); time.sleep(600)\n",
        "good2": GOOD,
        "killed3": GOOD + "os.kill(os.getpid(), 11)\n",
        "exits4": "sys.exit(7)\n",
        "silent5": "",
        "fails6": GOOD + "pen.check('it does not hold', False, 'because')\n",
        "good7": GOOD + "pen.absent('half of it', 'needs a GPU')\n",
    }
    results, output = run(tmp_path, scripts, {"hangs1": 3.0})
    assert {name: result["status"] for name, result in results.items()} == {
        "hangs1": "hung",
        "good2": "ok",
        "killed3": "crashed",
        "exits4": "crashed",
        "silent5": "crashed",
        "fails6": "failed",
        "good7": "ok",
    }
    assert "signal SIGSEGV" in results["killed3"]["why"]
    assert results["killed3"]["findings"][0]["figure"] == 1.5, "what it found before is kept"
    assert "exit code 7" in results["exits4"]["why"]
    assert "not through after 3 s" in results["hangs1"]["why"]
    assert "it was here" in results["hangs1"]["why"], "its last output"
    assert "without having found anything" in results["silent5"]["why"]
    assert "without 1 that cannot be tried here" in results["good7"]["why"]
    assert "failed: it does not hold: because" in "\n".join(output)
    assert len(output) == len(scripts), "each is told of at once"


def test_a_part_that_has_judged_nothing_is_not_well(tmp_path: Path) -> None:
    scripts = {
        "absent1": "pen.absent('it', 'needs the package nothing')\n",
        "measured2": "pen.measured('a figure', ms=3)\n",
        "both3": "pen.measured('a way', 'no'); pen.absent('two ranks', 'no way is known')\n",
    }
    results, output = run(tmp_path, scripts)
    assert {result["status"] for result in results.values()} == {"skipped"}
    assert results["absent1"]["why"] == "nothing was tried: it: needs the package nothing"
    assert results["measured2"]["why"] == "nothing was tried: it has only measured"
    assert results["both3"]["why"] == "nothing was tried: two ranks: no way is known"
    assert "not here: it: needs the package nothing" in "\n".join(output)
    assert runner.exit_code(results.values()) == runner.FAILED, "not one was tried"


def test_processes_of_a_part_end_with_the_part(tmp_path: Path) -> None:
    """Its child has its own session and outlives the part; so does the child of a part that
    hangs."""
    start = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )
    start += "pen.check('started', True, pid=child.pid)\n"
    scripts = {"hangs1": start + "time.sleep(600)\n", "ends2": start}
    results, _ = run(tmp_path, scripts, {"hangs1": 2.0})
    for result in results.values():
        pid = result["findings"][0]["pid"]
        assert not Path(f"/proc/{pid}").exists(), result


def test_parts_not_begun_within_the_total_time_are_listed(tmp_path: Path) -> None:
    scripts = {"hangs1": "time.sleep(600)", "late2": GOOD, "late3": GOOD}
    results, output = run(tmp_path, scripts, total_s=3.5)
    assert results["hangs1"]["status"] == "hung", "its own limit is longer"
    assert [results[f"late{n}"]["status"] for n in (2, 3)] == ["not begun"] * 2
    assert "3. the part late3: not begun (0.0 s): the 3.5 s for all parts were over" in output
    assert runner.exit_code(results.values()) == runner.DIED


def test_unused_time_of_a_part_goes_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, limits = [1000.0], {}
    took = {"a1": 10.0, "b2": 80.0, "c3": 1.0}

    def tried(each: Part, words: list[str], own: Path, limit: float) -> dict[str, Any]:
        limits[each.name] = limit
        now[0] += took[each.name]
        return {"number": each.number, "part": each.name, "status": "ok"}

    monkeypatch.setattr(runner, "_run", tried)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    parts = [part("a1", 40.0), part("b2", 50.0), part("c3", 30.0)]
    runner.run(parts, "cpu", True, tmp_path / "full", 120.0, lambda result: None)
    assert limits == {"a1": 40.0, "b2": 80.0, "c3": 30.0}
    runner.run(parts[:1], "cpu", True, tmp_path / "alone", 120.0, lambda result: None)
    assert limits["a1"] == 120.0, "who is alone has all of it"


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok", "skipped"], 0),
        (["skipped"], 1),
        (["ok", "failed"], 1),
        (["failed", "crashed"], 3),
        (["hung"], 3),
        (["ok", "not begun"], 3),
        ([], 0),
    ],
)
def test_exit_code_depends_on_the_part_statuses(statuses: list[str], code: int) -> None:
    assert runner.exit_code({"status": status} for status in statuses) == code


def test_a_part_for_gpus_is_not_run_on_cpu(tmp_path: Path) -> None:
    only = part("gpu1", on_cpu=False)
    results = runner.run([only], "cpu", True, tmp_path, LIMIT_S, print, lambda p: ["false"])
    assert [(r["status"], r["why"]) for r in results] == [("skipped", "needs a GPU")]


@pytest.mark.parametrize(("gpus", "status"), [(1, "skipped"), (2, "ok")])
def test_a_part_for_two_gpus_is_skipped_with_one(tmp_path: Path, gpus: int, status: str) -> None:
    """No GPU is needed: the part is a script."""
    pair = Part(1, "pair1", "two ranks", LIMIT_S, on_cpu=False, gpus=2)
    command = [sys.executable, "-c", FINDS + GOOD, str(tmp_path / "pair1" / FINDINGS)]
    runner.prepare_children()
    (found,) = runner.run(
        [pair], "cuda", True, tmp_path, LIMIT_S, print, lambda _: command, gpus=gpus
    )
    assert found["status"] == status
    assert found["why"] == ("one GPU" if gpus == 1 else "")


@pytest.mark.long
def test_hanging_part_reports_its_thread_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a part through `tests.acceptance.gpu.part` with a replacement for torch that hangs."""
    text = "import time\n\n\ndef in_torch():\n    time.sleep(600)\n\n\nin_torch()\n"
    (tmp_path / "torch.py").write_text(text)
    runner.prepare_children()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    slow = Part(3, "random_state", "a real one", 5.0)
    (result,) = runner.run([slow], "cpu", True, tmp_path / "run", slow.limit_s, print)
    assert result["status"] == "hung"
    assert "most recent call first" in result["why"], "the stacks of its threads"
    assert "in in_torch" in result["why"], "where it hangs"


# --- findings -------------------------------------------------------------------------------------


def test_an_error_in_a_trial_is_a_finding_and_the_next_trial_is_made(tmp_path: Path) -> None:
    pen = Pen(tmp_path / FINDINGS, "p")
    with pen.trial("first"):
        raise RuntimeError("CUDA error: invalid argument")
    with pen.trial("second"):
        raise ModuleNotFoundError("No module named 'torchft.x'", name="torchft.x")
    with pen.trial("third"):
        raise ImportError("cannot import name 'GroupName' from 'torch'", name="torch")
    with pen.trial("fourth"):
        pen.measured("a figure", ms=3)
    with (tmp_path / FINDINGS).open("a") as file:
        file.write('{"part": "p", "sta')  # the process died during the write
    found = read(tmp_path / FINDINGS)
    assert [f["status"] for f in found] == ["failed", "not here", "failed", "measured"]
    assert "invalid argument" in found[0]["text"]
    assert found[1]["text"] == "needs the package torchft.x, which is not installed here"
    assert "GroupName" in found[2]["text"], "an older torch: a failure that is named"


def test_a_module_of_ours_that_is_not_there_is_a_bug(tmp_path: Path) -> None:
    pen = Pen(tmp_path / FINDINGS, "p")
    with pytest.raises(ModuleNotFoundError), pen.trial("first"):
        raise ModuleNotFoundError("No module named 'fft.nothing'", name="fft.nothing")


# --- the machine, the page, the command -----------------------------------------------------------

MACHINE: dict[str, Any] = {
    "python": "3.12.3",
    "kernel": "6.18",
    "packages": {"torch": "2.11.0", "torchft": "not installed"},
    "commit": "abc",
    "driver": "580.1",
    "device": "NVIDIA H100",
    "memory_gib": 79.1,
    "nccl": "2.28.9",
    "cuda": "13.0",
    "fails": {"fft.train.api.manager": "ModuleNotFoundError: No module named 'torchft'"},
    "gpus": ["NVIDIA H100"],
    "unusable": "",
    "when": "2026-01-01 12:00",
}
NO_GPU: dict[str, Any] = {"device": None, "gpus": [], "driver": None, "unusable": "No CUDA GPUs"}
OLD = "The NVIDIA driver on your system is too old (found version 12020)."


@pytest.mark.parametrize(
    ("changes", "why", "mend"),
    [
        ({}, "", None),
        (NO_GPU | {"cuda": None}, "torch 2.11.0 was built without CUDA", ""),
        (NO_GPU | {"driver": "580.1"}, "torch 2.11.0 finds no GPU (No CUDA GPUs)", ""),
        (NO_GPU, "and there is no NVIDIA driver", ""),
        ({"fails": {"torch": "libcudart.so.13"}}, "cannot be loaded (libcudart.so.13)", "install"),
        ({"device": None, "driver": "535.9", "unusable": OLD}, OLD, "580 or newer for CUDA 13"),
        ({"device": None, "cuda": None}, "built without CUDA", "torch that was built for CUDA"),
        (NO_GPU | {"fails": {"gpus": "TimeoutExpired: nvidia-smi"}}, "no GPU", "nvidia-smi"),
        ({"fails": {machine.ASK: "exit code 1"}, "device": None}, "", None),
    ],
)
def test_missing_package_is_reported_with_the_fix(
    changes: dict[str, Any], why: str, mend: str | None
) -> None:
    """Without a GPU there is no fix."""
    about = {**MACHINE, **changes}
    reason = machine.missing(about)
    assert why in reason
    assert bool(reason) == bool(why)
    if mend is not None:
        assert mend in machine.mend(about)
        assert bool(machine.mend(about)) == bool(mend)


def test_a_machine_that_cannot_be_described_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    about = machine.ask()
    assert about["fails"] == {machine.ASK: "exit code 1: "}
    assert any("this machine: exit code 1" in line for line in machine.in_words(about))


def test_failed_probe_hides_no_other_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the probes through the process that collects them, where neither torch nor git can be
    loaded."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('libcudart is another one')\n")
    smi = "#!/bin/sh\ncase $1 in *name*) echo NVIDIA H100;; *) exit 9;; esac\n"
    for name, text in (("nvidia-smi", smi), ("git", "#!/bin/sh\nprintf '\\377'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{runner.ROOT}")
    about = machine.ask()
    assert about["fails"]["torch"] == "libcudart is another one"
    assert "UnicodeDecodeError" in about["fails"]["commit"]
    assert about["gpus"] == ["NVIDIA H100"]
    assert about["python"] == platform.python_version()
    assert machine.mend(about).startswith("NVIDIA H100 with driver unknown is here: install")


def test_the_commit_is_known_where_the_tree_has_no_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`packages` has recorded it."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", "")  # no git, as where a tree came without its history
    assert machine._commit() == "unknown"
    noted = tmp_path / packages.COMMIT.relative_to(runner.ROOT)
    noted.parent.mkdir()
    noted.write_text("abc1234\n")
    assert machine._commit() == "abc1234"


@pytest.mark.long
def test_imports_of_the_parts_work_with_an_older_torch() -> None:
    """torch 2.11 has no GroupName. Everything has been imported and run on CPU with 2.11."""
    script = """
import builtins
from tests.acceptance.gpu import machine
real = builtins.__import__
def older(name, globals=None, locals=None, fromlist=(), level=0):
    if "GroupName" in (fromlist or ()) and globals["__name__"].startswith("fft"):
        raise ImportError(f"cannot import name 'GroupName' from {name!r}")
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = older
print(machine.described()["fails"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S * 2,
        cwd=runner.ROOT,
    )
    assert done.stdout.strip() == "{}", done.stderr


def test_a_name_server_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting applies to every process of the parts, since the C library reads it."""
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    monkeypatch.setenv("RES_OPTIONS", "")  # registered so that the test's setting is undone
    del os.environ["RES_OPTIONS"]
    runner.prepare_children()
    script = "import os; print(os.environ['RES_OPTIONS'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "timeout:1 attempts:1"
    assert base_env({})["RES_OPTIONS"] == "timeout:1 attempts:1", "of jobs by `fft run`, too"


def test_gpu_page_lists_machine_parts_and_findings(tmp_path: Path) -> None:
    scripts = {"good1": GOOD, "fails2": "pen.check('a | b', False, 'one\\ntwo\\n<three>')\n"}
    results, _ = run(tmp_path, scripts)
    target = tmp_path / "gpu.md"
    target.write_text("# GPU\n<!-- gpu: begin -->\nnot run yet\n<!-- gpu: end -->\nthe end\n")
    page.write(target, MACHINE, list(results.values()))
    text = target.read_text()
    assert "not run yet" not in text
    assert text.endswith("the end\n")
    assert "Run on 2026-01-01 12:00." in text
    assert "device: NVIDIA H100, 79.1 GiB; driver 580.1; CUDA 13.0; NCCL 2.28.9" in text
    assert "cannot be loaded or found out: fft.train.api.manager: ModuleNotFoundError" in text
    assert "| it holds | ok | figure 1.5 |" in text
    assert "| a \\| b | failed |  | one … &lt;three> |" in text


def test_the_page_in_the_tree_has_its_place() -> None:
    text = page.PAGE.read_text()
    assert text.count("<!-- gpu: begin -->") == text.count("<!-- gpu: end -->") == 1


def test_required_packages_exclude_torch() -> None:
    names = {text.partition("==")[0] for text in needed("3.12")}
    assert {"torchft", "transitions", "pydantic", "pydantic-core", "opentelemetry-sdk"} <= names
    assert names.isdisjoint({"torch", "numpy", "triton", "sympy", "pytest"})


RESULT = {"number": 3, "part": "random_state", "title": "three", "status": "ok", "why": ""} | {
    "seconds": 1.0,
    "findings": [{"part": "random_state", "status": "ok", "what": "it holds", "text": ""}],
}


def saved(folder: Path, *lines: Any) -> Path:
    """Return the results that were copied from another machine."""
    path = folder / "results.jsonl"
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("\n".join(texts))
    return path


def ended_by(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Return the exit code of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["tests.acceptance.gpu", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tests.acceptance.gpu", run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_gpu_page_is_written_from_results_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run there was ended while it wrote the result of a part."""
    target = tmp_path / "gpu.md"
    target.write_text("<!-- gpu: begin -->\nnot run yet\n<!-- gpu: end -->\n")
    monkeypatch.setattr(page, "PAGE", target)
    head = {"machine": MACHINE | {"on": "cpu"}, "parts": ["random_state", "transfer"]}
    path = saved(tmp_path, head, RESULT, '{"number": 5, "part": "tran')
    assert ended_by(monkeypatch, "--page", str(path)) == 0
    text = target.read_text()
    assert "device: NVIDIA H100" in text
    assert "| 3 | three | ok | 1 |" in text
    assert "| it holds | ok |" in text
    assert "Run on 2026-01-01 12:00, **on CPU, to try the parts themselves**." in text
    assert "| not begun | 0 | the run ended before |" in text
    assert "not run yet" not in text


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "no results of"),
        ([{"status": "ok"}], "no results of"),
        ([{"machine": MACHINE, "parts": []}, "{", RESULT], "line 2: no JSON"),
        ([{"machine": {"python": "3.12"}, "parts": []}], "no results of"),
    ],
)
def test_invalid_run_folder_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: list[Any],
    expected: str,
) -> None:
    path = saved(tmp_path, *lines)
    assert ended_by(monkeypatch, "--page", str(path)) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert str(path) in error


@pytest.mark.parametrize(
    ("changes", "statuses", "code"),
    [
        ({}, ["ok"], 0),
        ({}, ["ok", "failed"], 1),
        ({}, ["ok", "crashed"], 3),
        ({}, ["ok", "not begun"], 3),
        ({"fails": {machine.ASK: "exit code 1"}, "device": None}, ["ok"], 1),
        ({"device": None, "unusable": OLD}, [], 4),
        (NO_GPU, [], 0),
    ],
)
def test_the_commands_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    statuses: list[str],
    code: int,
) -> None:
    """The machine and the results of its parts are simulated; another test runs real parts."""
    begun: list[Any] = []

    def results(parts: list[Part], *_: Any, **__: Any) -> list[dict[str, Any]]:
        begun.extend(parts)
        return [{"status": status} for status in statuses]

    monkeypatch.setattr(machine, "ask", lambda: {**MACHINE, **changes})
    monkeypatch.setattr(runner, "run", results)
    assert ended_by(monkeypatch, "--folder", str(tmp_path / "run")) == code
    assert begun == (chosen([]) if statuses else [])
    output = capsys.readouterr().out
    assert output.startswith(
        {0: "skipped: ", 4: "failed: "}.get(code, "") if not statuses else "dev"
    )


def command(*words: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "tests.acceptance.gpu", *words]
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=LIMIT_S * 2, cwd=runner.ROOT
    )


@pytest.mark.long
def test_gpu_run_without_a_gpu_prints_one_line_with_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = command()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: torch ")
    assert done.stdout.count("\n") == 1


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    done = command("--device", "cpu", "--folder", str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path} is there already: name a new folder" in done.stderr


@pytest.mark.long
def test_trials_on_cpu_by_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = command("6", "2", "--device", "cpu", "--small", "--folder", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    about, *results = [json.loads(line) for line in (folder / "results.jsonl").open()]
    assert about["machine"]["packages"]["torch"] == torch.__version__
    assert about["machine"]["fails"] == {}
    assert about["parts"] == ["side_stream", "nccl_rebuild"]
    assert [result["status"] for result in results] == ["skipped", "ok"]
    held = {f["what"] for result in results for f in result["findings"] if f["status"] == "ok"}
    assert "by ShardProcessGroupGloo: nothing is left behind" in held


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [p.name for p in PARTS if p.on_cpu])
def test_every_trial_that_can_be_made_on_cpu(tmp_path: Path, name: str) -> None:
    runner.prepare_children()
    (each,) = chosen([name])
    slow = Part(each.number, each.name, each.title, 250.0)
    (result,) = runner.run([slow], "cpu", True, tmp_path, 260.0, print)
    assert result["status"] == "ok", json.dumps(result, indent=1)
