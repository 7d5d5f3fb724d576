"""A step of a job: the command by which the controller releases members, creates new ones and stores the progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bursar.commands.command import Result, weight_of_drafts
from bursar.commands.objects.object import already_exists, conflict, namespace_refusal, not_found, sight_of
from bursar.commands.objects.removal import remove
from bursar.commands.objects.status import unchanged
from bursar.commands.workloads.allocation import GRACE_SECONDS
from bursar.commands.workloads.job import MANY, JobCommand, admit, charges_of, has_ended
from bursar.commands.workloads.job_status import is_owned, progress_in, with_progress
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import Gang, GangKey, GangRow
from bursar.core.objects.charge import Charge
from bursar.core.objects.event_text import step_why
from bursar.core.objects.job import JobStep
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob(JobCommand):
    """The next step: release members that are not wanted any more, create wanted ones, and store the progress."""

    step: JobStep
    drafts: tuple[Stored, ...] = ()
    drafts_gang: Gang | None = None

    def weight(self) -> int:
        return weight_of_drafts(*self.drafts)

    @property
    def many(self) -> bool:
        return len(self.members) + len(self.drafts) > MANY

    def objects(self) -> Iterable[Key]:
        return (self.key, *self.members, *(one.key for one in self.drafts))

    def gangs(self) -> dict[GangKey, int]:
        gang = self.drafts_gang
        return {(self.key.namespace, gang.group_id): gang.min_members} if gang else JobCommand.gangs(self)

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        yield from charges_of(batch, self.drafts, self.drafts_gang)
        yield from JobCommand.charges(self, batch)

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.revision != self.expected or self._outrun(batch, before):
            return conflict(self.key)
        # Members that have ended meanwhile are counted in the next step; they are removed only with their job.
        unwanted = [one for one in self.owned(batch, before) if self.step.progress.deleting or not has_ended(one)]
        left = sum(not has_ended(one) for one in self.release(batch, unwanted, GRACE_SECONDS))
        if self.step.remove:
            return remove(batch, before, self.origin)
        made, refusal = self._make(batch, before)
        progress = self.step.progress
        started = max([progress.started, *(turn.index + 1 for turn in self.step.create[: len(made)])])
        progress = replace(progress, started=started, active=progress.active + left + len(made))
        after = with_progress(before, progress, timestamp(batch.now), refusal)
        changed = (after.status, after.fields) != (before.status, before.fields)
        why = step_why(
            progress_in(before), progress, [one.key.name for one in made], refusal.message if refusal else ""
        )
        result = batch.put(after, Origin(self.origin.actor, self.origin.verb, why)) if changed else unchanged(before)
        for one in made:
            batch.put(replace(one, tenant=before.tenant), Origin(self.origin.actor, "create", f"job/{self.key.name}"))
        return result

    def _outrun(self, batch: UnitOfWork, job: Stored) -> bool:
        """Whether a missing member exists now, or the gang to join was removed."""
        there = [batch.objects[one.key] for one in self.drafts if one.key in batch.objects]
        if any(is_owned(one.doc, job.uid) for one in there):
            return True
        row = self._gang_row(batch)
        return self.drafts_gang is not None and row is None and len(self.drafts) < self.drafts_gang.min_members

    def _gang_row(self, batch: UnitOfWork) -> GangRow | None:
        if self.drafts_gang is None:
            return None
        row = batch.gangs.get((self.key.namespace, self.drafts_gang.group_id))
        return row if row is not None and row.members else None

    def _make(self, batch: UnitOfWork, job: Stored) -> tuple[Sequence[Stored], Refusal | None]:
        """The members that quota admits, in order, and the refusal of the next one."""
        if self.drafts and (refusal := namespace_refusal(batch, self.key, job.tenant)):
            return (), refusal
        made: list[Stored] = []
        for some in self._portions(batch):
            if taken := next((one.key for one in some if one.key in batch.objects), None):
                return made, already_exists(taken)
            admitted = admit(batch, some, self.drafts_gang, "allocation", sight_of(batch, self))
            if isinstance(admitted, Refusal):
                return made, admitted
            made += admitted
        return made, None

    def _portions(self, batch: UnitOfWork) -> Iterable[tuple[Stored, ...]]:
        """Members that are admitted together: all of an incomplete gang, and other members one by one."""
        row = self._gang_row(batch)
        if self.drafts_gang is not None and not (row is not None and row.charged):
            return (self.drafts,)
        return ((one,) for one in self.drafts)
