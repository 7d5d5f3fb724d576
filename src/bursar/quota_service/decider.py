"""`Decider`: which pending requests fit into the limits, and why the others do not.

Requests of a tenant are judged oldest first. One that does not fit does not hold up those behind it: its reason is
noted, and it is judged again when a limit rises or usage falls in a scope of its tenant. The server decides: a request
that it refuses although it fits these figures is held back until a figure named in the refusal improves, or a backoff
has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bursar.client import Event
from bursar.core.quota.quota import Exceeded
from bursar.core.quota.quota_messages import dimension_of, headroom_text, quota_refusal
from bursar.core.quota.tenant_tree import SYSTEM_SCOPE, Enforcement, tenant_scope
from bursar.core.values.quantity import amount
from bursar.core.values.refusal import Code

GATE = "quota"
DECIDE_MAX = 500  # decisions in one call
BACKOFF_SECONDS = 30.0
BACKOFF_SECONDS_MAX = 300.0
NOTE_SECONDS = 60.0  # the shortest time between two notes on one request
CONFLICT_SECONDS = 0.5
NOTE_CHARS_MAX = 1024  # of a reason that the server takes

Amounts = Mapping[str, int]
Key = tuple[str, str, str]  # kind, namespace, name
Group = tuple[str, ...]  # requests that are decided together: a gang, or one request by itself


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request at the gate, with the amounts that its approval would charge."""

    key: Key
    uid: str
    tenant: str
    since: str
    requested: Amounts
    reason: str = ""  # as it is noted at the gate
    gang: str = ""

    @property
    def group(self) -> Group:
        return (self.key[1], self.gang) if self.gang else self.key

    @property
    def age(self) -> tuple[str, Key]:
        """The order of requests: oldest first."""
        return self.since, self.key


@dataclass(slots=True)
class Figure:
    """The limit and the usage of one dimension in a scope."""

    limit: int
    used: int

    @property
    def headroom(self) -> int:
        return self.limit - self.used


@dataclass(slots=True)
class Scope:
    """The figures of a tenant, of a ResourceQuota, or of the system."""

    name: str
    tenant: str = ""
    ancestors: tuple[str, ...] = ()
    namespace: str = ""  # of a ResourceQuota
    checked: bool = True  # whether its limits alone say that a request does not fit
    figures: dict[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedDecision:
    """An approval, or a note of the reason for which a request is left pending."""

    request: PendingRequest
    note: str = ""

    def item(self) -> dict[str, str]:
        """The decision as POST /api/v1/approvals/decide takes it."""
        kind, namespace, name = self.request.key
        return {
            "kind": kind, "namespace": namespace, "name": name, "uid": self.request.uid, "gate": GATE,
            "decision": "note" if self.note else "approve", "reason": self.note,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hold:
    """A group that the server refused: it is tried again at a time, or when one of these figures improves."""

    tenant: str
    tries: int
    until: float
    causes: frozenset[tuple[str, str]] = frozenset()  # (scope, dimension)


@dataclass(frozen=True, slots=True)
class _Try:
    """A group whose approval was planned and is not answered yet, with the figures that it was added to."""

    requests: tuple[PendingRequest, ...]
    added: tuple[tuple[str, str, int], ...]  # (scope, dimension, amount)


class Decider:
    """Invariant: every request that is not judged yet is of a tenant in `_due`, is being tried, or is held."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[Key, PendingRequest]] = {}  # by tenant
        self._tenant_of: dict[Key, str] = {}
        self._scopes: dict[str, Scope] = {}
        self._quotas_in: dict[str, set[str]] = {}  # scopes of ResourceQuotas by namespace
        self._held: dict[Group, Hold] = {}
        self._tried: dict[Group, _Try] = {}
        self._noted_at: dict[Key, float] = {}
        self._due: set[str] = set()  # tenants whose requests are to be judged
        self._note_at: dict[str, float] = {}  # tenants whose notes are to be renewed, and when

    def __len__(self) -> int:
        return len(self._tenant_of)

    # Events.

    def take_request(self, event: Event) -> None:
        """Take an event of the watch of undecided requests."""
        request = pending_request(event.object)
        known = self._forget(request.key)
        if event.type == "DELETED":
            self._noted_at.pop(request.key, None)
            if known is not None and known.gang and known.tenant in self._requests:
                self._due.add(known.tenant)
            return
        self._requests.setdefault(request.tenant, {})[request.key] = request
        self._tenant_of[request.key] = request.tenant
        if known is not None and replace(known, reason=request.reason) == request:
            return  # Only the reason has changed, by a note of this service.
        self._held.pop(request.group, None)
        self._due.add(request.tenant)

    def take_figures(self, event: Event) -> None:
        """Take an event of the watch of quotas."""
        before = self._scopes.pop(str(event.object.get("scope", "")), None)
        if before is not None and before.namespace:
            self._quotas_in[before.namespace].discard(before.name)
        after = None if event.type == "DELETED" else scope_of(event.object)
        if after is not None:
            self._scopes[after.name] = after
            if after.namespace:
                self._quotas_in.setdefault(after.namespace, set()).add(after.name)
        if before is not None and (grown := _grown(before, after)):
            self._improved(before, grown)
        elif before is None and after is not None:
            # A scope that is new here may have had less headroom when the server refused.
            self._improved(after, after.figures)

    def begin_requests(self) -> None:
        """Forget all requests: the watch begins again."""
        for name in ("_requests", "_tenant_of", "_held", "_noted_at", "_due", "_note_at"):
            getattr(self, name).clear()

    def begin_figures(self) -> None:
        """Forget all figures: the watch begins again. Every request is judged by the new ones."""
        self._scopes.clear()
        self._quotas_in.clear()
        self._due.update(self._requests)

    def _forget(self, key: Key) -> PendingRequest | None:
        tenant = self._tenant_of.pop(key, None)
        if tenant is None:
            return None
        requests = self._requests[tenant]
        known = requests.pop(key)
        if not requests:
            del self._requests[tenant]
            self._due.discard(tenant)
        return known

    def _improved(self, scope: Scope, grown: Iterable[str]) -> None:
        """Judge requests again that a scope counts, after its headroom has grown in some dimensions."""
        better = {(scope.name, dimension) for dimension in grown}
        for group in [one for one, hold in self._held.items() if hold.causes & better]:
            # Its tenant may be unknown here, and so not be below the scope.
            self._due.add(self._held.pop(group).tenant)
        counted = (name for name in self._requests if scope.tenant == name or scope.name in self._names_above(name))
        self._due.update(counted)

    # Plans, and their answers.

    def plan(self, now: float, limit: int = DECIDE_MAX) -> list[PlannedDecision]:
        """The next decisions, the oldest requests of a tenant first. `answered` or `failed` says how each went."""
        self._due.update(self._overdue(now))
        self._due &= self._requests.keys()
        decisions: list[PlannedDecision] = []
        for tenant in sorted(self._due, key=self._oldest):
            for decision in self._judged(tenant, now):
                decisions.append(decision)
                if len(decisions) == limit:
                    return decisions  # The rest of this tenant, and the other tenants, remain due.
            self._due.discard(tenant)
        return decisions

    def answered(self, decision: PlannedDecision, answer: Mapping[str, Any], now: float) -> str:
        """Take the answer to a decision; return how it went: approved, noted, or the code of the refusal."""
        request = decision.request
        refusal = answer.get("refusal") or {}
        code = str((refusal.get("details") or {}).get("code", "")) if answer["status"] != 200 else ""
        if decision.note:
            self._noted(decision, now)
            return code or "noted"
        tried = self._tried.pop(request.group)
        if code:
            self._take_back(tried)
        if any(self._requests.get(one.tenant, {}).get(one.key) is not one for one in tried.requests):
            pass  # The watch has shown a later state, which is judged by itself.
        elif not code or code in (Code.DECIDED, Code.NOT_FOUND):
            for one in tried.requests:
                self._forget(one.key)
                self._noted_at.pop(one.key, None)
            self._held.pop(request.group, None)
        else:
            self._hold(request, code, refusal, now)
        if request.tenant in self._requests:
            self._due.add(request.tenant)
        return code or "approved"

    def failed(self, decisions: Iterable[PlannedDecision]) -> None:
        """Take that no answer came: the decisions are planned again."""
        for decision in decisions:
            if (tried := self._tried.pop(decision.request.group, None)) is not None:
                self._take_back(tried)
            if decision.request.tenant in self._requests:
                self._due.add(decision.request.tenant)

    def next_due(self) -> float | None:
        """The time of the next plan if nothing happens until then; None without one."""
        return min((*(hold.until for hold in self._held.values()), *self._note_at.values()), default=None)

    def _overdue(self, now: float) -> Iterator[str]:
        """The tenants for which the time of a hold or of a note has come."""
        for group, hold in [(group, hold) for group, hold in self._held.items() if hold.until <= now]:
            if any(one.group == group for one in self._requests.get(hold.tenant, {}).values()):
                yield hold.tenant
            else:
                del self._held[group]
        for tenant in [name for name, at in self._note_at.items() if at <= now]:
            del self._note_at[tenant]
            yield tenant

    def _oldest(self, tenant: str) -> tuple[str, Key]:
        return min(one.age for one in self._requests[tenant].values())

    def _judged(self, tenant: str, now: float) -> Iterator[PlannedDecision]:
        groups: dict[Group, list[PendingRequest]] = {}
        for request in sorted(self._requests[tenant].values(), key=lambda one: one.age):
            groups.setdefault(request.group, []).append(request)
        for group, requests in groups.items():
            if group in self._tried or (group in self._held and self._held[group].until > now):
                continue
            asked = _total(requests)
            if lacking := self._lacking(requests[0], asked):
                self._held.pop(group, None)
                yield from self._note(requests, lacking, now)
            else:
                self._try(requests, asked)
                yield PlannedDecision(requests[0])

    def _lacking(self, request: PendingRequest, asked: Amounts) -> list[Exceeded]:
        """The limits that a request would exceed, nearest scope first."""
        return [
            Exceeded(scope.name, dimension, figure.limit, figure.used, value)
            for scope in self._counting(request)
            if scope.checked
            for dimension, value in sorted(asked.items())
            if value > 0 and (figure := scope.figures.get(dimension)) is not None and value > figure.headroom
        ]

    def _counting(self, request: PendingRequest) -> list[Scope]:
        """The known scopes that count a request: ResourceQuotas of its namespace, its tenant, those above, the system.
        The server knows scopes that this service may not see, and counts by them too."""
        names = (*sorted(self._quotas_in.get(request.key[1], ())), *self._names_above(request.tenant))
        return [self._scopes[name] for name in names if name in self._scopes]

    def _names_above(self, tenant: str) -> tuple[str, ...]:
        """The scopes of a tenant, of those above it, and of the system."""
        own = self._scopes.get(tenant_scope(tenant))
        return (tenant_scope(tenant), *map(tenant_scope, own.ancestors if own else ()), SYSTEM_SCOPE)

    def _note(
        self, requests: Sequence[PendingRequest], lacking: Sequence[Exceeded], now: float
    ) -> Iterator[PlannedDecision]:
        """Notes of the limits that a group would exceed. They leave out the figures of tenants above."""
        text = lack_text(requests[0].tenant, lacking)
        for one in requests:
            if one.reason == text:
                continue
            due = self._noted_at.get(one.key, float("-inf")) + NOTE_SECONDS
            if due <= now:
                yield PlannedDecision(one, text)
            else:
                self._note_at[one.tenant] = min(due, self._note_at.get(one.tenant, due))

    def _noted(self, decision: PlannedDecision, now: float) -> None:
        """The note stands, or the server refused it because the request has changed."""
        request = decision.request
        self._noted_at[request.key] = now
        requests = self._requests.get(request.tenant, {})
        if requests.get(request.key) is request:
            requests[request.key] = replace(request, reason=decision.note)

    def _try(self, requests: Sequence[PendingRequest], asked: Amounts) -> None:
        """Add the amounts to the figures, so that the next request is judged as if this one was approved."""
        added = []
        for scope in self._counting(requests[0]):
            for dimension, value in asked.items():
                if (figure := scope.figures.get(dimension)) is not None:
                    figure.used += value
                    added.append((scope.name, dimension, value))
        self._tried[requests[0].group] = _Try(tuple(requests), tuple(added))

    def _take_back(self, tried: _Try) -> None:
        for name, dimension, value in tried.added:
            scope = self._scopes.get(name)
            if scope is not None and (figure := scope.figures.get(dimension)) is not None:
                figure.used -= value

    def _hold(self, request: PendingRequest, code: str, refusal: Mapping[str, Any], now: float) -> None:
        """Hold a refused group back. Another member of its gang, or a change of the request, ends that too."""
        before = self._held.get(request.group)
        tries = before.tries + 1 if before is not None else 1
        first = BACKOFF_SECONDS
        if code == Code.CONFLICT or self._is_outdated(refusal):
            first = CONFLICT_SECONDS
        until = now + min(BACKOFF_SECONDS_MAX, first * 2 ** (tries - 1))
        self._held[request.group] = Hold(request.tenant, tries, until, _causes(refusal))
        if code == Code.QUOTA_EXCEEDED:
            self._noted_at[request.key] = now  # The server has noted its numbers.

    def _is_outdated(self, refusal: Mapping[str, Any]) -> bool:
        """Whether the figures here have more headroom than the refusal says: they have improved since, or will soon be
        followed by those of the refusal."""
        for cause in (refusal.get("details") or {}).get("causes") or []:
            dimension = dimension_of(str(cause.get("dimension", "")))
            scope = self._scopes.get(str(cause.get("scope", "")))
            figure = scope.figures.get(dimension) if scope is not None else None
            if figure is None or not cause.get("limit"):
                continue
            left = amount(dimension, cause["limit"]) - amount(dimension, cause.get("current_usage") or "0")
            if figure.headroom > left:
                return True
        return False


def lack_text(tenant: str, lacking: Sequence[Exceeded]) -> str:
    """The exceeded limits as users of a tenant read them: without the figures of scopes above it."""
    own = tenant_scope(tenant)
    text = headroom_text(quota_refusal("request", lacking), lambda scope: scope == own or scope.startswith("quota:"))
    return text if len(text) <= NOTE_CHARS_MAX else f"{text[: NOTE_CHARS_MAX - 2]} …"


def _total(requests: Iterable[PendingRequest]) -> dict[str, int]:
    asked: dict[str, int] = {}
    for one in requests:
        for dimension, value in one.requested.items():
            asked[dimension] = asked.get(dimension, 0) + value
    return asked


def _grown(before: Scope, after: Scope | None) -> list[str]:
    """The dimensions in which a scope has more headroom than before, or no limit any more."""
    now = after.figures if after is not None else {}
    return [name for name, was in before.figures.items() if name not in now or now[name].headroom > was.headroom]


def _causes(refusal: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    causes = (refusal.get("details") or {}).get("causes") or []
    return frozenset(
        (str(one["scope"]), dimension_of(str(one["dimension"])))
        for one in causes
        if one.get("scope") and one.get("dimension")
    )


# Values of the API.


def pending_request(item: Mapping[str, Any]) -> PendingRequest:
    """A request of GET /api/v1/approvals; of one that is gone, only the key is known."""
    shown = item["object"]
    approval = (shown.get("status") or {}).get("approval") or {}
    pending = approval if approval.get("state") == "pending" else approval.get("change") or {}
    gate = (pending.get("gates") or {}).get(item.get("gate", "")) or {}
    return PendingRequest(
        (item["kind"], item["namespace"], item["name"]),
        str((shown.get("metadata") or {}).get("uid", "")),
        str(item.get("tenant", "")),
        str(item.get("since", "")),
        {name: amount(name, value) for name, value in (item.get("requested") or {}).items()},
        str(gate.get("reason", "")),
        str(item.get("gang", "")),
    )


def scope_of(item: Mapping[str, Any]) -> Scope:
    """A scope of GET /api/v1/quotas: its limited dimensions. A scope that queues work admits it beyond the limit, and
    a ResourceQuota with scopes counts only some objects: the server knows which."""
    figures = {
        name: Figure(amount(name, one["limit"]), amount(name, one["accepted"]))
        for name, one in item["quotas"].items()
        if one.get("limit") is not None
    }
    checked = item["enforcement"] == Enforcement.REJECT and not item.get("selective", False)
    return Scope(
        item["scope"], item.get("tenant", ""), tuple(item.get("ancestors") or ()), item.get("namespace", ""), checked,
        figures,
    )  # fmt: skip
