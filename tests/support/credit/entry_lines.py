"""The bytes that the database hashes of an entry (`entry_hash` in the schema), computed independently."""

from collections.abc import Iterable
from hashlib import sha256

from bursar.core.credit.ledger import Entry


def line(number: int, at: int, entry: Entry) -> bytes:
    """Its numbers, the lengths of its texts, then the texts: unambiguous, so that no two entries are alike."""
    texts = [str(entry.type).encode(), entry.request.encode(), entry.actor.encode(), entry.reason.encode()]
    numbers = (
        number, at, entry.debit, entry.credit, entry.amount, entry.lease, entry.seq, entry.rate, entry.begin, entry.end,
        *(len(text) for text in texts),
    )  # fmt: skip
    return " ".join(str(one) for one in numbers).encode() + b" " + b"".join(texts)


def lines_hash(lines: Iterable[bytes]) -> bytes:
    """The hash of the hashes of all lines."""
    return sha256(b"".join(sha256(one).digest() for one in lines)).digest()
