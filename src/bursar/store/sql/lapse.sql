-- Leases that nobody extends any more. All open ones are looked at: nothing that a beat changes has an index.

-- name: overdue
-- Those whose paid time is over, and that in which they may be frozen; those that were posted long after now, because our
-- clock was wrong then, unless whoever beats puts them right meanwhile; and those that never began, of a placement that is
-- gone. A placement is made together with its lease: what has none now will have none.
SELECT id, paid_until
  FROM lease
 WHERE started_at > 0
   AND (paid_until + CASE WHEN final = 'spend_rate_exceeded' THEN $1::bigint ELSE 0 END < ledger_now()
        OR posted_until > ledger_now() + span)
 UNION ALL
SELECT id, paid_until
  FROM lease
 WHERE started_at = 0
   AND NOT EXISTS (SELECT
                     FROM placement
                    WHERE (placement.node, placement.uid) = (lease.node, lease.uid) AND placement.epoch = lease.epoch);
