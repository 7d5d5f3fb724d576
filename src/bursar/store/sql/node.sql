-- Nodes' room, and what is placed on them.

-- name: lock
-- A node's row is all there is to its room, and a row that was waited for is seen as its rival left it: it can be read
-- by the statement that locks it.
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim
  FROM node
 WHERE name = ANY(string_to_array($1, chr(31)))
 ORDER BY name
   FOR NO KEY UPDATE;

-- name: read
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim FROM node WHERE name = ANY($1::text[]);

-- name: read_all
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim FROM node;

-- name: read_claimed
SELECT name, uid, generation, schedulable, allocatable, allocated, devices, claim
  FROM node WHERE claim IS NOT NULL ORDER BY name;

-- name: count_claimed
-- What counts against the pool. Whoever claims holds the settings' row, and asks in a later statement.
SELECT count(*) FROM node WHERE claim IS NOT NULL;

-- name: count
SELECT count(*) FROM node;

-- name: names
SELECT name FROM node ORDER BY name;

-- name: put
INSERT INTO node (name, uid, generation, schedulable, allocatable, allocated, devices, claim)
SELECT *
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::boolean[], $5::json[], $6::json[], $7::json[], $8::json[])
       AS line (name, uid, generation, schedulable, allocatable, allocated, devices, claim)
 ORDER BY 1
    ON CONFLICT (name) DO UPDATE
   SET generation = excluded.generation, schedulable = excluded.schedulable, allocatable = excluded.allocatable,
       allocated = excluded.allocated, devices = excluded.devices, claim = excluded.claim;

-- name: use
-- Only the room has moved.
UPDATE node
   SET allocated = line.allocated, devices = line.devices
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31))::json[],
              string_to_array($3, chr(31))::json[]) AS line (name, allocated, devices)
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

-- name: put_placements
-- Columns travel as texts (store/columns.py).
INSERT INTO placement (node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, revision, lease)
SELECT node, uid, namespace, name, coalesce(tenant, ''), epoch, exclusive, resources, devices, wanted, revision,
       nullif(lease, 0)
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)),
              string_to_array($4, chr(31)), string_to_array($5, chr(31)), string_to_array($6, ',')::bigint[],
              string_to_array($7, ',')::boolean[], string_to_array($8, chr(31))::json[],
              string_to_array($9, chr(31))::json[], string_to_array($10, ',')::boolean[],
              string_to_array($11, ',')::bigint[], string_to_array($12, ',')::bigint[])
       AS line (node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, revision, lease)
 ORDER BY 1, 2
    ON CONFLICT (node, uid) DO UPDATE
   SET wanted = excluded.wanted, revision = excluded.revision, epoch = excluded.epoch, lease = excluded.lease;

-- name: remove_placements
DELETE FROM placement
 WHERE (node, uid) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: seen
INSERT INTO node_seen (node, at)
SELECT name, now() FROM unnest($1::text[]) AS line (name) ORDER BY 1
    ON CONFLICT (node) DO UPDATE SET at = excluded.at;

-- name: last_seen
SELECT node, at FROM node_seen WHERE node = ANY($1::text[]);
