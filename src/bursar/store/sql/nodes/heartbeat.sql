-- Heartbeats of agents, their reports on work, and their directives. None of it enters the feed.

-- name: meet
-- The first heartbeat of a stream, which replaces the node's previous stream. Rows are locked in order of node names,
-- so that concurrent writers cannot deadlock. Columns travel as texts (store/db/columns.py).
WITH met AS (
    INSERT INTO node_seen AS seen (node, at, session, address, agent, granted_until)
    SELECT line.node, now(), line.session, coalesce(line.address, ''), coalesce(line.agent, ''),
           now() + line.lease_seconds * interval '1 second'
      FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, ',')::bigint[],
                  string_to_array($4, ',')::bigint[], string_to_array($5, chr(31)), string_to_array($6, chr(31)))
           AS line (node, session, generation, lease_seconds, address, agent)
      JOIN node ON node.name = line.node
      LEFT JOIN node_identity AS identity ON identity.node = line.node
     WHERE line.generation IN (0, identity.generation)
     ORDER BY line.node COLLATE "C"
        ON CONFLICT (node) DO UPDATE
       SET at = excluded.at, session = excluded.session, address = excluded.address, agent = excluded.agent,
           granted_until = greatest(seen.granted_until, excluded.granted_until)
    RETURNING node
)
SELECT met.node, ledger_now() AS began,
       (SELECT fields ->> 'status.silent' FROM object WHERE (kind, namespace, name) = ('Node', '', met.node)) AS silent
  FROM met;

-- name: heartbeat
-- Later heartbeats: accepted if the stream is still the node's and the certificate is still valid.
UPDATE node_seen AS seen
   SET at = now(), granted_until = greatest(seen.granted_until, now() + line.lease_seconds * interval '1 second')
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, ',')::bigint[],
              string_to_array($4, ',')::bigint[]) AS line (node, session, generation, lease_seconds)
  JOIN object ON (object.kind, object.namespace, object.name) = ('Node', '', line.node)
  LEFT JOIN node_identity AS identity ON identity.node = line.node
 WHERE seen.node = line.node AND seen.session = line.session AND line.generation IN (0, identity.generation)
RETURNING seen.node, object.fields ->> 'status.silent' AS silent;

-- name: claims
-- Those of the named allocations that are placed on the node that names them.
SELECT placement.node, placement.uid, placement.namespace, placement.name, placement.epoch, placement.lease,
       coalesce(object.gang, '') AS gang, object.fields ->> 'status.phase' AS phase
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31))) AS line (node, uid)
  JOIN placement ON (placement.node, placement.uid) = (line.node, line.uid)
  JOIN object ON (object.kind, object.namespace, object.name) = ('Allocation', placement.namespace, placement.name)
             AND object.uid = placement.uid;

-- name: wanted
-- All placements on these nodes, the claims of the nodes, and the revision of this snapshot: later changes come by the
-- feed. A node without placements has one row.
SELECT (SELECT value FROM revision) AS revision, line.node, (SELECT claim FROM node WHERE name = line.node) AS claim,
       placed.*
  FROM unnest($1::text[]) AS line (node)
  LEFT JOIN LATERAL (
           SELECT placement.uid, placement.namespace, placement.name, placement.tenant, placement.epoch,
                  placement.wanted, placement.lease, coalesce(object.gang, '') AS gang, object.doc, object.status,
                  tenant.uid AS tenant_uid
             FROM placement
             JOIN object
               ON (object.kind, object.namespace, object.name) = ('Allocation', placement.namespace, placement.name)
              AND object.uid = placement.uid
             LEFT JOIN object AS tenant
               ON (tenant.kind, tenant.namespace, tenant.name) = ('Tenant', '', placement.tenant)
            WHERE placement.node = line.node
       ) AS placed ON true
 ORDER BY line.node, placed.uid;

-- name: prepare
-- A placement on a node, with the data that it needs before it is started there.
SELECT placement.namespace, placement.name, placement.epoch, object.doc, object.status, gang.peers, stdin.data AS stdin
  FROM placement
  JOIN object ON (object.kind, object.namespace, object.name) = ('Allocation', placement.namespace, placement.name)
             AND object.uid = placement.uid
  LEFT JOIN gang ON (gang.namespace, gang.name) = (object.namespace, object.gang)
  LEFT JOIN allocation_stdin AS stdin ON stdin.uid = placement.uid
 WHERE placement.node = $1 AND placement.uid = $2;

-- name: addresses
-- Addresses set by administrators take precedence over those of agents.
SELECT object.name, coalesce(object.doc #>> '{metadata,annotations,bursar.io/address}', seen.address, '') AS address
  FROM object
  LEFT JOIN node_seen AS seen ON seen.node = object.name
 WHERE object.kind = 'Node' AND object.namespace = '' AND object.name = ANY($1);

-- name: address
SELECT address FROM node_seen WHERE node = $1;

-- name: save_usage
-- A node's measurements count only for allocations that are placed on it.
INSERT INTO allocation_usage AS used
       (uid, epoch, node, seconds, cpu_seconds, memory_bytes, memory_bytes_max, gpu_seconds, at)
SELECT line.uid, line.epoch, line.node, line.seconds, line.cpu_seconds, line.memory_bytes, line.memory_bytes_max,
       line.gpu_seconds, now()
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, ',')::bigint[], string_to_array($3, chr(31)),
              string_to_array($4, ',')::double precision[], string_to_array($5, ',')::double precision[],
              string_to_array($6, ',')::bigint[], string_to_array($7, ',')::bigint[],
              string_to_array($8, ',')::double precision[])
       AS line (uid, epoch, node, seconds, cpu_seconds, memory_bytes, memory_bytes_max, gpu_seconds)
  JOIN placement ON (placement.node, placement.uid, placement.epoch) = (line.node, line.uid, line.epoch)
 ORDER BY 1, 2, 3
    ON CONFLICT (uid, epoch, node) DO UPDATE
   SET seconds = excluded.seconds, cpu_seconds = excluded.cpu_seconds, memory_bytes = excluded.memory_bytes,
       memory_bytes_max = greatest(used.memory_bytes_max, excluded.memory_bytes_max),
       gpu_seconds = excluded.gpu_seconds, at = excluded.at;

-- name: save_load
INSERT INTO node_load (node, used, at)
SELECT line.node, line.used::json, now()
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31))) AS line (node, used)
 ORDER BY line.node COLLATE "C"
    ON CONFLICT (node) DO UPDATE SET used = excluded.used, at = excluded.at;

-- name: load
-- Recent measurements of all nodes or of these.
SELECT node, used
  FROM node_load
 WHERE at > now() - $1 * interval '1 second' AND ($2::text[] IS NULL OR node = ANY($2));

-- name: forget_usage
DELETE FROM allocation_usage
 WHERE ctid = ANY (ARRAY(SELECT ctid FROM allocation_usage WHERE at < $1 LIMIT $2));

-- name: forget_gone
-- Skips young rows: a heartbeat may be written while its node is deleted, or before its node is created.
WITH unmeasured AS (
    DELETE FROM node_load
     WHERE at < now() - interval '1 hour'
       AND NOT EXISTS (SELECT FROM node WHERE node.name = node_load.node)
)
DELETE FROM node_seen
 WHERE at < now() - interval '1 hour'
   AND NOT EXISTS (SELECT FROM node WHERE node.name = node_seen.node);

-- name: agents
-- Nodes whose agents have sent heartbeats, and may do so again.
SELECT count(*)
  FROM node_seen
  JOIN object ON object.kind = 'Node' AND object.namespace = '' AND object.name = node_seen.node
 WHERE node_seen.session <> '';
