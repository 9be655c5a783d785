"""Guarantees 8 to 11 and 14: membership, leaving, joining, and the end of doubt. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.effects import Decide, Finish, Heal
from fft.messages.protocol import Begin, Join, Peer, Record, Stop, Timer
from fft.protocol.active import chosen
from fft.protocol.flow import data_end
from fft.protocol.invariants.claims import Claim, Given, Holds, Know, Move, Same, leavers_of
from fft.protocol.roles import COMMITTING, OUTSIDE
from fft.protocol.state import Local, member_peers, members, waited_for


def live_set(move: Move) -> Iterator[Claim]:
    """8: an epoch's members are the same set for all, and all were in the barrier at one instant.

    This follows the formal semantics of JAX's ``live_devices``: a participant that leaves the
    barrier has seen that every member had entered it, and no other participant gets that epoch.
    """
    before, after, peer = move.before, move.after, move.peer
    if move.came_ready:
        yield Know(("in barrier", before.token.epoch, peer))
    new = after.epoch
    if new is not None and (before.epoch is None or before.epoch.n != new.n):
        text = f"{peer} and others have different member lists for epoch {new.epoch}"
        yield Same(("epoch", new.epoch), new, text)
        inside = any(peer in g.peers() for g in new.members)
        yield Holds(inside, f"{peer} entered epoch {new.epoch} uninvited")
    for effect in move.out.effects:
        if isinstance(effect, Decide) and effect.proposal.kind == "epoch":
            left = sorted(_left_out(after, effect))
            names = ", ".join(map(str, left))
            text = f"{peer} leaves {names} out of epoch {effect.proposal.epoch}, and nothing is"
            yield Holds(not left, text + " said against them")
            yield from _active(peer, effect.proposal)
    if move.entered("training") and before.role == "healing":
        epoch = after.token.epoch
        if isinstance(move.event, Begin):
            text = f"{peer} left the barrier of epoch {epoch} at the word for {move.event.epoch}"
            yield Holds(move.event.epoch == epoch, text)
        for member in member_peers(after):
            text = f"{peer} left the barrier of epoch {epoch} without {member}"
            if not isinstance(move.event, Begin):  # the coordinator has all `ready` messages
                yield Holds(after.ready.get(member) == epoch, text)
            yield Given((("in barrier", epoch, member),), text)


def _active(peer: Peer, epoch: Record) -> Iterator[Claim]:
    """The members that contribute are those that the rules choose, and they hold the state."""
    if epoch.rules:
        due = chosen([(g.group, g.place) for g in epoch.members], epoch.rules)
        text = (
            f"{peer} has {epoch.active} contribute to epoch {epoch.epoch}; the rules choose {due}"
        )
        yield Holds(bool(due) and epoch.active == due, text)
        late = set(epoch.active) & set(epoch.learners)
        yield Holds(not late, f"{sorted(late)} must contribute to epoch {epoch.epoch}, but fetch")


def _left_out(s: Local, decide: Decide) -> Iterator[Peer]:
    """Members that the next epoch lacks although their group neither leaves nor has lost a rank.

    Leavers are those of the record that the proposal follows. The participant's head may be newer
    at the end of the move, because deferred events are retried in it.
    """
    gone, inside = s.dead | s.suspected | s.joining, decide.proposal.peer_set
    for group in s.epoch.members if s.epoch else ():
        peers = group.peers()
        said = [s.hellos.get((p.group, p.rank)) for p in peers]
        stuck = any(h is not None and h.unwinding for h in said)
        leaves = decide.after is not None and group.group in leavers_of(decide.after)
        if not (stuck or leaves or gone & set(peers) or inside & set(peers)):
            yield from peers


def drain(move: Move) -> Iterator[Claim]:
    """9: a group that leaves on purpose leaves after a commit, and no rollback follows from it.

    It may also leave between two epochs, if no epoch was formed in time or no other group is to
    stay, or while its txn is held for a scope that has ended.
    """
    record = move.record
    if move.entered("terminal"):
        exit_ = next(step for step in move.out.steps if step.roles[1] == "terminal")
        gone = [e for e in move.out.effects if isinstance(e, Finish)]
        on_purpose = bool(gone) and gone[0].error is None and not isinstance(move.event, Stop)
        if on_purpose:
            text = f"{move.peer} left on purpose in state {exit_.source}, not after a commit"
            alone = _nobody_to_go_on_with(move) or _has_no_data(move.after)
            yield Holds(exit_.roles[0] in OUTSIDE or alone, text)
    if record is None:
        return
    yield Know(("record", record.n), record)
    if record.kind == "epoch":
        members = frozenset(peer for g in record.members for peer in g.peers())
        yield Know(("members", record.epoch), members)
    if record.kind == "commit" and record.last:
        text, left = f"record {record.n} ends the job, though some stay", leavers_of(record)
        members_of = (("members", record.epoch),)
        yield Given(members_of, text, lambda all_: {p.group for p in all_} <= set(left), False)
    # A record is compared with its predecessor, which also works while moves still arrive.
    last, n = ("record", record.n - 1), record.n
    text = f"after participants left with record {n - 1} came a rollback"
    left_well = record.kind == "epoch"
    yield Given((last,), text, lambda was: left_well or not leavers_of(was), needed=False)
    if record.kind == "epoch":
        yield Given(
            (("members", record.epoch - 1), last),
            f"some who left with record {n - 1} are in the next epoch",
            lambda members, was: not _stayed(members, was, record),
            needed=False,
        )


def _nobody_to_go_on_with(move: Move) -> bool:
    s, head = move.after, move.after.head
    if head is None or head.kind == "epoch" or head.epoch != s.token.epoch:
        return False
    if isinstance(move.event, Timer) and move.event.name == "quorum":
        return True
    others = {p.group for p in member_peers(s)} - {move.peer.group} - set(leavers_of(head))
    asked = {p.group for p in member_peers(s) if p in s.leaving}
    lost = {p.group for p in member_peers(s) if p in s.dead} & others
    return not others or (bool(lost) and others <= asked)


def _has_no_data(s: Local) -> bool:
    at = s.epoch if s.epoch is not None and s.token.txn == 1 else s
    return data_end(s, at.cursor, len(members(s)))


def _stayed(members: frozenset[Peer], last: Record, after: Record) -> set[Peer]:
    """Participants that left with ``last`` and are members of the epoch after it."""
    left = {peer for peer in members if peer.group in leavers_of(last)}
    return left & {peer for group in after.members for peer in group.peers()}


def join(move: Move) -> Iterator[Claim]:
    """11: a group that asks to join is admitted after a commit, and no attempt is lost by it."""
    event, record = move.event, move.record
    if isinstance(event, Join):
        who = event.hello.peer
        known = any(p[:2] == who[:2] for p in member_peers(move.before))
        aborts = any(isinstance(e, Decide) and e.proposal.kind == "abort" for e in move.out.effects)
        yield Holds(
            known or not aborts, f"{move.peer} gave an attempt up because {who} asks to join"
        )
        epoch = move.before.epoch
        if epoch is not None and who in epoch.peer_set and event.hello.head >= epoch.n:
            heard = move.out.verdict != "row" or move.entered("terminal")
            heard = heard or who in move.after.joining or who in move.after.dead
            text = f"{move.peer} takes {who} for a member that comes in, though it asks after epoch"
            stale = move.before.hellos.get((who.group, who.rank))
            older = stale is not None and stale.head > event.hello.head
            yield Holds(heard or older or move.after.epoch != epoch, f"{text} {epoch.epoch}")
    for effect in move.out.effects:
        if isinstance(effect, Decide) and effect.proposal.kind == "commit":
            left_out = sorted(_asking(move.after)) if not effect.proposal.change else []
            yield Holds(not left_out, f"{move.peer} commits and goes on without {left_out}")
    if record is None:
        return
    yield Know(("record", record.n), record)
    text = f"record {record.n - 1} ended its epoch with a commit, and then came a rollback"
    formed = record.kind == "epoch"
    last = (("record", record.n - 1),)
    yield Given(last, text, lambda was: formed or not was.change, needed=False)


def _asking(s: Local) -> set[str]:
    """Whole groups that are alive and ask to join, as far as the participant knows."""
    ranks: dict[tuple[str, str, int], set[int]] = {}
    for hello in s.hellos.values():
        if hello.peer in s.joining - s.dead - s.suspected and not hello.unwinding:
            ranks.setdefault((hello.peer.group, hello.store, hello.world), set()).add(
                hello.peer.rank
            )
    inside = {peer.group for peer in member_peers(s)}
    return {
        group
        for (group, _, world), there in ranks.items()
        if group not in inside and len(there) == world
    }


def reform(move: Move) -> Iterator[Claim]:
    """14: within the window the others wait for a group that replaces a lost rank, and only that
    fetches.

    The group meets at the store that its first rank names. A rank that holds the state does not
    fetch it, as far as the author of the epoch knows.
    """
    after, peer = move.after, move.peer
    for effect in move.out.effects:
        if isinstance(effect, Decide) and effect.proposal.kind == "epoch":
            inside = {g.group for g in effect.proposal.members}
            left = sorted({p.group for p in waited_for(after)} & after.reforming - inside)
            text = f"{peer} leaves out {', '.join(left)}, which re-form, before the window is over"
            yield Holds(not left, text)
            first = (
                (g, after.hellos.get((g.group, g.ranks[0].rank))) for g in effect.proposal.members
            )
            away = [g.group for g, hello in first if hello is not None and hello.home != g.home]
            yield Holds(not away, f"{peer} lets {', '.join(away)} meet where no first rank is")
            had = ", ".join(_told_to_fetch(after, effect.proposal))
            yield Holds(not had, f"{peer} has {had} fetch the state that it said it holds")
        if isinstance(effect, Heal) and effect.fetch_from is not None:
            held = effect.record.entries[peer[:2]].current
            yield Holds(not held, f"{peer} fetches the state that it holds")
    event = move.event
    if isinstance(event, Timer) and event.name == "reform_window" and move.out.verdict == "row":
        yield Holds(not after.reforming, f"{peer} waits for a lost rank beyond the window")


def _told_to_fetch(s: Local, epoch: Record) -> list[str]:
    """Ranks that are to fetch the state although their newest `Hello` names it as theirs."""
    behind = [place for place, entry in epoch.entries.items() if not entry.current]
    return [
        f"{group}/{rank}"
        for group, rank in behind
        if s.hellos[group, rank].lineage == epoch.lineage
    ]


def decided(move: Move) -> Iterator[Claim]:
    """10: a participant leaves in doubt only if its user stops it or a newer process replaces
    it."""
    if move.entered("terminal"):
        before = move.before
        errors = {e.error for e in move.out.effects if isinstance(e, Finish)}
        head, fenced = move.after.head, "Fenced" in errors
        # A head that decides this txn or a later one leaves no doubt, and ends the job.
        told = "Diverged" in errors and head is not None and head.token >= before.token
        yield Holds(
            before.vote is None
            or before.role in COMMITTING
            or told
            or fenced
            or isinstance(move.event, Stop),
            f"{move.peer} stopped in doubt about txn {before.token}: {move.after.cause.text}",
        )
