-- name: paid_on
-- What is placed on these nodes and paid for, with its lease where that is still open; `now` numbers this beat of it.
SELECT placement.node, placement.uid, placement.namespace, placement.name, coalesce(object.gang, '') AS gang,
       object.fields ->> 'status.phase' AS phase, lease.id AS lease, ledger_now() AS now
  FROM placement
  JOIN object ON (object.kind, object.namespace, object.name) = ('Allocation', placement.namespace, placement.name)
             AND object.uid = placement.uid
  LEFT JOIN lease ON lease.id = placement.lease
 WHERE placement.node = ANY($1::text[]) AND placement.lease IS NOT NULL;
