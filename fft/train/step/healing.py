"""Entry of the main thread into an epoch: process groups, and a peer's state if needed.

Touches process groups, the checkpoint transport and the state; reports the result to the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, wait
from typing import Any, cast

import torch
from torchft.manager import Manager

from fft.errors import FftError, GradientLayoutMismatch, GroupNotReformable, StateError
from fft.messages.causes import CauseCode
from fft.messages.effects import Heal, StartTxn
from fft.messages.protocol import Connected, Healed, HealFailed, Record
from fft.trace.format import progress_in_words
from fft.train.session.error_reports import code_of, text_of
from fft.train.session.rank_context import RankContext
from fft.train.session.rank_state import FetchedStateDiffers, RankState
from fft.train.state.transfer import PeerUnreachable, StateTransfer, UnloadableState
from fft.util.error_places import fingerprint, may_pass

logger = logging.getLogger(__name__)

_NOTED_EVERY_S = 1.0
_LOGGED_EVERY_S = 10.0
_CANCEL_FETCH_S = 5.0
"""Limit for a cancelled fetch to end."""


class FetchProgress:
    """Reports the progress of a fetch that takes long, in the log and in the trace."""

    def __init__(
        self,
        on_progress: Callable[[int, int, float], None],
        source: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the measurement.

        Args:
            on_progress: Receives the bytes so far, the bytes of the whole state, and the seconds
                left.
            source: The group whose state is fetched.
        """
        self._on_progress, self._source, self._clock = on_progress, source, clock
        self._began = clock()
        self._next_note = self._began + _NOTED_EVERY_S
        self._next_line = self._began + _LOGGED_EVERY_S

    def __call__(self, got: int, total: int) -> None:
        """Report that ``got`` of ``total`` bytes have arrived, unless the last report was just
        before."""
        if (now := self._clock()) < self._next_note:
            return
        self._next_note = now + _NOTED_EVERY_S
        left_s = (now - self._began) * (total - got) / got
        self._on_progress(got, total, left_s)
        if now >= self._next_line:
            self._next_line = now + _LOGGED_EVERY_S
            text = "fetching the state of group %s: %s"
            logger.warning(text, self._source, progress_in_words(got, total, left_s))


class StateNotExportable(StateError):
    """This rank cannot export its state, so every joiner would fail again."""


_PERMANENT_ERRORS = (
    GradientLayoutMismatch,
    GroupNotReformable,
    StateNotExportable,
    UnloadableState,
)
"""Errors that would fail the next epoch, too, so that they end this process."""


class StateExchange:
    """Serves this rank's state to peers and fetches a peer's."""

    def __init__(
        self,
        manager: Manager,
        state: RankState,
        transfer: StateTransfer | None,
        on_progress: Callable[[int, int, float], None],
    ) -> None:
        """Prepare the exchange.

        Args:
            transfer: FFT's own checkpoint transport, or None if the user has passed another one.
            on_progress: See `FetchProgress`.
        """
        self._manager, self._state, self.transfer = manager, state, transfer
        self._on_progress = on_progress
        self._served: Record | None = None
        """The epoch whose initial state is served."""

    def bind(self, record: Record) -> None:
        """Bind the transport to an epoch and a lineage, since torchft's transports check the step
        only."""
        if self.transfer is not None:
            rank = self._manager._torchft.group_rank
            self.transfer.state_id = f"{rank} {record.n} {record.epoch} {record.lineage}"

    def send(self, command: Heal) -> None:
        """Serve the state to the peers that need it."""
        record = command.record
        payload = self._state.export(record)
        self.bind(record)
        self._manager._torchft.checkpoint_transport.send_checkpoint(
            dst_ranks=list(command.send_to),
            step=record.step,
            state_dict=payload,
            timeout=self._manager._torchft.timeout,
        )
        self._served = record

    def end_service(self, plan: StartTxn) -> None:
        """Stop serving when a txn begins, unless joiners still fetch in the epoch's first txn."""
        if self._served is not None and (plan.token.txn > 1 or not self._served.learners):
            self.withdraw()

    def withdraw(self) -> None:
        """Stop serving the initial state of an earlier epoch; later requests wait for the next
        one."""
        if self._served is not None:
            self._manager._torchft.checkpoint_transport.disallow_checkpoint()
            self._served = None

    def fetch(self, command: Heal) -> tuple[dict[str, Any], int]:
        """Fetch a peer's state; return it and the number of bytes of its tensors."""
        assert command.fetch_from is not None
        manager, record = self._manager, command.record
        entry = record.members[command.fetch_from].entry(manager._torchft.group_rank)
        self.bind(record)
        if self.transfer is not None:
            source = record.members[command.fetch_from].group
            self.transfer.on_progress = FetchProgress(self._on_progress, source)
        payload = cast(
            "dict[str, Any]",
            manager._torchft.checkpoint_transport.recv_checkpoint(
                src_rank=command.fetch_from,
                metadata=entry.transport,
                step=record.step,
                timeout=manager._torchft.timeout,
            ),
        )
        if payload["fft"]["lineage"] != record.lineage:
            raise FftError(
                f"fetched lineage {payload['fft']['lineage']}, the epoch needs {record.lineage}"
            )
        return payload, _tensor_bytes(payload)

    def interrupt(self) -> None:
        """Make a fetch fail at once. Thread-safe."""
        if self.transfer is not None:
            self.transfer.interrupt()


class Healer:
    """Executes ``Heal``: at once, or for a joiner in the background of its first step."""

    def __init__(self, rank: RankContext, transfer: StateTransfer | None) -> None:
        self._manager, self._job = rank.manager, rank.job
        self._state, self._groups = rank.state, rank.groups
        self.exchange = StateExchange(rank.manager, rank.state, transfer, rank.job.report_fetch)
        self._learners = rank.settings.config.learners
        self._token = rank.settings.token
        self._operation_s = rank.limits["bus_operation"].seconds
        self._unreached = ""
        """The place to which the last fetch could not connect, or empty."""
        self.background_fetch: BackgroundFetch | None = None
        """The fetch in progress beside the step function."""
        self._compared: list[int] = []
        """Steps of the epochs in which ``extra`` and buffers were compared with another group's."""
        self._rejections: list[str] = []
        """Why fetched states were found to differ from the others', since the last step here."""
        self._export_error: Hashable = None
        """Fingerprint of the error that failed the last export, or None if it succeeded."""

    def facts(self, command: Heal) -> set[str]:
        """Return the facts about ``command`` that the main thread's table needs."""
        if command.fetch_from is None:
            return set()
        return {"learns"} if self._may_overlap_fetch(command) else {"fetches"}

    def heal(self, command: Heal, models: str) -> None:
        """Enter the epoch of ``command``; ``models`` describes the gradients that are reduced
        here."""
        epoch = command.record.epoch
        touched = False
        # before the groups connect: from then on peers may request the new state
        self.exchange.withdraw()
        try:
            self._groups.configure(command, models, self._to_compare(command))
            self._job.meet_at(self._groups.home, self._token, self._operation_s)
            self._warn_of_unlike(command)
            if command.send_to:
                self._send(command)
            size, source = 0, ""
            if self._job.executor.has_row("connected"):
                self._begin_background_fetch(command)
                return
            if command.fetch_from is not None:
                if len(self._rejections) > 1:
                    raise FetchedStateDiffers("; then: ".join(self._rejections))
                with torch.device("cpu"):  # also after torch.set_default_device()
                    payload, size = self.exchange.fetch(command)
                touched = True
                source = command.record.members[command.fetch_from].group
                self._state.load(payload, command.record, source, keep_gradients=False)
        except Exception as error:
            logger.warning("healing for epoch %d failed: %s", epoch, error)
            self._job.executor.report(HealFailed(epoch, text_of(error), torn=touched))
            self._job.note_error(error)
            # If the state does not fit here, or no living peer is reachable, another attempt would
            # only abort the others again.
            if isinstance(error, _PERMANENT_ERRORS) or self._is_final(error, touched):
                raise
            return
        self._healed(command.record, size, source)

    def _is_final(self, error: Exception, touched: bool) -> bool:
        """Whether this process must end: the error has changed the state, or is here again."""
        if isinstance(error, FetchedStateDiffers):
            self.rejected(str(error))
            return len(self._rejections) > 1
        return touched or self._is_cut_off(error)

    def rejected(self, why: str) -> None:
        """Note that the fetched state was found to differ from the others'."""
        self._rejections.append(why)

    def committed(self) -> None:
        """Note the commit of a step of this rank, whose state is therefore that of the others."""
        self._rejections.clear()

    def _is_cut_off(self, error: Exception) -> bool:
        """Whether this process could not reach one living peer in two epochs in a row.

        A third attempt would abort the others again. The replacement of this process waits outside
        the epoch (`fft.train.api.parts`). A dead peer is not in the second epoch.
        """
        before, self._unreached = self._unreached, ""
        if isinstance(error, PeerUnreachable):
            self._unreached = error.where
        return bool(self._unreached) and self._unreached == before

    def _to_compare(self, command: Heal) -> dict[str, str] | None:
        """Return digests of ``extra`` and buffers, or None where they are not compared.

        They are compared in the first epoch and in the next one at a later step: not in every
        epoch, because a comparison reads all of them.
        """
        compared = self._compared
        is_due = not compared or (len(compared) == 1 and command.record.step > compared[0])
        if command.fetch_from is not None or not is_due:
            return None
        try:
            return self._state.paradigm.digests_to_compare()
        except TypeError:
            return None  # an export raises it too, and ends this rank if it must

    def _warn_of_unlike(self, command: Heal) -> None:
        """Warn of ``extra`` and buffers that differ between groups that hold the job's state."""
        if (unlike := self._groups.differing_digests(command)) is None:
            return
        self._compared.append(command.record.step)
        for name, group in sorted(unlike.items()):
            logger.warning(
                "%s of group %s and of group %s differ at step %d, and a joining group copies "
                "them from either: change them only by values that are equal on all groups, such "
                "as the result of manager.allreduce(), or do not register them",
                name,
                self._job.peer.group,
                group,
                command.record.step,
            )
            self._job.note("unlike_state", {"name": name, "group": group})

    def _send(self, command: Heal) -> None:
        """Serve the state. Raises StateNotExportable if the same error fails it twice in a row."""
        try:
            self.exchange.send(command)
        except Exception as error:
            this = None if may_pass(error) else fingerprint(error)
            again, self._export_error = this == self._export_error, this
            if this is None or not again:
                raise
            raise StateNotExportable(
                f"the state of this rank could not be exported in two epochs in a row: "
                f"{text_of(error)}. Register only tensors, containers and plain values"
            ) from error
        self._export_error = None

    def _healed(self, record: Record, size: int, source: str) -> None:
        self._state.set_position(record)
        self._job.executor.report(
            Healed(record.epoch, size, source, self._state.digest_for_audit())
        )

    @property
    def joiners_wait(self) -> bool:
        """Whether a joiner must have its state before its first step function runs.

        A step function may change any part of the state, also one that a donor is sending. A digest
        for the audit is that of the state before the step function.
        """
        if self._learners == "never":
            return True
        declared = self._learners == "always" and not self._state.traces_digests
        return self._state.paradigm.steps_use_state and not declared

    def _may_overlap_fetch(self, command: Heal) -> bool:
        """Whether to fetch while the other groups compute; otherwise they wait for the fetch.

        The step function may change what a user's function exports or loads, and a data stream
        cannot be read before the position of the others is known.
        """
        state = self._state
        late = command.fetch_from is not None and self._job.peer.group in command.record.learners
        own = state.registered_state is not None and self.exchange.transfer is not None
        own = own and not self._manager._torchft.user_state_dicts
        is_fit = own and (state.source is None or state.source.in_any_order)
        return late and is_fit and not self.joiners_wait

    def _begin_background_fetch(self, command: Heal) -> None:
        engine = self._job.engine
        assert engine is not None and command.fetch_from is not None
        self.exchange.bind(command.record)
        self.background_fetch = BackgroundFetch(
            command.record,
            command.record.members[command.fetch_from].group,
            lambda: self.exchange.fetch(command),
            self.exchange.interrupt,
            engine.nudge,
        )
        self._job.executor.report(Connected(command.record.epoch))

    def load_fetched(self) -> bool:
        """Load the state that arrived during the step. False after a rollback or a failure."""
        fetch, engine = self.background_fetch, self._job.engine
        assert fetch is not None and engine is not None
        if not engine.wait_for(lambda: fetch.ended):
            return False
        self.background_fetch = None
        record, touched = fetch.record, False
        try:
            payload, size = fetch.result()
            touched = True
            self._state.load(payload, record, fetch.source, keep_gradients=True)
        except Exception as error:
            logger.warning("no state for epoch %d: %s", record.epoch, error)
            self._job.executor.report(_heal_failed(record, error, torn=touched))
            self._job.note_error(error)
            if isinstance(error, UnloadableState) or self._is_final(error, touched):
                raise
            return False
        self._healed(record, size, fetch.source)
        return True

    def cancel_fetch(self) -> None:
        """Cancel the fetch in progress."""
        fetch, self.background_fetch = self.background_fetch, None
        if fetch is not None:
            fetch.close(_CANCEL_FETCH_S)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_tensor_bytes, value))
    return 0


def _heal_failed(record: Record, error: Exception, torn: bool) -> HealFailed:
    """Return the report that this rank is not ready for the epoch of ``record``."""
    code = code_of(error, own=CauseCode.EPOCH_FAILED)
    return HealFailed(record.epoch, text_of(error), torn, code)


Payload = dict[str, Any]
_AGAIN_S = 0.05


class BackgroundFetch:
    """One fetch of the state with which the epoch of ``record`` begins.

    Args:
        record: The epoch record.
        source: The group that sends the state.
        fetch: Returns the state and its size in bytes, within its own time limit, or raises.
        stop: Makes a running ``fetch`` fail at once.
        on_done: Called on the thread of the fetch when it has ended, with or without success.
    """

    def __init__(
        self,
        record: Record,
        source: str,
        fetch: Callable[[], tuple[Payload, int]],
        stop: Callable[[], None],
        on_done: Callable[[], None],
    ) -> None:
        self.record = record
        self.source = source
        """The group that sends the state."""
        self._fetch, self._stop = fetch, stop
        self._came: Future[tuple[Payload, int]] = Future()
        self._came.add_done_callback(lambda _: on_done())
        # not an executor, whose threads would delay the exit of a process that fails elsewhere
        threading.Thread(target=self._run, name="fft-learning", daemon=True).start()

    def _run(self) -> None:
        try:
            self._came.set_result(self._fetch())
        except BaseException as error:  # noqa: BLE001 - raised again in result()
            self._came.set_exception(error)

    @property
    def ended(self) -> bool:
        """Whether the fetch has ended, so that `result` returns at once."""
        return self._came.done()

    def result(self) -> tuple[Payload, int]:
        """Return the state and its size in bytes, or raise the error of the fetch."""
        return self._came.result()

    def close(self, limit: float) -> None:
        """End a fetch that is no longer needed; wait at most ``limit`` seconds for its end."""
        deadline = time.monotonic() + limit
        while not self.ended and time.monotonic() < deadline:
            self._stop()  # repeated, because the fetch may not have connected yet
            wait([self._came], _AGAIN_S)
