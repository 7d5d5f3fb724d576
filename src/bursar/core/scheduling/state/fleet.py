"""Fleet: the nodes as NumPy columns, one array per resource, so that a query over all nodes is one operation.

`NodeColumns` is the capacity that can be taken and given back; a fleet has one set for now, and planning ahead makes
a copy for a later time. `Fleet` adds the description of nodes: name, labels, taints, generation. The arithmetic is in
`bursar.core.nodes.node`, which decides again when a plan is committed: a whole number of a device resource takes whole
devices, a fraction below one shares a single device, exclusive work takes the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bursar.core.nodes.node import DEVICES_MAX, WHOLE
from bursar.core.objects.ask import Shape, Taint
from bursar.core.objects.charge import Amounts
from bursar.core.values.quantity import is_device

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.intp]

PODS = "pods"
NO_LIMIT = 1 << 60  # of pods, on a node without a limit of pods
NOWHERE = -1  # the code of nodes without the label
ABSENT = -1  # the free part of a device that does not exist
UNCLAIMED = ""
GateTerms = tuple[tuple[str, ...], bool | None, bool]  # for which tenants, whole devices only, isolated
OPEN: GateTerms = ((), None, False)  # a node for all tenants, without a rule on fractions and without isolation
NOBODY = "\0"  # in place of a holder: a released node that is not wiped yet
ROWS_START = 64
NEEDS_MAX = 8192
LABEL_COLUMNS_MAX = 1024
RELABELLED_MAX = 100_000
GROWTH = 10  # eighths: columns grow by a quarter only, because every query scans their whole length


@dataclass(frozen=True, slots=True)
class Need:
    """A shape's requests as numbers of columns. `unknown` are resources that no node has ever offered."""

    plain: tuple[tuple[int, int], ...]  # (column, amount), devices included
    whole: tuple[tuple[int, int], ...]  # (device column, number of whole devices)
    shared: tuple[tuple[int, int], ...]  # (device column, thousandths of one device)
    exclusive: bool
    unknown: tuple[str, ...] = ()


class NodeColumns:
    """Free capacity by node. Every change is logged, so that caches derived from it can catch up."""

    def __init__(self, resources: int = 0, devices: Sequence[int] = (), rows: int = ROWS_START) -> None:
        self.free: Ints = np.zeros((resources, rows), np.int64)
        self.devices: list[NDArray[np.int32]] = [np.full((rows, width), ABSENT, np.int32) for width in devices]
        # Derived from the devices, for queries over all nodes: the number of whole devices, and the largest free part.
        self.whole: NDArray[np.int32] = np.zeros((len(devices), rows), np.int32)
        self.widest: NDArray[np.int32] = np.zeros((len(devices), rows), np.int32)
        self.placed: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.exclusive: Bools = np.zeros(rows, np.bool_)
        self.open: Bools = np.zeros(rows, np.bool_)  # exists, is ready, is not cordoned
        self.touched: list[int] = []

    def copy(self) -> NodeColumns:
        trial = NodeColumns()
        trial.free, trial.devices = self.free.copy(), [one.copy() for one in self.devices]
        trial.whole, trial.widest, trial.placed = self.whole.copy(), self.widest.copy(), self.placed.copy()
        trial.exclusive, trial.open = self.exclusive.copy(), self.open.copy()
        return trial

    def has_shape_of(self, other: NodeColumns) -> bool:
        return self.free.shape == other.free.shape and [one.shape for one in self.devices] == [
            one.shape for one in other.devices
        ]

    def fits(self, need: Need, allocatable: Ints, rows: Rows | slice = slice(None)) -> Bools:
        """The nodes with free capacity for one more of this."""
        free = self.free[:, rows]
        ok: Bools = self.open[rows] & ~self.exclusive[rows]
        if need.unknown:
            return np.zeros_like(ok)
        if need.exclusive:
            ok &= self.placed[rows] == 0
            for column, amount in need.plain:
                ok &= allocatable[column, rows] >= amount
            return ok
        for column, amount in need.plain:
            ok &= free[column] >= amount
        for column, count in need.whole:
            ok &= self.whole[column, rows] >= count
        for column, part in need.shared:
            ok &= self.widest[column, rows] >= part
        return ok

    def fits_at(self, need: Need, allocatable: Ints, row: int) -> bool:
        """`fits` for one node, without the cost of arrays."""
        if need.unknown or not self.open[row] or self.exclusive[row]:
            return False
        if need.exclusive:
            return not self.placed[row] and all(allocatable[column, row] >= amount for column, amount in need.plain)
        for column, amount in need.plain:
            if self.free[column, row] < amount:
                return False
        for column, count in need.whole:
            if self.whole[column, row] < count:
                return False
        return all(self.widest[column, row] >= part for column, part in need.shared)

    def take(self, row: int, need: Need, devices: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Take capacity of a node; `devices` are (device column, indices)."""
        self._move(row, need, devices, -1)

    def take_many(self, row: int, need: Need, devices: Sequence[tuple[int, Sequence[int]]], count: int) -> None:
        """Take capacity for several at once, none of which shares a device; `devices` are the devices of all."""
        self._move_many(row, need, devices, count, 0)

    def give_back(self, row: int, need: Need, devices: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The exact reverse of `take`."""
        self._move(row, need, devices, 1)

    def give_back_many(self, row: int, need: Need, devices: Sequence[tuple[int, Sequence[int]]], count: int) -> None:
        """The exact reverse of `take_many`."""
        self._move_many(row, need, devices, -count, WHOLE)

    def _move_many(
        self, row: int, need: Need, devices: Sequence[tuple[int, Sequence[int]]], count: int, left: int
    ) -> None:
        self.placed[row] += count
        for column, amount in need.plain:
            self.free[column, row] -= amount * count
        for column, indices in devices:
            line = self.devices[column][row]
            for index in indices:
                line[index] = left
            self.derive(column, row)
        self.touched.append(row)

    def _move(self, row: int, need: Need, devices: Sequence[tuple[int, Sequence[int]]], sign: int) -> None:
        self.placed[row] -= sign
        if need.exclusive:
            self.exclusive[row] = sign < 0
        else:
            free = self.free
            for column, amount in need.plain:
                free[column, row] += sign * amount
            for column, indices in devices:
                part = next((part for shared, part in need.shared if shared == column), WHOLE)
                line = self.devices[column][row]
                for index in indices:
                    line[index] += sign * part
                self.derive(column, row)
        self.touched.append(row)

    def widen(self, column: int, width: int) -> None:
        """Widen a device column to this number of devices per node."""
        old = self.devices[column]
        if width > old.shape[1]:
            wider = np.full((old.shape[0], width), ABSENT, np.int32)
            wider[:, : old.shape[1]] = old
            self.devices[column] = wider

    def whole_devices(self, column: int, row: int) -> list[int]:
        """The indices of a node's wholly free devices, from the left."""
        return [index for index, left in enumerate(self.devices[column][row].tolist()) if left == WHOLE]

    def derive(self, column: int, row: int) -> None:
        line = self.devices[column][row].tolist()
        self.widest[column, row] = max(0, *line) if line else 0
        self.whole[column, row] = line.count(WHOLE)


@dataclass(slots=True)
class LabelColumn:
    """One label of all nodes: a code per value, `NOWHERE` for nodes without the label.

    A topology's domains are the values of its label.
    """

    codes: Rows  # of NumPy's index type, because every decision indexes with them
    values: list[str] = field(default_factory=list)
    code_of: dict[str, int] = field(default_factory=dict)
    changed: int = 0  # rises when a node's value changed
    seen: int = 0  # the position in the fleet's log up to which it is current
    # Cached answers per node, by the answers per domain; valid until a node's value changes.
    handed_out: dict[tuple[bytes, bool], Bools] = field(default_factory=dict)


@dataclass(slots=True)
class Fleet:
    """All nodes as NumPy columns, one array per resource."""

    now: NodeColumns = field(default_factory=NodeColumns)
    allocatable: Ints = field(default_factory=lambda: np.zeros((0, ROWS_START), np.int64))
    names: list[str] = field(default_factory=list)  # by row; empty for a removed node
    row_of: dict[str, int] = field(default_factory=dict)
    labels: list[Mapping[str, str]] = field(default_factory=list)
    taints: list[tuple[Taint, ...]] = field(default_factory=list)
    generation: list[int] = field(default_factory=list)
    ready: list[bool] = field(default_factory=list)
    cordoned: list[bool] = field(default_factory=list)
    column_of: dict[str, int] = field(default_factory=dict)  # resource → row of `free`
    device_column_of: dict[str, int] = field(default_factory=dict)  # resource → entry of `devices`
    described: int = 0  # rises when a node is added, removed or described differently
    relabelled: list[int] = field(default_factory=list)  # the rows described differently, in order
    taint_code: NDArray[np.int32] = field(default_factory=lambda: np.zeros(ROWS_START, np.int32))
    taint_sets: dict[tuple[Taint, ...], int] = field(default_factory=lambda: {(): 0})
    claims: list[str] = field(default_factory=list)  # by row, the holder of the node
    claim_code: NDArray[np.int32] = field(default_factory=lambda: np.zeros(ROWS_START, np.int32))
    holders: dict[str, int] = field(default_factory=lambda: {UNCLAIMED: 0})  # the code of every holder so far
    gates: list[GateTerms] = field(default_factory=list)  # by row
    gate_code: NDArray[np.int32] = field(default_factory=lambda: np.zeros(ROWS_START, np.int32))
    gate_sets: dict[GateTerms, int] = field(default_factory=lambda: {OPEN: 0})
    named: frozenset[str] = frozenset()  # the tenants that nodes are dedicated to
    _label_columns: dict[str, LabelColumn] = field(default_factory=dict)
    _columns_made: int = 0
    _free_rows: list[int] = field(default_factory=list)
    _needs: dict[Shape, Need] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row_of)

    @property
    def size(self) -> int:
        """The number of rows in use, including rows of removed nodes."""
        return len(self.names)

    def put(
        self,
        name: str,
        allocatable: Amounts,
        *,
        labels: Mapping[str, str],
        taints: tuple[Taint, ...] = (),
        generation: int = 1,
        ready: bool = True,
        cordoned: bool = False,
        claim: str = UNCLAIMED,
        tenants: tuple[str, ...] = (),
        whole_only: bool | None = None,
        isolated: bool = False,
    ) -> int:
        """Add or replace a node. All of its capacity is then free: the caller must take placed work again."""
        for resource in sorted(allocatable):
            self.ensure_resource(resource)
        row = self.row_of.get(name)
        if row is None:
            row = self._free_rows.pop() if self._free_rows else self._new_row()
            self.row_of[name] = row
        self.names[row], self.labels[row], self.taints[row] = name, labels, taints
        self.generation[row], self.ready[row], self.cordoned[row] = generation, ready, cordoned
        self.taint_code[row] = self.taint_sets.setdefault(taints, len(self.taint_sets))
        self._claim(row, claim)
        self._put_gate(row, (tenants, whole_only, isolated))
        self._reset(row, allocatable)
        self.now.open[row] = ready and not cordoned
        self._log(row)
        self.now.touched.append(row)
        return row

    def remove(self, name: str) -> None:
        row = self.row_of.pop(name)
        self.names[row], self.labels[row], self.taints[row] = "", {}, ()
        self._claim(row, UNCLAIMED)
        self._put_gate(row, OPEN)
        self._reset(row, {})
        self.now.open[row] = False
        self._free_rows.append(row)
        self._log(row)
        self.now.touched.append(row)

    def holds_any(self, user: str) -> bool:
        """Whether this user holds a node."""
        code = self.holders.get(user, 0)
        return bool(code and (self.claim_code == code).any())

    def _claim(self, row: int, holder: str) -> None:
        self.claims[row] = holder
        self.claim_code[row] = self.holders.setdefault(holder, len(self.holders))

    def _put_gate(self, row: int, gate: GateTerms) -> None:
        before, self.gates[row] = self.gates[row], gate
        self.gate_code[row] = self.gate_sets.setdefault(gate, len(self.gate_sets))
        if before[0] != gate[0]:
            self.named = frozenset(name for terms in set(self.gates) for name in terms[0])

    def need(self, shape: Shape) -> Need:
        """A shape's requests in columns. Each placement counts as one pod, even on nodes without a limit of pods."""
        known = self._needs.get(shape)
        if known is not None:
            return known
        unknown = tuple(name for name, _ in shape.requests if name not in self.column_of)
        plain = [(self.column_of[name], amount) for name, amount in shape.requests if name in self.column_of]
        if not shape.exclusive and PODS in self.column_of:
            plain.append((self.column_of[PODS], WHOLE))
        parts = [
            (self.device_column_of[name], amount) for name, amount in shape.requests if name in self.device_column_of
        ]
        need = Need(
            plain=tuple(plain),
            whole=tuple((column, amount // WHOLE) for column, amount in parts if amount >= WHOLE),
            shared=tuple((column, amount) for column, amount in parts if amount < WHOLE),
            exclusive=shape.exclusive,
            unknown=unknown,
        )
        if len(self._needs) >= NEEDS_MAX:
            self._needs.clear()
        self._needs[shape] = need
        return need

    def label(self, key: str) -> LabelColumn:
        """A label as a column, updated with the nodes that were described differently since."""
        column = self._label_columns.get(key)
        rows = self.now.placed.shape[0]
        if column is None:
            column = self._new_label_column(key, rows)
        if column.codes.shape[0] < rows:
            column.codes = np.concatenate([column.codes, np.full(rows - column.codes.shape[0], NOWHERE, np.intp)])
            column.handed_out.clear()
        if column.seen < len(self.relabelled):
            self._read_labels(key, column, self.relabelled[column.seen :])
            column.seen = len(self.relabelled)
        return column

    def _new_label_column(self, key: str, rows: int) -> LabelColumn:
        """Create a label column. Requests may name any label, so their number is bounded; versions are never reused."""
        if len(self._label_columns) >= LABEL_COLUMNS_MAX:
            self._label_columns.clear()
        self._columns_made += 1
        column = LabelColumn(np.full(rows, NOWHERE, np.intp), changed=self._columns_made << 40)
        self._label_columns[key] = column
        self._read_labels(key, column, range(len(self.labels)))
        column.seen = len(self.relabelled)
        return column

    def _read_labels(self, key: str, column: LabelColumn, rows: Iterable[int]) -> None:
        for row in rows:
            value = self.labels[row].get(key)
            code = NOWHERE if value is None else column.code_of.setdefault(value, len(column.code_of))
            if code == len(column.values) and value is not None:
                column.values.append(value)
            if column.codes[row] != code:
                column.codes[row] = code
                column.changed += 1
                column.handed_out.clear()

    def _log(self, row: int) -> None:
        """Log a row that is described differently. A long log is dropped once all columns have read it."""
        self.described += 1
        self.relabelled.append(row)
        if len(self.relabelled) > RELABELLED_MAX:
            for key in list(self._label_columns):
                self.label(key).seen = 0
            self.relabelled.clear()

    def node_part(self, row: int, shape: Shape) -> int:
        """The thousandths of a node that a shape takes: the whole node, or its dominant fraction, rounded up."""
        if shape.exclusive:
            return WHOLE
        parts = [
            -(-amount * WHOLE // int(offered))
            for name, amount in shape.requests
            if (offered := self.allocatable[self.column_of[name], row] if name in self.column_of else 0)
        ]
        return min(WHOLE, max(parts, default=1))

    def _new_row(self) -> int:
        row = len(self.names)
        if row >= self.now.placed.shape[0]:
            self._grow_rows(self.now.placed.shape[0] * GROWTH // 8)
        self.names.append("")
        self.labels.append({})
        self.taints.append(())
        self.generation.append(0)
        self.ready.append(False)
        self.cordoned.append(False)
        self.claims.append(UNCLAIMED)
        self.gates.append(OPEN)
        return row

    def _grow_rows(self, rows: int) -> None:
        old = self.now
        self.now = NodeColumns(old.free.shape[0], [one.shape[1] for one in old.devices], rows)
        count = old.placed.shape[0]
        for name in ("free", "whole", "widest"):
            getattr(self.now, name)[:, :count] = getattr(old, name)
        for name in ("placed", "exclusive", "open"):
            getattr(self.now, name)[:count] = getattr(old, name)
        for new, before in zip(self.now.devices, old.devices, strict=True):
            new[:count] = before
        self.now.touched = old.touched
        allocatable = np.zeros((self.allocatable.shape[0], rows), np.int64)
        allocatable[:, :count] = self.allocatable
        self.allocatable = allocatable
        self.taint_code = np.concatenate([self.taint_code, np.zeros(rows - count, np.int32)])
        self.claim_code = np.concatenate([self.claim_code, np.zeros(rows - count, np.int32)])
        self.gate_code = np.concatenate([self.gate_code, np.zeros(rows - count, np.int32)])

    def ensure_resource(self, resource: str) -> None:
        """Give a resource a column: a node offers it, or placed work holds it although no node offers it now."""
        if resource not in self.column_of:
            rows = self.now.placed.shape[0]
            # Nodes without a limit of pods take any number.
            empty = np.full((1, rows), NO_LIMIT if resource == PODS else 0, np.int64)
            self.column_of[resource] = len(self.column_of)
            self.now.free = np.concatenate([self.now.free, empty])
            self.allocatable = np.concatenate([self.allocatable, empty])
            self._needs.clear()
        if is_device(resource) and resource not in self.device_column_of:
            rows = self.now.placed.shape[0]
            self.device_column_of[resource] = len(self.device_column_of)
            self.now.devices.append(np.full((rows, 8), ABSENT, np.int32))
            self.now.whole = np.concatenate([self.now.whole, np.zeros((1, rows), np.int32)])
            self.now.widest = np.concatenate([self.now.widest, np.zeros((1, rows), np.int32)])
            self._needs.clear()

    def _reset(self, row: int, allocatable: Amounts) -> None:
        """The row as a node with nothing placed on it."""
        now = self.now
        now.placed[row], now.exclusive[row] = 0, False
        for resource, column in self.column_of.items():
            offered = allocatable.get(resource, NO_LIMIT if resource == PODS else 0)
            self.allocatable[column, row] = now.free[column, row] = offered
        for resource, column in self.device_column_of.items():
            count = min(allocatable.get(resource, 0) // WHOLE, DEVICES_MAX)
            now.widen(column, count)
            now.devices[column][row] = ABSENT
            now.devices[column][row, :count] = WHOLE
            now.derive(column, row)
