"""Kubernetes: render the manifests of a job.

There is an Indexed Job for the bus, one for the groups and one for the spares. Each index is one
pod. With three pods of groups and spares or more, three pods serve the bus: one that judges the
job, and its two peers. A pod of a group or a spare waits for the bus and runs `fft run --join`. It
translates the exit status of FFT for the failure policy of its Job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fft.bus.token import JobToken
from fft.errors import ConfigError
from fft.launch.placement import Placement
from fft.launch.services import SERVERS, BusHosts

FOLDER = "/job"
"""Folder of the job in the pods of groups and spares: the volume of the claim, or an emptyDir."""
PORT = 29500
_COMPONENT = "app.kubernetes.io/component"
"""Label of the role of a pod."""
_JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
"""Label by which Kubernetes names the Job of a pod. A Job that is applied again has another UID."""
_LONGEST_NAME = 40
"""Maximum length of a job's name. A pod's host name, which appends a role and an index, has 63."""
_GRACE_S = 30
"""Grace period of a pod beyond the limit of its drain, in seconds."""
_BACKOFF_LIMIT = 6
"""Number of failures of an index after which Kubernetes still starts another pod. Disruptions and
drains do not count."""
_LATE_S = 600
"""How long the bus serves after a job that completed with fewer groups, or that has spare pods, if
there is no claim, in seconds. A pod that comes back meanwhile learns that the job is complete."""
_BUS_RESTART_S = 60
"""How long a pod waits for a new pod of the bus before it trusts the file of a complete job."""
_HELD_S = 15
"""How long a pod waits before it asks again for a group that another pod has, in seconds."""
_NO_BUS_S = 1800
"""How long a pod waits for the bus, in seconds. A spare then ends with status 0, because it often
finds room only when the groups have ended."""

_ALIVE = """\
alive() { kill -0 "$1" 2>/dev/null; }
tick() { sleep 5 & wait -n; }  # until a child ends or a signal arrives, and for 5 s at most
"""

_PEERS_S = 15
"""How long a peer serves longer than the pod that judges the job, in seconds."""

_BUS = (
    """\
# SIGTERM @ON_TERM@.
stop= drained=
trap 'stop=1' TERM
"""
    + _ALIVE
    + """\
leave() {  # a leader of the bus hands over
  kill -HUP "$serve"
  while alive "$serve"; do tick; done
  exit 75
}
exec {out}< <(trap '' TERM; exec fft serve --port @PORT@ --job @NAME@ @SERVE@)
serve=$!
until read -r -t 5 <&"$out"; do
  alive "$serve" || exit 1
  if [ -n "$stop" ]; then exit 75; fi
  if [ "$SECONDS" -gt @NO_BUS_S@ ]; then exit @NO_BUS_STATUS@; fi
done
while :; do
  fft launch outcome --groups @GROUPS@ --wait & over=$!
  while alive "$over"; do
    if [ -n "$stop" ] && [ -z "$drained" ]; then
      @ON_STOP@; drained=1
    fi
    tick
  done
  wait "$over"
  status=$?
  [[ "$status" = @GO_ON@ ]] && [ -z "$stop" ] && alive "$serve" || break
  tick  # the groups were drained or lost, and their new pods join this bus
done@LATE@
case $status in
  0 | 3) exit 0 ;;         # complete, perhaps with fewer groups
  2) exit 69 ;;            # fft serve has ended
  75) exit 75 ;;
  *) sleep 60 & wait -n "$!"; exit "$status" ;;  # the pods of the groups ask for the outcome, too
esac
"""
)

_LATE = """
case $status in  # pods of groups that were lost may come later, and ask this bus
  @STATUSES@)
    until=$((SECONDS + @LATE_S@))
    while [ -z "$stop" ] && [ "$SECONDS" -lt "$until" ] && alive "$serve"; do tick; done ;;
esac"""

_PART = (
    """\
# SIGTERM drains the groups of this pod.
stop= child=
trap 'stop=1; ${child:+kill -TERM $child}' TERM
"""
    + _ALIVE
    + """\
outcome() {  # sets job to the status, or to 2 without an answer, and bus to the line about the bus
  mapfile -t answer < <(fft launch outcome --groups @GROUPS@ 2> /dev/null; echo "$?")
  job=${answer[2]-2} bus=${answer[1]-}
}
# Pods of this Job create this file when the job is complete. A pod that starts after the bus has
# ended reads it.
complete_file=@FOLDER@/complete-$FFT_JOB_UID
end_complete() { touch "$complete_file"; exit 0; }
await_bus() {  # returns while the job on the bus is not complete
  while :; do
    outcome
    case $job in
      0 | 3) echo "the job on this bus is complete"; end_complete ;;
      2) ;;
      *) return ;;
    esac
    if [ -n "$stop" ]; then exit 75; fi
    if [ "$SECONDS" -gt @BUS_RESTART_S@ ] && [ -e "$complete_file" ]; then
      echo "no bus at $FFT_BUS, and $complete_file exists: the job is complete"; exit 0
    fi
    if [ "$SECONDS" -gt @NO_BUS_S@ ]; then
      fft launch outcome --groups @GROUPS@ >&2
      echo "no bus has come at $FFT_BUS within @NO_BUS_S@ s: look at the pod of the bus" >&2
      exit @NO_BUS_STATUS@
    fi
    tick
  done
}
command=("$@")
# The number of the group follows the first option, if this pod has a part of one.
if [ "$3" = --first-group ]; then command[3]=$((command[3] / @PARTS_OF_GROUP@)); fi
while :; do
  await_bus
  before=$bus
  "${command[@]}" & child=$!
  if [ -n "$stop" ]; then kill -TERM "$child"; fi
  while alive "$child"; do wait "$child"; done
  wait "$child"
  status=$? child=
  if [ "$status" != 4 ]; then break; fi
  SECONDS=0  # another pod, such as a spare, has the group, and may be lost
  while [ -z "$stop" ] && [ "$SECONDS" -lt @HELD_S@ ]; do tick; done
  if [ -n "$stop" ]; then exit 75; fi
  SECONDS=0
done
case $status in
  0 | 3) end_complete ;;
  75) exit 75 ;;           # drained: another pod takes the index
esac
outcome
# If the bus was lost, another pod joins the new one, which may have started already.
if [ "$bus" != "$before" ]; then exit 69; fi
case $job in
  0 | 3) end_complete ;;
  1) exit 1 ;;             # the job has failed, or nothing has begun and `fft run` cannot start
esac
exit 70                    # this pod has failed, and the job continues
"""
)


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A job for Kubernetes. Each group, and each spare node, is a pod."""

    name: str
    placement: Placement
    image: str
    script: Sequence[str]
    checkpoint: Sequence[str]
    """Options of `fft run` about checkpoints."""
    token: JobToken
    claim: str | None = None
    """PersistentVolumeClaim that the pods of groups and spares mount as the folder of the job."""
    bus: str | None = None
    """URL of a NATS bus of the user. By default pods of the job serve the bus."""
    nats: bool = True
    """Whether NATS serves the bus if the job has three pods or more."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Resource limits of a group's pod, such as ``nvidia.com/gpu``."""
    drain_timeout: float = 60.0
    run: Sequence[str] = ()
    """More options of `fft run`."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a name that Kubernetes would refuse."""
        pattern = rf"[a-z]([-a-z0-9]{{0,{_LONGEST_NAME - 2}}}[a-z0-9])?"
        if not re.fullmatch(pattern, self.name):
            raise ConfigError(
                f"--name {self.name!r}: expected at most {_LONGEST_NAME} lowercase letters, digits "
                "and hyphens, with a letter first and no hyphen last"
            )

    def manifests(self) -> list[dict[str, Any]]:
        """Return the Secret of the token, the headless Service, and the Jobs."""
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(),
            "spec": {
                "clusterIP": "None",  # headless: a name for each pod
                "publishNotReadyAddresses": True,
                "selector": self._labels(),
            },
        }
        jobs = [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": self._metadata(role),
                "spec": self._job(role, "", late_s=0 if self.claim else _LATE_S),
            }
            for role in self._roles()
        ]
        return [self._secret(), service, *jobs]

    def jobset(self) -> list[dict[str, Any]]:
        """Return the Secret of the token, and a JobSet with the Jobs, which has its own Service."""
        roles = self._roles()
        jobs = [
            {
                "name": role,
                "replicas": 1,
                "template": {
                    "metadata": {"labels": self._labels(role)},
                    "spec": self._job(role, "-0"),
                },
            }
            for role in roles
        ]
        jobset = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._metadata(),
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                # The first role knows the outcome. Its end also ends pods that started too late.
                "successPolicy": {"operator": "All", "targetReplicatedJobs": roles[:1]},
                "replicatedJobs": jobs,
            },
        }
        return [self._secret(), jobset]

    @property
    def pods(self) -> int:
        """Number of pods of groups and spares."""
        return self.placement.groups * self.placement.parts_of_group + self.placement.spare_nodes

    def _roles(self) -> list[str]:
        peers = ["peer"] if self.nats and self.pods >= SERVERS else []
        bus = [] if self.bus else ["bus", *peers]
        return [*bus, "group", *(["spare"] if self.placement.spare_nodes else [])]

    def _labels(self, role: str | None = None) -> dict[str, str]:
        labels = {
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": "fft",
        }
        return labels if role is None else {**labels, _COMPONENT: role}

    def _metadata(self, role: str | None = None) -> dict[str, Any]:
        name = self.name if role is None else f"{self.name}-{role}"
        return {"name": name, "labels": self._labels(role)}

    def _secret(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata("token"),
            "stringData": {"token": self.token.text(), **({"bus": self.bus} if self.bus else {})},
        }

    def _job(self, role: str, suffix: str, late_s: int = 0) -> dict[str, Any]:
        """Return the spec of the Indexed Job of one role.

        Args:
            suffix: Part of the names of pods between role and index, in a JobSet.
            late_s: How long the bus serves after the end for pods that come back, in seconds.
        """
        place = self.placement
        pods = place.groups * place.parts_of_group
        peers = SERVERS - 1
        count = {"bus": 1, "peer": peers, "group": pods, "spare": place.spare_nodes}[role]
        return {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimitPerIndex": _BACKOFF_LIMIT,
            "podReplacementPolicy": "Failed",  # never two pods of one index
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    _on_exit("Ignore", 75),
                    _on_exit("FailJob", 1),
                ]
            },
            "template": {
                "metadata": {"labels": self._labels(role)},
                "spec": self._pod(role, suffix, late_s),
            },
        }

    def _pod(self, role: str, suffix: str, late_s: int) -> dict[str, Any]:
        secret = f"{self.name}-token"
        place = self._place(suffix)
        url = {"value": place.url}
        serves = role in ("bus", "peer")
        text = self._bus(role, place, late_s) if serves else self._part(role)
        container: dict[str, Any] = {
            "name": "fft",
            "image": self.image,
            "command": ["bash", "-c", text, f"fft-{role}"],
            "args": [] if serves else self._command(role),
            "env": [
                {"name": "FFT_BUS", **(_from_secret(secret, "bus") if self.bus else url)},
                {"name": "FFT_TOKEN", **_from_secret(secret, "token")},
            ],
        }
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "subdomain": self.name,
            "terminationGracePeriodSeconds": round(self.drain_timeout) + _GRACE_S,
            "containers": [container],
        }
        if serves:
            return pod if len(place.hosts) == 1 else {**pod, **self._spread("bus", "peer")}
        if self.limits:
            container["resources"] = {"limits": dict(self.limits)}
        shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # the default is 64 MB
        claim = {"persistentVolumeClaim": {"claimName": self.claim}}
        folder = {"name": "job", **(claim if self.claim else {"emptyDir": {}})}
        uid = {"fieldRef": {"fieldPath": _JOB_UID}}
        container["env"].append({"name": "FFT_JOB_UID", "valueFrom": uid})
        container["volumeMounts"] = [
            {"name": "job", "mountPath": FOLDER},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        return {**pod, **self._spread(role), "volumes": [folder, shm]}

    def _place(self, suffix: str) -> BusHosts:
        """Return the names of the pods that serve the bus."""
        pods = ["bus", "peer"] if "peer" in self._roles() else ["bus"]
        names = [f"{pods[0]}{suffix}-0", *(f"{p}{suffix}-{n}" for p in pods[1:] for n in (0, 1))]
        return BusHosts([f"{self.name}-{each}.{self.name}" for each in names], PORT, self.name)

    def _spread(self, *roles: str) -> dict[str, Any]:
        """Return the field that spreads the pods of some roles over the nodes."""
        of_roles = {"key": _COMPONENT, "operator": "In", "values": [*roles]}
        selector = {"matchLabels": self._labels(), "matchExpressions": [of_roles]}
        return {
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": selector,
                }
            ]
        }

    def _command(self, role: str) -> list[str]:
        """Return the `fft run` command of a pod, in which Kubernetes expands ``$(NAME)``."""
        place = self.placement
        own = place.options(next(p for p in place.parts() if bool(p.spares) == (role == "spare")))
        if role == "group":
            own[own.index("--first-group") + 1] = "$(JOB_COMPLETION_INDEX)"
        options = [
            *place.common_options(),
            *("--no-progress", "--trace-dir", f"{FOLDER}/traces"),
            *("--drain-timeout", f"{self.drain_timeout:g}", *self.checkpoint, *self.run),
        ]
        return ["fft", "run", *own, *map(_literal, [*options, *self.script])]

    def _bus(self, role: str, place: BusHosts, late_s: int) -> str:
        # A spare pod completes the group of a lost pod, which may still come back.
        statuses = "0 | 3" if self.placement.spare_nodes else "3"
        if role == "peer":
            statuses, late_s = "0 | 3", late_s + _PEERS_S
        values: dict[str, object] = {
            "ON_TERM": "drains the groups, and this pod serves the bus until they have left",
            "ON_STOP": "fft drain --all --wait 10",
            "SERVE": "--host 0.0.0.0",
            "GO_ON": "75",
        }
        if len(place.hosts) > 1:
            hosts = ",".join(place.hosts)
            values = {
                "ON_TERM": "ends this pod; the two other ones serve the bus meanwhile",
                "ON_STOP": "leave",
                "SERVE": f'--bus nats --hosts {hosts} --host "$HOSTNAME.{self.name}"',
                "GO_ON": "75 || $status = 2",  # without a majority until other pods are back
            }
        late = self._filled(_LATE, {"STATUSES": statuses, "LATE_S": late_s}) if late_s else ""
        values |= {"NO_BUS_S": _NO_BUS_S, "NO_BUS_STATUS": 0 if role == "peer" else 69}
        text = self._filled(_BUS, {**values, "PORT": PORT, "NAME": self.name, "LATE": late})
        local = f"export FFT_BUS=tcp://127.0.0.1:{PORT}/{self.name}\n"
        return text if len(place.hosts) > 1 else local + text

    def _part(self, role: str) -> str:
        values = {"HELD_S": _HELD_S, "NO_BUS_S": _NO_BUS_S, "NO_BUS_STATUS": int(role == "group")}
        return self._filled(_PART, {**values, "BUS_RESTART_S": _BUS_RESTART_S, "FOLDER": FOLDER})

    def _filled(self, text: str, values: Mapping[str, object]) -> str:
        place = self.placement
        values = {**values, "GROUPS": place.groups, "PARTS_OF_GROUP": place.parts_of_group}
        for name, value in values.items():
            text = text.replace(f"@{name}@", str(value))
        return text


def _on_exit(action: str, code: int) -> dict[str, Any]:
    found = {"containerName": "fft", "operator": "In", "values": [code]}
    return {"action": action, "onExitCodes": found}


def _from_secret(name: str, key: str) -> dict[str, Any]:
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _literal(text: str) -> str:
    """Return ``text`` so that Kubernetes, which expands ``$(NAME)`` and ``$$``, restores it."""
    return text.replace("$", "$$")


def name_for(script: Path) -> str:
    """Return the name of the script in the characters that Kubernetes allows.

    The name is empty if the script's name has no letter.
    """
    name = re.sub("[^a-z0-9]+", "-", script.stem.lower()).lstrip("-0123456789")
    return name[:_LONGEST_NAME].rstrip("-")


def parsed_limits(text: str) -> dict[str, str]:
    """Return the resources in ``text``, such as ``cpu=8,nvidia.com/gpu=1``.

    Raises:
        ConfigError: The text is malformed.
    """
    found = {}
    for each in filter(None, text.split(",")):
        name, sign, value = each.partition("=")
        if not (name and sign and value):
            raise ConfigError(f"--limits {text!r}: expected NAME=N,…, found {each!r}")
        found[name] = value
    return found


class _Dumper(yaml.SafeDumper):
    """A dumper that writes a string of several lines as a literal block."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def rendered(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Return the manifests as one YAML stream."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=100)
