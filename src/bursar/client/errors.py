"""What can go wrong, as exceptions:

BursarError
├── ConfigError          the file with the contexts cannot be used as it is
├── ConnectionFailed     the server could not be reached, or stopped answering
└── ApiError             the server said no: `message` and `hint` say why and what would help
    ├── Invalid          400, 413, 415, 422: the request has to change; `causes` names every field at fault
    ├── Unauthorized     401: no token, or one that is no longer good
    ├── Forbidden        403: not allowed for this token
    │   └── CreditRefused    an account cannot pay, or a limit of it has no room; `causes` gives the numbers
    ├── QuotaExceeded    403 or 409: a limit has no room; `causes` gives the numbers of each
    ├── NotFound         404
    ├── Conflict         409: it exists already, or has changed since it was read
    ├── Gone             410: the revision asked for is no longer kept
    ├── RateLimited      429: `retry_after` says when to come back
    └── Unavailable      502, 503, 504: passes by itself
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bursar.core.values.refusal import Cause, Code


class BursarError(Exception):
    """Everything this package raises on purpose."""

    hint: str = ""

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(BursarError):
    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConnectionFailed(BursarError):
    """`passing` tells whether trying again may help; a certificate that is not trusted stays so."""

    def __init__(self, message: str = "", hint: str = "", *, passing: bool = True) -> None:
        super().__init__(message)
        self.hint = hint
        self.passing = passing


class ApiError(BursarError):
    """`status` is the HTTP status, `reason` Kubernetes' word for it, `code` our own, stable one."""

    def __init__(
        self,
        message: str = "",
        *,
        status: int = 0,
        reason: str = "",
        code: str = "",
        hint: str = "",
        causes: tuple[Cause, ...] = (),
        retry_after: float = 0.0,
        request_id: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.code = code
        self.hint = hint
        self.causes = causes
        self.retry_after = retry_after
        self.request_id = request_id
        self.details = dict(details or {})

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed a little later with nothing else changed."""
        return isinstance(self, RateLimited | Unavailable)


class Invalid(ApiError): ...


class Unauthorized(ApiError): ...


class Forbidden(ApiError): ...


class CreditRefused(Forbidden): ...


class QuotaExceeded(ApiError): ...


class NotFound(ApiError): ...


class Conflict(ApiError): ...


class Gone(ApiError): ...


class RateLimited(ApiError): ...


class Unavailable(ApiError): ...


_BY_STATUS: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: Invalid,
    415: Invalid,
    422: Invalid,
    429: RateLimited,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}
_BY_CODE: dict[str, type[ApiError]] = {
    Code.QUOTA_EXCEEDED: QuotaExceeded,
    Code.ACCOUNT_INACTIVE: CreditRefused,
    Code.INSUFFICIENT_CREDIT: CreditRefused,
    Code.CONCURRENCY_EXCEEDED: CreditRefused,
    Code.DAILY_CAP_EXCEEDED: CreditRefused,
}
_CAUSE_FIELDS = tuple(field.name for field in fields(Cause))


def api_error(status: int, document: object, headers: Mapping[str, str], text: str = "") -> ApiError:
    """The exception for an answer that is not a success; `document` is its body, if that was JSON."""
    body = document if isinstance(document, Mapping) else {}
    details = body.get("details") if isinstance(body.get("details"), Mapping) else {}
    assert isinstance(details, Mapping)
    code = str(details.get("code") or "")
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, ApiError)
    return kind(
        str(body.get("message") or text or f"the server answered {status}"),
        status=status,
        reason=str(body.get("reason") or ""),
        code=code,
        hint=str(details.get("hint") or ""),
        causes=_causes(details.get("causes")),
        retry_after=_seconds(headers.get("retry-after")) or _seconds(details.get("retryAfterSeconds")),
        request_id=headers.get("x-request-id", ""),
        details=details,
    )


def _causes(given: object) -> tuple[Cause, ...]:
    """Whatever of it we understand: an error about an error would help nobody."""
    if not isinstance(given, list):
        return ()
    known = [{name: str(one.get(name, "")) for name in _CAUSE_FIELDS} for one in given if isinstance(one, Mapping)]
    return tuple(Cause(**values) for values in known)


def _seconds(given: object) -> float:
    """Retry-After as seconds; its other form, a date, is not used by our servers."""
    try:
        return max(0.0, float(str(given)))
    except ValueError:
        return 0.0
