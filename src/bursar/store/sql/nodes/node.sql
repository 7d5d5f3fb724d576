-- Free resources of nodes, and placements.

-- name: lock
-- A node's row has all its free resources, and a row that was waited for is seen as its rival left it: it can be read
-- by the statement that locks it.
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim, gate, soiled
  FROM node
 WHERE name = ANY(string_to_array($1, chr(31)))
 ORDER BY name
   FOR NO KEY UPDATE;

-- name: lock_after_counters
-- `lock`, with counters locked before (`lock` in quota.sql). No node is locked before all counters are: each comes out of
-- the join with their number. First the counters, then the nodes.
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
-- The nodes that count against the pool. A claim holds the settings' row, and reads this in a later statement.
SELECT count(*) FROM node WHERE claim IS NOT NULL;

-- name: count
SELECT count(*) FROM node;

-- name: kept_for
-- A node spec that names a tenant is written under a shared lock of the tree: its exclusive lock makes this complete.
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
-- Only the free resources have changed.
UPDATE node
   SET allocated = line.allocated, devices = line.devices, soiled = line.soiled
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31))::json[],
              string_to_array($3, chr(31))::json[], string_to_array($4, ',')::boolean[])
       AS line (name, allocated, devices, soiled)
 WHERE node.name = line.name;

-- name: remove
-- When it was last heard goes with it: another of its name has not been heard yet.
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
