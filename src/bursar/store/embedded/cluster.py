"""Creating a cluster, and the commands that move one to another major version of PostgreSQL."""

import asyncio
import os
import shlex
import shutil
from pathlib import Path

from bursar.osuser import name_of
from bursar.store.embedded.account import DatabaseUser
from bursar.store.embedded.binaries import Binaries, find_binaries
from bursar.store.embedded.directory import PORT, Directory, make_private
from bursar.store.embedded.error import EmbeddedError
from bursar.store.embedded.process import spawn

SUPERUSER = "postgres"
ROLE = "bursar"  # also the name of its database

# Locale C sorts by code point, so no index depends on the C library's version. `trust` lasts until `write_access`,
# before the first start.
INITDB = (
    f"--username={SUPERUSER} --encoding=UTF8 --locale=C --data-checksums --auth-local=trust --auth-host=reject"
).split()
SETTINGS = {
    "listen_addresses": "",
    "port": str(PORT),
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "128MB",
    "max_connections": "100",
    "wal_level": "replica",
    "wal_compression": "on",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "logging_collector": "off",
    "log_destination": "stderr",
    "log_timezone": "UTC",
    "timezone": "UTC",
    "jit": "off",
    "autovacuum_naptime": "10s",  # hot rows are updated thousands of times a second
    "autovacuum_vacuum_cost_delay": "1ms",
}


MAP = "bursar"
HEAD = "# Written by Bursar at each start: changes made here are lost.\n"


def write_access(directory: Directory, account: DatabaseUser, client: str | None) -> None:
    """Write the connection rules (pg_hba): roles by the peer user that the kernel reports for the socket (`peer`).

    The user that runs PostgreSQL, and the current user, may take either role; the client may take `bursar`, which is no
    superuser. If one of these users has no name, peer authentication cannot map it: then every user that can enter the
    socket's directory is trusted, and that is the account alone.
    """
    names = [name_of(account.uid), name_of(os.geteuid())]
    if None in names:
        rules, users = "local all all trust\n", ""
    else:
        rules = f"local all all peer map={MAP}\n"
        pairs = dict.fromkeys([(name, role) for name in names for role in (SUPERUSER, ROLE)])
        pairs |= {(client, ROLE): None} if client else {}
        users = "".join(f'{MAP} "{name}" {role}\n' for name, role in pairs)
    _write(directory.pgdata / "pg_hba.conf", HEAD + rules, account)
    _write(directory.pgdata / "pg_ident.conf", HEAD + users, account)


def _write(path: Path, text: str, account: DatabaseUser) -> None:
    """Write a file without following links: the database's user can write to its directory too."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        if account.switch:
            os.fchown(fd, account.uid, account.gid)
        file.write(text)


async def initialise(directory: Directory, binaries: Binaries, account: DatabaseUser, alive_fd: int) -> None:
    """Create a cluster aside and rename it when it is complete, so that an interrupted initdb never looks like a
    cluster."""
    _clear_unfinished(directory, account)
    command = [str(binaries.bin_dir / "initdb"), *INITDB, "--no-instructions", "-D", str(directory.unfinished)]
    initdb = await spawn(command, account, alive_fd=alive_fd, output=asyncio.subprocess.PIPE)
    try:
        output, _ = await initdb.communicate()
    finally:
        if initdb.returncode is None:  # cancelled
            initdb.kill()
    if initdb.returncode != 0:
        raise EmbeddedError(
            f"initdb ended with status {initdb.returncode}: {output.decode(errors='replace').strip()[-2000:]}",
            f"Mend what it names and start again; {directory.unfinished} is made anew each time.",
        )
    _publish(directory)


def _clear_unfinished(directory: Directory, account: DatabaseUser) -> None:
    if directory.unfinished.exists():
        shutil.rmtree(directory.unfinished)
    make_private(directory.unfinished, account)


def _publish(directory: Directory) -> None:
    directory.unfinished.rename(directory.pgdata)
    root = os.open(directory.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(root)
    finally:
        os.close(root)


def choose_binaries(directory: Directory, account: DatabaseUser, socket_dir: Path) -> Binaries:
    """Choose binaries of the version that wrote the cluster; without any, the refusal shows both remedies."""
    major = directory.version()
    try:
        return find_binaries(major, account)
    except EmbeddedError as error:
        if major is None:
            raise
        try:
            new = find_binaries(None, account)
        except EmbeddedError:
            raise error from None
        move = move_script(directory, account, socket_dir, major, new)
        raise EmbeddedError(
            error.problem,
            f"{error.next_step}\nOr, with its binaries at hand once, move the data to PostgreSQL {new.major}:\n{move}",
        ) from None


def move_script(directory: Directory, account: DatabaseUser, socket_dir: Path, major: int, new: Binaries) -> str:
    """Return the commands that dump a cluster with its old version and restore it into a fresh one of the new
    version."""
    q = shlex.quote
    run = f"runuser -u {q(account.name)} -- " if account.switch else ""
    pgdata, kept = q(str(directory.pgdata)), q(f"{directory.pgdata}.{major}")
    dump, socket = q(str(directory.root / "bursar.dump")), q(str(socket_dir))
    owner = f"-o {q(account.name)} " if account.switch else ""
    options = q(
        f"-c listen_addresses='' -c unix_socket_directories='{socket_dir}' "
        f"-c unix_socket_permissions=0700 -c port={PORT}"
    )
    connect = f"-h {socket} -p {PORT} -U {SUPERUSER}"
    return "\n".join(
        (
            "  (set -e; umask 077; cd /",
            f"  OLD=/path/to/postgresql-{major}/bin NEW={q(str(new.bin_dir))}",
            f"  {run}$OLD/pg_ctl start -w -s -l /dev/null -D {pgdata} -o {options}",
            f"  {run}$NEW/pg_dump {connect} -Fc {ROLE} > {dump}",
            f"  {run}$OLD/pg_ctl stop -w -s -D {pgdata}",
            f"  mv {pgdata} {kept}",
            f"  install -d -m 700 {owner}{pgdata}",
            f"  {run}$NEW/initdb {' '.join(INITDB)} -D {pgdata} > /dev/null",
            f"  {run}$NEW/pg_ctl start -w -s -l /dev/null -D {pgdata} -o {options}",
            f"  {run}$NEW/createuser {connect} {ROLE}",
            f"  {run}$NEW/createdb {connect} -O {ROLE} {ROLE}",
            f"  {run}$NEW/pg_restore {connect} -e -d {ROLE} < {dump}",
            f"  {run}$NEW/pg_ctl stop -w -s -D {pgdata})",
            f"  # then start Bursar; when all is well, remove {kept} and {dump}",
        )
    )
