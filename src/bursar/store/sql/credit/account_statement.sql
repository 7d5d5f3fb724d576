-- Account statements. Blocks and pages are summed by key; single entries are read only at the edges of a period and
-- after the last block. Entry numbers rise with time, so a point in time is a position between two entries.

-- name: cut
-- The last block wholly before a time, and whether the next one is wholly after it.
SELECT seal.floor, ledger.last, coalesce(before.number, 0) AS block, coalesce(before.last, 0) AS sealed,
       after.first_at >= $1 AS clean,
       before.number IS NULL OR EXISTS (SELECT FROM entry_page WHERE last_block = before.number) AS page_end
  FROM seal
 CROSS JOIN ledger
  LEFT JOIN (SELECT number, last FROM entry_block WHERE last_at < $1 ORDER BY last_at DESC, number DESC LIMIT 1) AS before
    ON true
  LEFT JOIN entry_block AS after ON after.number = coalesce(before.number, 0) + 1
 WHERE seal.id = 1;

-- name: first_since
SELECT number FROM entry WHERE number > $1 AND at >= $2 ORDER BY number LIMIT 1;

-- name: newest
SELECT ledger.last, coalesce(block.number, 0) AS block, coalesce(block.last, 0) AS sealed
  FROM ledger
  LEFT JOIN (SELECT number, last FROM entry_block ORDER BY number DESC LIMIT 1) AS block ON true
 WHERE ledger.id = 1;

-- name: posted
-- Balances after a block, plus the entries since, up to and including an entry.
SELECT wanted.id, coalesce(sealed.posted, 0) + coalesce(since.amount, 0) AS posted
  FROM unnest($1::bigint[]) AS wanted (id)
  LEFT JOIN LATERAL (
        SELECT posted FROM account_balance WHERE account = wanted.id AND block <= $2 ORDER BY block DESC LIMIT 1
       ) AS sealed ON true
  LEFT JOIN (
        SELECT account, sum(amount) AS amount
          FROM entry_side
         WHERE number > $3 AND number <= $4 AND account = ANY($1)
         GROUP BY account
       ) AS since ON since.account = wanted.id;

-- name: first_unit
-- The first page, or block in no page, that begins after an entry.
SELECT first_block, first
  FROM ((SELECT first_block, first FROM entry_page WHERE first > $1 ORDER BY first LIMIT 1)
         UNION ALL
        (SELECT number, first
           FROM entry_block
          WHERE first > greatest($1, (SELECT last FROM entry_page ORDER BY number DESC LIMIT 1))
          ORDER BY first
          LIMIT 1)) AS unit
 ORDER BY first
 LIMIT 1;

-- name: last_unit
-- The last page, or block in no page, that does not extend beyond an entry.
SELECT last_block, last
  FROM ((SELECT last_block, last FROM entry_page WHERE first <= $1 ORDER BY first DESC LIMIT 2)
         UNION ALL
        (SELECT number, last
           FROM entry_block
          WHERE first <= $1 AND first > coalesce((SELECT last FROM entry_page ORDER BY number DESC LIMIT 1), 0)
          ORDER BY first DESC
          LIMIT 2)) AS unit (last_block, last)
 WHERE last <= $1
 ORDER BY last DESC
 LIMIT 1;

-- name: totals
SELECT account, type, sum(amount) AS amount, min(lease) FILTER (WHERE lease > 0) AS first_lease,
       max(lease) AS last_lease
  FROM (SELECT account, type, amount, lease FROM entry_rollup WHERE account = ANY($1) AND block BETWEEN $2 AND $3
         UNION ALL
        SELECT account, type, amount, lease FROM entry_side WHERE account = ANY($1) AND number > $4 AND number <= $5
         UNION ALL
        SELECT account, type, amount, lease FROM entry_side WHERE account = ANY($1) AND number > $6 AND number <= $7)
       AS part
 GROUP BY account, type;

-- name: floor
-- The first entry that is still stored singly.
SELECT floor FROM seal WHERE id = 1;

-- name: lines
-- First selects the leases of the page one after another by index, then sums only these, so that leases after the page
-- are not read.
WITH edge AS MATERIALIZED (
    SELECT lease, type, amount, (until - begin)::numeric AS micros, 1::bigint AS count, begin, until
      FROM entry_side
     WHERE account = $1 AND number > $4 AND number <= $5 AND lease > $8 AND lease <= $9
     UNION ALL
    SELECT lease, type, amount, until - begin, 1, begin, until
      FROM entry_side
     WHERE account = $1 AND number > $6 AND number <= $7 AND lease > $8 AND lease <= $9
), chosen AS MATERIALIZED (
    SELECT lease
      FROM ((SELECT DISTINCT lease
               FROM entry_rollup
              WHERE account = $1 AND block BETWEEN $2 AND $3 AND lease > $8 AND lease <= $9
              ORDER BY lease
              LIMIT $10)
             UNION
            (SELECT DISTINCT lease FROM edge ORDER BY lease LIMIT $10)) AS next
     ORDER BY lease
     LIMIT $10
), part AS (
    SELECT chosen.lease, rolled.*
      FROM chosen
     CROSS JOIN LATERAL (
               SELECT type, amount, micros, count, begin, until
                 FROM entry_rollup
                WHERE account = $1 AND lease = chosen.lease AND block BETWEEN $2 AND $3
           ) AS rolled
     UNION ALL
    SELECT edge.* FROM edge JOIN chosen USING (lease)
), line AS (
    SELECT lease, sum(amount) AS amount, coalesce(sum(amount) FILTER (WHERE type = 'debit'), 0) AS debited,
           coalesce(sum(amount) FILTER (WHERE type = 'refund'), 0) AS refunded,
           coalesce(sum(amount) FILTER (WHERE type NOT IN ('debit', 'refund')), 0) AS adjusted,
           coalesce(sum(micros) FILTER (WHERE type = 'debit'), 0) AS micros,
           coalesce(min(begin) FILTER (WHERE begin > 0), 0) AS begin, max(until) AS until, sum(count) AS entries
      FROM part
     GROUP BY lease
)
SELECT line.lease, line.amount, line.debited, line.refunded, line.adjusted, line.micros, line.begin, line.until,
       line.entries, coalesce(open.job, ended.job, '') AS job, coalesce(open.work, ended.work, '') AS work,
       coalesce(open.node, ended.node, '') AS node,
       coalesce(open.class, ended.class, '') AS class, coalesce(open.gpus, ended.gpus, 0) AS gpus,
       CASE WHEN open.id IS NOT NULL THEN 'open' ELSE coalesce(ended.state, '') END AS state
  FROM line
  LEFT JOIN lease AS open ON open.id = line.lease
  LEFT JOIN lease_ended AS ended ON ended.id = line.lease
 ORDER BY line.lease;

-- name: items
-- Sealed entries without a lease are kept for ever in entry_kept; later ones are read from all entries.
SELECT number, at, type, CASE WHEN debit = $1 THEN -amount ELSE amount END AS amount, request, actor, reason
  FROM ((SELECT * FROM entry_kept WHERE debit = $1 AND lease = 0 AND number > $2 AND number <= $3
          ORDER BY number LIMIT $5)
         UNION ALL
        (SELECT * FROM entry_kept WHERE credit = $1 AND lease = 0 AND number > $2 AND number <= $3
          ORDER BY number LIMIT $5)
         UNION ALL
        SELECT * FROM entry
         WHERE number > greatest($2, $4) AND number <= $3 AND lease = 0 AND (debit = $1 OR credit = $1)) AS line
 ORDER BY number
 LIMIT $5;

-- name: names
SELECT id, tenant, username FROM account WHERE id = ANY($1::bigint[]) AND id >= 100;

-- name: names_of_tenant
SELECT id, tenant, username FROM account WHERE tenant = $1 AND id >= 100 ORDER BY username;
