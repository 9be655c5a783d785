"""A process for which the kernel has no ``flock``: ``without_locks.py ERRNO DIRECTORY``.

A seccomp filter answers the call with ERRNO, as a file system without locks does (see seccomp(2)).
The store of DIRECTORY is then held and looked at.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

from fft.durable.stores import LocalStore

_FLOCK = {"x86_64": 73, "aarch64": 32}
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FAIL_WITH, _ALLOW = 0x00050000, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_flock(number: int) -> None:
    """Let it fail with ``number``, in this thread and for good."""
    steps = [
        (_LOAD, 0, 0, 0),  # the number of the call
        (_IF_EQUAL, 0, 1, _FLOCK[platform.machine()]),
        (_RETURN, 0, 0, _FAIL_WITH | number),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(steps), b"".join(struct.pack("=HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program))):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    """Hold the directory, and ask whether somebody is at work in it."""
    number, root = int(sys.argv[1]), Path(sys.argv[2])
    refuse_flock(number)
    store = LocalStore(root)
    with store.hold(), store.at_work():
        os.write(1, f"held; at work: {store.is_at_work()}\n".encode())


if __name__ == "__main__":
    main()
