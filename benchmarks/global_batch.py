"""Train ``examples/global_batch.py`` with constant groups and under faults, and plot both losses.

``python -m benchmarks.global_batch --dir runs/global-batch --svg docs/global-batch.svg`` runs both
jobs, audits them, and checks that every step has the same number of samples.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from fft.trace.audit import audit_dir
from fft.trace.run import Run

EXAMPLES = Path(__file__).parents[1] / "examples"
WIDTH, HEIGHT, LEFT, BELOW, ABOVE = 720, 320, 56, 40, 16
LIMIT_S = 570


def run(traces: Path, steps: int, faults: Path | None) -> dict[int, float]:
    """Run a job to its end, and return the mean loss of each step."""
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--ranks", "1"]
    command += ["--trace-dir", str(traces), "--timeout", str(LIMIT_S)]
    command += [] if faults is None else ["--faults", str(faults)]
    script = [str(EXAMPLES / "global_batch.py"), "--steps", str(steps)]
    subprocess.run([*command, *script], check=True, timeout=LIMIT_S + 30)
    report = audit_dir(traces)
    assert report.ok, report.render()
    sizes = {step.slices for step in Run(traces).steps()}
    assert len(sizes) == 1, f"expected one number of samples in all steps, found slices {sizes}"
    return {row["step"]: row["loss"] for row in Run(traces).metrics() if row["group"] == "0"}


def absences(traces: Path) -> list[tuple[int, int]]:
    """Return the first and the last step of each time in which a group computed alone."""
    found: list[tuple[int, int]] = []
    for step in Run(traces).steps():
        if len(step.groups) > 1:
            continue
        if found and found[-1][1] == step.step - 1:
            found[-1] = found[-1][0], step.step
        else:
            found.append((step.step, step.step))
    return found


def plot(
    constant: dict[int, float], disturbed: dict[int, float], alone: list[tuple[int, int]]
) -> str:
    """Return both curves as an SVG; gray: the steps that one group computed alone."""
    values = [*constant.values(), *disturbed.values()]
    low, high, last = min(values), max(values), max(constant)

    def x(step: float) -> float:
        return LEFT + (step - 0.5) / last * (WIDTH - LEFT - 16)

    def y(loss: float) -> float:
        return ABOVE + (high - loss) / (high - low or 1.0) * (HEIGHT - ABOVE - BELOW)

    def curve(losses: dict[int, float], style: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(losses.items()))
        return f'<polyline fill="none" points="{points}" {style}/>'

    def text(left: float, top: float, said: str) -> str:
        return f'<text x="{left:.0f}" y="{top:.0f}">{said}</text>'

    shades = [
        f'<rect x="{x(first - 0.5):.1f}" y="{ABOVE}" width="{x(end + 0.5) - x(first - 0.5):.1f}" '
        f'height="{HEIGHT - ABOVE - BELOW}" fill="#ddd"/>'
        for first, end in alone
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            *shades,
            curve(constant, 'stroke="#1f77b4" stroke-width="4" stroke-opacity="0.5"'),
            curve(disturbed, 'stroke="#d62728" stroke-width="1.5"'),
            text(4, ABOVE + 10, f"{high:.2f}"),
            text(4, HEIGHT - BELOW, f"{low:.2f}"),
            text(LEFT, HEIGHT - 8, f"loss by step, 1 to {last}; blue: two groups throughout; red: "
                 "with an exception, a kill and a drain; gray: one group alone"),
            "</svg>\n",
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--svg", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    constant = run(args.dir / "constant", args.steps, None)
    disturbed = run(args.dir / "faults", args.steps, EXAMPLES / "global_batch_faults.yaml")
    alone = absences(args.dir / "faults")
    args.svg.write_text(plot(constant, disturbed, alone), encoding="utf-8")
    apart = max(abs(constant[step] - disturbed[step]) for step in constant)
    print(f"steps {len(constant)} and {len(disturbed)}; one group alone in steps {alone}")
    print(f"largest difference of the losses: {apart:.2e}")


if __name__ == "__main__":
    main()
