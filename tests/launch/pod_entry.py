"""Enter a pod: ``python pod_entry.py SPEC COMMAND…`` replaces itself by the command as PID 1.

The pod has the network namespace, host name, ``/etc/hosts`` and volumes of the JSON file SPEC, and
the files of this machine as its image.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Make the namespaces and the root directory, and start the command."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    with open(f"/run/netns/{spec['space']}") as space:
        _check(_LIBC.setns(space.fileno(), CLONE_NEWNET))
    _check(_LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    _check(_LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    socket.sethostname(spec["hostname"])
    _mount(spec["hosts"], "/etc/hosts")
    root, work = spec["root"], os.getcwd()
    _check(_LIBC.mount(b"none", os.fsencode(root), b"tmpfs", 0, None))
    for name in os.listdir("/"):
        source, target = f"/{name}", f"{root}/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.isdir(source):
            os.mkdir(target)
            _mount(source, target)
    for place, source in spec["volumes"].items():
        target = root + place
        os.makedirs(target, exist_ok=True)
        if source is None:  # an emptyDir in memory
            _check(_LIBC.mount(b"none", os.fsencode(target), b"tmpfs", 0, None))
        else:
            _mount(source, target)
    os.chroot(root)
    os.chdir(work)
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *sys.argv[2:]]
    os.execvpe(command[0], command, spec["env"])


def _mount(source: str, target: str) -> None:
    flags = MS_BIND | MS_REC
    _check(_LIBC.mount(os.fsencode(source), os.fsencode(target), None, flags, None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
