-- Nodes' room, and what is placed on them.

-- name: lock
SELECT count(*) FROM (
    SELECT 1 FROM node WHERE name = ANY($1::text[]) ORDER BY name FOR NO KEY UPDATE
) AS locked;

-- name: read
SELECT name, generation, schedulable, allocatable, allocated, devices FROM node WHERE name = ANY($1::text[]);

-- name: read_all
SELECT name, generation, schedulable, allocatable, allocated, devices FROM node;

-- name: put
INSERT INTO node (name, uid, generation, schedulable, allocatable, allocated, devices)
SELECT *
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::boolean[], $5::json[], $6::json[], $7::json[])
       AS line (name, uid, generation, schedulable, allocatable, allocated, devices)
 ORDER BY 1
    ON CONFLICT (name) DO UPDATE
   SET generation = excluded.generation, schedulable = excluded.schedulable, allocatable = excluded.allocatable,
       allocated = excluded.allocated, devices = excluded.devices;

-- name: remove
DELETE FROM node WHERE name = ANY($1::text[]);

-- name: placements_of
SELECT node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted
  FROM placement WHERE uid = ANY($1::text[]) ORDER BY node, uid;

-- name: placements_on
SELECT node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted
  FROM placement WHERE node = ANY($1::text[]) ORDER BY node, uid;

-- name: put_placements
INSERT INTO placement (node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, revision)
SELECT *
  FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::boolean[], $8::json[],
              $9::json[], $10::boolean[], $11::bigint[])
       AS line (node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, revision)
 ORDER BY 1, 2
    ON CONFLICT (node, uid) DO UPDATE SET wanted = excluded.wanted, revision = excluded.revision, epoch = excluded.epoch;

-- name: remove_placements
DELETE FROM placement
 WHERE (node, uid) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: seen
INSERT INTO node_seen (node, at)
SELECT name, now() FROM unnest($1::text[]) AS line (name) ORDER BY 1
    ON CONFLICT (node) DO UPDATE SET at = excluded.at;

-- name: last_seen
SELECT node, at FROM node_seen WHERE node = ANY($1::text[]);
