"""The authorisation matrix: every operation of the OpenAPI document, by every role, on every relation between tenants.

The tables below state the rights anew, without asking the server's own rules. The document is read as it is served, so
new operations join by themselves: a new one fails here until the tables say who may use it. Denied requests are asked
first, and must leave every row of every table as it was; after that everybody does all that is allowed to them.
"""

import asyncio
import base64
import binascii
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import pytest
import pytest_asyncio

from bursar.core.values.access import Role
from support.api.callers import LETTERS, RELATIONS, SEES, Caller, answering, assembled
from support.api.families import MARK, Mark, Marks, founded, prepare
from support.api.operations import Filled, Filler, Operation, Unfilled, operations
from support.api.raw_http import RawAnswer, Wire, ask_all, request
from support.api.site import Site, eventually, opened_site
from support.api.table_dumps import COUNTERS, WITH_VARIABLES, Dump, changes, dump, none
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The rights.

# Roles by path and method: *, everybody even without a token; -, not offered. Variables are left out of paths, but
# where an item has other rights than its collection.
RIGHTS = """
path                                GET        POST       PUT    PATCH  DELETE
/                                   *          -          -      -      -
.well-known/jwks.json               *          -          -      -      -
healthz                             *          -          -      -      -
hello                               *          -          -      -      -
livez                               *          -          -      -      -
readyz                              *          -          -      -      -
metrics                             ASB        -          -      -      -
authority                           ASPBTUVNJ  -          -      -      -
whoami                              ASPBTUVNJ  -          -      -      -
poddisruptionbudgets                ASPBTUVNJ  -          -      -      -
selfsubjectreviews                  -          ASPBTUVN   -      -      -
selfsubjectaccessreviews            -          ASPBTUVN   -      -      -
selfsubjectrulesreviews             -          ASPBTUVN   -      -      -

nodes                               ASPBTUVN   AJ         A      A      A
nodes/status                        ASPBTUVN   -          AN     AN     -
nodes/certificates                  -          ANJ        -      -      -
nodes/evictions                     ASN        -          -      -      -
nodes/claim                         -          ATU        -      -      -
nodes/release                       -          ATU        -      -      -
nodes/drain                         AS         A          -      -      -
nodes/fence                         -          A          -      -      A
nodes/wipe                          -          A          -      -      -
nodes/wiped                         -          A          -      -      -
priorityclasses                     ASPBTUVN   A          A      A      A
queues                              ASPBTUVN   A          A      A      A
tiers                               ASPBTUVN   AS         AS     AS     A

tenants                             ASPBTUV    AS         AS     AS     A
tenants/status                      ASPBTUV    -          A      A      -
tenants/quotas                      ASPBTUV    -          -      -      -
tenants/limits                      ASPBTUV    -          AS     -      AS
tenants/usage                       ASPBTUV    -          -      -      -
namespaces                          ASPTUV     AST        AST    AST    AT
namespaces/status                   ASPTUV     -          A      A      -
resourcequotas                      ASPTUV     AST        AST    AST    AST
resourcequotas/status               ASPTUV     -          A      A      -
settings                            ASP        A          A      A      A
members                             ASPTUV     AST        AST    AST    AST
limitranges                         ASPTUV     AST        AST    AST    AST
projects                            ASPTUV     AS         AS     AS     AS
projectrequests                     ASP        AS         -      -      -
rolebindings                        ASPTUV     AST        AST    AST    AST
users                               ASP        AS         AS     AS     AS
identities                          ASP        AS         AS     AS     AS
groups                              ASP        AS         AS     AS     AS
useridentitymappings                ASP        AS         -      -      AS
tokens                              AST        AT         -      -      AT
webhooks                            AS         A          -      -      A
webhooks/deliveries                 AS         -          -      -      -
webhooks/test                       -          A          -      -      -

allocations                         ASPTUVN    ATU        ATU    ATU    ATU
allocations/status                  ASPTUVN    -          AN     AN     -
allocations/stdin                   -          -          ATU    -      -
allocations/log                     ASPTUV     -          -      -      -
allocations/explain                 ASPTUV     -          -      -      -
allocations/simulate                -          ATU        -      -      -
allocations/bulk-release            -          ATU        -      -      -
allocations/approve                 -          AP         -      -      -
allocations/deny                    -          AP         -      -      -
allocations/approval                -          -          -      AP     -
jobs                                ASPTUV     ATU        ATU    ATU    ATU
jobs/status                         ASPTUV     -          -      -      -
jobs/explain                        ASPTUV     -          -      -      -
jobs/cancel                         -          ATU        -      -      -
jobs/boost                          -          A          -      -      -
jobs/approve                        -          AP         -      -      -
jobs/deny                           -          AP         -      -      -
jobs/approval                       -          -          -      AP     -
resourceclaims                      ASPTUV     ATU        ASTU   ASTU   ATU
resourceclaims/status               ASPTUV     -          AS     AS     -
resourceclaims/approve              -          AP         -      -      -
resourceclaims/deny                 -          AP         -      -      -
resourceclaims/approval             -          -          -      AP     -
quotarequests                       ASPTUV     AT         AT     AT     AT
quotarequests/approve               -          APT        -      -      -
quotarequests/deny                  -          APT        -      -      -
quotarequests/approval              -          -          -      AP     -
quotas                              ASPBTUV    -          -      -      -
approvals                           ASPBTUV    -          -      -      -
approvals/decide                    -          APT        -      -      -
pods                                ASPBTUV    -          -      -      -
pods/log                            ASPTUV     -          -      -      -
pods/eviction                       -          A          -      -      -
preemptions                         -          A          -      -      -
claims                              ASPBTUV    -          -      -      -
events                              ASPBTUV    -          -      -      -
usage                               ASPBTUV    ASN        -      -      -
usage/export                        ASPBTUV    -          -      -      -
metrics/queues                      ASPBTUV    -          -      -      -
metrics/cluster/utilization         ASPBTUV    -          -      -      -
metrics/tenants/usage               ASPBTUV    -          -      -      -

accounts                            ASPBTUV    AB         -      AB     -
adjustments                         -          AB         -      -      -
balance                             ASPBTUV    -          -      -      -
forecast                            ASPBTUV    -          -      -      -
leases                              ASPBTUV    ASTU       -      -      -
leases/{name}                       ASPBTUVN   -          -      -      -
leases/extend                       -          ASTUN      -      -      -
leases/close                        -          ASTUN      -      -      -
ledger                              ASB        -          -      -      -
ledger/keys                         -          A          -      -      -
ledger/verify                       ASB        -          -      -      -
limits                              ASPBTUV    -          ASB    -      -
payments                            -          *          -      -      -
prices                              ASPBTUV    AB         -      -      AB
refunds                             -          AB         -      -      -
statements                          ASPBTUV    -          -      -      -
topups                              -          ASB        -      -      -
"""

Cells = dict[tuple[str, str], str]


def cells() -> Cells:
    """(path, method) → letters."""
    head, *rows = [line.split() for line in RIGHTS.splitlines() if line]
    return {(row[0], method): one for row in rows for method, one in zip(head[1:], row[1:], strict=True) if one != "-"}


def place(operation: Operation, table: Cells) -> tuple[str, str]:
    """The cell of an operation."""
    path = re.sub(r"^/(api/v1|apis/[^/]+/v1)/|^/(?=.)", "", operation.path).removeprefix("namespaces/{namespace}/")
    if (path, operation.method) not in table:
        path = re.sub(r"/\{\w+\}", "", path)
    return path, operation.method


# Answers to requests that are allowed, where they are not success alone.
_NO_APPROVAL = {409}  # neither allocations nor jobs need one here
_DECIDED = {200, 409}  # of two opposite decisions, the first counts
_CLAIM = "approveResourceClaimAtApiV1NamespacesNamespaceResourceclaimsName"
REFUSED = {
    "approveAllocationAtApiV1NamespacesNamespaceAllocationsNameApprove": _NO_APPROVAL,
    "approveAllocationAtApiV1NamespacesNamespaceAllocationsNameDeny": _NO_APPROVAL,
    "patchAllocationApproval": _NO_APPROVAL,
    "approveJobAtApiV1NamespacesNamespaceJobsNameApprove": _NO_APPROVAL,
    "approveJobAtApiV1NamespacesNamespaceJobsNameDeny": _NO_APPROVAL,
    "patchJobApproval": _NO_APPROVAL,
    f"{_CLAIM}Approve": _DECIDED,
    f"{_CLAIM}Deny": _DECIDED,
    "createPayments": {401},  # it is not signed
    "createRoleBinding": {201, 409},  # of several, the first fills it
    "createUserIdentityMapping": {409},  # it is mapped
    "createQuotaRequest": {201, 422},  # the limit may be gone
    "createSettings": {409},  # there are some
    "deleteAllTenants": {409},
    "deleteProject": {200, 403},  # services delete only what was created as a project
    "deleteSettings": {403},
    "deleteTenant": {409},  # it has children, or accounts with credit
    "deleteUserIdentityMapping": {200, 404},  # its identity may be deleted already
    "getAllocationLog": {503},  # no agent is called from here
    "getNodeDrain": {200, 404},  # not all are drained
    "getPodLog": {503},
    "replaceAllocation": {422},  # a spec stays
    "replaceJob": {422},
    "replaceQuotaRequest": {422},
}  # fmt: skip
# Operations that decide a request once, and that answer 409 where nothing is to be decided.
DECISIONS = ("/approve", "/deny", "/approval")
# Answers about a target that is hidden or absent, other than 404.
HIDDEN_OTHERWISE = {
    "approveApprovalsDecide": 200,  # each item has its own answer
    "claimNode": 403,  # nodes are seen by everybody
    "releaseNode": 403,
    "createMember": 403,
    "createNamespace": 403,
    "createSelfSubjectAccessReview": 201,  # it answers
}  # fmt: skip
# A tenant that a body names and that does not exist is the body's fault, for roles that see all there are.
ABSENT_IS_INVALID = frozenset(
    {
        "createGroup", "createIdentity", "createMember", "createNamespace", "createProject", "createProjectRequest",
        "createTenant", "createUser",
    }
)  # fmt: skip
# Nodes read their own alone.
OF_THE_NODE = frozenset({"listNodeEvictions"})
# It makes a node that is absent.
MAKES_ABSENT = "createNodeCertificates"


class Outcome(Enum):
    """The kinds of answers that a request must get."""

    UNKNOWN = "refused without a good token"
    FORBIDDEN = "refused to the role"
    HIDDEN = "answered as if there were nothing"
    DONE = "done"


def outcome(caller: Caller, relation: str, filled: Filled, letters: str, fingerprints: Marks) -> Outcome:
    """The answer that a request must get, by the role and by all that it names."""
    operation = filled.operation
    if letters == "*":
        return Outcome.DONE
    if not caller.role:
        return Outcome.UNKNOWN
    if caller.role not in [LETTERS[one] for one in letters]:
        return Outcome.FORBIDDEN
    target = caller.family.targets[relation]
    named = [fingerprints.known[one] for one in filled.names(target)]
    if operation.id == "getStatements" and "tenant" in filled.query:
        named.append(Mark(target.tenant, user="all"))  # it is the statement of all accounts
    if relation == "nobody":
        return Outcome.DONE if operation.id == MAKES_ABSENT and caller.role == "system-admin" else Outcome.HIDDEN
    # Some things are for everybody to see, and for nobody but their owners to change.
    is_near = relation in SEES[caller.role] or (operation.method == "GET" and operation.id not in OF_THE_NODE)
    return Outcome.DONE if is_near and all(caller.reads(one) for one in named) else Outcome.HIDDEN


def statuses(caller: Caller, filled: Filled, expected: Outcome) -> set[int]:
    """The answers that are right."""
    operation = filled.operation
    match expected:
        case Outcome.UNKNOWN:
            return {401}
        case Outcome.FORBIDDEN:
            return {403}
        case Outcome.DONE:
            decides = operation.path.endswith(DECISIONS)
            if decides and caller.role == "tenant-admin":
                return {200, 403, 409}  # administrators of tenants decide for the tenants directly below alone
            return {200, 409} if decides else REFUSED.get(operation.id, {200, 201, 202})
    is_act = operation.method != "GET" or operation.id in OF_THE_NODE
    if caller.role in ("node", "joining node") and operation.noun == "nodes" and is_act:
        return {403}  # for others
    if caller.sees_everything and operation.id in ABSENT_IS_INVALID:
        return {400}
    return {404, HIDDEN_OTHERWISE.get(operation.id, 200 if operation.is_collection else 404)}


# Requests and their answers.


@dataclass(frozen=True, slots=True)
class Request:
    caller: Caller
    relation: str
    filled: Filled
    variant: int
    expected: Outcome

    @property
    def operation(self) -> Operation:
        return self.filled.operation


@dataclass(frozen=True, slots=True)
class Told:
    """A request with its answer."""

    request: Request
    answer: RawAnswer

    @property
    def plain(self) -> tuple[int, str]:
        """The answer, as it reads alike for two targets."""
        target = self.request.caller.family.targets[self.request.relation]
        return self.answer.status, _OTHERWISE.sub("<…>", target.plain(self.answer.body.decode()))

    def __str__(self) -> str:
        one = self.request
        where = f"{one.operation.id} ({one.operation.method} {one.filled.where})"
        return f"{where} as {one.caller.name} on {one.relation}: {self.answer.status}"


_OTHERWISE = re.compile(r"(new|request)-\d+|\d{4}-\d\d-\d\dT[\d:.]+Z?")

# In this order after all others that create or change, for they leave nothing to be acted on.
LATE = ("preemptNamespacesPreemptions", "createPodEviction", "drainNode", "getNodeDrain", "fenceNode", "cancelJob")
LAST = ("bulkReleaseAllocations", MAKES_ABSENT)
METHODS = ("GET", "PATCH", "PUT", "POST")


def in_order(those: Iterable[Operation]) -> list[Operation]:
    """As they can succeed one after another: reading, changing, making, stopping, deleting from the inside out."""

    def rank(one: Operation) -> tuple[int, int]:
        if one.id in LATE:
            return len(METHODS), LATE.index(one.id)
        if one.method == "DELETE":
            return len(METHODS) + (1 if "{name}" in one.path else 3), -one.path.count("/")
        return (len(METHODS) + 2, 0) if one.id in LAST else (METHODS.index(one.method), 0)

    return sorted(those, key=rank)


@dataclass(slots=True)
class Matrix:
    """A site with families and somebody of every role."""

    site: Site
    fingerprints: Marks
    callers: list[Caller]
    operations: list[Operation]
    filler: Filler
    table: Cells = field(default_factory=cells)
    faults: set[str] = field(default_factory=set)

    def requests(self, caller: Caller, relation: str) -> list[Request]:
        """All that a caller asks about one tenant, in an order in which it can succeed. Operations that name no tenant
        are asked once."""
        found = []
        for operation in in_order(self.operations):
            letters = self.table.get(place(operation, self.table))
            if letters is None:
                self.faults.add(f"{operation}: RIGHTS does not say who may use it")
                continue
            for variant, one in enumerate(self._filled(operation, caller, relation)):
                if relation == "own" or one.names(caller.family.targets[relation]):
                    expected = outcome(caller, relation, one, letters, self.fingerprints)
                    found.append(Request(caller, relation, one, variant, expected))
        return found

    def _filled(self, operation: Operation, caller: Caller, relation: str) -> Iterator[Filled]:
        target = caller.family.targets[relation]
        try:
            for one in self.filler.fill(operation, target):
                if operation.method == "DELETE" and "labelSelector" in one.operation.query and caller.sees_everything:
                    # Only a role that may delete all objects deletes a family.
                    yield replace(one, query={**one.query, "labelSelector": f"family={target.names['family']}"})
                else:
                    yield one
        except Unfilled as error:
            self.faults.add(str(error))

    async def ask(self, sequences: Iterable[Sequence[Request]]) -> list[Told]:
        """Ask each sequence one after another, several at once."""

        async def asked(wire: Wire, sequence: Sequence[Request]) -> list[Told]:
            return [Told(one, await wire.ask(one.filled.raw(one.caller.token))) for one in sequence]

        return [one for some in await ask_all(self.site.url, sequences, asked) for one in some]


# Watches, for the whole time.


@dataclass(slots=True)
class Watcher:
    caller: Caller
    operation: Operation
    seen: bytearray = field(default_factory=bytearray)

    async def watch(self, url: str) -> None:
        reader, writer = await asyncio.open_connection(*Wire(url).where)
        try:
            headers = [("Authorization", f"Bearer {self.caller.token}")]
            writer.write(request("GET", f"{self.operation.path}?watch=true", headers))
            while piece := await reader.read(1 << 16):
                self.seen += piece
        finally:
            writer.close()


@asynccontextmanager
async def watching(matrix: Matrix) -> AsyncIterator[list[Watcher]]:
    """Everybody who sees less than everything watches every kind in all namespaces."""
    watched = [one for one in matrix.operations if "watch" in one.query and not one.variables]
    callers = [one for one in matrix.callers if one.role and not one.sees_everything]
    watchers = [Watcher(caller, operation) for caller in callers for operation in watched]
    tasks = [asyncio.create_task(one.watch(matrix.site.url)) for one in watchers]

    async def begun() -> bool:
        return all(one.seen for one in watchers)

    try:
        await eventually(begun)
        yield watchers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def seen_to_the_end(matrix: Matrix, watchers: Sequence[Watcher]) -> None:
    """Until everybody has seen the last change of their own tenant."""
    for one in watchers:
        if one.operation.id == "listTenants" and one.caller.tenants and one.caller.role != "node":
            tenant = one.caller.family.own.tenant
            last = matrix.fingerprints.new(tenant)
            note = {"metadata": {"annotations": {"last": last}}}
            assert (await matrix.site.patch(f"tenants/{tenant}", note)).status == 200

            async def seen(one: Watcher = one, last: str = last) -> bool:
                return last.encode() in one.seen

            await eventually(seen)


# The site, and the traversal of its routes.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matrix(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[Matrix]:
    name = await clone_database(embedded_postgres, database_template)
    options: Any = {"requests_per_minute": 10**9, "grpc_address": "127.0.0.1:1"}
    async with opened_site(_url(embedded_postgres, name), **options) as site:
        fingerprints = Marks()
        await prepare(site)
        # Roles that change something have a family of their own.
        changing = ("tenant-admin", "user", "node", "approver", "system-admin", "service", "billing-admin")
        families = await asyncio.gather(*(founded(site, fingerprints) for _ in changing))
        for path in ("authority", "/.well-known/jwks.json"):
            assert (await site.get(path)).status == 200, "keys that are made when they are first asked for are there"
        callers = await assembled(site, dict(zip(changing, families, strict=True)), fingerprints)
        document = (await site.get("/openapi.json")).body
        async with answering(site):
            yield Matrix(site, fingerprints, callers, operations(document), Filler(document))
    await drop_database(embedded_postgres, name)


@dataclass(slots=True)
class Requests:
    """Everything that was asked, and the database before and after the denied requests, and after the tenants' own."""

    matrix: Matrix
    told: list[Told]
    dumps: list[Dump]
    watchers: list[Watcher]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run_batch(matrix: Matrix) -> Requests:
    """Everything is asked once; the tests look at what came of it."""
    planned = [matrix.requests(caller, relation) for caller in matrix.callers for relation in RELATIONS]
    denied = [one for some in planned for one in some if one.expected is not Outcome.DONE]
    allowed = [[one for one in some if one.expected is Outcome.DONE] for some in planned]
    allowed = [some for some in allowed if some]

    def those(*, sees_everything: bool, own: bool) -> list[Sequence[Request]]:
        return [
            some
            for some in allowed
            if some[0].caller.sees_everything == sees_everything
            # What is their own they delete whole, with what they see of others; viewers need it to be there.
            and (some[0].relation == "own" and some[0].caller.role != "viewer") == own
        ]

    async with watching(matrix) as watchers:
        dumps = [await dump(matrix.site)]
        # Denied requests change nothing: in any order, many at once.
        told = await matrix.ask(denied[start : start + 8] for start in range(0, len(denied), 8))
        dumps.append(await dump(matrix.site))
        told += await matrix.ask(those(sees_everything=False, own=False))
        told += await matrix.ask(those(sees_everything=False, own=True))
        dumps.append(await dump(matrix.site))
        await seen_to_the_end(matrix, watchers)
        told += await matrix.ask(those(sees_everything=True, own=False))
        told += await matrix.ask(those(sees_everything=True, own=True))
        dumps.append(await dump(matrix.site))
    return Requests(matrix, told, dumps, watchers)


async def test_every_operation_has_its_rights_and_every_right_its_operation(run_batch: Requests) -> None:
    assert {*LETTERS.values()} == {*Role, "joining node"}
    none(run_batch.matrix.faults)
    used = {place(one, run_batch.matrix.table) for one in run_batch.matrix.operations}
    none(f"RIGHTS: {cell} is not an operation" for cell in sorted(run_batch.matrix.table.keys() - used))
    tried = {one.request.operation.id for one in run_batch.told if one.request.expected is Outcome.DONE}
    none(f"{one} is not tried by anybody who may use it" for one in run_batch.matrix.operations if one.id not in tried)


async def test_every_answer_is_the_one_that_is_expected(run_batch: Requests) -> None:
    """Hence none is 5xx, but of logs that no agent can be asked for."""
    none(
        f"{one}, should be {one.request.expected.value} with {sorted(right)}: {one.answer.body[:300].decode()}"
        for one in run_batch.told
        if one.answer.status not in (right := statuses(one.request.caller, one.request.filled, one.request.expected))
    )


async def test_denied_requests_change_nothing(run_batch: Requests) -> None:
    """Not a row of any table."""
    none(f"{table} {how}: {row}" for table, how, row in changes(*run_batch.dumps[:2]))


PARENT = re.compile(r'"(spec\.)?parent": "[^"]*"')


async def test_tenants_change_nothing_of_others(run_batch: Requests) -> None:
    """Every row that changed by allowed requests of tenants and nodes is marked as theirs, or not at all."""
    matrix, changed = run_batch.matrix, changes(*run_batch.dumps[1:3])
    callers = [one for one in matrix.callers if one.role and not one.sees_everything]
    owned = {
        text
        for text, mark in matrix.fingerprints.known.items()
        if mark.public or any(one.owns(mark) for one in callers)
    }
    none(
        f"{table} {how}, of {others}: {row}"
        for table, how, row in changed
        # A tenant's document names its parent, also where an approver of the tenant raises its limits.
        if table not in COUNTERS and (others := matrix.fingerprints.in_(PARENT.sub("", row).encode()) - owned)
    )
    actors = {json.loads(row)["actor"] for table, _, row in changed if table == "change"}
    for one in callers:
        if one.role in ("tenant-admin", "user"):
            assert f"user:{one.family.own.tenant}/{one.user}" in actors, "they did change what is theirs"


async def test_answers_tell_nothing_of_others(run_batch: Requests) -> None:
    """Neither body nor headers nor continue tokens hold a mark that is hidden from the caller, but those it sent."""
    fingerprints = run_batch.matrix.fingerprints
    none(
        f"{one} tells {hidden}"
        for one in run_batch.told
        if (
            hidden := [
                (text, fingerprints.known[text])
                for text in fingerprints.in_(one.answer.head, one.answer.body, *continued(one.answer.body))
                - fingerprints.in_(one.request.filled.asked)
                if not one.request.caller.may_be_told(fingerprints.known[text])
            ]
        )
    )


async def test_marks_are_shown_to_whoever_may_see_them(run_batch: Requests) -> None:
    """Hence their absence elsewhere is no accident."""
    told = [one for one in run_batch.told if one.request.caller.role == "system-admin"]
    own, bodies = told[0].request.caller.family.own.tenant, b"\n".join(one.answer.body for one in told)
    planted = {text.encode() for text, mark in run_batch.matrix.fingerprints.known.items() if mark.tenant == own}
    assert {text for text in planted if MARK.fullmatch(text)} <= set(MARK.findall(bodies))


async def test_hidden_is_answered_as_absent(run_batch: Requests) -> None:
    """Word for word; nodes, which everybody sees, are not."""
    known = run_batch.matrix.fingerprints.known

    def names_a_node(one: Request) -> bool:
        return any(known[name].public for name in one.filled.names(one.caller.family.targets[one.relation]))

    def key(one: Request) -> tuple[str, str, int]:
        return one.caller.name, one.operation.id, one.variant

    absent_ = {key(one.request): one for one in run_batch.told if one.request.relation == "nobody"}
    none(
        f"{one}, and where there is nothing {nothing.answer.status}: {one.plain[1]} / {nothing.plain[1]}"
        for one in run_batch.told
        if one.request.expected is Outcome.HIDDEN and not names_a_node(one.request)
        if (nothing := absent_.get(key(one.request))) is not None and one.plain != nothing.plain
    )


async def test_watches_tell_nothing_of_others(run_batch: Requests) -> None:
    fingerprints = run_batch.matrix.fingerprints
    none(
        f"{one.operation.id} as {one.caller.name} tells {text}: {mark}"
        for one in run_batch.watchers
        for text in fingerprints.in_(bytes(one.seen))
        if not one.caller.may_be_told(mark := fingerprints.known[text])
    )


SHOWS_VARIABLES = frozenset({"Allocation", "AllocationList", "Job", "JobList"})


async def test_values_of_variables_are_shown_by_objects_alone(run_batch: Requests) -> None:
    """By operations that answer with the allocation or job itself, and by their watches."""
    fingerprints = run_batch.matrix.fingerprints
    said = [(one.request.operation, str(one), one.answer.body) for one in run_batch.told]
    said += [(one.operation, f"watching {one.operation.id}", bytes(one.seen)) for one in run_batch.watchers]
    none(
        f"{what} tells the variables {shown}"
        for operation, what, body in said
        if not operation.answers & SHOWS_VARIABLES
        if (shown := [one for one in fingerprints.in_(body) if fingerprints.known[one].variable])
    )


async def test_values_of_variables_are_kept_with_objects_alone(run_batch: Requests) -> None:
    """Not in notices to webhooks, usage, leases or statements: nothing that is sent or exported is made of more."""
    fingerprints = run_batch.matrix.fingerprints
    assert run_batch.dumps[-1]["notice"], "there are notices"
    none(
        f"{table}: {row}"
        for one in run_batch.dumps
        for table, rows in one.items()
        for row in rows
        if table not in WITH_VARIABLES
        and any(fingerprints.known[text].variable for text in fingerprints.in_(row.encode()))
    )


_CONTINUE = re.compile(rb'"continue":\s*"([^"]+)"')


def continued(body: bytes) -> Iterator[bytes]:
    """The contents of the tokens that lead to the next page."""
    for token in _CONTINUE.findall(body):
        try:
            yield base64.urlsafe_b64decode(token + b"=" * (-len(token) % 4))
        except binascii.Error:
            continue
