"""The main thread of a simulated process.

It does in virtual time what ``fft.train.worker`` does with a command, by the same table
(``fsm_specs/main_thread.yaml``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import (
    Applied,
    ApplyFailed,
    Connected,
    Fault,
    Healed,
    HealFailed,
    Manifest,
    Peer,
    Prepared,
    Record,
    Restored,
    Stop,
    Synchronise,
    Token,
)
from fft.protocol.apart import is_brought, own_lease
from fft.prove.bits import Bits
from fft.prove.simulator.meetings import Meeting
from fft.prove.simulator.standing import Command, Standing

if TYPE_CHECKING:
    from fft.prove.simulator.process import Process

STATE_BYTES = 1000
"""Size of one transfer of state, in bytes."""
_SHUTDOWN = 5.0
"""Seconds that a manager's shutdown waits for its engine."""


@dataclass(frozen=True)
class _Came:
    """The result of a fetch. ``bits`` is None if it failed."""

    cause: str
    bits: Bits | None = None
    source: str = ""
    torn: bool = False


class MainThread:
    """The user's thread; ``bits`` models the real contents of its memory."""

    def __init__(self, process: Process, bits: Bits) -> None:
        self.bits = bits
        self.serving: Record | None = None
        """The epoch whose members can fetch this process's state."""
        self._process = process
        self._world = process.world
        self._slot: Command | None = None
        self._stands = Standing(process)
        self._waits = True
        """It waits for a command; otherwise it is working, or has ended."""
        self._quits = False
        """Its user's code gives up."""
        self._plan: StartTxn | None = None
        self._meeting: Meeting | None = None
        self._serial = 0
        """Number of the newest wait; results of older waits are ignored."""
        self._era = -1
        """Record number of the epoch of the process groups; ``_members`` has their members."""
        self._members: tuple[Peer, ...] = ()
        self._aborted = True
        self._failing: str | None = None
        """The fault that will occur in this step function."""
        self._heal: Heal | None = None
        self._held = 0, False
        """Contents of the vote once the state has arrived: reductions, and whether to skip."""
        self._interval = self._world.digest_interval()
        self._learning: Heal | None = None
        """For a learner: the heal that it is fetching its state for."""
        self._came: _Came | None = None
        """The result of that fetch."""
        self._computed: tuple[int | None, int] | None = None
        """In an asynchronous job: lease and base of the group's contribution, or None."""

    # --- commands ---

    def command(self, command: Command) -> None:
        """Take a command that the engine has put into the slot; the newest one counts."""
        self._slot = command
        if self._quits and isinstance(command, Finish):
            self._exit(1)
        self._look()

    def _look(self) -> None:
        """Take the command, if this thread is waiting for one."""
        command = self._slot
        if command is None or not self._waits:
            return
        self._slot, self._waits = None, False
        for effect in self._stands.hears(command):
            self._carry_out(effect, command)

    def _carry_out(self, effect: str, command: Command) -> None:
        match effect, command:
            case "restore", Restore():
                self._process.later(self._world.latency.restore(), self._restored, command)
            case "connect", Heal():
                self._begin_heal(command)
            case "begin_body", StartTxn():
                self._enter(command)
            case "apply", Apply():
                base = self._computed[1] if self._computed is not None else None
                self._world.consumed(self._process, self._plan, base)
                self._computed = None
                self._process.later(self._world.latency.apply(), self._applied, command.skip)
            case "leave", Finish(error=error):
                self._exit(int(error is not None))
            case _:
                raise TypeError(f"the simulator cannot {effect} for {command}")

    def _exit(self, code: int) -> None:
        self._process.later(self._world.latency.exit(), self._world.exited, self._process, code)

    def _wait(self) -> None:
        self._waits = True
        self._look()

    def _give_up(self) -> None:
        """End the step function without a vote."""
        self._stands.moves_on("unwound")
        self._wait()

    def _token(self) -> Token:
        return self._process.local.token

    def _restored(self, command: Restore) -> None:
        self._plan, self._learning = None, None
        self.bits = self.bits.restored()
        self._stands.says(Restored(command.token))
        self._wait()

    def _applied(self, skip: bool) -> None:
        who, token = self._process.peer, self._token()
        if self._world.strikes("apply_failed"):
            self.bits, self._computed = self.bits.torn(who), None
            self._stands.says(ApplyFailed(token, "the optimizer step raised"))
        else:
            self.bits = self.bits.skipped(token) if skip else self.bits.applied(who, token)
            self._stands.says(Applied(token, self.bits.told))
            if self._world.spec.bound:
                self._stand_apart()
        self._wait()

    def _stand_apart(self) -> None:
        """Compute this group's contribution to a later synchronization, then ask to be in it."""
        process = self._process
        record = process.local.head
        assert record is not None, "a txn was committed"
        self._computed = own_lease(record.leases, process.participant.config), record.step
        after = self._world.apart_for(process.peer)
        process.later(after, process.post, Synchronise())

    def _bring(self, plan: StartTxn) -> None:
        """Keep the computed contribution, or recompute it in the txn from the epoch's state."""
        if not self._world.spec.bound:
            return
        config, epoch = self._process.participant.config, self._process.local.epoch
        if plan.lease is None:
            self._computed = None
        elif self._computed is None or not is_brought(epoch, config, self._computed, plan.lease):
            self._computed = plan.lease, plan.step

    # --- the process groups ---

    def abort(self) -> None:
        """Abort the groups for the engine, which unblocks every thread in them on all ranks."""
        if self._aborted:
            return
        self._aborted = True
        self._world.lost(self._process.peer, self._era)
        if self._meeting is not None:
            self._process.later(self._world.latency.hop(), self.missed, self._serial, "aborted")

    def _meet(self, key: tuple[int, ...], limit: float) -> None:
        self._serial += 1
        self._meeting = self._world.meeting(key, self._members)
        self._meeting.join(self._process, self._serial, limit)

    def met(self, serial: int) -> None:
        """Continue after all members came."""
        if serial != self._serial or self._meeting is None:
            return
        self._meeting = None
        if self._heal is None:
            self._reduced()
        elif self._aborted:
            self._heal_failed("aborted")
        else:
            self._rebuilt(self._heal)

    def missed(self, serial: int, cause: str) -> None:
        """Continue after a member did not come or the groups were aborted."""
        if serial != self._serial or self._meeting is None:
            return
        self._meeting = None
        if self._heal is not None:
            self._heal_failed(cause)
        elif self._aborted:
            self._unwind()
        else:
            self._fail(f"a reduction failed: {cause}")

    # --- the step function ---

    def _enter(self, plan: StartTxn) -> None:
        world = self._world
        if plan.token.txn > 1 or self.serving is None or not self.serving.learners:
            self.serving = None
        self._plan = plan
        self._bring(plan)
        self.bits = self.bits.begin(self._process.peer, plan.token)
        if world.compares and self._learning is None and world.strikes("corrupted"):
            self.bits = self.bits.corrupted(self._process.peer)
        self._failing = world.body_fault()
        compute = world.latency.compute()
        if not world.data_notes.takes(self._process, plan):
            self._process.later(compute, self._quit)  # as of a loader that has failed
        elif self._failing in ("exception", "quit"):
            self._process.later(compute * world.rng.random(), self._raise, self._failing)
        else:
            self._process.later(compute, self._reduce)

    def _raise(self, kind: str) -> None:
        self._world.count(kind)
        if kind == "quit":
            self._quit()
            return
        self._fault(f"injected: {kind}")
        self._give_up()

    def _quit(self) -> None:
        self._world.lost(self._process.peer, self._era)
        self._aborted = self._quits = True
        self._process.post(Stop("the user's code gave up"))
        self._process.later(_SHUTDOWN, self._world.exited, self._process, 1)

    def _fault(self, cause: str) -> None:
        assert self._plan is not None
        if not self._aborted:
            self._process.post(Fault(self._plan.token, cause))

    def _reduce(self) -> None:
        plan = self._plan
        assert plan is not None
        if self._aborted:
            self._unwind()
            return
        if self._failing == "user_skips_early":
            self._world.count(self._failing)
            self._vote(0, skip=True)
            return
        if self._failing == "skipped" and self._world.skips_alone(plan.token, self._members):
            self.bits = self.bits.spoil(self._process.peer)
            self._vote(self._world.rng.choice([0, self._world.reductions - 1]))
            return
        self._meet((self._era, *plan.token), self._world.group_timeout)

    def _reduced(self) -> None:
        assert self._plan is not None
        if self._aborted:
            self._unwind()
        elif self._failing in ("one_sided", "late_exception"):
            self._world.count(self._failing)
            if self._failing == "one_sided":
                self._fail("injected: the last reduction failed on this side")
            else:
                self._raise_late()
        else:
            world, token = self._world, self._plan.token
            left_out = world.skipped_by_all(token) == self._process.peer.rank
            alone = self._failing == "user_skips"
            if alone:
                world.count("user_skips")
            self._vote(world.reductions - left_out, skip=world.all_skip(token) or alone)

    def _raise_late(self) -> None:
        self._fault("injected: exception after the reductions")
        self._give_up()

    def _fail(self, cause: str) -> None:
        """Handle a failed reduction: the gradients here differ from those of the peers."""
        self.bits = self.bits.spoil(self._process.peer)
        self._fault(cause)
        if self._world.awaits_reductions:
            self._vote(self._world.reductions, cause)
        else:
            self._give_up()

    def _unwind(self) -> None:
        """End the step function after an abort."""
        if self._world.awaits_reductions:
            self._vote(self._world.reductions, "the process group was aborted")
        else:
            self._give_up()

    def _vote(self, count: int, cause: str = "", skip: bool = False) -> None:
        """Post YES, or NO because of ``cause``, and wait for the decision."""
        assert self._plan is not None
        if self._learning is not None and not cause:
            self._held = count, skip
            self._waits = True
            self._learn()
            return
        manifest = Manifest(count=count, bytes=4 * count, shapes="x")
        # By the step, so that a replay compares again.
        compares = self._world.compares and self._plan.step % self._interval == 0
        digest = self.bits.digest if compares else None
        self._stands.says(Prepared(self._plan.token, not cause, manifest, cause, skip, digest))
        if self._failing == "after_vote" and not cause:
            self._world.count("after_vote")
            self._process.post(Fault(self._plan.token, "injected: fault after the vote"))
        self._wait()

    def _learn(self) -> None:
        """Vote for a learner whose step function has ended, once its state has arrived."""
        learning, came = self._learning, self._came
        is_over = self._waits and self._stands.role == "computing"
        if not is_over or learning is None or came is None:
            return
        self._learning = None
        if came.bits is None:
            self._failed_to_heal(learning, came.cause, came.torn)
            return
        self.bits = self.bits.learnt(came.bits)
        self._stands.says(Healed(learning.record.epoch, STATE_BYTES, came.source, self.bits.told))
        self._waits = False
        count, skip = self._held
        self._vote(count, skip=skip)

    # --- healing ---

    def _begin_heal(self, command: Heal) -> None:
        self._heal, self._era, self._aborted = command, command.record.n, False
        self._members = tuple(p for g in command.record.members for p in g.peers())
        limit = self._process.participant.config.timeouts.get("ready_window", 60.0)
        self._meet((command.record.n,), limit)

    def _rebuilt(self, command: Heal) -> None:
        world = self._world
        if world.strikes("heal_failed"):
            self._heal_failed("injected: connection reset")
            return
        if command.send_to:
            self.serving = command.record
        if command.fetch_from is None:
            self._healed(0, "")
            return
        limit = self._process.participant.config.timeouts.get("vote_window", 60.0)
        give_up = world.clock.now + limit
        self._process.later(world.latency.transfer(), self._fetch, command, give_up)
        if self._process.peer.group in command.record.learners:
            self._heal, self._learning, self._came = None, command, None
            self._stands.says(Connected(command.record.epoch))
            self._wait()

    def _fetch(self, command: Heal, give_up: float) -> None:
        """Complete the transfer if its source is ready; otherwise wait for it."""
        world, record = self._world, command.record
        if command is not (self._heal or self._learning):
            return  # a rollback has ended it
        assert command.fetch_from is not None
        entry = record.members[command.fetch_from]
        source = world.processes[entry.peers()[self._process.peer.rank]]
        served = source.main.serving
        if not source.alive:
            self._fetched(_Came(f"{source.peer} does not answer"))
        elif served is None or source.stopped:
            if world.clock.now >= give_up:
                self._fetched(_Came(f"{source.peer} serves no state"))
            else:
                self._process.later(0.1, self._fetch, command, give_up)
        elif served.step != record.step or served.lineage != record.lineage:
            self._fetched(_Came(f"{source.peer} serves step {served.step}"))
        elif world.strikes("heal_torn"):
            self._fetched(_Came("injected: the state does not fit", torn=True))
        else:
            self._fetched(_Came("", source.main.bits, entry.group))

    def _fetched(self, came: _Came) -> None:
        if self._heal is None:
            self._came = came
            self._learn()
        elif came.bits is None:
            self._heal_failed(came.cause, came.torn)
        else:
            self.bits = self.bits.fetched(came.bits)
            self._healed(STATE_BYTES, came.source)

    def _healed(self, size: int, source: str) -> None:
        assert self._heal is not None
        epoch, self._heal = self._heal.record.epoch, None
        self._stands.says(Healed(epoch, size, source, self.bits.told))
        self._wait()

    def _heal_failed(self, cause: str, torn: bool = False) -> None:
        healing, self._heal = self._heal, None
        assert healing is not None
        self._failed_to_heal(healing, cause, torn)

    def _failed_to_heal(self, command: Heal, cause: str, torn: bool) -> None:
        if torn:
            self.bits = self.bits.torn(self._process.peer)
        self._stands.says(HealFailed(command.record.epoch, cause, torn))
        if torn and self._world.rng.random() < 0.7:  # the manager raises: the process ends
            self._waits = False
            self._exit(1)
            return
        self._wait()
