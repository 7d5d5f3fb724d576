-- The authority that signs certificates, and which of a node's certificates count.

-- name: read
SELECT certificate, key FROM authority;

-- name: lock_against_writers
-- Two servers that start together: the second sees what the first has written.
LOCK TABLE authority IN SHARE ROW EXCLUSIVE MODE;

-- name: insert
INSERT INTO authority (certificate, key) VALUES ($1, $2);

-- name: enrol
-- The node's row is held meanwhile, so that a deletion of the node comes before, and there is nothing to enrol, or
-- after, and ends what was begun here. Asked again with the same token, which only the same key can, it is the same
-- generation; any other ends what could be asked again.
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
-- As it is, or the first one.
INSERT INTO node_identity (node)
SELECT name FROM node WHERE name = $1 FOR KEY SHARE
    ON CONFLICT (node) DO UPDATE SET node = excluded.node
RETURNING generation;

-- name: end
-- Nodes that were never enrolled have no certificate to end.
UPDATE node_identity SET generation = generation + 1, begun_at = now(), token = '' WHERE node = ANY($1::text[]);

-- name: generations
-- Of the nodes that exist; 0 where none was ever enrolled.
SELECT node.name, coalesce(identity.generation, 0) AS generation
  FROM node
  LEFT JOIN node_identity AS identity ON identity.node = node.name
 WHERE node.name = ANY($1::text[]);
