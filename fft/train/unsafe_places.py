"""Where in Python an exception out of nowhere would leave something half done. Pure: only looks.

`look` judges a stack at a moment at which a signal handler runs. There are three answers:

- ``SAFE``: an exception here is one that the code must expect, or harms only the body.
- ``SOON``: not between these two bytecodes; a little later it will be safe. Such places are short:
  what takes a lock, enters or leaves a context, keeps the books of a queue. Out of a *call that
  waits* the exception may come here too, for that call could have failed by itself.
- ``LATER``: not here, whatever it waits for: imports and compilations leave modules and caches
  half made, which no later attempt mends; a thread that is being started would be nobody's.

The table below says which code is what, by the file it is from and the function's name; a stack is
judged from its newest frame back to the body's own. Besides the table there is one rule about
bytecode, `_leads_into_try`: what a call has just taken, the ``try`` or ``with`` that follows gives
back, so between the two is no place for an exception, in anybody's code.

What cannot be seen: a callback of a weak reference, or a handler of another signal, looks like any
other function. (Python drops what is raised in a callback; it is raised again.)
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
    """Of a place: may an exception be raised there? The greater, the less."""

    SAFE = 0
    SOON = 1
    LATER = 2


class Reach(enum.Enum):
    """What a rule covers."""

    FRAME = 0
    """The bytecodes of the function itself; what it calls is judged by itself."""
    CALLS = 1
    """All that the function calls, too."""


class Rule(NamedTuple):
    """What holds for a function."""

    safety: Safety
    reach: Reach


_SOON: Final = Rule(Safety.SOON, Reach.CALLS)
_LATER: Final = Rule(Safety.LATER, Reach.CALLS)
_OWN_SOON: Final = Rule(Safety.SOON, Reach.FRAME)

_STDLIB: Final = os.path.dirname(contextlib.__file__) + os.sep
_FFT: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep

_NAMES: Final[dict[str, Rule]] = {
    # What they have taken is given back by an ``__exit__`` that would not be called. The generator
    # of a ``@contextmanager`` runs inside of these two, before and after its ``yield``.
    "__enter__": _SOON,
    "__exit__": _SOON,
    # The same without ``with``: the caller's ``try`` begins after it, and ends before it.
    "acquire": _SOON,
    "release": _SOON,
    # Python drops what is raised here, and the rest of the destructor with it.
    "__del__": _SOON,
}
"""By the name of a function, whosever it is."""

_FILES: Final[tuple[tuple[str, str | None, Rule], ...]] = (
    # --- Python ---
    # A module that is cut stays in sys.modules of its parents, and its lock is held.
    ("<frozen importlib._bootstrap>", None, _LATER),
    ("<frozen importlib._bootstrap_external>", None, _LATER),
    # ``enter_context`` and its like between entering and noting that; but not the decorator.
    (_STDLIB + "contextlib.py", "inner", _OWN_SOON),
    (_STDLIB + "contextlib.py", None, _SOON),
    # A thread or process that starts, and whoever starts it waits for that: nobody would own it.
    (_STDLIB + "threading.py", "start", _LATER),
    (_STDLIB + "multiprocessing" + os.sep, "start", _LATER),
    (_STDLIB + "subprocess.py", "__init__", _LATER),
    # After a wait the lock is taken again; who leaves without it releases that of somebody else.
    (_STDLIB + "threading.py", "_acquire_restore", _LATER),
    # Locks, lists of waiters, items taken and not handed over.
    (_STDLIB + "threading.py", None, _SOON),
    (_STDLIB + "queue.py", None, _SOON),
    (_STDLIB + "logging" + os.sep, None, _SOON),
    (_STDLIB + "concurrent" + os.sep + "futures" + os.sep, None, _SOON),
    (_STDLIB + "weakref.py", None, _SOON),
    (_STDLIB + "_weakrefset.py", None, _SOON),
    # Semaphores and processes of the system, pipes, files: nobody else removes them.
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
    # CUDA graphs are recorded at run time, and a stream in capture is of no use to anybody.
    ("/torch/_inductor/cudagraph_trees.py", None, _LATER),
    # While a trace is taken, modules and operators are patched, for everyone.
    ("/torch/fx/_symbolic_trace.py", None, _LATER),
    ("/torch/fx/experimental/proxy_tensor.py", None, _LATER),
    ("/torch/export/_trace.py", None, _LATER),
    ("/torch/jit/", None, _LATER),
    ("/torch/utils/cpp_extension.py", None, _LATER),
    ("/triton/compiler/", None, _LATER),
    # --- torch: what runs around the user's code, with a setting of the thread's to put back ---
    ("/torch/_dynamo/eval_frame.py", None, _OWN_SOON),
    ("/torch/_functorch/_aot_autograd/", None, _OWN_SOON),
    # ``set_grad_enabled(False)`` does so before it is entered.
    ("/torch/autograd/grad_mode.py", None, _OWN_SOON),
    ("/torch/utils/_contextlib.py", None, _OWN_SOON),
    # Workers of a loader that are half started or half ended.
    ("/torch/utils/data/dataloader.py", "__init__", _SOON),
    ("/torch/utils/data/dataloader.py", "_shutdown_workers", _SOON),
)
"""(file or folder, name of a function or None for all, rule); the first that fits counts.

What begins with ``/torch/`` or ``/triton/`` is the end of a path, or a folder somewhere in it.
"""

_F = TypeVar("_F", bound=Callable[..., Any])


class _Known(NamedTuple):
    """What is known of a code object, which is kept so that its number stays its own."""

    code: CodeType
    rule: Rule | None
    leads_into_try: dict[int, bool]


_MANY: Final = 10_000
_known: dict[int, _Known] = {}
"""By ``id``: a code object's own hash looks at all that is in it, each time."""
_guarded: dict[int, CodeType] = {}


def guarded(function: _F) -> _F:
    """Decorator: nothing is raised while this function, or what it calls, is at work."""
    code = function.__code__
    _guarded[id(code)] = code
    _known.pop(id(code), None)
    return function


def look(frame: FrameType | None, body: FrameType | None) -> Safety:
    """Whether an exception may be raised in ``frame`` now.

    ``body``: whose frame the body is; what it and its callers are does not count. If it is not on
    the stack, the whole stack does.
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
    """Whose body it is that is being entered in ``frame``.

    That is the newest frame that no rule is for; but not a generator that somebody's ``__enter__``
    drives, which enters for that one's caller.
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
        if len(_known) >= _MANY:  # of programs that make functions as they run
            _known.clear()
        known = _known[id(code)] = _Known(code, _rule(code), {})
    return known


def _rule(code: CodeType) -> Rule | None:
    if id(code) in _guarded:
        return _LATER
    found = _NAMES.get(code.co_name)
    if any(getattr(callback, "__code__", None) is code for callback in gc.callbacks):
        found = _SOON  # Python drops what is raised in a callback of its garbage collector
    for path, name, rule in _FILES:
        if (name is None or name == code.co_name) and _is_from(code.co_filename, path):
            return rule if found is None or rule.safety > found.safety else found
    return found


def _is_from(file: str, path: str) -> bool:
    if path.startswith(("/torch/", "/triton/")):
        return path in file if path.endswith("/") else file.endswith(path)
    return file.startswith(path) if path.endswith(os.sep) else file == path


# --- bytecode -----------------------------------------------------------------------------------

_FAR: Final = 32
"""Instructions between a call and its ``try``: the storing of a result, a condition."""
_CACHE: Final = dis.opmap["CACHE"]
_EXTENDED_ARG: Final = dis.opmap["EXTENDED_ARG"]
_ENDS: Final = frozenset(
    op
    for op, name in enumerate(dis.opname)
    if name.startswith(("CALL", "PRECALL", "RESUME", "RETURN", "RAISE", "RERAISE", "YIELD", "SEND"))
    or "BACKWARD" in name
)
"""Signals are looked for here, or the function is left: the next chance has come."""
_JUMPS: Final = frozenset(dis.hasjrel) - _ENDS
_ALWAYS: Final = frozenset(dis.opmap[n] for n in ("JUMP_FORWARD",))
_CALLS: Final = frozenset(
    op for op, name in enumerate(dis.opname) if name.startswith(("CALL", "PRECALL"))
)


class _Range(NamedTuple):
    """Of an exception table: from and up to which bytecode, and where its handler is."""

    start: int
    end: int
    handler: int


def _leads_into_try(known: _Known, at: int) -> bool:
    """Whether the call at ``at`` is the last before a protected range begins.

    The interpreter looks for signals when a call has returned, and the next time when another is
    made. So the exception would strike after the one has taken something, and outside the range
    that gives it back.
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
    if dis.opname[text[at]] == "PRECALL":  # the interpreter may have made the call here already
        after = _next(text, after)
    paths, seen = [after], set[int]()
    while paths and len(seen) < _FAR:
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
    """The instruction after the one at ``at``."""
    at += 2
    while at < len(text) and text[at] == _CACHE:
        at += 2
    return at


def _handlers(ranges: list[_Range], at: int) -> Iterator[int]:
    """Handlers in force at ``at``, the innermost first: each is within the range of the next."""
    seen = set[int]()
    while True:
        found = next((r.handler for r in ranges if r.start <= at < r.end), None)
        if found is None or found in seen:
            return
        seen.add(found)
        yield found
        at = found
