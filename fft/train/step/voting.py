"""Voting of one rank: the preconditions, the choice of YES or NO, and the content of the vote.

This module runs on the main thread. `fft.train.step.worker` waits for the decision.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from fft.errors import GradientsNotReproducible, ResultRefused
from fft.messages.causes import CauseCode
from fft.messages.effects import StartTxn
from fft.messages.progress import Goal
from fft.messages.protocol import Prepared
from fft.trace.inputs import CONSUMED, LOOP, TORCHFT, TRANSACTIONS
from fft.train.data.global_batch import rows_of
from fft.train.data.step_input import StepInput
from fft.train.gradients.recomputation import Recompute
from fft.train.guard.injector import InjectedFault
from fft.train.process_groups import CollectiveFailed, GroupAborted
from fft.train.session.error_reports import code_of, text_of
from fft.train.session.rank_context import RankContext
from fft.train.step.healing import Healer


class Voter:
    """Votes for one rank, once in each txn.

    Attributes:
        preconditions: The conditions outside the job that a YES waits for.
    """

    def __init__(self, rank: RankContext, healer: Healer) -> None:
        self._manager, self._injector = rank.manager, rank.injector
        self._job, self._watchers = rank.job, rank.watchers
        self._state, self._txn, self._reductions = rank.state, rank.txn, rank.reductions
        self._healer, self._recomputation = healer, rank.results.recomputation
        self.preconditions = rank.state.paradigm.vote_preconditions()
        self._loop = ""
        """The loop of the last txn that this rank has voted in."""
        self._goal = Goal()
        """The planned end of FFT's own loop."""
        self._consumes: dict[str, Any] | None = None
        """The data that the commit of the open txn consumes, in FFT's own loop."""
        self._compares_at_vote = False
        """The vote of this txn compares the whole state, as the step function leaves it."""
        self._data: str | None = None
        """Digest of the data that this txn has drawn."""
        self._shard = ""
        """Name of the shard of the data that this rank draws from."""
        self._equality: str | None = None
        """Digest of the state, if the replicas are compared in this txn (`Vote.digest`)."""

    def begin(self, plan: StartTxn) -> None:
        """Start the txn of ``plan``.

        The first votes of a joiner compare the whole state, as the step function has left it.
        """
        self._data, self._shard = None, ""
        checks = self._state.checks
        head = self._job.local.head if self._job.local is not None else None
        at_vote = bool(checks and checks.every and head and head.unproven)
        self._compares_at_vote = at_vote
        self._equality = None if checks is None or at_vote else checks.digest(plan.step)

    def note_data(self, drawn: StepInput) -> None:
        """Add the digest of the data that this txn has drawn to the vote."""
        self._data, self._shard = drawn.digest, drawn.shard
        if self._goal.samples is None and self._loop != TRANSACTIONS:
            self.announce(replace(self._goal, samples=rows_of(drawn.batch)))

    def announce(self, goal: Goal) -> None:
        """Take the planned end of the loop; it is traced and reported with the first vote."""
        self._goal = goal

    def compare_now(self) -> None:
        """Compare the replicas in this txn, even if that is not due: it is the last of the job."""
        checks = self._state.checks
        if checks is not None and self._equality is None and not self._compares_at_vote:
            self._equality = checks.now()

    def ask(self, plan: StartTxn) -> None:
        """Request the preconditions of the txn that begins; its vote waits for them.

        Raises:
            NoLighthouseQuorum: a precondition has failed in too many attempts in a row.
        """
        for each in self.preconditions:
            each.ask(plan)

    def end(self) -> None:
        """End the wait for the preconditions, because the txn is over. Thread-safe. Idempotent."""
        for each in self.preconditions:
            each.end()

    def pause(self) -> None:
        """Wait before the next attempt, after a rollback of a job that makes no progress."""
        for each in self.preconditions:
            with self._watchers.waiting():
                each.pause()

    def vote(
        self,
        plan: StartTxn,
        skip: bool,
        last: bool,
        consumes: dict[str, Any] | None,
        block: str = "",
    ) -> None:
        """Wait for the preconditions of the vote, and cast it.

        A rank whose fetch has failed casts no vote, because its engine has the failure already.

        Args:
            consumes: The data that its commit consumes, or None in torchft's loop.
            block: The entry or the end of a live block; empty in a step.
        """
        if not block:
            self._note_loop(plan, consumes)
        self._watchers.body_done()
        with self._watchers.waiting():
            self._reductions.wait()
            self._await_preconditions(plan)
        self.inject("vote")
        if self._state.registered_state is not None:
            self._state.registered_state.note_edits()
        if not self._has_state():
            return
        # an inf in one shard is enough: the engine combines the skip flags of all ranks
        is_step = not block and self._txn.failure is None
        skip = skip or (is_step and self._must_skip(plan))
        cause, code = "", CauseCode.NONE
        if (error := self._txn.failure) is not None:
            cause, code = text_of(error), code_of(error)
        if self._compares_at_vote and not block and error is None:
            epoch = self._job.local.epoch if self._job.local is not None else None
            overlaps = epoch is not None and bool(epoch.learners)
            self._equality = self._state.digest_for_first_vote(overlaps)
        own = self._gradients() if error is None and not skip and not block else None
        repeats = self._recomputation.repeats(own)
        build = self._reductions.manifest.build
        manifest = build(self._data, self._shard, block, own, repeats)
        digest = self._equality
        yes = error is None
        if yes:
            self._state.checkpoints.before_vote(plan, last, skip)
        waits = self._healer.joiners_wait
        vote = Prepared(plan.token, yes, manifest, cause, skip, digest, waits, last, code)
        self._job.executor.report(vote)
        self.inject("after_vote")

    def _gradients(self) -> str | None:
        """Return the fingerprint of the tensors that a commit would apply, if the replicas compare
        it.

        A torchft loop applies its gradients itself, and may average something else.
        """
        checks = self._state.checks
        if checks is None or self._equality is None or self._loop == TORCHFT:
            return None
        return checks.gradients(self._state.paradigm.reduced())

    def _must_skip(self, plan: StartTxn) -> bool:
        """Return whether the result of the txn must be skipped; if it is refused, vote NO.

        In torchft's loop the script itself decides about the gradients.
        """
        if self._loop == TORCHFT:
            return self._state.updates.must_skip()
        try:
            return self._state.paradigm.must_skip(plan)
        except (ResultRefused, GradientsNotReproducible, Recompute, GroupAborted) as error:
            self._txn.failure = error
            return False
        except CollectiveFailed as error:  # a peer has already left the sum of the norms
            self._txn.failure = error
            self._job.note_error(error)
            return False

    def _note_loop(self, plan: StartTxn, consumes: dict[str, Any] | None) -> None:
        """Trace that another loop begins with this vote.

        The one before it has ended: however it was left, it commits nothing more.
        """
        loop, self._consumes = TORCHFT if consumes is None else TRANSACTIONS, consumes
        if loop != self._loop:
            self._loop = loop
            goal = {name: value for name, value in asdict(self._goal).items() if value is not None}
            told = {"goal": goal} if loop == TRANSACTIONS else {}
            self._job.note(LOOP, {"runs": loop, "from": list(plan.token), **told})
            if told and self._job.reporter is not None:
                self._job.reporter.goal = self._goal

    def committed(self) -> None:
        """Trace, before the engine continues, what the commit of the last vote consumes."""
        consumes, self._consumes = self._consumes, None
        if consumes is not None:
            self._job.trace.note(CONSUMED, consumes)

    def _await_preconditions(self, plan: StartTxn) -> None:
        """Wait until each condition holds; vote NO for the first one that does not."""
        for each in self.preconditions:
            if self._txn.failure is not None:
                return
            if (error := each.wait_until_met(plan)) is not None:
                self._txn.failure = error

    def _has_state(self) -> bool:
        """Wait for a fetch; return whether this rank can vote. A NO vote needs no state."""
        if self._healer.background_fetch is None or self._txn.failure is not None:
            return True
        with self._watchers.waiting():  # the fetch has its own limits
            return self._healer.load_fetched()

    def inject(self, phase: str) -> None:
        """Inject the planned fault of ``phase``, if any, as a reported error."""
        if self._injector is None:
            return
        try:
            self._injector.at(phase)
        except InjectedFault as fault:
            self._manager.report_error(fault)
