"""Write docs/schema.sql: the schema that all migrations make together, read from PostgreSQL's own catalogue.

The file is for reading. `make schema` writes it anew, and a test compares it with a database that was just migrated.
"""

import asyncio
import tempfile
from pathlib import Path

import asyncpg

PAGE = Path(__file__).resolve().parent.parent / "docs" / "schema.sql"
HEAD = """\
-- The schema of Bursar's database, as its migrations (src/bursar/store/sql/migrations) make it.
-- Written by `make schema`; a test compares it with a migrated database. ARCHITECTURE.md says who writes which table.
"""

TABLES = """
SELECT c.oid, c.relname AS name, pg_get_partkeydef(c.oid) AS partitioned, c.reloptions AS options
  FROM pg_class c
 WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
 ORDER BY c.relname COLLATE "C"
"""
COLUMNS = """
SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null,
       pg_get_expr(d.adbin, d.adrelid) AS given, a.attidentity::text AS identity, a.attgenerated::text AS generated,
       (SELECT k.collname FROM pg_collation k WHERE k.oid = a.attcollation AND k.collname = 'C') AS collation
  FROM pg_attribute a
  LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""
CONSTRAINTS = """
SELECT conname AS name, pg_get_constraintdef(oid) AS text FROM pg_constraint
 WHERE conrelid = $1 AND contype <> 'n' ORDER BY contype = 'c', conname COLLATE "C"
"""
INDEXES = """
SELECT pg_get_indexdef(i.indexrelid) AS text FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
 WHERE i.indrelid = $1 AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = i.indexrelid)
 ORDER BY c.relname COLLATE "C"
"""
TRIGGERS = """
SELECT pg_get_triggerdef(oid) AS text FROM pg_trigger
 WHERE tgrelid = $1 AND NOT tgisinternal ORDER BY tgname COLLATE "C"
"""
SEQUENCES = """
SELECT c.relname AS name FROM pg_class c
 WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'S'
   AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('a', 'i'))
 ORDER BY c.relname COLLATE "C"
"""
FUNCTIONS = """
SELECT pg_get_functiondef(oid) AS text FROM pg_proc
 WHERE pronamespace = 'public'::regnamespace ORDER BY proname COLLATE "C"
"""


async def render(db: asyncpg.Connection) -> str:
    """The schema as SQL: tables by name with their constraints, indexes and triggers; then sequences and functions."""
    parts = [HEAD, *[await _table(db, table) for table in await db.fetch(TABLES)]]
    parts += [f"CREATE SEQUENCE {one['name']};\n" for one in await db.fetch(SEQUENCES)]
    parts += [f"{one['text'].rstrip()};\n" for one in await db.fetch(FUNCTIONS)]
    return "\n".join(parts)


async def _table(db: asyncpg.Connection, table: asyncpg.Record) -> str:
    rows = [_column(one) for one in await db.fetch(COLUMNS, table["oid"])]
    width = max(len(name) for name, _, _ in rows)
    types = max(len(kind) for _, kind, _ in rows)
    lines = [f"    {name:{width}} {kind:{types}} {rest}".rstrip() for name, kind, rest in rows]
    lines += [f"    CONSTRAINT {one['name']} {one['text']}" for one in await db.fetch(CONSTRAINTS, table["oid"])]
    end = f" PARTITION BY {table['partitioned']}" if table["partitioned"] else ""
    end += f" WITH ({', '.join(table['options'])})" if table["options"] else ""
    text = f"CREATE TABLE {table['name']} (\n" + ",\n".join(lines) + f"\n){end};\n"
    for statement in (INDEXES, TRIGGERS):
        text += "".join(f"{_short(one['text'])};\n" for one in await db.fetch(statement, table["oid"]))
    return text


def _column(one: asyncpg.Record) -> tuple[str, str, str]:
    kind = one["type"] + (' COLLATE "C"' if one["collation"] else "")
    rest = ["NOT NULL"] if one["not_null"] else []
    if one["identity"]:
        rest.append(f"GENERATED {'ALWAYS' if one['identity'] == 'a' else 'BY DEFAULT'} AS IDENTITY")
    elif one["generated"]:
        rest.append(f"GENERATED ALWAYS AS ({one['given']}) STORED")
    elif one["given"] is not None:
        rest.append(f"DEFAULT {one['given']}")
    return one["name"], kind, " ".join(rest)


def _short(definition: str) -> str:
    return definition.replace(" ON ONLY public.", " ON ").replace(" ON public.", " ON ").replace("public.", "")


async def _migrated(folder: Path) -> str:
    from bursar.store.db.migrate import migrate
    from bursar.store.embedded import start

    embedded = await start(folder / "data")
    try:
        db = await asyncpg.connect(embedded.url)
        await migrate(db)
        text = await render(db)
        await db.close()
        return text
    finally:
        await embedded.stop()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL may run as another user
        PAGE.write_text(asyncio.run(_migrated(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
