"""Live blocks: code that every member of the live set runs, and that either every member finishes
or none.

A block consists of two transactions of the job; neither changes FFT's state. The first one commits
when all members of the epoch have voted, so all wait at the entry together. The epoch's record is
the list of members. The second one commits when all have finished the block. If it does not commit,
every member of the block raises `LiveBlockFailed`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import FrameType

from fft.bus import BusError
from fft.errors import (
    DeviceLost,
    Drained,
    FftError,
    LiveBlockFailed,
    LiveBlockMisuse,
    RestartRefused,
)
from fft.messages.causes import Cause, CauseCode
from fft.messages.effects import Apply, StartTxn
from fft.messages.protocol import ENTRY, Peer, Record
from fft.train.guard import accelerator
from fft.train.guard.interrupt import Interrupted
from fft.train.guard.unsafe_places import guarded
from fft.train.limits import Feature
from fft.train.session.error_reports import different_blocks
from fft.train.session.rank_context import RankContext
from fft.train.step.attempt import AttemptContext
from fft.train.step.transaction import TransactionLoop

LIVE = "live_block"
"""Name of the trace note for a live block that is entered, finished or failed."""

_REFUSAL = "restart_refused"
"""Register with the text of the RestartRefused that has ended the job."""


class LiveBlocks:
    """The live blocks of one manager; at most one is open at a time. Main thread only."""

    def __init__(self, rank: RankContext, loop: TransactionLoop) -> None:
        self._manager, self._limits = rank.manager, rank.limits
        self._job, self._watchers = rank.job, rank.watchers
        self._txn, self._features = rank.txn, rank.features
        self._loop, self._worker, self._commits = loop, loop.worker, loop.commits
        self._attempt = loop.attempt
        self._open = ""
        """Place of the open block, or empty."""
        self._plan: StartTxn | None = None
        self._members: tuple[Peer, ...] = ()
        self._before = False
        """The value of ``txn.by_fft`` before the open block, which `_close` restores."""

    def block(self, frame: FrameType | None) -> LiveBlock:
        """Return a block that the code of ``frame`` enters."""
        assert frame is not None, "a caller exists"
        return LiveBlock(self, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    def final_block(self, place: str) -> LiveBlock:
        """Return a block at whose end all members leave the job, which is then complete."""
        return LiveBlock(self, place, is_final=True)

    # --- the entry ---

    def enter(self, place: str, is_final: bool = False) -> tuple[Peer, ...]:
        """Wait until all members have reached the entry of the block, and return them.

        Raises:
            RestartRefused: A final block was entered too late: this error has ended the job.
        """
        self._raise_if_nested(place)
        self._open = place
        self._before, self._txn.by_fft = self._txn.by_fft, True
        try:
            self._members = self._commit_entry(place)
            self._note("entered", place)
            following = self._worker.continue_epoch()
            if not isinstance(following, StartTxn):
                raise self._failure(*self._rolled_back(following), place)
            if is_final:
                self._raise_if_refused()
        except BaseException as failure:
            self._close()
            if is_final and isinstance(failure, (FftError, Drained)):
                self._raise_if_refused()
            raise
        self._plan = following
        return self._members

    @guarded
    def start(self) -> None:
        """Allow interruptions of the block by a rollback. A block has no usual duration."""
        if self._watchers.monitor is not None:
            self._watchers.monitor.pulse.atomic.__enter__()
        self._attempt.allow_interrupts()

    @guarded
    def end(self) -> None:
        """Disable interruptions: the block has returned or raised."""
        self._attempt.exit()
        if self._watchers.monitor is not None:
            self._watchers.monitor.pulse.atomic.__exit__()

    def _commit_entry(self, place: str) -> tuple[Peer, ...]:
        """Repeat the entry's txn until one commits in an epoch that continues; return the members
        of that epoch."""
        while True:
            if (plan := self._worker.begin()) is None:
                if self._loop.is_over:
                    raise LiveBlockFailed(
                        f"{place}: a live block cannot follow the last step of transactions(), "
                        "with whose commit the job ends. Do its work after the loop, without "
                        "manager.live(), or enter it only if txn.step + 1 < max_steps"
                    )
                raise Drained("this replica group has drained")
            members = self._members_of(plan)
            command = self._vote(f"{ENTRY}{place}")
            if command is None:
                self._raise_if_out_of_order(plan, place, members)
            elif not command.record.change:
                return members

    def _members_of(self, plan: StartTxn) -> tuple[Peer, ...]:
        """Return the members of the epoch of ``plan``; empty if the engine is in another one."""
        local = self._job.local
        epoch = None if local is None else local.epoch
        return epoch.peers if epoch is not None and epoch.epoch == plan.token.epoch else ()

    def _vote(self, block: str, last: bool = False) -> Apply | None:
        at = block if block.startswith(ENTRY) else ""
        command = self._attempt.vote(skip=True, last=last, block=block, place=at)
        if command is not None:
            self._commits.apply_block(command)
        return command

    # --- the end ---

    def leave(self, place: str, error: BaseException | None, is_final: bool = False) -> None:
        """End the block: it commits, or raises on all members.

        Args:
            place: The place of the block in the code.
            error: The exception that left the block, or None.
            is_final: All members leave the job with the block.

        Raises:
            LiveBlockFailed: A member has failed; the message names it.
            StepRetriesExceeded: The block failed too many times in a row with the same error on
                this rank.
        """
        try:
            if error is None:
                error = self._synchronize()
            if error is None:
                if self._vote(f"end of {place}", is_final) is not None:
                    self._attempt.failures.committed()
                    self._note("finished", place)
                    if is_final:
                        self._worker.begin()  # waits until this rank has left
                        self._worker.hooks.complete()
                    return
            else:
                self._report(error)
            if error is None or isinstance(error, (Exception, Interrupted)):
                raise self._failure(
                    *self._rolled_back(self._worker.continue_epoch()), place
                ) from error
        except (FftError, Drained):
            if is_final:  # the others may have left before this rank was told
                self._raise_if_refused()
            raise
        finally:
            self._close()

    def _synchronize(self) -> Exception | None:
        """Wait for the work that the block has queued on devices. Return its error, if any."""
        try:
            with self._watchers.waiting():
                accelerator.wait(self._manager._torchft.timeout)
        except (RuntimeError, TimeoutError, DeviceLost) as error:
            return error
        return None

    def _report(self, error: BaseException) -> None:
        """Report an exception that left the block, which rolls it back on all members."""
        assert self._plan is not None, "the block is open"
        self._attempt.fail(self._plan, None, error)
        if not isinstance(error, Exception | Interrupted):
            self._manager.report_error(RuntimeError(f"{type(error).__name__} left a live block"))

    def _rolled_back(self, following: StartTxn | Record | None) -> tuple[Record, Cause]:
        """Return the record of the next epoch, and take the cause of the rollback before it.

        Raises Drained if no epoch follows.
        """
        if not isinstance(following, Record):
            raise Drained("this replica group has drained")
        return following, self._attempt.take_rollback().cause

    def _failure(
        self, following: Record, cause: Cause, place: str
    ) -> LiveBlockFailed | RestartRefused:
        """Return the error for a block that ``cause`` rolled back before ``following``."""
        gone = [peer for peer in self._members if peer not in following.peer_set]
        failed = tuple(sorted({*gone, *cause.accused}))
        self._note("failed", place, failed=list(map(str, failed)), cause=cause.text)
        if cause.code == CauseCode.RESULT_ENDS_JOB:
            text = cause.finding.removeprefix(f"{RestartRefused.__name__}: ")
            with suppress(BusError):  # for processes that join or are late
                self._job.bus.write(_REFUSAL, text.encode())
            return RestartRefused(text)
        if cause.code == CauseCode.BLOCK_BESIDE_STEP:
            uncommitted = (
                ". The transaction before this block was not committed: enter a block only if "
                "txn.committed"
            )
            return LiveBlockFailed(
                f"the live block at {place} was not entered: {cause.finding}. These ranks do not "
                "reach the block before they have run their step, as a group does that has just "
                "come back. Go on with the next transaction, in which all take this step"
                f"{uncommitted if self._loop.is_rolled_back else ''}",
                failed,
                self._members,
            )
        names = ", ".join(map(str, failed)) or "none"
        members = ", ".join(map(str, self._members))
        return LiveBlockFailed(
            f"the live block at {place} failed on all its members ({members}). Failed members: "
            f"{names}. Cause: {cause.text or 'unknown'}. FFT's state is unchanged; undo the "
            "changes of the block, and enter it again",
            failed,
            self._members,
        )

    def _raise_if_refused(self) -> None:
        """Raise RestartRefused if it has ended the job on other ranks."""
        with suppress(BusError):
            if (text := self._job.bus.read(_REFUSAL)) is not None:
                raise RestartRefused(text.decode())

    def _close(self) -> None:
        self._open, self._plan = "", None
        self._txn.by_fft = self._before

    def _note(self, what: str, place: str, **more: object) -> None:
        members = list(map(str, self._members))
        self._job.note(LIVE, {"what": what, "place": place, "members": members, **more})

    # --- misuse ---

    def _raise_if_nested(self, place: str) -> None:
        """Raise LiveBlockMisuse for a block within another one, or within a transaction."""
        self._features.use(Feature.LIVE)
        if self._open:
            raise LiveBlockMisuse(
                f"live block at {place} inside the live block at {self._open}: blocks cannot be "
                "nested. Move the inner code into the outer block, or the inner block behind it"
            )
        if self._txn.plan is not None and self._txn.voted is None:
            raise LiveBlockMisuse(
                f"live block at {place} inside an open transaction: enter it between two "
                "transactions, after `with txn:` or after should_commit()"
            )

    def _raise_if_out_of_order(self, plan: StartTxn, place: str, members: tuple[Peer, ...]) -> None:
        """Raise an error if a live member entered another block or a step, or did not enter in
        time.

        Raises:
            LiveBlockFailed: A member is in a step, as after a return to the job; it repeats it.
            StepRetriesExceeded: This rank has met members in a step here before.
            LiveBlockMisuse: A member entered another block, or none in time.
        """
        following, cause = self._rolled_back(self._worker.continue_epoch())
        if cause.code == CauseCode.BLOCK_BESIDE_STEP:
            self._members = members
            failure = self._failure(following, cause, place)
            self._attempt.raise_if_retries_exceeded(
                plan, None, failure, plan.step, f"live block at {place}"
            )
            raise failure
        if cause.code == CauseCode.BLOCKS_DIFFER:
            raise different_blocks(cause)
        if cause.code == CauseCode.NO_DECISION:
            window = self._limits["vote_window"].seconds
            raise LiveBlockMisuse(
                f"live block at {place}: within vote_window = {window:g} s not all members "
                f"({', '.join(map(str, members))}) have entered it. Every process must enter "
                "every block, in the same order: move the block out of `if rank == …:`, and enter "
                "it only if txn.committed. If the code between two blocks takes longer, raise the "
                "window: timeouts={'vote_window': seconds}"
            )


class LiveBlock(AttemptContext):
    """One use of ``with manager.live() as members:``."""

    def __init__(self, blocks: LiveBlocks, place: str, is_final: bool = False) -> None:
        self._blocks, self._place, self._is_final = blocks, place, is_final

    @guarded
    def __enter__(self) -> tuple[Peer, ...]:  # type: ignore[override]
        members = self._blocks.enter(self._place, self._is_final)
        self._blocks.start()
        return members

    @guarded
    def _exit(self) -> None:
        self._blocks.end()

    def _complete(self) -> None:
        self._blocks.leave(self._place, None, self._is_final)

    def _fail(self, error: BaseException) -> bool:
        self._blocks.leave(self._place, error, self._is_final)
        return False
