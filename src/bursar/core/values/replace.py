"""`replace` for frozen dataclasses and msgspec structs.

Values are frozen dataclasses. Values that every batch makes by the thousand are msgspec structs, which take a tenth of
the time to make.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    # The type checker knows the fields of `dataclasses.replace`; no other signature can express them.
    from dataclasses import replace as replace
else:

    def replace(value: Any, /, **changes: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            return msgspec.structs.replace(value, **changes)
        return dataclasses.replace(value, **changes)
