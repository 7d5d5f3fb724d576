-- The certificate authority of nodes, and the valid generation of each node's certificates.

-- name: read
SELECT certificate, key FROM authority;

-- name: lock_against_writers
-- Serialises servers that start together: the second sees the CA that the first has written.
LOCK TABLE authority IN SHARE ROW EXCLUSIVE MODE;

-- name: insert
INSERT INTO authority (certificate, key) VALUES ($1, $2);

-- name: enrol
-- Holds the node's row, so that a deletion of the node commits before, and there is nothing to enrol, or after, and
-- ends this generation. A repeated request with the same token, which requires the same key, returns the same
-- generation. Any other request makes repetitions impossible.
WITH begun AS (
    INSERT INTO node_identity AS identity (node, token)
    SELECT name, $2 FROM node
     WHERE name = $1 AND ($2 = '' OR EXISTS (SELECT FROM token WHERE id = $2 AND used_key = $3))
       FOR KEY SHARE
        ON CONFLICT (node) DO UPDATE
       SET generation = identity.generation + (identity.token <> excluded.token OR excluded.token = '')::integer,
           begun_at = now(), token = excluded.token
    RETURNING node, generation
), past AS (
    UPDATE token SET used_key = NULL
      FROM begun
     WHERE token.node = begun.node AND token.id <> $2 AND token.used_key IS NOT NULL
)
SELECT generation FROM begun;

-- name: ensure
-- Returns the present generation, or begins the first one.
INSERT INTO node_identity (node)
SELECT name FROM node WHERE name = $1 FOR KEY SHARE
    ON CONFLICT (node) DO UPDATE SET node = excluded.node
RETURNING generation;

-- name: end
-- A node that was never enrolled has no certificate to invalidate.
UPDATE node_identity SET generation = generation + 1, begun_at = now(), token = '' WHERE node = ANY($1::text[]);

-- name: generations
-- Generations of existing nodes; 0 if a node was never enrolled.
SELECT node.name, coalesce(identity.generation, 0) AS generation
  FROM node
  LEFT JOIN node_identity AS identity ON identity.node = node.name
 WHERE node.name = ANY($1::text[]);
