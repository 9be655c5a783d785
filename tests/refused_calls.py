"""A system call that the kernel refuses in this process, as on a file system without support.

A seccomp filter answers the call with an error of its own (see seccomp(2)).
"""

from __future__ import annotations

import ctypes
import platform
import struct

_NUMBERS = {"flock": {"x86_64": 73, "aarch64": 32}, "write": {"x86_64": 1, "aarch64": 64}}
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FAIL_WITH, _ALLOW = 0x00050000, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse(call: str, number: int) -> None:
    """Make ``call`` fail with the error ``number``, in this thread and permanently."""
    steps = [
        (_LOAD, 0, 0, 0),  # the number of the call
        (_IF_EQUAL, 0, 1, _NUMBERS[call][platform.machine()]),
        (_RETURN, 0, 0, _FAIL_WITH | number),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(steps), b"".join(struct.pack("=HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for call_of in (
        (_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(*call_of) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
