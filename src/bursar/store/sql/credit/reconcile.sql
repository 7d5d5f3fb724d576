-- Ended leases, and their measured usage.
--
-- Lock order: account, sums of usage, ended leases. Writers of usage take the latter two in the same order. The lock of
-- an account guards its drift as well.

-- name: due
-- Leases that ended long enough ago for late events to have arrived, without an event for as long. The node of work
-- that is still placed may yet report its run time. Missing event numbers extend the wait, but not for ever.
SELECT ended.id, ended.account
  FROM lease_ended AS ended
 WHERE ended.reconciled_at IS NULL
   AND ended.closed_at <= ledger_now() - $1::bigint
   AND NOT EXISTS (SELECT
                     FROM placement
                    WHERE (placement.node, placement.uid, placement.epoch) = (ended.node, ended.uid, ended.epoch))
   AND NOT EXISTS (SELECT
                     FROM allocation_usage AS used
                    WHERE (used.uid, used.epoch, used.node) = (ended.uid, ended.epoch, ended.node)
                      AND used.at > now() - $1 * interval '1 microsecond')
   AND NOT EXISTS (SELECT
                     FROM job_usage AS usage
                    WHERE (usage.account, usage.job, usage.lease) = (ended.account, ended.job, ended.id)
                      AND usage.events > 0 AND usage.at > now() - $1 * interval '1 microsecond')
   AND (ended.closed_at <= ledger_now() - $2::bigint
        OR NOT EXISTS (SELECT
                         FROM job_usage AS usage
                        WHERE (usage.account, usage.job) = (ended.account, ended.job)
                       HAVING max(usage.seq_max) - min(usage.seq_min) + 1 > sum(usage.events)))
 ORDER BY ended.closed_at, ended.id
 LIMIT $3;

-- name: claim_sums
-- A lease without measured usage gets an empty sum; the insert waits for a concurrent writer of its first event.
INSERT INTO job_usage (account, job, lease, events, amount, at)
SELECT ended.account, ended.job, ended.id, 0, 0, now()
  FROM lease_ended AS ended
 WHERE ended.id = ANY ($1::bigint[])
 ORDER BY 1, 2, 3
    ON CONFLICT DO NOTHING;

-- name: lock_sums
SELECT usage.lease, usage.events, usage.amount
  FROM lease_ended AS ended
  JOIN job_usage AS usage ON (usage.account, usage.job, usage.lease) = (ended.account, ended.job, ended.id)
 WHERE ended.id = ANY ($1::bigint[])
 ORDER BY usage.account, usage.job, usage.lease
   FOR NO KEY UPDATE OF usage;

-- name: open_questions
-- Leases that nobody has reconciled meanwhile, with the final reports of their nodes. Run it under the locks.
SELECT ended.id, used.seconds, CASE WHEN ended.settled THEN ended.measured END AS told
  FROM lease_ended AS ended
  LEFT JOIN allocation_usage AS used ON (used.uid, used.epoch, used.node) = (ended.uid, ended.epoch, ended.node)
 WHERE ended.id = ANY ($1::bigint[]) AND ended.reconciled_at IS NULL;

-- name: missing
-- Counts missing event numbers of the jobs of these leases. The count is capped for senders that skip numbers, so that
-- the sum cannot overflow.
SELECT coalesce(sum(least(missing, 1000000)) FILTER (WHERE missing > 0), 0)::bigint
  FROM (SELECT max(usage.seq_max) - min(usage.seq_min) + 1 - sum(usage.events) AS missing
          FROM (SELECT DISTINCT account, job FROM lease_ended WHERE id = ANY ($1::bigint[])) AS jobs
          JOIN job_usage AS usage USING (account, job)
         GROUP BY usage.account, usage.job) AS gaps;

-- name: save_last_words
-- Saves nodes' final reports for leases that ended without one. They are reconciled again, by that report alone.
UPDATE lease_ended
   SET measured = late.micros, settled = true, reconciled_at = NULL
  FROM (SELECT ended.id, line.micros
          FROM unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[]) AS line (uid, epoch, node, micros)
          JOIN lease_ended AS ended
            ON (ended.job, ended.uid, ended.epoch, ended.node) = (line.uid, line.uid, line.epoch, line.node)
         WHERE NOT ended.settled
         ORDER BY ended.id
           FOR NO KEY UPDATE OF ended) AS late
 WHERE lease_ended.id = late.id;

-- name: settle
UPDATE lease_ended
   SET measured = line.measured, reconciled_at = now()
  FROM unnest($1::bigint[], $2::bigint[]) AS line (id, measured)
 WHERE lease_ended.id = line.id;

-- name: count
-- Only reconciliation locks these rows, and after them only the ledger's.
INSERT INTO reconcile_total AS total (outcome, leases, amount)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::numeric[])
 ORDER BY 1
    ON CONFLICT (outcome) DO UPDATE
   SET leases = total.leases + excluded.leases, amount = total.amount + excluded.amount;

-- name: drifts
-- Run it under the locks of the accounts: writers of an account's drift hold its lock, so these rows need none.
SELECT account, sum(amount) AS amount, bool_or(alerted) AS alerted
  FROM account_drift
 WHERE account = ANY ($1::bigint[]) AND hour >= $2
 GROUP BY account;

-- name: add_drifts
INSERT INTO account_drift AS drift (account, hour, leases, amount, alerted)
SELECT line.account, $1, line.leases, line.amount, line.alerted
  FROM unnest($2::bigint[], $3::bigint[], $4::numeric[], $5::boolean[]) AS line (account, leases, amount, alerted)
 ORDER BY 1
    ON CONFLICT (account, hour) DO UPDATE
   SET leases = drift.leases + excluded.leases, amount = drift.amount + excluded.amount,
       alerted = drift.alerted OR excluded.alerted;

-- name: drifting
SELECT count(*)
  FROM (SELECT FROM account_drift WHERE hour >= $1 GROUP BY account HAVING sum(amount) > $2::numeric) AS above;

-- name: forget_drifts
-- Nobody writes to past hours. Rows are locked in physical order, so two controllers that delete at once cannot
-- deadlock.
DELETE FROM account_drift WHERE ctid = ANY (ARRAY(SELECT ctid FROM account_drift WHERE hour < $1));

-- name: totals
SELECT outcome, leases, amount FROM reconcile_total ORDER BY outcome;

-- name: backlog
SELECT count(*) AS leases, coalesce(ledger_now() - min(closed_at), 0) AS oldest_micros
  FROM lease_ended
 WHERE reconciled_at IS NULL AND closed_at <= ledger_now() - $1::bigint;
