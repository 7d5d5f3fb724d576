-- Last heartbeats of nodes, and their recorded conditions. All times are those of the database's clock.

-- name: look
-- Returns only nodes that are silent or recorded as such, and one more row that counts all nodes with heartbeats. Nodes
-- without a heartbeat and without a condition are left out.
WITH known AS MATERIALIZED (
    SELECT object.name, seen.at, nullif(seen.granted_until, '-infinity') AS granted_until,
           object.fields ->> 'status.silent' AS silent, object.fields ->> 'status.silentSince' AS since
      FROM object
      LEFT JOIN node_seen AS seen ON seen.node = object.name
     WHERE object.kind = 'Node' AND object.namespace = ''
)
SELECT name, at, granted_until, silent, since, clock_timestamp() AS now, 0::bigint AS heard, NULL::json AS settings
  FROM known
 WHERE silent IS NOT NULL OR at <= clock_timestamp() - make_interval(secs => $1::double precision)
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, clock_timestamp(), (SELECT count(at) FROM known),
       (SELECT doc FROM object WHERE kind = 'Settings' AND namespace = '' AND name = 'system');

-- name: lock
-- A concurrent heartbeat waits for the decision, and then reads it. In the lock order (docs/invariants.md) this comes
-- after nodes and before accounts.
SELECT node, at, nullif(granted_until, '-infinity') AS granted_until, clock_timestamp() AS now
  FROM node_seen
 WHERE node = ANY($1::text[])
 ORDER BY node
   FOR NO KEY UPDATE;

-- name: phases
SELECT coalesce(fields ->> 'status.phase', 'Ready') AS phase, count(*) AS nodes
  FROM object
 WHERE kind = 'Node' AND namespace = ''
 GROUP BY 1;

-- name: silent
-- Counts the nodes that have sent heartbeats and are not lost, and the silent ones among them.
SELECT count(*) AS heard,
       count(*) FILTER (WHERE seen.at <= clock_timestamp() - make_interval(secs => $1::double precision)) AS silent
  FROM object
  JOIN node_seen AS seen ON seen.node = object.name
 WHERE object.kind = 'Node' AND object.namespace = ''
   AND coalesce(object.fields ->> 'status.silent', 'NotReady') = 'NotReady';
