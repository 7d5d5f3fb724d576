"""Widget: a kind of its own for tests, which needs nothing but this file."""

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import UNSET, UnsetType

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.charge import Charge
from bursar.core.values.access import AccessGroup, KindAccess
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds import registry
from bursar.wire.shared.kind import Kind, column
from bursar.wire.shared.meta import ObjectMeta, Text, Wire


class WidgetSpec(Wire):
    color: str
    size: int


class WidgetStatus(Wire):
    phase: Text = UNSET


class Widget(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: WidgetSpec
    status: WidgetStatus | UnsetType = UNSET


def _check(widget: Widget) -> list[Cause]:
    return [] if widget.spec.size >= 0 else [field_fault("spec.size", "must not be negative")]


WIDGET = Kind(
    name="Widget",
    plural="widgets",
    type=Widget,
    namespaced=True,
    description="Is tried in tests.",
    short_names=("wd",),
    uid_prefix="widget",
    access=KindAccess(AccessGroup.WORK),
    check=_check,
    selectable=("spec.color",),
    fields=lambda one: {"spec.color": one.spec.color},
    charge=lambda one: Charge(accepted={"widgets": one.spec.size * WHOLE}),
    first_status=lambda _, __: {"phase": "New"},
    columns=(column("Color", "spec.color"), column("Phase", "status.phase", wide=True)),
    has_status=True,
    in_all=True,
    words={"WidgetSpec.color": "The color to paint it in."},
    example={"metadata": {"name": "red"}, "spec": {"color": "red", "size": 1}},
)


@contextmanager
def registered() -> Iterator[Kind]:
    """The kind among the others, until the end of the block."""
    registry.register(WIDGET)
    try:
        yield WIDGET
    finally:
        registry.KINDS.remove(WIDGET)
        del registry.BY_NAME[WIDGET.name], registry.BY_PLURAL[WIDGET.plural]


def main() -> None:
    """The command line, in a process that knows the kind."""
    from bursar.cli.main import cli

    registry.register(WIDGET)
    cli(prog_name="bursar")


if __name__ == "__main__":
    main()
