-- Verification of the ledger. Each statement returns only faulty rows.

-- name: missing_entries
SELECT number
  FROM generate_series($1::bigint, $2::bigint) AS wanted (number)
 WHERE NOT EXISTS (SELECT FROM entry WHERE entry.number = wanted.number)
 LIMIT $3;

-- name: untimely_entries
-- Entries whose time is before that of the previous entry.
SELECT number
  FROM (SELECT number, at, lag(at) OVER (ORDER BY number) AS before
          FROM entry WHERE number BETWEEN $1 AND $2) AS line
 WHERE at < before
 LIMIT $3;

-- name: kept_differences
SELECT coalesce(line.number, kept.number) AS number, kept.number IS NULL AS missing, line.number IS NULL AS extra
  FROM (SELECT * FROM entry WHERE number BETWEEN $1 AND $2 AND (lease = 0 OR actor <> '')) AS line
  FULL JOIN (SELECT * FROM entry_kept WHERE number BETWEEN $1 AND $2) AS kept ON kept.number = line.number
 WHERE (line.number, line.at, line.type, line.debit, line.credit, line.amount, line.lease, line.seq, line.rate, line.begin,
        line.until, line.request, line.actor, line.reason)
       IS DISTINCT FROM
       (kept.number, kept.at, kept.type, kept.debit, kept.credit, kept.amount, kept.lease, kept.seq, kept.rate, kept.begin,
        kept.until, kept.request, kept.actor, kept.reason)
 LIMIT $3;

-- name: sums_of_entries
-- Sums of entries in the format of rollups.
SELECT account, lease, type, count(*) AS count, sum(amount) AS amount, sum(until - begin) AS micros,
       min(number) AS first, max(number) AS last, coalesce(min(begin) FILTER (WHERE begin > 0), 0) AS begin,
       max(until) AS until
  FROM entry_side
 WHERE number BETWEEN $1 AND $2
 GROUP BY account, lease, type;

-- name: rollups
SELECT account, lease, type, count, amount, micros, first, last, begin, until
  FROM entry_rollup
 WHERE block BETWEEN $1 AND $2;

-- name: rollup_sum
SELECT coalesce(sum(amount), 0) AS amount, min(block) AS first_block, max(block) AS last_block
  FROM entry_rollup
 WHERE block BETWEEN $1 AND $2;

-- name: balances_against_entries
-- Balances after a block that differ from the previous balances plus the entries of the block.
SELECT coalesce(moved.account, balance.account) AS account, balance.posted AS said,
       coalesce(before.posted, 0) + coalesce(moved.amount, 0) AS due, moved.account IS NULL AS extra
  FROM (SELECT account, sum(amount) AS amount
          FROM entry_side WHERE number BETWEEN $2 AND $3
         GROUP BY account) AS moved
  FULL JOIN (SELECT account, posted FROM account_balance WHERE block = $1) AS balance ON balance.account = moved.account
  LEFT JOIN LATERAL (
        SELECT posted
          FROM account_balance
         WHERE account = coalesce(moved.account, balance.account) AND block < $1
         ORDER BY block DESC
         LIMIT 1
       ) AS before ON true
 WHERE moved.account IS NULL OR balance.posted IS DISTINCT FROM coalesce(before.posted, 0) + moved.amount
 ORDER BY 1
 LIMIT $4;

-- name: balances_against_rollups
-- Balances at the end of a page that differ from the previous balances plus the rollups of the page.
SELECT coalesce(moved.account, balance.account) AS account, balance.posted AS said,
       coalesce(before.posted, 0) + coalesce(moved.amount, 0) AS due, moved.account IS NULL AS extra
  FROM (SELECT account, sum(amount) AS amount
          FROM entry_rollup WHERE block BETWEEN $1 AND $2
         GROUP BY account) AS moved
  FULL JOIN (SELECT DISTINCT ON (account) account, posted
               FROM account_balance WHERE block BETWEEN $1 AND $2
              ORDER BY account, block DESC) AS balance ON balance.account = moved.account
  LEFT JOIN LATERAL (
        SELECT posted
          FROM account_balance
         WHERE account = coalesce(moved.account, balance.account) AND block < $1
         ORDER BY block DESC
         LIMIT 1
       ) AS before ON true
 WHERE moved.account IS NULL OR balance.posted IS DISTINCT FROM coalesce(before.posted, 0) + moved.amount
 ORDER BY 1
 LIMIT $3;

-- name: stray_rollups
-- Rollups and balances of blocks that do not exist.
SELECT DISTINCT block FROM entry_rollup WHERE block > $1
 UNION
SELECT DISTINCT block FROM account_balance WHERE block > $1
 LIMIT $2;

-- name: tail
-- Counts the entries that are not sealed yet; `last` of the ledger says how many there must be.
SELECT ledger.last, (SELECT count(*) FROM entry WHERE number > $1) AS count,
       (SELECT max(number) FROM entry WHERE number > $1) AS newest
  FROM ledger
 WHERE id = 1;

-- name: posted_differences
-- Accounts whose balance differs from the sealed balance plus the entries since. System accounts store no balance.
SELECT account.id, account.posted AS said, coalesce(sealed.posted, 0) + coalesce(tail.amount, 0) AS due
  FROM account
  LEFT JOIN LATERAL (
        SELECT posted FROM account_balance WHERE account = account.id ORDER BY block DESC LIMIT 1
       ) AS sealed ON true
  LEFT JOIN (SELECT account, sum(amount) AS amount FROM entry_side WHERE number > $1 GROUP BY account) AS tail
    ON tail.account = account.id
 WHERE account.posted <> CASE WHEN account.id < 100 THEN 0
                              ELSE coalesce(sealed.posted, 0) + coalesce(tail.amount, 0) END
 ORDER BY account.id
 LIMIT $2;

-- name: strangers
-- Accounts that have entries but do not exist. Each account is looked up once; older balances of it are skipped.
WITH RECURSIVE known (account) AS (
    (SELECT account FROM account_balance ORDER BY account LIMIT 1)
     UNION ALL
    SELECT (SELECT account FROM account_balance WHERE account > known.account ORDER BY account LIMIT 1)
      FROM known
     WHERE known.account IS NOT NULL
)
SELECT account
  FROM known
 WHERE account IS NOT NULL AND NOT EXISTS (SELECT FROM account WHERE account.id = known.account)
 LIMIT $1;

-- name: held_differences
SELECT account.id, account.held AS said, coalesce(open.held, 0) AS due, account.gpus AS gpus_said,
       coalesce(open.gpus, 0) AS gpus_due
  FROM account
  LEFT JOIN (SELECT account, sum(held) AS held, sum(gpus) AS gpus FROM lease GROUP BY account) AS open
    ON open.account = account.id
 WHERE account.held <> coalesce(open.held, 0) OR account.gpus <> coalesce(open.gpus, 0)
 ORDER BY account.id
 LIMIT $1;

-- name: negative
SELECT 'account ' || id AS name, 'available' AS what, posted::numeric - held + credit_limit AS amount
  FROM account WHERE id >= 100 AND posted::numeric - held + credit_limit < 0
 UNION ALL
SELECT 'account ' || id, 'held', held FROM account WHERE held < 0
 UNION ALL
SELECT 'lease ' || id, 'held', held FROM lease WHERE held < 0
 UNION ALL
SELECT 'lease ' || id, 'posted', posted FROM lease WHERE posted < 0
 LIMIT $1;

-- name: lease_held_differences
-- Open leases whose hold differs from the time that is paid and not yet posted: the rest of the current segment, and
-- those ahead.
SELECT id, held AS said, reckoned.due
  FROM lease,
       LATERAL (SELECT coalesce(sum((segment ->> 1)::bigint), 0), coalesce(sum(div(
                           (segment ->> 0)::numeric * (segment ->> 1)::bigint, 1000000)), 0)
                  FROM json_array_elements(ahead) AS segment) AS following (micros, due),
       LATERAL (SELECT following.due + div(rate::numeric * (paid_until - following.micros - since), 1000000)
                       - div(rate::numeric * (posted_until - since), 1000000)) AS reckoned (due)
 WHERE held <> reckoned.due
 ORDER BY id
 LIMIT $1;

-- name: some_leases
-- The next leases that one statement can sum, at least one; a lease has a few rollups per quarter of an hour.
SELECT max(id)
  FROM (SELECT id, coalesce(sum(quarters) OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
          FROM (SELECT id, 1 + greatest(0, ledger_now() - opened_at) / 900000000 AS quarters
                  FROM ((SELECT id, opened_at FROM lease WHERE id > $1 ORDER BY id LIMIT $2)
                         UNION ALL
                        (SELECT id, opened_at FROM lease_ended
                          WHERE id > $1 AND reconciled_at IS NULL
                          ORDER BY id
                          LIMIT $2)) AS known
                 ORDER BY id
                 LIMIT $2) AS known) AS known
 WHERE before < $3;

-- name: lease_posted_differences
-- Leases whose posted amount differs from their entries. Manual refunds and charges are excluded.
WITH known AS (
    SELECT id, posted FROM lease WHERE id > $2 AND id <= $3
     UNION ALL
    SELECT id, posted FROM lease_ended WHERE id > $2 AND id <= $3 AND reconciled_at IS NULL
), tail AS (
    SELECT lease, sum(amount) AS amount
      FROM entry_side
     WHERE number > $1 AND lease > 0 AND lease > $2 AND lease <= $3 AND actor = ''
     GROUP BY lease
)
SELECT known.id, known.posted AS said, due.amount AS due
  FROM known
  LEFT JOIN tail ON tail.lease = known.id
  LEFT JOIN LATERAL (
        SELECT sum(amount) AS amount FROM entry_rollup WHERE lease = known.id AND lease > 0
       ) AS rolled ON true
  LEFT JOIN LATERAL (
        SELECT sum(CASE WHEN debit = 2 THEN amount WHEN credit = 2 THEN -amount ELSE 0 END) AS amount
          FROM entry_kept
         WHERE lease = known.id AND lease > 0 AND number <= $1 AND actor <> ''
       ) AS byhand ON true,
       LATERAL (SELECT coalesce(byhand.amount, 0) - coalesce(rolled.amount, 0) - coalesce(tail.amount, 0)) AS due (amount)
 WHERE known.posted <> due.amount
 ORDER BY known.id
 LIMIT $4;

-- name: ended_leases
-- Leases that ended within a range of blocks, and the number of quarters of an hour for which they have rollups.
SELECT id, 1 + greatest(0, closed_at - opened_at) / 900000000 AS quarters
  FROM lease_ended
 WHERE id IN (SELECT lease FROM entry_rollup WHERE block BETWEEN $1 AND $2 AND lease > 0) AND closed_at BETWEEN $3 AND $4
 ORDER BY id;

-- name: ended_differences
-- Ended leases whose posted amount differs from their entries.
SELECT ended.id, ended.posted AS said, due.amount AS due
  FROM lease_ended AS ended
  LEFT JOIN LATERAL (
        SELECT sum(amount) AS amount FROM entry_rollup WHERE lease = ended.id AND lease > 0
       ) AS rolled ON true
  LEFT JOIN LATERAL (
        SELECT sum(CASE WHEN debit = 2 THEN amount WHEN credit = 2 THEN -amount ELSE 0 END) AS amount
          FROM entry_kept
         WHERE lease = ended.id AND lease > 0 AND number <= $2 AND actor <> ''
       ) AS byhand ON true
  LEFT JOIN (
        SELECT lease, sum(amount) AS amount FROM entry_side WHERE number > $2 AND lease > 0 AND actor = '' GROUP BY lease
       ) AS tail ON tail.lease = ended.id,
       LATERAL (SELECT coalesce(byhand.amount, 0) - coalesce(rolled.amount, 0) - coalesce(tail.amount, 0)) AS due (amount)
 WHERE ended.id = ANY ($1::bigint[]) AND ended.posted <> due.amount
 ORDER BY ended.id
 LIMIT $3;

-- name: sum_of_balances
SELECT coalesce(sum(last.posted), 0) AS amount
  FROM account
 CROSS JOIN LATERAL (
        SELECT posted FROM account_balance WHERE account = account.id ORDER BY block DESC LIMIT 1
       ) AS last;
