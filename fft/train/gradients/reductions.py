"""The reductions of a txn: the issued ones for its vote, the pending ones for a rollback.

This module runs on the main thread and on autograd's threads; `Reductions.cancel` runs on the
engine thread.
"""

from __future__ import annotations

import hashlib
import threading
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import AllreduceOptions, ReduceOp
from torchft import manager as torchft_manager
from torchft.futures import future_timeout
from torchft.manager import Manager, _ManagedWork
from torchft.utils import get_stream_context
from torchft.work import _DummyWork

from fft.errors import FftError, TxnAborted
from fft.messages.effects import StartTxn
from fft.messages.protocol import Manifest
from fft.train.gradients.recomputation import Recomputation
from fft.train.guard import accelerator
from fft.train.guard.injector import Injector
from fft.train.guard.unsafe_places import guarded
from fft.train.guard.watchers import Watchers

_NONE = object()


class OpenTxn:
    """The txn that is open on this rank, as its reductions and its vote see it.

    Attributes:
        plan: The txn, or None between two txns.
        voted: The vote of this rank while the decision is pending, or None.
        failure: The last error that was reported in it, so that it will be rolled back, or None.
        participants: Number of groups whose gradients count, also after its end.
        index: Index of this group among them, or None if its gradients do not count.
        fixed_slices: Number of batches of a step, of which a group may have several, or 0: one
            each.
        by_fft: Whether FFT's own loop runs it, in which a failed reduction raises an error.
        is_rehearsal: Whether it is outside the job, so that no other group takes part.
    """

    plan: StartTxn | None = None
    voted: Literal["step", "skip"] | None = None
    failure: Exception | None = None
    participants = 0
    index: int | None = None
    fixed_slices = 0
    by_fft = False
    is_rehearsal = False

    def begin(self, plan: StartTxn) -> None:
        """Open the txn of ``plan``."""
        self.plan, self.voted, self.failure = plan, None, None
        self.participants, self.index = plan.participants, plan.index
        self.fixed_slices = plan.fixed_slices

    def close(self) -> None:
        """End the txn on this rank. Idempotent."""
        self.plan = self.voted = None

    def refuse_in_doubt(self, what: str) -> None:
        """Raise FftError in doubt: no other call would be correct for both decisions."""
        if self.plan is not None and self.voted is not None:
            raise FftError(
                f"{what} while the decision of step {self.plan.step} is not known, after a "
                "should_commit() that has timed out: call should_commit() again, until it answers"
            )

    @property
    def contributes(self) -> bool:
        """Whether the gradients of this rank count, and no error was reported."""
        return self.index is not None and self.failure is None


class Reductions:
    """The reductions of the open txn across the groups.

    Args:
        txn: The open txn.
        manager: torchft's side, whose process group connects the groups.
        watchers: Supervision of the main thread.
        injector: Injects planned faults, or None.
        recompute_every: Steps between two recomputed steps; 0 disables recomputation.
    """

    def __init__(
        self,
        txn: OpenTxn,
        manager: Manager,
        watchers: Watchers,
        injector: Injector | None,
        recompute_every: int,
    ) -> None:
        self.txn, self.watchers = txn, watchers
        self.recomputation = Recomputation(recompute_every)
        self.refused = ""
        """Why reductions are not allowed now; empty if they are."""
        self.manifest = ManifestBuilder()
        self._group, self._timeout = manager._torchft.pg, manager._torchft.timeout
        # torchft's works use these two names
        self._logger, self.report_error = manager._torchft.logger, manager.report_error
        self._injector = injector
        self._works: list[Reduction] = []
        self._last: torch.Tensor | None = None
        """The last tensor reduced in this txn, where faults may be injected."""
        self._futures: dict[torch.futures.Future[Any], Any] = {}
        """Future → the value with which a rollback completes it."""
        self._futures_lock = threading.Lock()
        self._is_cancelled = False
        """The txn is rolled back: a new future is cancelled at once, and not waited for."""

    def begin(self) -> None:
        """Reset for a new txn."""
        self._works.clear()
        self._is_cancelled = False
        self._last = None
        self.manifest = ManifestBuilder()

    # --- one reduction ---

    def reduce_gradients(
        self, bucket: torch.Tensor, layout: str, op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> Reduction:
        """Start to reduce gradients in place, and let a recomputed step compare them before.

        Args:
            bucket: The gradients.
            layout: Digest of their layout. A txn with different digests is not committed.
            op: Reduction operation.
        """
        self.recomputation.before_reduction(bucket, layout)
        return self.all_reduce(bucket, op, layout)

    @guarded
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType,
        layout: str | None = None,
        should_quantize: bool = False,
    ) -> Reduction:
        """Start to reduce ``tensor`` in place across the groups, and note it for the vote.

        A group whose gradients do not count reduces zeros.

        Args:
            tensor: The tensor.
            op: Reduction operation; AVG divides the sum by the number of groups that count.
            layout: Text for the vote, which is equal on all ranks. None: the script reduces.
            should_quantize: Whether the transport may round, as in torchft.

        Raises:
            FftError: Reductions are not allowed now.
            TxnAborted: An earlier reduction has failed in FFT's own loop.
        """
        self.txn.refuse_in_doubt("allreduce()")
        if self.txn.plan is None and self.txn.by_fft:
            raise FftError(
                "allreduce() between two transactions: a fault of another group would fail it, "
                "and FFT would not repeat it. Move it into the step function, inside `with txn:`"
            )
        if self.refused:
            raise FftError(self.refused)
        if self._injector is not None:
            self._injector.at("before_allreduce")
        self._raise_failure()
        if layout is None:
            self.recomputation.before_reduction_by_script(tensor)
        self.manifest.add(tensor, op)
        if self._injector is not None and tensor.is_floating_point():
            self._last = tensor
            if self._injector.poisons("before"):
                _poison(tensor)
        self.watchers.ping()
        work = self._issue(tensor, op, should_quantize)
        self._works.append(work)
        if self._injector is not None:
            self._injector.at("during_allreduce")
        if layout is not None:
            self.manifest.note(layout)
        return work

    def _issue(self, tensor: torch.Tensor, op: Any, should_quantize: bool) -> Reduction:
        """Start a reduction. An error is reported, and the work is then done at once."""
        if self.txn.failure is not None or self.txn.is_rehearsal:
            return Reduction(self, _DummyWork(tensor), tensor)
        if self.txn.index is None:
            tensor.zero_()
        divisor, sent = 0, op
        if op == ReduceOp.AVG:
            if not tensor.is_floating_point():
                raise ValueError("average reduce op is only supported for floating point tensors")
            divisor, sent = self.txn.participants, ReduceOp.SUM
        try:
            if should_quantize and torchft_manager.IS_TRITON_AVAILABLE:
                stream = torch.accelerator.current_stream()
                work = torchft_manager.allreduce_quantized([tensor], sent, self._group, stream)
            else:
                options = AllreduceOptions()
                options.reduceOp = sent
                work = self._group.allreduce([tensor], options)
        except Exception as error:
            self._logger.exception(f"a reduction could not be started: {error}")
            self.report_error(error)
            work, divisor = _DummyWork(tensor), 0
        return Reduction(self, work, tensor, divisor)

    def mean(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its mean over the groups. Raises TxnAborted if that fails.

        It changes no gradient, so a joiner that fetches its state may take part.
        """
        self.all_reduce(tensor, ReduceOp.AVG, "mean").wait()
        self.recomputation.results_used()
        self._raise_failure()

    def share(self, packed: torch.Tensor) -> None:
        """Replace ``packed`` by its sum over the groups before the vote; all but one have zeros."""
        self.all_reduce(packed, ReduceOp.SUM, "statistics")

    def raise_if_failed(self) -> None:
        """Forget the completed reductions of the reducers.

        Raises TxnAborted if one has failed in FFT's own loop.
        """
        self._works.clear()
        self._raise_failure()
        if self._injector is not None:
            self._injector.at("after_allreduce")

    def _raise_failure(self) -> None:
        if self.txn.by_fft and self.txn.failure is not None:
            raise TxnAborted(str(self.txn.failure))

    # --- all reductions of the txn ---

    def wait(self) -> None:
        """Wait for all pending reductions before the vote, and report errors."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._wait_for_device()
        injector = self._injector
        if (error := self._group.errored()) is not None:
            self.report_error(error)
        if self._last is not None and injector and injector.poisons("after"):
            _poison(self._last)
        self._last = None
        if self.txn.failure is None and injector and injector.fails_after_allreduce():
            self.report_error(RuntimeError("injected: the last all-reduce failed on this side"))

    def _wait_for_device(self) -> None:
        """Wait for the work that the step function has queued on devices: a YES covers its results.

        A timeout is reported as an error.

        Raises:
            DeviceLost: A device is lost.
        """
        try:
            accelerator.wait(self._timeout)
        except TimeoutError as error:
            self.report_error(error)

    def reset(self) -> None:
        """Forget all pending reductions after a rollback."""
        self._works.clear()

    # --- futures ---

    def wrap_future(
        self,
        future: torch.futures.Future[Any],
        default: Any,
        timeout: timedelta | None = None,
    ) -> torch.futures.Future[Any]:
        """Return a future that never fails, as torchft's: an error is reported and gives
        ``default``.

        `cancel` completes it with ``default``, too.
        """
        stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None

        def value(done: torch.futures.Future[Any]) -> Any:
            with get_stream_context(stream):
                try:
                    return done.value()
                except Exception as error:
                    text = f"a future failed, the step will not be committed: {error}"
                    self._logger.exception(text)
                    self.report_error(error)
                    return default

        # with an accelerator, a future is done as soon as its work is queued
        if future.done() and stream is None:
            return future.then(value)
        outer: torch.futures.Future[Any] = torch.futures.Future()
        self._futures[outer] = default
        inner = future_timeout(future, self._timeout if timeout is None else timeout).then(value)
        inner.add_done_callback(lambda done: self._complete(outer, done.value()))
        # checked after the insertion, so that either `cancel` or this line cancels the future
        if self._is_cancelled:
            self._complete(outer, default)
        return outer

    def _complete(self, future: torch.futures.Future[Any], value: Any) -> None:
        """Complete a pending future, unless another thread has."""
        with self._futures_lock:
            is_pending = self._futures.pop(future, _NONE) is not _NONE
        if is_pending:
            future.set_result(value)

    def cancel(self, cause: str) -> None:
        """Roll the txn back: complete every pending future with its default, now and until `begin`.

        Engine thread.
        """
        self.txn.failure = self.txn.failure or TxnAborted(cause)
        self._is_cancelled = True
        for future, default in list(self._futures.items()):
            self._complete(future, default)


class Reduction(_ManagedWork):  # type: ignore[misc]
    """The work of one reduction, which torchft's loops accept, too.

    Its future exists after a failed wait, too, because DDP requires it.
    """

    _is_over = False
    """Whether a wait succeeded and need not be repeated. It stays False with an accelerator,
    because each stream must wait."""

    def __init__(
        self, reductions: Reductions, work: Any, tensor: torch.Tensor, divisor: int = 0
    ) -> None:
        super().__init__(reductions, work, tensor)
        if divisor:
            self.get_future().then(lambda _: tensor.div_(divisor))
        elif isinstance(work, _DummyWork):
            self.get_future().then(lambda _: tensor)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result. Returns False, and reports the error, if the reduction failed."""
        if self._is_over and self._managed_fut_tail._fut is not None:
            return True
        with self._manager.watchers.reducing():
            done = bool(super().wait(timeout))
        self._is_over = done and not torch.accelerator.is_available()
        tail = self._managed_fut_tail
        if tail._fut is None:
            tail._fut = torch.futures.Future()
            tail._fut.set_result(self._value)
        return done


class ManifestBuilder:
    """Counts the reductions of a txn for its vote."""

    def __init__(self) -> None:
        self._count = 0
        self._bytes = 0
        self._shapes = hashlib.blake2b(digest_size=8)

    @property
    def empty(self) -> bool:
        """Whether no reduction was added yet."""
        return self._count == 0

    def add(self, tensor: torch.Tensor, op: Any) -> None:
        """Add one reduction, in issue order."""
        self._count += 1
        if not tensor.is_sparse:  # the size of a sparse tensor differs between the groups
            self._bytes += tensor.nbytes
        self._shapes.update(f"{op}|{tensor.dtype}|{tuple(tensor.shape)};".encode())

    def note(self, layout: str) -> None:
        """Add the layout of the last tensor."""
        self._shapes.update(layout.encode())

    def build(
        self,
        data: str | None = None,
        shard: str = "",
        block: str = "",
        fingerprint: str | None = None,
        repeats: bool | None = None,
    ) -> Manifest:
        """Return the manifest so far.

        Args:
            data: Digest of the data that the rank has drawn from ``shard``.
            shard: Name of the part of the data that the rank draws from.
            block: The live block that the rank enters or ends.
            fingerprint: Digest of the reduced gradients.
            repeats: Whether they repeat those of the attempt before.
        """
        shapes = self._shapes.hexdigest()
        done = self._count, self._bytes, shapes
        return Manifest(*done, fingerprint, repeats, data=data, shard=shard, block=block)


def _poison(tensor: torch.Tensor) -> None:
    """Make one value of ``tensor`` NaN, as a memory error would."""
    with torch.no_grad():
        tensor[(0,) * tensor.dim()] = float("nan")
