-- How large the nodes are that there are.

-- name: edition
-- Whatever happens to nodes, one of the two is different afterwards.
SELECT count(*) AS nodes, coalesce(max(revision), 0) AS revision FROM object WHERE kind = 'Node';

-- name: nodes_since
SELECT name, doc, status FROM object WHERE kind = 'Node' AND revision > $1;
