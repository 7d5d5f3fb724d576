-- Sizes of nodes.

-- name: edition
-- Every change of nodes changes at least one of the two columns.
SELECT count(*) AS nodes, coalesce(max(revision), 0) AS revision FROM object WHERE kind = 'Node';

-- name: nodes_since
SELECT name, doc, status FROM object WHERE kind = 'Node' AND revision > $1;
