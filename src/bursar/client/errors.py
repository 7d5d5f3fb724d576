"""The exceptions of the SDK:

BursarError
├── ConfigError          the configuration file cannot be used
├── ConnectionFailed     the server could not be reached, or stopped answering
└── ApiError             the server refused: `message` has the reason, `hint` the remedy
    ├── Invalid          400, 413, 415, 422: the request must change; `causes` lists every faulty field
    ├── Unauthorized     401: no token, or an invalid one
    ├── Forbidden        403: not allowed for this token
    │   └── CreditRefused    an account cannot pay, or reached its limit; `causes` has the numbers
    ├── QuotaExceeded    403 or 409: a limit is reached; `causes` has the numbers
    ├── NotFound         404
    ├── Conflict         409: the object exists, or has changed since it was read
    ├── Gone             410: the requested revision is no longer stored
    ├── RateLimited      429: `retry_after` has the seconds to wait
    └── Unavailable      502, 503, 504: transient
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bursar.core.values.refusal import Cause, Code


class BursarError(Exception):
    """The base of all errors that this package raises on purpose."""

    hint: str = ""

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(BursarError):
    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConnectionFailed(BursarError):
    """No answer from the server. `passing` is true if a retry may help, unlike for an untrusted certificate."""

    def __init__(self, message: str = "", hint: str = "", *, passing: bool = True) -> None:
        super().__init__(message)
        self.hint = hint
        self.passing = passing


class ApiError(BursarError):
    """A refusal. `status` is the HTTP status, `reason` Kubernetes' reason, `code` Bursar's stable code."""

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
        """Whether the same request may succeed a little later."""
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
    """The exception for an answer that is not a success; `document` is its body if that is JSON."""
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
    """The causes that can be read; others are skipped, so that no error hides the error."""
    if not isinstance(given, list):
        return ()
    known = [{name: str(one.get(name, "")) for name in _CAUSE_FIELDS} for one in given if isinstance(one, Mapping)]
    return tuple(Cause(**values) for values in known)


def _seconds(given: object) -> float:
    """Retry-After in seconds; Bursar does not send its other form, a date."""
    try:
        return max(0.0, float(str(given)))
    except ValueError:
        return 0.0
