"""The places in Python code where an asynchronous exception would leave something half done.

`classify` classifies the stack at the moment when a signal handler runs:

- ``SAFE``: the code must expect an exception here, or the exception harms only the step function.
- ``SOON``: an exception is unsafe between these two bytecodes and safe a little later. Such places
  are short: code that takes a lock, enters or leaves a context, or updates a queue. The exception
  may still leave a *call that waits* here, because such a call can fail by itself.
- ``LATER``: an exception is unsafe even in a call that waits. Interrupted imports and compilations
  leave partly initialized modules and caches, which no later attempt repairs; an interrupted start
  leaves a thread without an owner.

The table below classifies code by file and function name. `classify` goes through the stack from
the newest frame back to the frame of the step function. In addition, `_leads_into_try` holds for
all code: the ``try`` or ``with`` after a call releases what the call took, so the place between the
two is unsafe.

Limit: a callback of a weak reference, or the handler of another signal, looks like any other
function. (Python drops an exception that is raised in a callback; it is then raised again.)
"""

from __future__ import annotations

import contextlib
import dis
import enum
import gc
import os
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeVar


class Safety(enum.IntEnum):
    """Whether an exception may be raised at a place; a greater value is less safe."""

    SAFE = 0
    SOON = 1
    LATER = 2


class Reach(enum.Enum):
    """The code that a rule covers."""

    FRAME = 0
    """The bytecodes of the function itself; its callees have their own rules."""
    CALLS = 1
    """The function and everything that it calls."""


class Rule(NamedTuple):
    """The safety of a function."""

    safety: Safety
    reach: Reach


_SOON: Final = Rule(Safety.SOON, Reach.CALLS)
_LATER: Final = Rule(Safety.LATER, Reach.CALLS)
_OWN_SOON: Final = Rule(Safety.SOON, Reach.FRAME)

_STDLIB: Final = os.path.dirname(contextlib.__file__) + os.sep
_FFT: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep

_NAMES: Final[dict[str, Rule]] = {
    # Only ``__exit__`` releases what they took, and it would not be called. The generator of a
    # ``@contextmanager`` runs inside of these two, before and after its ``yield``.
    "__enter__": _SOON,
    "__exit__": _SOON,
    # The same without ``with``: the caller's ``try`` begins after one and ends before the other.
    "acquire": _SOON,
    "release": _SOON,
    # Python drops an exception that is raised here, and skips the rest of the destructor.
    "__del__": _SOON,
}
"""Rules by function name, for all files."""

_FILES: Final[tuple[tuple[str, str | None, Rule], ...]] = (
    # --- Python ---
    # An interrupted module stays in sys.modules of its parents, and its lock stays held.
    ("<frozen importlib._bootstrap>", None, _LATER),
    ("<frozen importlib._bootstrap_external>", None, _LATER),
    # ``enter_context`` and the like between entering and recording it, but not the decorator.
    (_STDLIB + "contextlib.py", "inner", _OWN_SOON),
    (_STDLIB + "contextlib.py", None, _SOON),
    # The caller waits for a starting thread or process, which would lose its owner.
    (_STDLIB + "threading.py", "start", _LATER),
    (_STDLIB + "multiprocessing" + os.sep, "start", _LATER),
    (_STDLIB + "subprocess.py", "__init__", _LATER),
    # After a wait the lock is taken again; a caller without it would release another's lock.
    (_STDLIB + "threading.py", "_acquire_restore", _LATER),
    # Locks, lists of waiters, items that were taken and not handed over.
    (_STDLIB + "threading.py", None, _SOON),
    (_STDLIB + "queue.py", None, _SOON),
    (_STDLIB + "logging" + os.sep, None, _SOON),
    (_STDLIB + "concurrent" + os.sep + "futures" + os.sep, None, _SOON),
    (_STDLIB + "weakref.py", None, _SOON),
    (_STDLIB + "_weakrefset.py", None, _SOON),
    # Semaphores and processes of the system, pipes, files: no other code removes them.
    (_STDLIB + "multiprocessing" + os.sep, None, _SOON),
    (_STDLIB + "subprocess.py", None, _SOON),
    (_STDLIB + "tempfile.py", None, _SOON),
    # --- FFT: what a step function calls that is shared with other threads ---
    # A line that is written before the writer's end of the file is updated breaks the chain.
    (_FFT + "trace" + os.sep, None, _SOON),
    (_FFT + "engine" + os.sep, None, _SOON),
    (_FFT + "bus" + os.sep, None, _SOON),
    (_FFT + "health" + os.sep, None, _SOON),
    # --- torch: compilation. Dynamo's callback, and what AOTAutograd compiles in the backward. ---
    ("/torch/_dynamo/convert_frame.py", None, _LATER),
    ("/torch/_dynamo/compiled_autograd.py", None, _LATER),
    ("/torch/_functorch/_aot_autograd/runtime_wrappers.py", "get_or_compile", _LATER),
    ("/torch/_inductor/compile_fx.py", None, _LATER),
    ("/torch/_inductor/async_compile.py", None, _LATER),
    # CUDA graphs are recorded at run time, and a stream that stays in capture is unusable.
    ("/torch/_inductor/cudagraph_trees.py", None, _LATER),
    # While a trace is taken, modules and operators are patched for the whole process.
    ("/torch/fx/_symbolic_trace.py", None, _LATER),
    ("/torch/fx/experimental/proxy_tensor.py", None, _LATER),
    ("/torch/export/_trace.py", None, _LATER),
    ("/torch/jit/", None, _LATER),
    ("/torch/utils/cpp_extension.py", None, _LATER),
    ("/triton/compiler/", None, _LATER),
    # --- torch: code around the user's code that must restore a setting of the thread ---
    ("/torch/_dynamo/eval_frame.py", None, _OWN_SOON),
    ("/torch/_functorch/_aot_autograd/", None, _OWN_SOON),
    # ``set_grad_enabled(False)`` changes it before it is entered.
    ("/torch/autograd/grad_mode.py", None, _OWN_SOON),
    ("/torch/utils/_contextlib.py", None, _OWN_SOON),
    # Workers of a loader that are half started or half ended.
    ("/torch/utils/data/dataloader.py", "__init__", _SOON),
    ("/torch/utils/data/dataloader.py", "_shutdown_workers", _SOON),
)
"""(file or folder, function name or None for all, rule); the first match counts.

An entry that begins with ``/torch/`` or ``/triton/`` is the end of a path, or a folder in it.
"""

_F = TypeVar("_F", bound=Callable[..., Any])


class _Known(NamedTuple):
    """Facts about a code object. The reference to it keeps its ``id`` unique."""

    code: CodeType
    rule: Rule | None
    leads_into_try: dict[int, bool]


_MAX_KNOWN: Final = 10_000
_known: dict[int, _Known] = {}
"""Facts by ``id`` of the code object; its own hash would visit all of its contents each time."""
_guarded: dict[int, CodeType] = {}


def guarded(function: _F) -> _F:
    """Decorate a function so that nothing is raised in it or in its callees."""
    code = function.__code__
    _guarded[id(code)] = code
    _known.pop(id(code), None)
    return function


def classify(frame: FrameType | None, body: FrameType | None) -> Safety:
    """Return whether an exception may be raised in ``frame`` now.

    Args:
        frame: The newest frame.
        body: The frame of the step function. It and its callers do not count; if it is not on the
            stack, all frames count.
    """
    if frame is None:
        return Safety.SAFE
    known = _of(frame.f_code)
    worst = Safety.SOON if _leads_into_try(known, frame.f_lasti) else Safety.SAFE
    newest = frame
    at: FrameType | None = frame
    while at is not None and at is not body:
        code = at.f_code
        rule = (_known.get(id(code)) or _of(code)).rule  # no call for each frame of a deep stack
        if rule is not None and rule.safety > worst and (rule.reach is Reach.CALLS or at is newest):
            worst = rule.safety
            if worst is Safety.LATER:
                break
        at = at.f_back
    return worst


def owner(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the step function that is being entered in ``frame``.

    It is the newest frame without a rule. A generator that an ``__enter__`` drives does not count,
    because it enters for the caller of that ``__enter__``.
    """
    while frame is not None:
        back = frame.f_back
        driven = back is not None and back.f_code.co_name == "__enter__"
        if _of(frame.f_code).rule is None and not driven:
            return frame
        frame = back
    return None


def _of(code: CodeType) -> _Known:
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _MAX_KNOWN:  # in programs that create functions at run time
            _known.clear()
        known = _known[id(code)] = _Known(code, _rule(code), {})
    return known


def _rule(code: CodeType) -> Rule | None:
    if id(code) in _guarded:
        return _LATER
    found = _NAMES.get(code.co_name)
    if any(getattr(callback, "__code__", None) is code for callback in gc.callbacks):
        found = _SOON  # Python drops exceptions of callbacks of its garbage collector
    for path, name, rule in _FILES:
        if (name is None or name == code.co_name) and _is_from(code.co_filename, path):
            return rule if found is None or rule.safety > found.safety else found
    return found


def _is_from(file: str, path: str) -> bool:
    if path.startswith(("/torch/", "/triton/")):
        return path in file if path.endswith("/") else file.endswith(path)
    return file.startswith(path) if path.endswith(os.sep) else file == path


# --- bytecode -----------------------------------------------------------------------------------

_MAX_SCANNED_INSTRUCTIONS: Final = 32
"""Maximum number of instructions between a call and its ``try``, such as storing a result."""
_CACHE: Final = dis.opmap["CACHE"]
_EXTENDED_ARG: Final = dis.opmap["EXTENDED_ARG"]
_ENDS: Final = frozenset(
    op
    for op, name in enumerate(dis.opname)
    if name.startswith(("CALL", "PRECALL", "RESUME", "RETURN", "RAISE", "RERAISE", "YIELD", "SEND"))
    or "BACKWARD" in name
)
"""Instructions at which Python handles signals or leaves the function."""
_JUMPS: Final = frozenset(dis.hasjrel) - _ENDS
_ALWAYS: Final = frozenset(dis.opmap[n] for n in ("JUMP_FORWARD",))
_CALLS: Final = frozenset(
    op for op, name in enumerate(dis.opname) if name.startswith(("CALL", "PRECALL"))
)


class _Range(NamedTuple):
    """An entry of an exception table: start and end of the bytecodes, and the handler."""

    start: int
    end: int
    handler: int


def _leads_into_try(known: _Known, at: int) -> bool:
    """Whether the call at ``at`` is the last one before a protected range begins.

    The interpreter handles signals after a call returns and then not before the next call. The
    exception would come after the call took something and before the range that releases it.
    """
    if not known.code.co_exceptiontable or at < 0:
        return False
    found = known.leads_into_try.get(at)
    if found is None:
        found = known.leads_into_try[at] = _scan(known.code, at)
    return found


def _scan(code: CodeType, at: int) -> bool:
    text = code.co_code
    if text[at] not in _CALLS:
        return False
    ranges = [_Range(e.start, e.end, e.target) for e in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]
    around = set(_handlers(ranges, at))
    after = _next(text, at)
    if dis.opname[text[at]] == "PRECALL":  # the interpreter may already have made the call here
        after = _next(text, after)
    paths, seen = [after], set[int]()
    while paths and len(seen) < _MAX_SCANNED_INSTRUCTIONS:
        at = paths.pop()
        if at in seen or at >= len(text):
            continue
        seen.add(at)
        innermost = next(_handlers(ranges, at), None)
        if innermost is not None and innermost not in around:
            return True
        argument = 0
        while text[at] == _EXTENDED_ARG:
            argument, at = (argument | text[at + 1]) << 8, at + 2
        op, argument = text[at], argument | text[at + 1]
        if op in _ENDS:
            continue
        if op in _JUMPS:
            paths.append(_next(text, at) + 2 * argument)
        if op not in _ALWAYS:
            paths.append(_next(text, at))
    return False


def _next(text: bytes, at: int) -> int:
    """Return the offset of the instruction after the one at ``at``."""
    at += 2
    while at < len(text) and text[at] == _CACHE:
        at += 2
    return at


def _handlers(ranges: list[_Range], at: int) -> Iterator[int]:
    """Yield the handlers in force at ``at``; each lies in the range of the next, outer one."""
    seen = set[int]()
    while True:
        found = next((r.handler for r in ranges if r.start <= at < r.end), None)
        if found is None or found in seen:
            return
        seen.add(found)
        yield found
        at = found
