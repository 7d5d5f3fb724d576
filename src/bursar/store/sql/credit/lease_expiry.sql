-- Expiry of leases that are no longer extended. Columns that heartbeats change have no index, so leases are not
-- searched by time: each is read again when the time has passed until which it was paid at the last reading.

-- name: look
-- Selects the named leases, and the next ones after a number. `over_at` is the time of expiry: the end of the paid
-- time, plus the freeze time if the spend rate is exceeded. It is 0 (at once) for a lease posted well into the future
-- by a wrong clock, unless a heartbeat corrects it meanwhile, and for a lease that never began and whose placement is
-- gone. A placement is created together with its lease, so a lease without one will never have one. NULL if the lease
-- has not begun.
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
