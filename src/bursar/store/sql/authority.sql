-- The authority that signs certificates, and which of a node's certificates count.

-- name: read
SELECT certificate, key FROM authority;

-- name: lock_against_writers
-- Two servers that start together: the second sees what the first has written.
LOCK TABLE authority IN SHARE ROW EXCLUSIVE MODE;

-- name: insert
INSERT INTO authority (certificate, key) VALUES ($1, $2);

-- name: enrol
-- The node's row is held meanwhile, so that whoever deletes the node comes before, and there is nothing to enrol, or
-- after, and ends what was begun here.
INSERT INTO node_identity (node)
SELECT name FROM node WHERE name = $1 FOR KEY SHARE
    ON CONFLICT (node) DO UPDATE SET generation = node_identity.generation + 1, begun_at = now()
RETURNING generation;

-- name: ensure
-- As it is, or the first one.
INSERT INTO node_identity (node)
SELECT name FROM node WHERE name = $1 FOR KEY SHARE
    ON CONFLICT (node) DO UPDATE SET node = excluded.node
RETURNING generation;

-- name: end
-- Who was never enrolled has no certificate to end.
UPDATE node_identity SET generation = generation + 1, begun_at = now() WHERE node = ANY($1::text[]);

-- name: generations
-- Of the nodes that exist; 0 where none was ever enrolled.
SELECT node.name, coalesce(identity.generation, 0) AS generation
  FROM node
  LEFT JOIN node_identity AS identity ON identity.node = node.name
 WHERE node.name = ANY($1::text[]);
