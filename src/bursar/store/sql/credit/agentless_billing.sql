-- name: paid_on
-- Paid placements on these nodes, with their leases if still open; `now` is the number of this heartbeat. The status is
-- read only for placements with a recorded shortfall.
SELECT placement.node, placement.uid, placement.namespace, placement.name, placement.epoch,
       coalesce(object.gang, '') AS gang, object.fields ->> 'status.phase' AS phase, lease.id AS lease,
       ledger_now() AS now,
       CASE WHEN strpos(object.status::text, '"paidUntil"') > 0 THEN object.status -> 'nodes' END AS nodes
  FROM placement
  JOIN object ON (object.kind, object.namespace, object.name) = ('Allocation', placement.namespace, placement.name)
             AND object.uid = placement.uid
  LEFT JOIN lease ON lease.id = placement.lease
 WHERE placement.node = ANY($1::text[]) AND placement.lease IS NOT NULL;
