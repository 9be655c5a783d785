"""The effect of a commit on the state of a rank: scaler, optimizers, schedules, user's functions.

This module also detects the steps of a loop that steps its optimizer itself, as torchft's loops do.
It runs on the main thread, and changes only the given optimizers, schedulers and scaler.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler as torchs
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fft.errors import FftError
from fft.messages.causes import Cause, CauseCode

logger = logging.getLogger(__name__)

_IDLE_AFTER = 10
"""Number of updates after which an optimizer that never had a gradient is reported."""
_IDLE = (
    "registered optimizers without any gradient in their first steps: %s. They change nothing: "
    "does the loss depend on their parameters, and are these the parameters of the model? "
    "Otherwise, do not register them"
)
_UNHELD = (
    "the script has no reference to %s any more, and its state does not change. If another object "
    "has replaced it, register that one, so that rollbacks restore it and joining groups fetch it"
)
_ACCUMULATES = (
    "the script calls accelerator.accumulate(), which divides the loss, but FFT steps after each "
    "transaction: remove this call, and pass micro_batches= to fft.CursorLoader"
)


class Updates:
    """The update that follows a COMMIT in FFT's own loop.

    Args:
        optimizers: Stepped in this order.
        schedulers: Stepped after the optimizers.
        scaler: Unscales the gradients before the vote and checks whether they are finite; optional.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
        scaler: Any | None = None,
    ) -> None:
        self._optimizers = list(optimizers)
        self._schedulers = list(schedulers)
        self.lengths = ScheduleLengths(self._schedulers)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        for each in self._optimizers:
            _refuse_unfit(each)
        for each in self._schedulers:
            _refuse_unfit(each)
        self._count = 0
        """Number of updates, up to `_IDLE_AFTER`; one more after `mistakes` has reported."""
        self._idle = list(self._optimizers)
        """Optimizers that had no gradient in these updates."""
        self._epochs: list[Any] = []
        """Positions of the schedulers when the step function began."""
        self._left_at: list[Any] | None = None
        """Positions of the schedulers after the last update, or None if they may have changed
        since."""
        self.take_statistics: Callable[[], None] | None = None
        """Writes the running statistics that all ranks take with the commit, or None."""
        self.after: list[Callable[[], object]] = []
        """The user's functions that `done` calls."""
        self._is_mine = False
        self._hooks = [o.register_step_pre_hook(self._refuse_in_body) for o in self._optimizers]
        self.in_body = False
        """The step function of a txn is running, in which no optimizer may be stepped."""

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters that the optimizers step."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the optimizers would apply, each once."""
        return [p.grad for p in dict.fromkeys(self.parameters()) if p.grad is not None]

    @property
    def has_scaler(self) -> bool:
        """Whether a scaler looks for gradients that are not finite."""
        return self._scaler is not None

    @property
    def has_optimizers(self) -> bool:
        """Whether any optimizer is stepped."""
        return bool(self._optimizers)

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call ``function`` once after each update, in the order of registration."""
        self.after.append(function)

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` is stepped here."""
        return any(each is optimizer for each in self._optimizers)

    def begin_step(self) -> None:
        """Begin a step function. Raises FftError if a scheduler was stepped since the last
        update."""
        self._epochs = self._epochs_now()
        if self._left_at is not None and self._left_at != self._epochs:
            self._left_at = None
            raise FftError(
                "a registered scheduler was stepped or changed between two txns: FFT steps it "
                "after each COMMIT, so the learning rate would be wrong; remove scheduler.step() "
                "from the loop, or register it in extra= to step it yourself"
            )
        self.in_body, self.take_statistics = True, None

    def loaded(self) -> None:
        """Record that the state, including the schedulers, was loaded."""
        self._left_at = None

    def scheduled_in_body(self) -> FftError | None:
        """Return the error for a step function that stepped a scheduler, or None."""
        if self._epochs == self._epochs_now():
            return None
        return FftError(
            "scheduler.step() called inside `with txn:`: FFT steps the registered schedulers "
            "after COMMIT; remove the call"
        )

    def _epochs_now(self) -> list[Any]:
        return [getattr(each, "last_epoch", None) for each in self._schedulers]

    @property
    def have_gradients(self) -> bool:
        """Whether any optimizer has a gradient."""
        return any(map(_has_gradients, self._optimizers))

    def must_skip(self) -> bool:
        """Unscale the reduced gradients; return whether the scaler requires this step to be
        skipped."""
        if self._scaler is None:
            return False
        found = False
        for optimizer in filter(_has_gradients, self._optimizers):
            if self._scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
                self._scaler.unscale_(optimizer)
            infs = self._scaler._found_inf_per_device(optimizer)
            found = any(float(inf) > 0 for inf in infs.values()) or found
        return found

    def apply(self) -> None:
        """Step optimizers, scaler and schedulers, and drop the gradients. `done` is called next."""
        if self.take_statistics is not None:
            self.take_statistics()
        if self._count < _IDLE_AFTER:
            self._count += 1
            self._idle = [each for each in self._idle if not _has_gradients(each)]
        self._is_mine = True
        try:
            for optimizer in self._optimizers:
                if self._scaler is None:
                    optimizer.step()
                elif _has_gradients(optimizer):
                    self._scaler.step(optimizer)
            if self._scaler is not None and self.have_gradients:
                self._scaler.update()
            for scheduler in self._schedulers:
                scheduler.step()
            self.lengths.stepped()
            self._left_at = self._epochs_now()
        finally:
            self._is_mine = False
        self._drop_gradients()

    def mistakes(self, unheld: Callable[[], str]) -> Iterator[tuple[str, str]]:
        """Yield name and text of a warning for each likely mistake that the first updates reveal.

        Args:
            unheld: `StepState.unheld`; called after the first update and after the tenth.
        """
        if self._count == 1:
            unheld()
            accelerate = sys.modules.get("accelerate.state")
            state = {} if accelerate is None else accelerate.GradientState._shared_state
            if not state.get("sync_gradients", True):
                yield "accelerate_accumulate", _ACCUMULATES
        if self._count != _IDLE_AFTER:
            return
        self._count += 1
        # an optimizer of frozen parameters waits until they are thawed
        idle = [each for each in self._idle if any(p.requires_grad for p in _parameters(each))]
        if names := ", ".join(type(each).__name__ for each in idle):
            yield "idle_optimizer", _IDLE % names
        if names := unheld():
            yield "unheld_extra", _UNHELD % names

    def done(self) -> None:
        """Call the functions of the user for a committed step."""
        for function in self.after:
            function()

    def skip(self) -> None:
        """Reduce the scale, also on ranks whose own gradients were finite, and step nothing."""
        if self._scaler is not None:
            # as update() does after an inf, whichever rank has found it
            state = self._scaler.state_dict()
            state["scale"] *= state["backoff_factor"]
            state["_growth_tracker"] = 0
            self._scaler.load_state_dict(state)
            self.forget()
        self._drop_gradients()

    def forget(self) -> None:
        """Mark all gradients as scaled again after a rollback."""
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _refuse_in_body(self, optimizer: Any, *_: Any) -> None:
        if self.in_body and not self._is_mine:
            raise FftError(
                f"{type(optimizer).__name__}.step() called inside `with txn:`: FFT steps the "
                "registered optimizers after COMMIT; remove the call (and scaler.step() and "
                "scaler.update(), with register(..., scaler=scaler))"
            )


_WRAPPED_IN = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "LightningOptimizer": "optimizer",
    "_FabricModule": "module",
    "_FabricOptimizer": "optimizer",
}
"""Wrappers of Accelerate and Lightning, with the attribute that holds the wrapped object. They are
listed by name, because an algorithm such as Lookahead has an inner optimizer, too."""
_PACKAGES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def unwrapped(each: Any) -> Any:
    """Return the optimizer, scheduler or module inside the wrappers of Accelerate and Lightning.

    Their ``step()`` belongs to another loop: it may do nothing, or count its own steps.

    Raises:
        FftError: ``each`` is torchft's wrapper, which votes in its ``step()``.
    """
    for kind in type(each).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "torchft" and kind.__name__ == "OptimizerWrapper":
            raise FftError(
                "register(): expected an optimizer of torch, got torchft.Optimizer, whose step() "
                "votes by itself; pass the optimizer that it wraps"
            )
        if package in _PACKAGES and kind.__name__ in _WRAPPED_IN:
            return unwrapped(getattr(each, _WRAPPED_IN[kind.__name__]))
    return each


class LoopUpdates:
    """Checks that the user's loop steps its optimizers completely after each commit.

    From the first such commit on it counts the optimizer steps of this thread, of any optimizer.
    """

    def __init__(self) -> None:
        self._begun = self._finished = 0
        self._thread = threading.get_ident()
        self._hooks: list[Any] = []
        self._is_open = False
        """There was a commit, and `check_missed` has not been called since."""
        self.missed: int | None = None
        """Step of the last commit, if no optimizer step has followed it here."""

    def begin(self) -> None:
        """Start to watch for the loop's update, after a commit."""
        if not self._hooks:
            self._hooks = [
                register_optimizer_step_pre_hook(self._step_begins),
                register_optimizer_step_post_hook(self._step_ends),
            ]
        self._thread, self._begun, self._finished = threading.get_ident(), 0, 0
        self._is_open = True

    def _step_begins(self, *_: Any) -> None:
        self._begun += threading.get_ident() == self._thread

    def _step_ends(self, *_: Any) -> None:
        self._finished += threading.get_ident() == self._thread

    @property
    def is_made(self) -> bool:
        """Whether the loop has stepped an optimizer since, and no step is unfinished."""
        return 0 < self._begun == self._finished

    def take_incomplete(self) -> str | None:
        """Return once that a step was begun and did not finish, or None."""
        if self._begun <= self._finished:
            return None
        self._thread, self._begun, self._finished = threading.get_ident(), 0, 0
        self._is_open = False
        return "optimizer.step() was begun and did not finish"

    def failed(self) -> None:
        """Stop watching for an update that has failed, which the engine knows."""
        self._is_open = False

    def check_missed(self, step: int) -> bool:
        """Return whether no optimizer step followed the commit of ``step``. Once for each commit.

        Called before the next txn. To step none is correct if all groups do so: the scaler has
        found an inf, or the loop averages weights itself. The next vote therefore includes it, and
        does not match the votes of ranks that have stepped an optimizer.
        """
        if not self._is_open:
            return False
        self._is_open = False
        self.missed = None if self._begun or self._finished else step
        return self.missed is not None

    def why_lost(self, cause: Cause) -> str | None:
        """Return why this rank's state is lost, or None if it is not.

        It is lost if this rank made no optimizer step after the last commit, and its vote does not
        match those of ranks that did.
        """
        if self.missed is None or cause.code != CauseCode.MANIFESTS_DIFFER:
            return None
        return (
            f"should_commit() returned True in step {self.missed}, but this rank called no "
            "optimizer.step(), unlike others: was an exception caught in between?"
        )

    def forget(self) -> None:
        """Reset after matching votes or a fetch: the state equals that of other ranks."""
        self.missed = None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _refuse_unfit(each: Any) -> None:
    """Raise FftError if there is no ``step()``, or if it cannot be called without arguments."""
    # the object's own method may be wrapped by a scheduler
    of_class = getattr(type(each), "step", None)
    own = getattr(each, "step", None)
    if not callable(own):
        raise FftError(
            "register(): expected an optimizer or lr_scheduler with step(), got "
            f"{type(each).__name__}; pass it as extra= if it only has a state"
        )
    try:
        if of_class is not None:
            inspect.signature(of_class).bind(each)
        else:  # an attribute of the object, or forwarded by a proxy
            inspect.signature(own).bind()
    except ValueError:  # a built-in function has no signature
        return
    except TypeError as error:
        if isinstance(each, torch.optim.Optimizer):
            fix = (
                "register it as extra= and call its step(closure) in the step function, where the "
                "closure calls backward() and returns txn.mean(loss)"
            )
        else:
            fix = "register it as extra=, and call it between two txns, after `if txn.committed:`"
        kind = type(each).__name__
        raise FftError(
            f"{kind}.step() needs an argument ({error}), which FFT cannot pass: {fix}"
        ) from None


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for p in _parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


SCHEDULE_FIX = (
    "The number of steps in the data depends on the number of groups. Follow txn.progress instead, "
    "the fraction of the data that is consumed, or pass max_steps equal to the length of the "
    "schedule"
)


def length_of(scheduler: Any) -> int | None:
    """Return the number of steps after which ``scheduler`` reaches its end, or None if it has none
    or it is unknown.

    A pure warm-up has no end: afterwards the rate stays where it is.
    """
    if isinstance(scheduler, torchs.SequentialLR):
        last = length_of(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, torchs.ChainedScheduler):
        lengths = [n for each in scheduler._schedulers if (n := length_of(each)) is not None]
        return max(lengths, default=None)
    if isinstance(scheduler, torchs.CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, torchs.OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, torchs.PolynomialLR):
        return int(scheduler.total_iters)
    if isinstance(scheduler, torchs.LinearLR):
        falls = scheduler.end_factor < scheduler.start_factor
        return int(scheduler.total_iters) if falls else None
    if isinstance(scheduler, torchs.LambdaLR):
        return _length_in(scheduler.lr_lambdas)
    return None


def _length_in(functions: Sequence[Any]) -> int | None:
    """Return the number of steps bound to a function, as in Hugging Face's schedules."""
    names = ("num_training_steps", "num_steps", "total_steps")
    bound = [f.keywords for f in functions if isinstance(f, partial)]
    lengths = [k[name] for k in bound for name in names if isinstance(k.get(name), int)]
    return max(lengths, default=None)


class ScheduleLengths:
    """Compares the steps of the registered schedulers with their lengths. Main thread."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = list(schedulers)
        self._warned: set[int] = set()

    def stepped(self) -> None:
        """Warn once for each scheduler that is beyond its length."""
        for number, (scheduler, length) in enumerate(self._lengths()):
            if _steps_of(scheduler) > length and number not in self._warned:
                self._warned.add(number)
                logger.warning(
                    "%s: step %d is beyond its %d steps, so the learning rate no longer follows "
                    "the schedule (a cosine climbs back to its start). %s",
                    type(scheduler).__name__,
                    _steps_of(scheduler),
                    length,
                    SCHEDULE_FIX,
                )

    def data_ended(self) -> None:
        """Warn for each scheduler that has not reached its end when the data end."""
        for scheduler, length in self._lengths():
            if _steps_of(scheduler) < length:
                logger.warning(
                    "%s: the data ended at step %d of %d, so the learning rate has not reached its "
                    "end. %s",
                    type(scheduler).__name__,
                    _steps_of(scheduler),
                    length,
                    SCHEDULE_FIX,
                )

    def _lengths(self) -> list[tuple[Any, int]]:
        """The schedulers that have a length; a loaded state may have changed it."""
        return [(s, n) for s in self._schedulers if (n := length_of(s)) is not None]


def _steps_of(scheduler: Any) -> int:
    if isinstance(scheduler, torchs.ChainedScheduler):
        return max(_steps_of(each) for each in scheduler._schedulers)
    return int(getattr(scheduler, "last_epoch", 0))
