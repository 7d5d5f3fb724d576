-- Leases that are no longer extended. Nothing that a heartbeat changes has an index, so they are not searched for: each is
-- looked at when what it was last known to have paid for is over.

-- name: look
-- Those that are named, and the next ones after a number. `over_at` is when it is over: when its paid time is, and that in
-- which it may be frozen; at once for one that was posted long after now, because our clock was wrong then, unless a
-- heartbeat corrects it meanwhile, and for one that never began, of a placement that is gone. A placement is made together
-- with its lease: what has none now will have none. Null for one that is still to begin.
SELECT looked.id, looked.paid_until,
       CASE WHEN started_at > 0 AND posted_until <= ledger_now() + span
            THEN paid_until + CASE WHEN final = 'spend_rate_exceeded' THEN $1::bigint ELSE 0 END
            WHEN started_at = 0
             AND EXISTS (SELECT
                           FROM placement
                          WHERE (placement.node, placement.uid) = (looked.node, looked.uid)
                            AND placement.epoch = looked.epoch)
            THEN NULL
            ELSE 0
       END AS over_at
  FROM (SELECT * FROM lease WHERE id = ANY($2::bigint[])
         UNION ALL
        (SELECT * FROM lease WHERE id > $3 ORDER BY id LIMIT $4)) AS looked;
