"""`make gpu` without a GPU: which parts are run, what becomes of one that hangs, crashes or fails,
what is written; and the trials themselves, on CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import machine, page, runner
from benchmarks.gpu.findings import Pen, read
from benchmarks.gpu.packages import needed
from benchmarks.gpu.part import FINDINGS
from benchmarks.gpu.plan import PARTS, TOTAL_S, Part, chosen

LIMIT_S = 60.0
FINDS = "from benchmarks.gpu.findings import Pen; from pathlib import Path; import sys, os, time\n"
FINDS += "pen = Pen(Path(sys.argv[1]), 'a part')\n"


def part(name: str, limit_s: float = LIMIT_S, on_cpu: bool = True) -> Part:
    """One that ends in its number."""
    return Part(int(name[-1]), name, f"the part {name}", limit_s, on_cpu)


def run(
    folder: Path,
    scripts: dict[str, str],
    limits: dict[str, float] | None = None,
    total_s: float = LIMIT_S,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The results of parts that are these scripts, by name, and what was said."""
    runner.find_packages()
    said: list[str] = []
    parts = [part(name, (limits or {}).get(name, LIMIT_S)) for name in scripts]

    def command(each: Part) -> list[str]:
        findings = str(folder / each.name / FINDINGS)
        return [sys.executable, "-c", FINDS + scripts[each.name], findings]

    tell = lambda result: said.append(runner.in_words(result))  # noqa: E731
    results = runner.run(parts, "cpu", True, folder, total_s, tell, command)
    return {result["part"]: result for result in results}, said


GOOD = "pen.check('it holds', True, figure=1.5)\n"


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


# --- which parts ----------------------------------------------------------------------------------


def test_parts_are_chosen_by_number_and_name_in_the_plans_order() -> None:
    assert chosen([]) == list(PARTS)
    assert [p.name for p in chosen(["transfer", "1", "5"])] == ["across_groups", "transfer"]
    with pytest.raises(ValueError, match=r"no part 'nccl'; there are 1 \(across_groups\), 2"):
        chosen(["nccl"])


def test_the_plan_is_that_of_the_issue() -> None:
    assert [p.number for p in PARTS] == list(range(1, 10))
    assert all((runner.ROOT / f"benchmarks/gpu/parts/{p.name}.py").is_file() for p in PARTS)
    assert TOTAL_S < 8 * 60


# --- what becomes of a part -----------------------------------------------------------------------


def test_parts_that_crash_hang_and_fail_hide_no_other(tmp_path: Path) -> None:
    scripts = {
        "good1": GOOD,
        "killed2": GOOD + "os.kill(os.getpid(), 11)\n",
        "exits3": "sys.exit(7)\n",
        "hangs4": GOOD + "print('it was here', flush=True); time.sleep(600)\n",
        "silent5": "",
        "fails6": GOOD + "pen.check('it does not hold', False, 'because')\n",
        "absent7": "pen.absent('it', 'needs the package nothing')\n",
        "good8": GOOD,
    }
    results, said = run(tmp_path, scripts, {"hangs4": 3.0})
    assert {name: result["status"] for name, result in results.items()} == {
        "good1": "ok",
        "killed2": "crashed",
        "exits3": "crashed",
        "hangs4": "hung",
        "silent5": "crashed",
        "fails6": "failed",
        "absent7": "not run",
        "good8": "ok",
    }
    assert "signal SIGSEGV" in results["killed2"]["why"]
    assert results["killed2"]["findings"][0]["figure"] == 1.5, "what it found before is kept"
    assert "exit code 7" in results["exits3"]["why"]
    assert "not through after 3 s" in results["hangs4"]["why"]
    assert "it was here" in results["hangs4"]["why"], "its last output"
    assert "without having found anything" in results["silent5"]["why"]
    assert "failed: it does not hold: because" in "\n".join(said)
    assert "not here: it: needs the package nothing" in "\n".join(said)
    assert len(said) == len(scripts), "each is told of at once"


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    """Its child has a session of its own and outlives it; so does the child of one that hangs."""
    start = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )
    start += "pen.check('started', True, pid=child.pid)\n"
    scripts = {"ends1": start, "hangs2": start + "time.sleep(600)\n"}
    results, _ = run(tmp_path, scripts, {"hangs2": 3.0})
    for result in results.values():
        pid = result["findings"][0]["pid"]
        assert not Path(f"/proc/{pid}").exists(), result


def test_no_part_is_begun_when_the_time_for_all_is_over(tmp_path: Path) -> None:
    began = time.monotonic()
    results, _ = run(tmp_path, {"hangs1": "time.sleep(600)", "late2": GOOD}, total_s=5.0)
    assert results["hangs1"]["status"] == "hung", "its own limit is longer"
    assert results["late2"]["status"] == "no time"
    assert time.monotonic() - began < LIMIT_S
    assert runner.exit_code(results.values()) == runner.DIED


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok", "not run"], 0),
        (["ok", "failed"], 1),
        (["failed", "crashed"], 3),
        (["hung"], 3),
        (["no time"], 3),
        ([], 0),
    ],
)
def test_the_exit_code_says_what_failed(statuses: list[str], code: int) -> None:
    assert runner.exit_code({"status": status} for status in statuses) == code


def test_a_part_for_gpus_is_not_run_on_cpu(tmp_path: Path) -> None:
    only = part("gpu1", on_cpu=False)
    results = runner.run([only], "cpu", True, tmp_path, LIMIT_S, print, lambda p: ["false"])
    assert [(r["status"], r["why"]) for r in results] == [("not run", "needs a GPU")]


def test_a_real_part_that_hangs_tells_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `benchmarks.gpu.part`; it hangs in a torch that another one stands for."""
    text = "import time\n\n\ndef in_torch():\n    time.sleep(600)\n\n\nin_torch()\n"
    (tmp_path / "torch.py").write_text(text)
    runner.find_packages()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    slow = Part(3, "random_state", "a real one", 8.0)
    (result,) = runner.run([slow], "cpu", True, tmp_path / "run", LIMIT_S, print)
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
        file.write('{"part": "p", "sta')  # the process died while it wrote
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
    "fails": {"fft.train.manager": "ModuleNotFoundError: No module named 'torchft'"},
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"device": None, "cuda": None}, "torch 2.11.0 was built without CUDA"),
        ({"device": None}, "torch 2.11.0 finds no GPU"),
        ({"device": None, "driver": None}, "finds no GPU, and there is no NVIDIA driver"),
        ({"fails": {"torch": "libcudart.so.13"}}, "torch cannot be loaded (libcudart.so.13)"),
    ],
)
def test_what_is_missing_is_said(changes: dict[str, Any], why: str) -> None:
    said = machine.missing({**MACHINE, **changes})
    assert why in said
    assert bool(said) == bool(why)


def test_the_page_tells_the_machine_each_part_and_each_finding(tmp_path: Path) -> None:
    scripts = {"good1": GOOD, "fails2": "pen.check('a | b', False, 'one\\ntwo\\n<three>')\n"}
    results, _ = run(tmp_path, scripts)
    target = tmp_path / "gpu.md"
    target.write_text("# GPU\n<!-- gpu: begin -->\nnot run yet\n<!-- gpu: end -->\nthe end\n")
    page.write(target, MACHINE, list(results.values()), "2026-01-01 12:00")
    text = target.read_text()
    assert "not run yet" not in text
    assert text.endswith("the end\n")
    assert "device: NVIDIA H100, 79.1 GiB; driver 580.1; CUDA 13.0; NCCL 2.28.9" in text
    assert "cannot be loaded: fft.train.manager: ModuleNotFoundError" in text
    assert "| it holds | ok | figure 1.5 |" in text
    assert "| a \\| b | failed |  | one … &lt;three> |" in text


def test_the_page_in_the_tree_has_its_place() -> None:
    text = page.PAGE.read_text()
    assert text.count("<!-- gpu: begin -->") == text.count("<!-- gpu: end -->") == 1


def test_what_a_machine_may_lack_is_all_but_torch() -> None:
    names = {text.partition("==")[0] for text in needed("3.12")}
    assert {"torchft", "transitions", "pydantic", "pydantic-core", "opentelemetry-sdk"} <= names
    assert names.isdisjoint({"torch", "numpy", "triton", "sympy", "pytest"})


def command(*words: str) -> subprocess.CompletedProcess[str]:
    told = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(
        told, capture_output=True, text=True, timeout=LIMIT_S * 2, cwd=runner.ROOT
    )


def test_without_a_gpu_one_sentence_says_what_is_missing() -> None:
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


def test_a_trial_on_cpu_by_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = command("5", "6", "--device", "cpu", "--small", "--folder", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    about, *results = [json.loads(line) for line in (folder / "results.jsonl").open()]
    assert about["machine"]["packages"]["torch"] == torch.__version__
    assert [result["status"] for result in results] == ["ok", "ok"]
    held = {f["what"] for result in results for f in result["findings"] if f["status"] == "ok"}
    assert "a state that was fetched has the same bits" in held
    assert "by ShardProcessGroupGloo: nothing is left behind" in held


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [p.name for p in PARTS if p.on_cpu])
def test_every_trial_that_can_be_made_on_cpu(tmp_path: Path, name: str) -> None:
    runner.find_packages()
    (each,) = chosen([name])
    slow = Part(each.number, each.name, each.title, 250.0)
    (result,) = runner.run([slow], "cpu", True, tmp_path, 260.0, print)
    assert result["status"] == "ok", json.dumps(result, indent=1)
