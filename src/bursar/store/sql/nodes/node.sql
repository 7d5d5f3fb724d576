-- Free resources of nodes, and placements.

-- name: lock
-- All free resources of a node are in its row, and a lock that had to wait returns the row's latest version. So the
-- statement that locks a node may also read it.
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim, gate, soiled
  FROM node
 WHERE name = ANY(string_to_array($1, chr(31)))
 ORDER BY name
   FOR NO KEY UPDATE;

-- name: lock_after_counters
-- `lock` after locking counters (`lock` in quota.sql). Nodes come out of a join with the number of locked counters, so
-- no node is locked before all counters are. Returns the counters first, then the nodes.
WITH counter AS MATERIALIZED (
    SELECT quota.scope, quota.dimension, hard, soft, accepted, bound
      FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31))) AS wanted (scope, dimension)
      JOIN quota ON (quota.scope, quota.dimension) = (wanted.scope, wanted.dimension)
     ORDER BY quota.scope, quota.dimension
       FOR NO KEY UPDATE OF quota
), counted AS MATERIALIZED (
    SELECT count(*) FROM counter
), room AS MATERIALIZED (
    SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim, gate, soiled
      FROM counted, node
     WHERE name = ANY(string_to_array($3, chr(31)))
     ORDER BY name
       FOR NO KEY UPDATE OF node
)
SELECT counter.*, NULL AS name, NULL AS uid, NULL::bigint AS generation, NULL::boolean AS schedulable,
       NULL::json AS allocatable, NULL::json AS allocated, NULL::json AS devices, NULL::json AS claim,
       NULL::json AS gate, NULL::boolean AS soiled
  FROM counter
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, room.* FROM room;

-- name: read
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim, gate, soiled FROM node WHERE name = ANY($1::text[]);

-- name: read_all
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim, gate, soiled FROM node;

-- name: read_claimed
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim, gate, soiled
  FROM node WHERE claim IS NOT NULL ORDER BY name;

-- name: count_claimed
-- Counts the nodes that use the pool of claimable nodes. A claim locks the settings' row, and runs this in a later
-- statement.
SELECT count(*) FROM node WHERE claim IS NOT NULL;

-- name: count
SELECT count(*) FROM node;

-- name: kept_for
-- Node specs that name a tenant are written under the tree's shared lock, so this is complete under its exclusive lock.
SELECT name FROM node WHERE (gate::jsonb -> 'tenants') ? $1 ORDER BY name;

-- name: put
INSERT INTO node (name, uid, generation, schedulable, allocatable, allocated, devices, claim, gate, soiled)
SELECT *
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::boolean[], $5::json[], $6::json[], $7::json[], $8::json[],
              $9::json[], $10::boolean[])
       AS line (name, uid, generation, schedulable, allocatable, allocated, devices, claim, gate, soiled)
 ORDER BY 1
    ON CONFLICT (name) DO UPDATE
   SET generation = excluded.generation, schedulable = excluded.schedulable, allocatable = excluded.allocatable,
       allocated = excluded.allocated, devices = excluded.devices, claim = excluded.claim,
       gate = excluded.gate, soiled = excluded.soiled;

-- name: use
-- Updates only the free resources.
UPDATE node
   SET allocated = line.allocated, devices = line.devices, soiled = line.soiled
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31))::json[],
              string_to_array($3, chr(31))::json[], string_to_array($4, ',')::boolean[])
       AS line (name, allocated, devices, soiled)
 WHERE node.name = line.name;

-- name: remove
-- Deletes the last heartbeat too: a later node of the same name has not sent any.
WITH unheard AS (DELETE FROM node_seen WHERE node = ANY($1::text[]))
DELETE FROM node WHERE name = ANY($1::text[]);

-- name: labels
SELECT name, labels
  FROM object
 WHERE kind = 'Node' AND namespace = '' AND name = ANY(string_to_array($1, chr(31)));

-- name: placements_of
SELECT node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, lease
  FROM placement WHERE uid = ANY($1::text[]) ORDER BY node, uid;

-- name: placements_on
SELECT node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, lease
  FROM placement WHERE node = ANY($1::text[]) ORDER BY node, uid;

-- name: remove_placements
DELETE FROM placement
 WHERE (node, uid) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: seen
INSERT INTO node_seen (node, at)
SELECT name, now() FROM unnest($1::text[]) AS line (name) ORDER BY 1
    ON CONFLICT (node) DO UPDATE SET at = excluded.at;

-- name: last_seen
SELECT node, at FROM node_seen WHERE node = ANY($1::text[]);
