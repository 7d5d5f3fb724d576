-- Measured usage of jobs: each event once, and the sums of the events of a lease.
--
-- Lock order: events, then sums, then ended leases. Reconciliation locks the account before them.

-- name: payers
-- Leases of these jobs, open or ended not too long ago.
SELECT found.id, found.account, account.tenant, found.job, found.class, found.gpus, found.node, found.opened_at,
       found.closed_at
  FROM (SELECT id, account, job, class, gpus, node, opened_at, 0 AS closed_at
          FROM lease
         WHERE job = ANY ($1::text[])
         UNION ALL
        SELECT id, account, job, class, gpus, node, opened_at, closed_at
          FROM lease_ended
         WHERE job = ANY ($1::text[]) AND closed_at > ledger_now() - $2::bigint) AS found
  JOIN account ON account.id = found.account
 ORDER BY found.id;

-- name: save
-- In key order, so that two senders of the same events cannot deadlock.
INSERT INTO usage_event
       (account, job, seq, lease, node, class, gpus, begin_us, end_us, micros, monotonic, utilization)
SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::text[], $7::bigint[],
                     $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::double precision[])
       AS line (account, job, seq, lease, node, class, gpus, begin_us, end_us, micros, monotonic, utilization)
 ORDER BY line.account, line.job COLLATE "C", line.seq
    ON CONFLICT DO NOTHING
RETURNING account, job, seq;

-- name: load
SELECT event.account, event.job, event.seq, event.lease, begin_us, end_us, micros, class, gpus, node, monotonic,
       utilization
  FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS line (account, job, seq)
  JOIN usage_event AS event ON (event.account, event.job, event.seq) = (line.account, line.job, line.seq);

-- name: add_up
INSERT INTO job_usage AS usage (account, job, lease, events, seq_min, seq_max, amount, at)
SELECT *, now()
  FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::numeric[])
       AS line (account, job, lease, events, seq_min, seq_max, amount)
 ORDER BY line.account, line.job COLLATE "C", line.lease
    ON CONFLICT (account, job, lease) DO UPDATE
   SET events = usage.events + excluded.events, seq_min = least(usage.seq_min, excluded.seq_min),
       seq_max = greatest(usage.seq_max, excluded.seq_max), amount = usage.amount + excluded.amount, at = excluded.at;

-- name: reopen
-- Ended and reconciled leases are reconciled again, unless a final report of their node settled them.
UPDATE lease_ended
   SET reconciled_at = NULL
  FROM (SELECT id
          FROM lease_ended
         WHERE id = ANY ($1::bigint[]) AND reconciled_at IS NOT NULL AND NOT settled
         ORDER BY id
           FOR NO KEY UPDATE) AS late
 WHERE lease_ended.id = late.id
RETURNING lease_ended.id;

-- name: forget_events
-- Events of leases that ended too long ago to accept usage. Reads the oldest first, so that only old rows are read.
DELETE FROM usage_event
 WHERE ctid = ANY (ARRAY(
           SELECT event.ctid
             FROM usage_event AS event
             JOIN lease_ended ON lease_ended.id = event.lease
            WHERE event.at < $1 AND lease_ended.reconciled_at IS NOT NULL
              AND lease_ended.closed_at < ledger_now() - $2::bigint
            ORDER BY event.at
            LIMIT $3
       ));

-- name: forget_sums
DELETE FROM job_usage
 WHERE ctid = ANY (ARRAY(
           SELECT job_usage.ctid
             FROM job_usage
             JOIN lease_ended ON lease_ended.id = job_usage.lease
            WHERE job_usage.made_at < $1 AND job_usage.at < $1 AND lease_ended.reconciled_at IS NOT NULL
              AND lease_ended.closed_at < ledger_now() - $2::bigint
            ORDER BY job_usage.made_at
            LIMIT $3
       ));
