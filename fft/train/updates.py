"""What a commit does to the state of a rank: scaler, optimizers, schedules, user's functions.

And how a loop that steps its optimizer by itself, as torchft's do, is seen to do so. Runs on the
main thread; touches the optimizers, schedulers and scaler that it was given.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fft.messages.causes import Cause, CauseCode
from fft.train.schedules import ScheduleLengths
from fft.util.errors import FftError


class Updates:
    """The update that follows a COMMIT of FFT's own loop.

    Args:
        optimizers: stepped in this order.
        schedulers: stepped after them.
        scaler: unscales the gradients before the vote and says whether they are finite; None: none.
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
        self._epochs: list[Any] = []
        """Of the schedulers, as the body began."""
        self._left_at: list[Any] | None = None
        """Of the schedulers, as the last update left them; None: they may be elsewhere."""
        self.after: list[Callable[[], object]] = []
        """Functions of the user, called by `done`."""
        self._is_mine = False
        self._hooks = [o.register_step_pre_hook(self._refuse_in_body) for o in self._optimizers]
        self.in_body = False
        """The body of a txn is open, where nobody may step an optimizer."""

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def parameters(self) -> list[torch.Tensor]:
        """All that the optimizers step."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    @property
    def has_optimizers(self) -> bool:
        """Whether anything is stepped."""
        return bool(self._optimizers)

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call ``function`` once after each update, in the order of registration."""
        self.after.append(function)

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is one of those that are stepped here."""
        return any(each is optimizer for each in self._optimizers)

    def opened(self) -> None:
        """A body begins. Raises FftError if a scheduler was stepped since the last update."""
        self._epochs = self._epochs_now()
        if self._left_at is not None and self._left_at != self._epochs:
            self._left_at = None
            raise FftError(
                "a registered scheduler was stepped, or changed, between two txns: the transaction "
                "steps it itself after each COMMIT, so that this rate is not the one meant; take "
                "scheduler.step() out of the loop, or do not register the scheduler"
            )
        self.in_body = True

    def loaded(self) -> None:
        """The state, that of schedulers included, comes from elsewhere."""
        self._left_at = None

    def scheduled_in_body(self) -> FftError | None:
        """What to say if the body has stepped a scheduler, which the commit does again."""
        if self._epochs == self._epochs_now():
            return None
        return FftError(
            "scheduler.step() inside `with txn:`: the transaction steps the registered schedulers "
            "itself, after COMMIT; take the call out of the body"
        )

    def _epochs_now(self) -> list[Any]:
        return [getattr(each, "last_epoch", None) for each in self._schedulers]

    @property
    def have_gradients(self) -> bool:
        """Whether there is anything to step."""
        return any(map(_has_gradients, self._optimizers))

    @property
    def were_unscaled(self) -> bool:
        """Whether the body has unscaled gradients, by the scale that it had."""
        return self._scaler is not None and any(
            self._scaler._per_optimizer_states[id(optimizer)]["stage"].name != "READY"
            for optimizer in self._optimizers
        )

    def must_skip(self) -> bool:
        """Unscale the reduced gradients; whether the scaler says that this step must be skipped."""
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
        """Step everything, and drop the gradients. Then call `done`."""
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

    def done(self) -> None:
        """Call the functions of the user for a committed step."""
        for function in self.after:
            function()

    def skip(self) -> None:
        """Back the scale off, on the ranks whose own gradients were finite, too; step nothing."""
        if self._scaler is not None:
            # what update() does when it has found an inf, wherever that was found
            state = self._scaler.state_dict()
            state["scale"] *= state["backoff_factor"]
            state["_growth_tracker"] = 0
            self._scaler.load_state_dict(state)
            self.forget()
        self._drop_gradients()

    def forget(self) -> None:
        """After a rollback: no gradient is unscaled any more."""
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _refuse_in_body(self, optimizer: Any, *_: Any) -> None:
        if self.in_body and not self._is_mine:
            raise FftError(
                f"{type(optimizer).__name__}.step() inside `with txn:`: the transaction steps the "
                "registered optimizers itself, after COMMIT; take the call out of the body (and "
                "scaler.step() and scaler.update(), with register(..., scaler=scaler))"
            )


class StepWatch:
    """Sees whether optimizer steps of this thread, of any optimizer, were begun and finished.

    For loops in which the user calls ``optimizer.step()`` after ``should_commit()``.
    """

    def __init__(self) -> None:
        self._begun = self._finished = 0
        self._thread = threading.get_ident()
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._finish),
        ]

    def _begin(self, *_: Any) -> None:
        self._begun += threading.get_ident() == self._thread

    def _finish(self, *_: Any) -> None:
        self._finished += threading.get_ident() == self._thread

    def begin(self) -> None:
        """A commit: count from here, the steps of this thread."""
        self._thread = threading.get_ident()
        self._begun = self._finished = 0

    @property
    def was_torn(self) -> bool:
        """Whether a step began since, and did not finish: part of the state may be updated."""
        return self._begun > self._finished

    @property
    def was_begun(self) -> bool:
        """Whether there was a step since, finished or not."""
        return self._begun > 0 or self._finished > 0

    @property
    def is_done(self) -> bool:
        """Whether there was one, and none is unfinished."""
        return 0 < self._begun == self._finished

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class LoopUpdates:
    """Of the commits whose update is made by the user's loop: was it made, and whole?

    Watches from the first such commit on.
    """

    def __init__(self) -> None:
        self._watch: StepWatch | None = None
        self._is_open = False
        """There was a commit, and `look` has not been called since."""
        self.missed: int | None = None
        """The step of the last commit, if no optimizer step has followed it here."""

    def begin(self) -> None:
        """A commit: the loop is to make its update now."""
        if self._watch is None:
            self._watch = StepWatch()
        self._watch.begin()
        self._is_open = True

    @property
    def is_made(self) -> bool:
        """Whether the loop has stepped an optimizer since, and none is unfinished."""
        return self._watch is not None and self._watch.is_done

    def take_torn(self) -> str | None:
        """That a step was begun and not finished, told once; None: none was."""
        if self._watch is None or not self._watch.was_torn:
            return None
        self._watch.begin()
        self._is_open = False
        return "optimizer.step() was begun and did not finish"

    def failed(self) -> None:
        """The update has failed, which the engine knows: it is not looked for."""
        self._is_open = False

    def look(self, step: int) -> bool:
        """Before the next txn, once for each commit: whether nobody has stepped after ``step``.

        That may be right, if all groups do so: the scaler has found an inf, or weights are averaged
        by hand. So the next vote says it, and does not fit those of who has stepped an optimizer.
        """
        if not self._is_open or self._watch is None:
            return False
        self._is_open = False
        self.missed = None if self._watch.was_begun else step
        return self.missed is not None

    def why_torn(self, cause: Cause) -> str | None:
        """Return why this rank's state is lost, or None if it is not.

        It is lost if no optimizer step followed the last commit here, and the reductions of this
        rank's vote do not match those of the others, which have made that step.
        """
        if self.missed is None or cause.code != CauseCode.MANIFESTS_DIFFER:
            return None
        return (
            f"should_commit() said True in step {self.missed}, and no optimizer.step() followed "
            "it on this rank, as on others: was an exception caught in between?"
        )

    def forget(self) -> None:
        """The state is that of the others: by a commit with votes that fit, or fetched."""
        self.missed = None

    def close(self) -> None:
        """Watch no more. Idempotent."""
        if self._watch is not None:
            self._watch.close()


def _refuse_unfit(each: Any) -> None:
    """Raise if there is no ``step()``, or it cannot be called without arguments."""
    of_class = getattr(type(each), "step", None)  # its own may be wrapped by a scheduler
    own = getattr(each, "step", None)
    if not callable(own):
        raise FftError(
            "register(): expected an optimizer or lr_scheduler with step(), got "
            f"{type(each).__name__}; pass it as extra= if it only has a state"
        )
    try:
        if of_class is not None:
            inspect.signature(of_class).bind(each)
        else:  # an attribute of the object, or passed on by a proxy
            inspect.signature(own).bind()
    except ValueError:  # a built-in function has no signature
        return
    except TypeError as error:
        raise FftError(
            f"{type(each).__name__}.step() needs an argument ({error}), which the transaction does "
            "not have: do not register it; call it between two txns, after `if txn.committed:`, "
            "and register its state as extra="
        ) from None


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
