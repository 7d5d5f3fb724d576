-- Accounts, leases and entries. Accounts, ended leases and the ledger's row are locked in this order, as stated in
-- docs/invariants.md. The lock of an account covers its open leases.

-- name: lock
-- The whole account is in its row, so the statement that locks it may also read it.
SELECT id, tenant, username, status, posted, held, credit_limit, gpus, gpus_max, spend_rate_max, spend_burst, tokens,
       tokens_at, daily_cap, stop_at_cap, time_zone, day, day_posted, low_balance, version, tenant_uid
  FROM account
 WHERE id = ANY(string_to_array($1, ',')::bigint[])
 ORDER BY id
   FOR NO KEY UPDATE;

-- name: lease_rows
-- Read under the locks of their accounts, which every change of a lease takes. Row locks are not needed, and would cost
-- one write each.
SELECT id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node, opened_at, started_at,
       since, past, ahead, posted_until, paid_until, posted, held, seq, final, work, refunded
  FROM lease
 WHERE id = ANY(string_to_array($1, ',')::bigint[]);

-- name: lock_ended
SELECT id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node, opened_at, started_at,
       since, past, ahead, posted_until, paid_until, posted, held, seq, final, work, refunded, state,
       closed_at, written_off
  FROM lease_ended
 WHERE id = ANY(string_to_array($1, ',')::bigint[])
 ORDER BY id
   FOR NO KEY UPDATE;

-- name: moment
-- Read after the locks, so that every decision committed before has an earlier time.
SELECT ledger_now() AS now, prices FROM ledger;

-- name: find_accounts
SELECT id, tenant, username
  FROM account
 WHERE (tenant, username) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: reserve_accounts
SELECT nextval(pg_get_serial_sequence('account', 'id')) AS id FROM generate_series(1, $1);

-- name: add_accounts
-- The statement that saves all accounts fills the other columns.
INSERT INTO account (id, tenant, username, tenant_uid)
SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[]) AS line (id, tenant, username, tenant_uid)
 ORDER BY 2, 3
    ON CONFLICT DO NOTHING
RETURNING id;

-- name: read_accounts
SELECT id, tenant, username, status, posted, held, credit_limit, gpus, gpus_max, spend_rate_max, spend_burst, tokens,
       tokens_at, daily_cap, stop_at_cap, time_zone, day, day_posted, low_balance, version, tenant_uid
  FROM account
 WHERE id = ANY($1::bigint[]);

-- name: read_payers
-- The paying account, the owner's own account, and who opened the lease.
SELECT id, tenant, username, status, posted, held, credit_limit, gpus, gpus_max, spend_rate_max, spend_burst, tokens,
       tokens_at, daily_cap, stop_at_cap, time_zone, day, day_posted, low_balance, version, tenant_uid,
       (SELECT opened_by FROM lease WHERE lease.id = $4) AS opened_by
  FROM account
 WHERE id = $1 OR (tenant, username) = ($2, $3);

-- name: lock_of_tenant
-- The rows as locked decide whether an account is in use: none can receive anything meanwhile.
SELECT id, tenant, username, status, posted, held, credit_limit, gpus, gpus_max, spend_rate_max, spend_burst, tokens,
       tokens_at, daily_cap, stop_at_cap, time_zone, day, day_posted, low_balance, version, tenant_uid
  FROM account
 WHERE tenant = $1
 ORDER BY id
   FOR NO KEY UPDATE;

-- name: list_accounts
-- Without the system's accounts. Accounts that the caller may not see are filtered here, so that pages are full.
SELECT id, tenant, username, status, posted, held, credit_limit, gpus, gpus_max, spend_rate_max, spend_burst, tokens,
       tokens_at, daily_cap, stop_at_cap, time_zone, day, day_posted, low_balance, version, tenant_uid
  FROM account
 WHERE id >= 100 AND ($1::text[] IS NULL OR tenant = ANY($1)) AND ($2::text[] IS NULL OR username = ANY($2))
   AND (tenant, username) > ($3, $4)
 ORDER BY tenant, username
 LIMIT $5;

-- name: read_leases
SELECT id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node, opened_at, started_at,
       since, past, ahead, posted_until, paid_until, posted, held, seq, final, work, refunded
  FROM lease
 WHERE id = ANY($1::bigint[]);

-- name: read_ended
SELECT id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node, opened_at, started_at,
       since, past, ahead, posted_until, paid_until, posted, held, seq, final, work, refunded, state,
       closed_at, written_off
  FROM lease_ended
 WHERE id = ANY($1::bigint[]);

-- name: leases_of_accounts
SELECT id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node, opened_at, started_at,
       since, past, ahead, posted_until, paid_until, posted, held, seq, final, work, refunded
  FROM lease
 WHERE account = ANY($1::bigint[]) AND id > $2
 ORDER BY id
 LIMIT $3;

-- name: accounts_of_leases
SELECT id, account FROM lease WHERE id = ANY($1::bigint[])
 UNION ALL
SELECT id, account FROM lease_ended WHERE id = ANY($1::bigint[]);

-- name: reserve_leases
SELECT nextval('lease_number') AS number FROM generate_series(1, $1);

-- name: save
-- Accounts, leases and entries in one statement, because each round trip costs a busy process one turn of its event
-- loop. Columns travel as texts (store/db/columns.py). The rows of accounts are locked already. The ledger's row is
-- locked here until COMMIT, so that entries become visible in the order of their numbers.
WITH balanced AS (
    UPDATE account
       SET status = line.status, posted = line.posted, held = line.held, credit_limit = line.credit_limit,
           gpus = line.gpus, gpus_max = line.gpus_max, spend_rate_max = line.spend_rate_max,
           spend_burst = line.spend_burst, tokens = line.tokens, tokens_at = line.tokens_at,
           daily_cap = line.daily_cap, stop_at_cap = line.stop_at_cap, time_zone = line.time_zone, day = line.day,
           day_posted = line.day_posted, low_balance = line.low_balance, version = account.version + 1
      FROM unnest(
               $1::bigint[], $2::bigint[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
               $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::boolean[],
               $15::text[], $16::integer[], $17::bigint[], $18::bigint[]
           ) AS line (id, version, status, posted, held, credit_limit, gpus, gpus_max, spend_rate_max, spend_burst,
                      tokens, tokens_at, daily_cap, stop_at_cap, time_zone, day, day_posted, low_balance)
     WHERE account.id = line.id AND account.version = line.version
    RETURNING 1
), moved AS (
    UPDATE lease
       SET rate = line.rate, started_at = line.started_at, since = line.since, past = line.past::json,
           ahead = line.ahead::json, posted_until = line.posted_until, paid_until = line.paid_until,
           posted = line.posted, held = line.held, seq = line.seq, final = coalesce(line.final, '')
      FROM unnest(
               string_to_array($19, ',')::bigint[], string_to_array($20, ',')::bigint[],
               string_to_array($21, ',')::bigint[], string_to_array($22, ',')::bigint[],
               string_to_array($23, chr(31)), string_to_array($24, chr(31)), string_to_array($25, ',')::bigint[],
               string_to_array($26, ',')::bigint[], string_to_array($27, ',')::bigint[],
               string_to_array($28, ',')::bigint[], string_to_array($29, ',')::bigint[], string_to_array($30, chr(31))
           ) AS line (id, rate, started_at, since, past, ahead, posted_until, paid_until, posted, held, seq, final)
     WHERE lease.id = line.id
    RETURNING 1
), taken AS (
    UPDATE ledger
       SET last = last + $31::bigint,
           at = greatest(at, timestamptz 'epoch' + ledger_now() * interval '1 microsecond')
     WHERE id = 1 AND $31 > 0
    RETURNING last - $31 AS before, at
), written AS (
    INSERT INTO entry (number, at, type, debit, credit, amount, lease, seq, rate, begin, until, request, actor, reason)
    SELECT taken.before + line.place, taken.at, line.type, line.debit, line.credit, line.amount, line.lease, line.seq,
           line.rate, line.begin, line.until, coalesce(line.request, ''), coalesce(line.actor, ''),
           coalesce(line.reason, '')
      FROM taken,
           unnest(
               string_to_array($32, chr(31)), string_to_array($33, ',')::bigint[],
               string_to_array($34, ',')::bigint[], string_to_array($35, ',')::bigint[],
               string_to_array($36, ',')::bigint[], string_to_array($37, ',')::bigint[],
               string_to_array($38, ',')::bigint[], string_to_array($39, ',')::bigint[],
               string_to_array($40, ',')::bigint[], string_to_array($41, chr(31)), string_to_array($42, chr(31)),
               string_to_array($43, chr(31))
           ) WITH ORDINALITY AS line (type, debit, credit, amount, lease, seq, rate, begin, until, request, actor,
                                      reason, place)
)
SELECT (SELECT count(*) FROM balanced) AS balanced, (SELECT count(*) FROM moved) AS moved,
       (SELECT before FROM taken) AS before;

-- name: open_leases
INSERT INTO lease (id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node, opened_at,
                   started_at, since, past, ahead, posted_until, paid_until, posted, held, seq, final, work, opened_by)
SELECT line.id, line.account, line.job, line.rate, line.span, line.amounts::json, coalesce(line.class, ''), line.gpus,
       line.discount, line.mode, coalesce(line.uid, ''), line.epoch, coalesce(line.node, ''), line.opened_at,
       line.started_at, line.since, line.past::json, line.ahead::json, line.posted_until, line.paid_until,
       line.posted, line.held, line.seq, coalesce(line.final, ''), coalesce(line.work, ''),
       coalesce(line.opened_by, '')
  FROM unnest(
           string_to_array($1, ',')::bigint[], string_to_array($2, ',')::bigint[], string_to_array($3, chr(31)),
           string_to_array($4, ',')::bigint[], string_to_array($5, ',')::bigint[], string_to_array($6, chr(31)),
           string_to_array($7, chr(31)), string_to_array($8, ',')::bigint[], string_to_array($9, ',')::integer[],
           string_to_array($10, chr(31)), string_to_array($11, chr(31)), string_to_array($12, ',')::bigint[],
           string_to_array($13, chr(31)), string_to_array($14, ',')::bigint[], string_to_array($15, ',')::bigint[],
           string_to_array($16, ',')::bigint[], string_to_array($17, chr(31)), string_to_array($18, chr(31)),
           string_to_array($19, ',')::bigint[], string_to_array($20, ',')::bigint[], string_to_array($21, ',')::bigint[],
           string_to_array($22, ',')::bigint[], string_to_array($23, ',')::bigint[], string_to_array($24, chr(31)),
           string_to_array($25, chr(31)), string_to_array($26, chr(31))
       ) AS line (id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node, opened_at,
                  started_at, since, past, ahead, posted_until, paid_until, posted, held, seq, final, work,
                  opened_by);

-- name: end_leases
-- Leases that were opened in this batch are not in the table; they are inserted as ended directly. Leases settled by
-- measured usage need no reconciliation.
WITH gone AS (
    DELETE FROM lease WHERE id = ANY(string_to_array($1, ',')::bigint[])
    RETURNING id
), kept AS (
    INSERT INTO lease_ended (id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node,
                             opened_at, started_at, since, past, ahead, posted_until, paid_until, posted, held, seq,
                             final, work, refunded, state, closed_at, measured, settled, reconciled_at, written_off)
    SELECT line.id, line.account, line.job, line.rate, line.span, line.amounts::json, coalesce(line.class, ''),
           line.gpus, line.discount, line.mode, coalesce(line.uid, ''), line.epoch, coalesce(line.node, ''),
           line.opened_at, line.started_at, line.since, line.past::json, line.ahead::json, line.posted_until,
           line.paid_until, line.posted, line.held, line.seq, coalesce(line.final, ''), coalesce(line.work, ''), line.refunded,
           line.state, line.closed_at, nullif(line.measured, '')::bigint, coalesce(line.measured, '') <> '',
           CASE WHEN line.measured <> '' THEN now() END, line.written_off
      FROM unnest(
               string_to_array($1, ',')::bigint[], string_to_array($2, ',')::bigint[], string_to_array($3, chr(31)),
               string_to_array($4, ',')::bigint[], string_to_array($5, ',')::bigint[], string_to_array($6, chr(31)),
               string_to_array($7, chr(31)), string_to_array($8, ',')::bigint[], string_to_array($9, ',')::integer[],
               string_to_array($10, chr(31)), string_to_array($11, chr(31)), string_to_array($12, ',')::bigint[],
               string_to_array($13, chr(31)), string_to_array($14, ',')::bigint[],
               string_to_array($15, ',')::bigint[], string_to_array($16, ',')::bigint[],
               string_to_array($17, chr(31)), string_to_array($18, chr(31)), string_to_array($19, ',')::bigint[],
               string_to_array($20, ',')::bigint[], string_to_array($21, ',')::bigint[],
               string_to_array($22, ',')::bigint[], string_to_array($23, ',')::bigint[],
               string_to_array($24, chr(31)), string_to_array($25, chr(31)), string_to_array($26, chr(31)),
               string_to_array($27, ',')::bigint[], string_to_array($28, chr(31)), string_to_array($29, ',')::bigint[],
               string_to_array($30, ',')::bigint[]
           ) AS line (id, account, job, rate, span, amounts, class, gpus, discount, mode, uid, epoch, node, opened_at,
                      started_at, since, past, ahead, posted_until, paid_until, posted, held, seq, final, work, state,
                      closed_at, measured, written_off, refunded)
)
SELECT count(*) FROM gone;

-- name: correct_ended
-- Corrections after the end of a lease.
UPDATE lease_ended
   SET posted = line.posted, written_off = line.written_off, refunded = line.refunded
  FROM unnest(string_to_array($1, ',')::bigint[], string_to_array($2, ',')::bigint[],
              string_to_array($3, ',')::bigint[], string_to_array($4, ',')::bigint[])
       AS line (id, posted, written_off, refunded)
 WHERE lease_ended.id = line.id
RETURNING 1;

-- name: refunded
-- Manual refunds of open leases. They are rare, so heartbeats do not write this column.
UPDATE lease
   SET refunded = line.refunded
  FROM unnest(string_to_array($1, ',')::bigint[], string_to_array($2, ',')::bigint[]) AS line (id, refunded)
 WHERE lease.id = line.id;

-- name: notice
INSERT INTO notice (type, tenant, subject, data)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::json[]);

-- name: tell
-- Notifies allocations that wait for credit. The notification is sent when the transaction commits.
SELECT pg_notify('bursar_credit', $1);

-- name: position
SELECT last FROM ledger;

-- name: partitions
SELECT child.relname AS name
  FROM pg_inherits
  JOIN pg_class AS child ON child.oid = inhrelid
 WHERE inhparent = 'entry'::regclass
 ORDER BY 1;
