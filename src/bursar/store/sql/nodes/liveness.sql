-- When nodes were last heard, and what was said of them. Times are those of the database's clock alone.

-- name: look
-- Of all nodes only those are named that are silent, or were said to be; those that were ever heard are counted, in one
-- more row. Nodes without a heartbeat and without a condition are left out.
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
-- The last lock before the revision. A concurrent heartbeat waits, and then reads the decision.
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
-- Of the nodes that were ever heard and are not lost: how many there are, and how many of them are silent.
SELECT count(*) AS heard,
       count(*) FILTER (WHERE seen.at <= clock_timestamp() - make_interval(secs => $1::double precision)) AS silent
  FROM object
  JOIN node_seen AS seen ON seen.node = object.name
 WHERE object.kind = 'Node' AND object.namespace = ''
   AND coalesce(object.fields ->> 'status.silent', 'NotReady') = 'NotReady';
