"""The reductions of a txn: the issued ones for its vote, the pending ones for a rollback.

This module runs on the main thread and on autograd's threads; `TxnReductions.cancel` runs on the
engine thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Work
from torchft.manager import Manager, _ManagedWork
from torchft.work import _DummyWork

from fft.errors import FftError, TxnAborted
from fft.messages.protocol import Manifest
from fft.train.gradients.recomputation import Recomputation
from fft.train.gradients.reducer import Reducer
from fft.train.guard import accelerator
from fft.train.guard.injector import Injector
from fft.train.guard.watchers import Watchers


class TxnReductions:
    """The reductions of the current txn, and the reducers that issue them during backward."""

    def __init__(
        self,
        manager: Manager,
        watchers: Watchers,
        injector: Injector | None,
        recomputation: Recomputation,
    ) -> None:
        self._manager = manager
        self._watchers = watchers
        self._injector = injector
        self._recomputation = recomputation
        self.raises = False
        """Whether a failed reduction raises in the step function; it does in FFT's own loop."""
        self.refused = ""
        """Why reductions are not allowed now; empty if they are."""
        self.reducers: list[Reducer] = []
        """The hooks of the reducers reference the manager in a cycle that the garbage collector
        cannot see; `close` breaks it."""
        self.manifest = ManifestBuilder()
        self._is_for_fft = False
        """Whether the reduction that is being issued is FFT's, and not the script's."""
        self._works: list[Work] = []
        self._last: torch.Tensor | None = None
        """The last tensor reduced in this txn, where faults may be injected."""
        self._futures: set[_CancellableFuture] = set()
        self._is_cancelled = False
        """The txn is rolled back: a new future is cancelled at once, and not waited for."""

    @property
    def models(self) -> str:
        """Names of the models that the reducers reduce."""
        return ", ".join(reducer.model for reducer in self.reducers)

    def begin(self) -> None:
        """Reset for a new txn."""
        self._works.clear()
        self._is_cancelled = False
        self._last = None
        self.manifest = ManifestBuilder()

    def begin_reducers(self) -> None:
        """Prepare the reducers for a step function."""
        for reducer in self.reducers:
            reducer.begin()

    def issue(self, reduce: Callable[..., Work], tensor: torch.Tensor, *how: Any) -> Work:
        """All-reduce by torchft's ``reduce(tensor, should_quantize, reduce_op)``, and note it.

        Raises FftError: Reductions are not allowed now.
        """
        if self.refused:
            raise FftError(self.refused)
        if self._injector is not None:
            self._injector.at("before_allreduce")
        self._raise_failure()
        if not self._is_for_fft:
            self._recomputation.before_reduction_by_script(tensor)
        self.manifest.add(tensor, how[-1])
        if self._injector is not None and tensor.is_floating_point():
            self._last = tensor
            if self._injector.poisons("before"):
                _poison(tensor)
        self._watchers.ping()
        work = reduce(tensor, *how)
        if isinstance(work, _DummyWork):
            # torchft's DDP hook expects a _ManagedWork, and fails on a bare _DummyWork.
            work = _ManagedWork(self._manager, work, tensor)
            work.get_future().then(lambda _: tensor)
        work.__class__ = _TxnWork
        cast("_TxnWork", work).reducing = self._watchers.reducing
        self._works.append(work)
        if self._injector is not None:
            self._injector.at("during_allreduce")
        return work

    def reduce_gradients(self, bucket: torch.Tensor, layout: str, op: ReduceOp.RedOpType) -> Work:
        """Issue the reduction of a bucket; ``layout`` describes its gradients, for the manifest."""
        self.note_gradients(bucket, layout)
        return self._issue_for_fft(bucket, layout, op)

    def note_gradients(self, bucket: torch.Tensor, layout: str) -> None:
        """Let a recomputed step compare a bucket, which is about to be reduced."""
        self._recomputation.before_reduction(bucket, layout)

    def _issue_for_fft(self, tensor: torch.Tensor, layout: str, op: ReduceOp.RedOpType) -> Work:
        """Issue a reduction that the user's code has not asked for."""
        self._is_for_fft = True
        try:
            work: Work = self._manager.allreduce(tensor, reduce_op=op)
        finally:
            self._is_for_fft = False
        self.manifest.note(layout)
        return work

    def results_used(self) -> None:
        """From now on, the script may use reduced gradients of the open txn."""
        self._recomputation.results_used()

    def mean(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its mean over the groups. Raises TxnAborted if that fails.

        It changes no gradient, so a joiner that fetches its state may take part.
        """
        self._issue_for_fft(tensor, "mean", ReduceOp.AVG).wait()
        self._recomputation.results_used()
        self._raise_failure()

    def share(self, packed: torch.Tensor) -> None:
        """Replace ``packed`` by its sum over the groups before the vote; all but one have zeros."""
        self._issue_for_fft(packed, "statistics", ReduceOp.SUM)

    def raise_if_failed(self) -> None:
        """Forget the completed reductions of the reducers.

        Raises TxnAborted if one has failed in FFT's own loop.
        """
        self._works.clear()
        self._raise_failure()
        if self._injector is not None:
            self._injector.at("after_allreduce")

    def _raise_failure(self) -> None:
        if self.raises and (error := self._manager._torchft.errored) is not None:
            raise TxnAborted(str(error.original_exception))

    def wait(self) -> None:
        """Wait for all pending reductions before the vote, and report errors."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._wait_for_device()
        manager, injector = self._manager, self._injector
        if (error := manager._torchft.pg.errored()) is not None:
            manager.report_error(error)
        if self._last is not None and injector and injector.poisons("after"):
            _poison(self._last)
        self._last = None
        if manager._torchft.errored is None and injector and injector.fails_after_allreduce():
            error = RuntimeError("injected: the last all-reduce failed on this side")
            manager.report_error(error)

    def _wait_for_device(self) -> None:
        """Wait for the work that the step function has queued on devices: a YES covers its results.

        A timeout is reported as an error.

        Raises:
            DeviceLost: A device is lost.
        """
        try:
            accelerator.wait(self._manager._torchft.timeout)
        except TimeoutError as error:
            self._manager.report_error(error)

    def reset(self) -> None:
        """Forget all pending reductions after a rollback."""
        self._works.clear()
        for reducer in self.reducers:
            reducer.reset()

    # --- futures ---

    def wrap(
        self,
        wrap: Callable[..., torch.futures.Future[Any]],
        future: torch.futures.Future[Any],
        default: Any,
        timeout: timedelta | None,
    ) -> torch.futures.Future[Any]:
        """torchft's ``wrap(future, default, timeout)``, completed by `cancel`, too."""
        if future.done() and not torch.accelerator.is_available():
            return self._settled(future, default)
        outer = _CancellableFuture(default, self._futures.discard)
        self._futures.add(outer)
        wrap(future, default, timeout).add_done_callback(outer.settle)
        # checked after the insertion, so that either `cancel` or this line cancels the future
        if self._is_cancelled:
            outer.cancel()
        return outer.future

    def _settled(self, fut: torch.futures.Future[Any], default: Any) -> torch.futures.Future[Any]:
        """Return a future for one that is done, without torchft's thread for timeouts.

        For CPU only: with an accelerator, a future is done as soon as its work is queued.
        """
        try:
            fut.value()
        except Exception as error:
            text = f"a future failed, the step will not be committed: {error}"
            self._manager._torchft.logger.exception(text)
            self._manager.report_error(error)
            fut = torch.futures.Future()
            fut.set_result(default)
        return fut

    def cancel(self) -> None:
        """Complete every pending future with its default, now and until `begin`. Engine thread."""
        self._is_cancelled = True
        for future in list(self._futures):
            future.cancel()

    def close(self) -> None:
        """Take the reducers' hooks off the parameters. Idempotent."""
        for reducer in self.reducers:
            reducer.close()
        self.reducers.clear()


class _TxnWork(_ManagedWork):  # type: ignore[misc]
    """torchft's managed work.

    Its future exists after a failed wait, too, because DDP requires it.
    """

    reducing: Callable[[], AbstractContextManager[None]]
    """Creates the context of a wait."""
    is_over = False
    """Whether a wait succeeded and need not be repeated. It stays False with an accelerator,
    because each stream must wait."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torchft does. Returns False, and reports the error, if the work failed."""
        if self.is_over and self._managed_fut_tail._fut is not None:
            return True
        with self.reducing():
            done = bool(super().wait(timeout))
        self.is_over = done and not torch.accelerator.is_available()
        tail = self._managed_fut_tail
        if tail._fut is None:
            tail._fut = torch.futures.Future()
            tail._fut.set_result(self._value)
        return done


class _CancellableFuture:
    """A torch future that completes with the wrapped one, or with ``default`` when cancelled."""

    def __init__(self, default: Any, on_done: Callable[[_CancellableFuture], None]) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._default = default
        self._on_done = on_done
        self._lock = threading.Lock()
        self._done = False

    def settle(self, inner: torch.futures.Future[Any]) -> None:
        """Complete as the wrapped future, whose errors torchft has already replaced."""
        self._set(inner.value())

    def cancel(self) -> None:
        """Complete with the default now."""
        self._set(self._default)

    def _set(self, value: Any) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
        self._on_done(self)
        self.future.set_result(value)


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
