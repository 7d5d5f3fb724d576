-- Sealing entries in blocks, merging the rollups of blocks into pages, and verifying both.

-- name: lock
-- One process seals at a time; a second one has nothing to do. The lock has a row of its own, because a page takes
-- long, and verification records its findings meanwhile.
SELECT true FROM sealing FOR UPDATE SKIP LOCKED;

-- name: head
SELECT number, first, last, amount, first_at, last_at, checksum, weighted, entries_hash, kept_hash, rollup_hash, previous,
       hash
  FROM entry_block
 ORDER BY number DESC
 LIMIT 1;

-- name: time_of_entry
SELECT at FROM entry WHERE number = $1;

-- name: first_since
-- The first entry in a range at or after a time.
SELECT number FROM entry WHERE number >= $1 AND number <= $2 AND at >= $3 ORDER BY number LIMIT 1;

-- name: digest
-- The digest of a block's entries. OFFSET prevents inlining of the subquery, which would hash each entry once per use.
SELECT count(*) AS count, coalesce(sum(amount), 0) AS amount, min(at) AS first_at, max(at) AS last_at,
       coalesce(sum(part), 0) AS checksum, coalesce(sum(part * place), 0) AS weighted,
       sha256(coalesce(string_agg(hash, ''::bytea ORDER BY number), ''::bytea)) AS entries_hash,
       sha256(coalesce(string_agg(hash, ''::bytea ORDER BY number) FILTER (WHERE kept), ''::bytea)) AS kept_hash
  FROM (
        SELECT number, amount, at, kept, hash, number - $1 + 1 AS place,
               ('x' || encode(substr(hash, 1, 5), 'hex'))::bit(40)::bigint AS part
          FROM (
                SELECT number, amount, at, lease = 0 OR actor <> '' AS kept,
                       entry_hash(number, at, debit, credit, amount, lease, seq, rate, begin, until, type, request,
                                  actor, reason) AS hash
                  FROM entry
                 WHERE number BETWEEN $1 AND $2
                OFFSET 0
               ) AS line
       ) AS line;

-- name: kept_hash
SELECT sha256(coalesce(string_agg(
           entry_hash(number, at, debit, credit, amount, lease, seq, rate, begin, until, type, request, actor, reason),
           ''::bytea ORDER BY number
       ), ''::bytea)) AS hash
  FROM entry_kept
 WHERE number BETWEEN $1 AND $2;

-- name: save_kept
INSERT INTO entry_kept (number, at, type, debit, credit, amount, lease, seq, rate, begin, until, request, actor, reason)
SELECT number, at, type, debit, credit, amount, lease, seq, rate, begin, until, request, actor, reason
  FROM entry
 WHERE number BETWEEN $1 AND $2 AND (lease = 0 OR actor <> '');

-- name: save_rollups
INSERT INTO entry_rollup (block, account, lease, type, count, amount, micros, first, last, begin, until)
SELECT $1, account, lease, type, count(*), sum(amount), sum(until - begin), min(number), max(number),
       coalesce(min(begin) FILTER (WHERE begin > 0), 0), max(until)
  FROM entry_side
 WHERE number BETWEEN $2 AND $3
 GROUP BY account, lease, type;

-- name: rollup_hash
SELECT sha256(coalesce(string_agg(
           sha256(convert_to(concat_ws(' ', account, lease, type, count, amount, micros, first, last, begin, until),
                             'UTF8')),
           ''::bytea ORDER BY account, lease, type
       ), ''::bytea)) AS hash
  FROM entry_rollup
 WHERE block = $1;

-- name: save_balances
INSERT INTO account_balance (account, block, posted)
SELECT moved.account, $1, coalesce(before.posted, 0) + moved.amount
  FROM (SELECT account, sum(amount) AS amount FROM entry_rollup WHERE block = $1 GROUP BY account) AS moved
  LEFT JOIN LATERAL (
        SELECT posted
          FROM account_balance
         WHERE account = moved.account AND block < $1
         ORDER BY block DESC
         LIMIT 1
       ) AS before ON true;

-- name: save_block
INSERT INTO entry_block (number, first, last, amount, first_at, last_at, checksum, weighted, entries_hash, kept_hash,
                         rollup_hash, previous, hash)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);

-- name: blocks
SELECT number, first, last, amount, first_at, last_at, checksum, weighted, entries_hash, kept_hash, rollup_hash, previous,
       hash
  FROM entry_block
 WHERE number > $1 AND number <= $2
 ORDER BY number
 LIMIT $3;

-- name: block_before
SELECT number, first, last, amount, first_at, last_at, checksum, weighted, entries_hash, kept_hash, rollup_hash, previous,
       hash
  FROM entry_block
 WHERE number < $1
 ORDER BY number DESC
 LIMIT 1;

-- name: page_before
SELECT number, first_block, last_block, first, last, rollup_hash, previous, hash
  FROM entry_page
 WHERE number < $1
 ORDER BY number DESC
 LIMIT 1;

-- name: last_page
SELECT number, first_block, last_block, first, last, rollup_hash, previous, hash
  FROM entry_page
 ORDER BY number DESC
 LIMIT 1;

-- name: page_of_block
-- The first page that ends with this block or later.
SELECT number, first_block, last_block, first, last, rollup_hash, previous, hash
  FROM entry_page
 WHERE last_block >= $1
 ORDER BY last_block
 LIMIT 1;

-- name: merge_rollups
-- Merges into the rollups of the last block, which then become the page's.
INSERT INTO entry_rollup AS kept (block, account, lease, type, count, amount, micros, first, last, begin, until)
SELECT $2, account, lease, type, sum(count), sum(amount), sum(micros), min(first), max(last),
       coalesce(min(begin) FILTER (WHERE begin > 0), 0), max(until)
  FROM entry_rollup
 WHERE block >= $1 AND block < $2
 GROUP BY account, lease, type
    ON CONFLICT (account, block, lease, type) DO UPDATE
   SET count = kept.count + excluded.count, amount = kept.amount + excluded.amount,
       micros = kept.micros + excluded.micros, first = least(kept.first, excluded.first),
       last = greatest(kept.last, excluded.last),
       begin = coalesce(least(nullif(kept.begin, 0), nullif(excluded.begin, 0)), 0),
       until = greatest(kept.until, excluded.until);

-- name: drop_merged
DELETE FROM entry_rollup WHERE block >= $1 AND block < $2;

-- name: save_page
INSERT INTO entry_page (number, first_block, last_block, first, last, rollup_hash, previous, hash)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8);

-- name: last_page_before
-- The newest page whose entries are all at least so many days old.
SELECT page.number, page.first_block, page.last_block, page.first, page.last, page.rollup_hash, page.previous, page.hash
  FROM entry_page AS page
  JOIN entry_block AS block ON block.number = page.last_block
 WHERE block.last_at < timestamptz 'epoch' + ledger_now() * interval '1 microsecond' - $1 * interval '1 day'
 ORDER BY page.number DESC
 LIMIT 1;

-- name: page_of_entry
SELECT number, first_block, last_block, first, last, rollup_hash, previous, hash
  FROM entry_page
 WHERE first <= $1
 ORDER BY first DESC
 LIMIT 1;

-- name: raise_floor
UPDATE seal SET floor = greatest(floor, $1) WHERE id = 1;

-- name: thin_balances
-- Where single entries are dropped, one balance per page is enough: nobody can query times within a page.
DELETE FROM account_balance AS balance
 USING entry_page AS page
 WHERE page.last < $1 AND page.last >= $2 AND balance.block >= page.first_block AND balance.block < page.last_block
   AND EXISTS (
           SELECT FROM account_balance AS later
            WHERE later.account = balance.account AND later.block > balance.block AND later.block <= page.last_block
       );

-- name: partitions
-- Partitions with their ranges of numbers; `pending` marks one whose removal was begun.
SELECT child.relname AS name, inhdetachpending AS pending,
       (regexp_match(pg_get_expr(child.relpartbound, child.oid), 'FROM \(''(\d+)''\)'))[1]::bigint AS first,
       (regexp_match(pg_get_expr(child.relpartbound, child.oid), 'TO \(''(\d+)''\)'))[1]::bigint - 1 AS last
  FROM pg_inherits
  JOIN pg_class AS child ON child.oid = inhrelid
 WHERE inhparent = 'entry'::regclass
 ORDER BY 3;

-- name: orphans
-- Detached partitions that still exist.
SELECT relname AS name
  FROM pg_class
 WHERE relname ~ '^entry_[0-9]+$' AND relkind = 'r' AND NOT relispartition
   AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'entry'::regclass);

-- name: standing
SELECT seal.floor, seal.verified, seal.reviewed, seal.leases, seal.findings, seal.checked_at, ledger.last,
       coalesce(block.number, 0) AS block, coalesce(block.last, 0) AS sealed, block.hash, block.sealed_at
  FROM seal
 CROSS JOIN ledger
  LEFT JOIN (SELECT number, last, hash, sealed_at FROM entry_block ORDER BY number DESC LIMIT 1) AS block ON true
 WHERE seal.id = 1;

-- name: claim_check
-- The first caller in each period verifies.
UPDATE seal
   SET checking_at = clock_timestamp()
 WHERE id = 1 AND (checking_at IS NULL OR checking_at <= clock_timestamp() - $1 * interval '1 second')
RETURNING 1;

-- name: claim_drop
-- The first caller in each period drops partitions.
UPDATE seal
   SET dropping_at = clock_timestamp()
 WHERE id = 1 AND (dropping_at IS NULL OR dropping_at <= clock_timestamp() - $1 * interval '1 second')
RETURNING 1;

-- name: save_check
UPDATE seal SET verified = $1, reviewed = $2, leases = $3, findings = $4, checking_at = clock_timestamp() WHERE id = 1;

-- name: save_checked
UPDATE seal SET checked_at = clock_timestamp() WHERE id = 1;
