"""The credit policy in the current system settings."""

from __future__ import annotations

from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.values.refusal import Refusal
from bursar.ops.objects.object import get
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.settings import SETTINGS_KEY, credit_policy_of


async def load_credit_policy(runtime: Runtime) -> CreditPolicy:
    found = await get(runtime, SETTINGS_KEY)
    return CreditPolicy() if isinstance(found, Refusal) else credit_policy_of(found.doc)
