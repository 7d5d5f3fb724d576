"""Bursar as a backend of waldur-site-agent, Waldur's own process for providers of resources.

The agent fetches orders, reports usage and synchronizes states; this backend maps them to Bursar. An order for a
resource creates a tenant with its namespace, an update sets its limits and budgets, a termination closes it. Usage is
reported by calendar month, in UTC. The backend runs in the agent's process and uses only the public API. The agent
finds it by its entry point, `bursar`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from waldur_api_client.client import AuthenticatedClient
from waldur_api_client.models.resource import Resource
from waldur_site_agent.backend import logger
from waldur_site_agent.backend.backends import BaseBackend
from waldur_site_agent.backend.clients import UnknownClient
from waldur_site_agent.backend.exceptions import (
    BackendError,
    BackendNotReadyError,
    ConfigurationError,
    DuplicateResourceError,
)
from waldur_site_agent.backend.structures import BackendResourceInfo, ClientResource
from waldur_site_agent.backend.utils import get_current_time_in_timezone

from bursar.bridges.waldur_tenant import ALL, BUDGETS, Hours, NotTheirs, NotYet, ResourceState, Tenants, state_of, whole
from bursar.client import ApiError, BursarError, Client, ConnectionFailed, NotFound
from bursar.core.quota.quota_messages import dimension_of

TOTAL = "TOTAL_ACCOUNT_USAGE"  # the agent's key for the usage of all users
USED = "usage"  # the accounting type of components billed by use


class NotThere(BackendError):  # type: ignore[misc]
    """Waldur has no tenant of that name."""


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors: a refusal fails an order, a transient error postpones it to the next round."""
    try:
        yield
    except NotYet as error:
        raise BackendNotReadyError(str(error)) from error
    except NotFound as error:
        raise NotThere(error.message) from error
    except NotTheirs as error:
        raise BackendError(f"{error}. Nothing was changed: check the resource's backend_id") from error
    except ValueError as error:
        raise BackendError(str(error)) from error
    except (ApiError, ConnectionFailed) as error:
        said = f"{error.message} {error.hint}".strip()
        raise (BackendNotReadyError if error.passing else BackendError)(said) from error
    except BursarError as error:
        raise BackendError(error.message) from error


class TenantClient(UnknownClient):  # type: ignore[misc]
    """The client interface that the agent expects of a backend. Bursar stores no users: they come with tokens."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def list_resources(self) -> list[ClientResource]:
        with translated():
            return [_resource(one) for one in self._tenants.all()]

    def get_resource(self, resource_id: str) -> ClientResource | None:
        with translated():
            found = self._tenants.find(resource_id)
            return None if found is None else _resource(found)


def _resource(document: Mapping[str, Any]) -> ClientResource:
    name, spec = document["metadata"]["name"], document.get("spec") or {}
    return ClientResource(name=name, description=spec.get("displayName", ""), backend_id=name)


class BursarBackend(BaseBackend):  # type: ignore[misc]
    """A resource is a tenant; a component is a budget (`gpu_hours`, `node_hours`) or the limit of a dimension."""

    supports_cycle_preflight = True

    def __init__(self, backend_settings: dict[str, Any], backend_components: dict[str, dict[str, Any]]) -> None:
        super().__init__(backend_settings, backend_components)
        self.backend_type = "bursar"
        self._server = Client(_url(backend_settings), _token(backend_settings), ca_file=backend_settings.get("ca_file"))
        self._tenants = Tenants(
            self._server,
            parent=backend_settings.get("parent", ""),
            wait_seconds=float(backend_settings.get("delete_wait_seconds", 10)),
            downscaled=_dimensions(backend_settings.get("downscaled_limits", {"max_concurrent_allocations": 1})),
        )
        self.client = TenantClient(self._tenants)
        self._pulled: dict[str, str] = {}  # the resource of each tenant name that was pulled

    # Availability.

    def ping(self, raise_exception: bool = False) -> bool:
        try:
            with translated():
                self._server.whoami()
        except (BackendError, BackendNotReadyError) as error:
            logger.warning("Bursar cannot be used: %s", error)
            if raise_exception:
                raise BackendError(str(error)) from error
            return False
        return True

    def diagnostics(self) -> bool:
        if not self.ping():
            return False
        with translated():
            logger.info("Bursar at %s, as %s", self._server.context.url, self._server.whoami())
            logger.info("Tenants of Waldur: %s", ", ".join(one["metadata"]["name"] for one in self._tenants.all()))
        return True

    def list_components(self) -> list[str]:
        return list(self.backend_components)

    # Orders.

    def create_resource_with_id(
        self, waldur_resource: Resource, resource_backend_id: str, user_context: dict[str, Any] | None = None
    ) -> BackendResourceInfo:
        """Create the tenant with all its limits in one request, so that it never exists without them."""
        del user_context
        limits, _ = self._collect_resource_limits(waldur_resource)
        with translated():
            made = self._tenants.put(
                resource_backend_id,
                _owner(waldur_resource),
                str(waldur_resource.name or ""),
                self._targets(limits),
            )
        if not made:
            raise DuplicateResourceError(resource_backend_id)
        return BackendResourceInfo(
            backend_id=resource_backend_id, backend_metadata=self.get_resource_metadata(resource_backend_id)
        )

    def has_prepaid_components(self) -> bool:
        """True, so that the agent passes an update's resource. Otherwise it passes only a tenant's name."""
        return True

    def _setup_resource_limits(self, resource_backend_id: str, waldur_resource: Resource) -> dict[str, int]:
        """Apply an update: set all agreed limits of the resource."""
        limits, agreed = self._collect_resource_limits(waldur_resource)
        with translated():
            self._tenants.set_limits(resource_backend_id, _owner(waldur_resource), self._targets(limits))
        return agreed

    def set_resource_limits(self, resource_backend_id: str, limits: dict[str, int]) -> None:
        """Refuse an update without its resource."""
        del limits
        raise BackendError(f"an update of {resource_backend_id!r} does not name its resource: nothing was changed")

    def delete_resource(self, waldur_resource: Resource, **kwargs: str) -> None:
        """Delete the tenant with all its work; with `soft_delete` only close it."""
        del kwargs
        name = str(waldur_resource.backend_id or "").strip()
        if not name:
            logger.warning("Resource %s never had a tenant", waldur_resource.uuid)
            return
        try:
            with translated():
                if self.backend_settings.get("soft_delete", False):
                    self._tenants.set_state(name, _owner(waldur_resource), ResourceState.TERMINATED)
                else:
                    self._tenants.delete(name, _owner(waldur_resource))
        except NotThere:
            logger.warning("Tenant %s of resource %s not found", name, waldur_resource.uuid)

    def pull_resource(self, waldur_resource: Resource) -> BackendResourceInfo | None:
        """Report a tenant only to its own resource, whatever backend_id another resource has."""
        name = str(waldur_resource.backend_id or "").strip()
        if not self._is_its_own(name, waldur_resource):
            return None
        self._pulled[name] = _owner(waldur_resource)
        return super().pull_resource(waldur_resource)

    def _is_its_own(self, name: str, waldur_resource: Resource) -> bool:
        with translated():
            return bool(name) and self._tenants.find(name, _owner(waldur_resource)) is not None

    def _pre_create_resource(self, waldur_resource: Resource, user_context: dict[str, Any] | None = None) -> None:
        del waldur_resource, user_context

    def _collect_resource_limits(self, waldur_resource: Resource) -> tuple[dict[str, int], dict[str, int]]:
        """The ordered limits, else those of the agent's configuration. Waldur already knows what it ordered."""
        ordered = waldur_resource.limits.to_dict() if waldur_resource.limits else {}
        limits = {name: one["limit"] for name, one in self.backend_components.items() if one.get("limit") is not None}
        return self._converted({**limits, **{name: value for name, value in ordered.items() if value is not None}}), {}

    # States.

    def downscale_resource(self, resource_backend_id: str) -> bool:
        return self._put_state(resource_backend_id, ResourceState.DOWNSCALED)

    def pause_resource(self, resource_backend_id: str) -> bool:
        return self._put_state(resource_backend_id, ResourceState.PAUSED)

    def restore_resource(self, resource_backend_id: str) -> bool:
        return self._put_state(resource_backend_id, ResourceState.OPEN)

    def get_resource_metadata(self, resource_backend_id: str) -> dict[str, str]:
        with translated():
            found = self._tenants.find(resource_backend_id)
        return {} if found is None else {"tenant": resource_backend_id, "state": str(state_of(found)) or "ok"}

    def sync_resource_limits(self, waldur_resource: Resource, waldur_rest_client: AuthenticatedClient) -> None:
        """Do nothing: limits come from Waldur by orders, and changes by administrators are not sent back."""
        del waldur_resource, waldur_rest_client

    def add_user(self, waldur_resource: Resource, username: str, **kwargs: str) -> bool:
        """Do nothing: users with a token of the tenant, or an OIDC claim, may use it."""
        del waldur_resource, kwargs
        return bool(username)

    def _put_state(self, name: str, state: ResourceState) -> bool:
        """Set the state of the tenant's pulled resource: the agent pulls before it changes states."""
        if name not in self._pulled:
            raise BackendError(f"the resource of {name!r} is unknown: nothing was changed")
        with translated():
            self._tenants.set_state(name, self._pulled[name], state)
        return True

    # Usage.

    def _get_usage_report(self, resource_backend_ids: list[str]) -> dict[str, Any]:
        today = get_current_time_in_timezone(self.timezone)
        return self.get_usage_report_for_period(resource_backend_ids, today.year, today.month)

    def get_usage_report_for_period(
        self, resource_backend_ids: list[str], year: int, month: int, waldur_resource: Resource | None = None
    ) -> dict[str, Any]:
        """The usage of a calendar month in UTC: hours of budgets, and of components billed by use. A month that has
        begun in the agent's time zone but not yet in UTC is empty."""
        begin, end = date(year, month, 1), date(year + month // 12, month % 12 + 1, 1)
        report: dict[str, Any] = {}
        for name in resource_backend_ids:
            if waldur_resource is not None and not self._is_its_own(name, waldur_resource):
                continue
            used: Hours = {ALL: {}}
            if begin <= datetime.now(UTC).date():
                with translated():
                    used = self._tenants.hours(name, begin.isoformat(), end.isoformat())
            report[name] = {user or TOTAL: self._reported(hours) for user, hours in used.items()}
        return report

    def _reported(self, used: Mapping[str, float]) -> dict[str, float]:
        reported = {}
        for name, one in self.backend_components.items():
            target = self._target(name)
            if target in BUDGETS or one.get("accounting_type") == USED:
                factor = one.get("unit_factor_reporting") or one.get("unit_factor") or 1
                reported[name] = used.get(target, 0.0) / float(factor)
        return reported

    # Components.

    def _target(self, component: str) -> str:
        """The budget or dimension of a component: its own name, unless the settings map it to another."""
        named = (self.backend_settings.get("dimensions") or {}).get(component, component)
        return named if named in BUDGETS else dimension_of(str(named))

    def _targets(self, limits: Mapping[str, int]) -> dict[str, int]:
        return {self._target(component): value for component, value in limits.items()}

    def _converted(self, limits: Mapping[str, float]) -> dict[str, int]:
        """Limits in Bursar's units, without components that the agent's configuration does not have."""
        known = {name: value for name, value in limits.items() if name in self.backend_components}
        factors = {name: one.get("unit_factor", 1) for name, one in self.backend_components.items()}
        return {name: whole(value, factors[name]) for name, value in known.items()}


def _owner(resource: Resource) -> str:
    """The resource's UUID, as in the label of its tenant."""
    assert isinstance(resource.uuid, UUID), "Waldur names what it orders"
    return resource.uuid.hex


def _url(settings: Mapping[str, Any]) -> str:
    if not settings.get("url"):
        raise ConfigurationError("backend_settings needs url: Bursar's URL, such as https://bursar.example.com")
    return str(settings["url"])


def _token(settings: Mapping[str, Any]) -> str:
    if settings.get("token"):
        return str(settings["token"])
    if not settings.get("token_file"):
        raise ConfigurationError("backend_settings needs token or token_file: a Bursar token with the role service")
    try:
        return Path(settings["token_file"]).read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"{settings['token_file']} cannot be read: {error.strerror}") from error


def _dimensions(limits: Mapping[str, Any]) -> dict[str, int]:
    return {dimension_of(name): int(value) for name, value in limits.items()}
