"""SLURM: write the batch scripts of a job, and submit them.

The job is one allocation, or with an array one job for each group. A script sets its traps before
anything else, because a signal that comes earlier would end it. It starts the bus and one
`fft run --join` for each part of the placement, and asks `fft launch outcome` how the job
has ended.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fft.errors import FftError
from fft.launch.placement import Part, Placement
from fft.launch.services import SERVERS

_REQUEUE_S = 30
"""Time between the end of the drain and the time limit, in seconds. SLURM's signals have a
resolution of a minute at worst, and come early rather than late."""

_PROGRAM = (sys.executable, "-m", "fft.cli")

_HEAD = """\
#!/bin/bash
#SBATCH @OPTIONS@
# A warning (USR1) drains the job and puts it back into the queue; SIGTERM drains it for good.
stop= child=
trap 'stop=requeue; ${child:+kill -USR1 $child}' USR1
trap 'stop=${stop:-end}; ${child:+kill -USR1 $child}' TERM

fft=(@PROGRAM@)
run=@FOLDER@
script=(@SCRIPT@)
options=(@RUN_OPTIONS@)
export FFT_TOKEN_FILE="$run/job.token"
alive() { kill -0 "$@" 2>/dev/null; }
# The last task of an array has the id of the whole array.
id=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
# Print the hosts that the next allocation must not have: those that FFT has found to be bad, if
# there are enough others, and those that the user has excluded.
excluded() {
  local list="$run/traces/bad-hosts" others
  [ -s "$list" ] || return
  others=$(sinfo -hN -p "$SLURM_JOB_PARTITION" -t idle,alloc,mix,comp -o %N | sort -u |
    grep -vxFcf "$list")
  [ "$others" -ge "$SLURM_JOB_NUM_NODES" ] || return
  { squeue -h -j "$1" -o %x | grep -v '(null)'; cat "$list"; } | grep . | paste -sd,
}
# SLURM sends SIGTERM to all processes of a job that it puts back into the queue.
requeue() (
  job=${id:-$SLURM_JOB_ID} bad=$(excluded "${id:-$SLURM_JOB_ID}")
  trap '' TERM
  scontrol requeue "$job" || exit
  [ -z "$bad" ] || scontrol update JobId="$job" ExcNodeList="$bad"
  :
)
tick() { sleep 5 & wait -n; }  # until a child ends or a signal arrives, and for 5 s at most
"""

_SERVE = """
# Bad hosts come last, and so become the spare ones. The first node stays: it has this shell.
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST" |
  awk -v bad=" $(paste -sd' ' "$run/traces/bad-hosts" 2>/dev/null) " \\
    'NR == 1 || !index(bad, " " $1 " ") { print; next } { last[++n] = $1 }
     END { for (i = 1; i <= n; i++) print last[i] }'))
address() {  # NODE
  getent hosts "$1" > /dev/null && echo "$1" && return
  scontrol show node "$1" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'
}
hosts=()
for node in "${nodes[@]:0:3}"; do hosts+=("$(address "$node")"); done
# The first three nodes serve the bus, or the first one. The servers end with this shell, but
# not with its node. SIGTERM reaches all processes when SLURM ends the job, and a drain needs the
# bus.
server=("${fft[@]}" serve --hosts "$(IFS=,; echo "${hosts[*]}")" --token-file "$FFT_TOKEN_FILE" \\
  --job "slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}")
end_servers() {
  squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format='%i %j' |
    awk '$2 == "bus" { print $1 }' | xargs --no-run-if-empty scancel --quiet --signal=KILL
}
trap end_servers EXIT
if [ "${#hosts[@]}" = 3 ]; then
  for number in 1 2; do
    srun --nodes=1 --ntasks=1 --nodelist="${nodes[$number]}" --no-kill --input=none --overlap \\
      --mem=0 --job-name=bus --open-mode=append --output="$run/bus-$number-%N.out" \\
      bash -c 'trap "" TERM USR1; exec "$@"' bus "${server[@]}" --host "${hosts[$number]}" &
  done
fi
exec {bus}< <(trap '' TERM USR1; exec "${server[@]}" --host "${hosts[0]}" --with-parent)
serve=$!
until read -r line <&"$bus"; do alive "$serve" || exit 1; done
export "$(grep -o 'FFT_BUS=[^ ]*' <<< "$line")"
"""

_STEPS = """
# One step for each group and each spare node. If the node of this shell is lost, SLURM lets
# the steps of the others run. They put the job back into the queue if the bus is lost.
steps=()
part='trap : USR1; trap "ends=1" TERM  # all processes of a step get them; fft run handles them
"$@"; status=$?
case $status in 0 | 3 | 75) exit "$status" ;; esac
"${@:1:@WORDS@}" launch outcome --groups @GROUPS@ > /dev/null 2>&1
[ $? = 2 ] && [ -z "$ends" ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"'
step() {  # NAME NODE OPTION…
  [ -z "$stop" ] || return
  srun --nodes=1 --ntasks=1 --nodelist="${nodes[$2]}" --no-kill --input=none@SHARE@ \\
    --open-mode=append --output="$run/$1-%N.out" \\
    bash -c "$part" "$1" "${fft[@]}" run "${options[@]}" "${@:3}" "${script[@]}" &
  steps+=($!)
}
@PARTS@

# The step of a lost node may end much later than the job, and srun returns 0 for it. So FFT judges.
"${fft[@]}" launch outcome --groups @GROUPS@ --wait > /dev/null & over=$!
drained=
while alive "$over" && alive "${steps[@]}"; do
  if [ -n "$stop" ]; then
    # All groups leave with the same commit. The signal then reaches the steps, but not this shell.
    [ -n "$drained" ] || "${fft[@]}" drain --all --wait 10
    drained=1
    scancel --quiet --signal=USR1 "$SLURM_JOB_ID"
  fi
  tick
done
kill "$over" 2>/dev/null

"${fft[@]}" launch outcome --groups @GROUPS@
status=$?
case $stop:$status in
  *:0 | *:3) exit 0 ;;         # complete, perhaps with fewer groups
  requeue:* | :75) requeue && exit 0 ;;  # warned, or drained, or a lost node ended the job
  :2) requeue && exit 0 ;;     # the bus was lost
esac
exit "$status"
"""

_BUS = """
# The groups find the bus by this file.
rm -f "$run/bus"
printf 'FFT_BUS=%s\\n' "$FFT_BUS" > "$run/bus.new" && mv "$run/bus.new" "$run/bus"
trap 'rm -f "$run/bus"; end_servers' EXIT

drained=
while :; do
  "${fft[@]}" launch outcome --groups @GROUPS@ --wait & over=$!
  while alive "$over"; do
    if [ -n "$stop" ] && [ -z "$drained" ]; then
      "${fft[@]}" drain --all --wait 10
      drained=1
      scancel --quiet --batch --signal=USR1 "$(< "$run/array")"
    fi
    tick
  done
  wait "$over"
  status=$?
  [ "$status" = 75 ] && [ -z "$stop" ] || break
  tick  # all groups were drained, and come back to this bus
done
case $stop:$status in
  *:0 | *:3) touch "$run/complete"; scancel --quiet --state=PENDING "$(< "$run/array")"; exit 0 ;;
  requeue:* | :2) requeue && exit 0 ;;  # warned, or the bus was lost
esac
exit "$status"
"""

_GROUP = """
until [ -s "$run/bus" ]; do
  if [ -e "$run/complete" ] || [ "$stop" = end ]; then exit 0; fi
  if [ "$SECONDS" -gt 600 ]; then echo "no bus has come within 600 s" >&2; exit 1; fi
  if [ "$stop" = requeue ]; then requeue && exit 0; fi
  tick
done
export "$(< "$run/bus")"
"${fft[@]}" run "${options[@]}" --groups 1 \\
  --first-group "$((SLURM_ARRAY_TASK_ID / @PARTS_OF_GROUP@))" "${script[@]}" &
child=$!
while alive "$child"; do wait "$child"; done
wait "$child"
status=$?
child=
case $stop:$status in
  *:0 | *:3) exit 0 ;;
  requeue:* | :75) requeue && exit 0 ;;
esac
# If the bus was lost, the job goes on when its bus is back.
"${fft[@]}" launch outcome --groups @GROUPS@
if [ $? = 2 ] && [ -z "$stop" ]; then requeue && exit 0; fi
exit "$status"
"""


class SlurmError(FftError):
    """A job could not be submitted; the message names the reason."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job for SLURM. All its starts use the same folder."""

    placement: Placement
    folder: Path
    """Absolute path of the folder of the job, on a disk that all nodes share."""
    script: Sequence[str]
    checkpoint: Sequence[str]
    """Options of `fft run` about checkpoints."""
    drain_timeout: float = 60.0
    sbatch: Sequence[str] = ()
    """More options of sbatch, which override those given here."""
    bus_sbatch: Sequence[str] = ()
    """The same for the job of the bus, in the form with an array."""
    run: Sequence[str] = ()
    """More options of `fft run`."""

    def bus_hosts(self, as_array: bool) -> int:
        """Return the number of nodes that may serve the bus: all, or those of the bus's own job."""
        place = self.placement
        if as_array:
            return SERVERS if place.groups * place.parts_of_group >= SERVERS else 1
        return place.nodes + place.spare_nodes

    def batch_script(self) -> str:
        """Return the script of a job that is one allocation."""
        place = self.placement
        options = [
            *self._options("job.out"),
            *(f"--nodes={place.nodes + place.spare_nodes}", "--no-kill"),
            f"--ntasks-per-node={place.groups_per_node}",
        ]
        parts = "\n".join(self._step(part) for part in place.parts())
        text = _SERVE + _STEPS.replace("@SHARE@", self._share()).replace("@PARTS@", parts)
        return self._filled(text, [*options, *self.sbatch])

    def bus_script(self) -> str:
        """Return the script of the bus of a job whose groups are the tasks of an array."""
        nodes = f"--nodes=1-{self.bus_hosts(as_array=True)}"
        options = [*self._options("bus.out", "-bus"), nodes, "--ntasks-per-node=1"]
        return self._filled(_SERVE + _BUS, [*options, *self.bus_sbatch])

    def group_script(self) -> str:
        """Return the script of the array whose tasks are the groups."""
        options = [*self._options("group-%a.out"), "--nodes=1", "--ntasks=1"]
        tasks = self.placement.groups * self.placement.parts_of_group
        options.append(f"--array=0-{tasks - 1}")
        return self._filled(_GROUP, [*options, *self.sbatch])

    def _options(self, output: str, suffix: str = "") -> list[str]:
        return [
            f"--job-name={Path(self.script[0]).stem}{suffix}",
            f"--output={self.folder / output}",
            *("--open-mode=append", "--requeue"),
            f"--signal=B:USR1@{round(self.drain_timeout) + _REQUEUE_S}",
        ]

    def _share(self) -> str:
        """Return the options of srun that give each group its share of a node."""
        count = self.placement.groups_per_node
        if count == 1:
            return ""  # the step has the whole node
        return (
            f' --exact --mem=0 --cpus-per-task="$((SLURM_CPUS_ON_NODE / {count}))"'
            f" ${{SLURM_GPUS_ON_NODE:+--gpus=$((SLURM_GPUS_ON_NODE / {count}))}}"
        )

    def _step(self, part: Part) -> str:
        return shlex.join(["step", part.name, str(part.node), *self.placement.options(part)])

    def _filled(self, text: str, options: Sequence[str]) -> str:
        run = [
            *self.placement.common_options(),
            *("--no-progress", "--trace-dir", str(self.folder / "traces")),
            *("--drain-timeout", f"{self.drain_timeout:g}", "--resume", *self.checkpoint),
            *self.run,
        ]
        values = {
            "OPTIONS": "\n#SBATCH ".join(options),
            "PROGRAM": shlex.join(_PROGRAM),
            "WORDS": str(len(_PROGRAM)),
            "FOLDER": shlex.quote(str(self.folder)),
            "SCRIPT": shlex.join(self.script),
            "RUN_OPTIONS": shlex.join(run),
            "GROUPS": str(self.placement.groups),
            "PARTS_OF_GROUP": str(self.placement.parts_of_group),
        }
        # in one pass, so that an argument of the script that looks like a name stays as it is
        return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], _HEAD + text)


def submit(job: SlurmJob, as_array: bool) -> list[str]:
    """Write the scripts of the job into its folder, and submit them.

    Returns:
        The ids of the submitted SLURM jobs; with an array that of the bus first.

    Raises:
        SlurmError: sbatch is not installed, or refuses a script.
    """
    if not as_array:
        return [_sbatch(_written(job.folder / "job.sbatch", job.batch_script()))]
    bus = _sbatch(_written(job.folder / "bus.sbatch", job.bus_script()))
    script = _written(job.folder / "group.sbatch", job.group_script())
    array = _sbatch(script, f"--dependency=after:{bus}")
    (job.folder / "array").write_text(array)
    return [bus, array]


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _sbatch(script: Path, *options: str) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"sbatch is not installed here: submit {script} on a login node of SLURM"
        ) from None
    if done.returncode:
        raise SlurmError(f"sbatch refuses {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
