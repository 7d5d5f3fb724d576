-- Objects and the changes made to them.

-- name: lock
-- In key order, so that two batches can never deadlock. An object is its row, and a row that was waited for is seen as its
-- rival left it: it can be read by the statement that locks it. One that was deleted meanwhile is not there, also where
-- another of its name was created since: a creator finds that out when it saves.
-- Columns travel as texts (store/db/columns.py), and each key comes once.
SELECT object.kind, object.namespace, object.name, uid, tenant, revision, labels, fields, gang, charge, doc, status
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)))
       AS wanted (kind, namespace, name)
  JOIN object
    ON (object.kind, object.namespace, object.name) = (wanted.kind, coalesce(wanted.namespace, ''), wanted.name)
 ORDER BY object.kind, object.namespace, object.name
   FOR NO KEY UPDATE OF object;

-- name: lock_under_tree
-- `lock`, with the tree held shared before (`lock_shared` in tree.sql). No object is locked before the tree is: each comes
-- out of the join with the tree's row. There is one line at least, which has the tree's version.
WITH held AS MATERIALIZED (
    SELECT version AS tree_version FROM tree WHERE id = 1 FOR SHARE
), found AS MATERIALIZED (
    SELECT object.kind, object.namespace, object.name, uid, tenant, revision, labels, fields, gang, charge, doc, status
      FROM held, unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)))
           AS wanted (kind, namespace, name)
      JOIN object
        ON (object.kind, object.namespace, object.name) = (wanted.kind, coalesce(wanted.namespace, ''), wanted.name)
     ORDER BY object.kind, object.namespace, object.name
       FOR NO KEY UPDATE OF object
)
SELECT held.tree_version, found.* FROM held LEFT JOIN found ON true;

-- name: lock_under_leader
-- The same, with the leader's row held before the tree's (`lock_with_tree` in leader.sql).
WITH held AS MATERIALIZED (
    SELECT leader.fence, tree.version AS tree_version
      FROM leader, tree
     WHERE leader.id = 1 AND tree.id = 1
       FOR KEY SHARE OF leader
       FOR SHARE OF tree
), found AS MATERIALIZED (
    SELECT object.kind, object.namespace, object.name, uid, tenant, revision, labels, fields, gang, charge, doc, status
      FROM held, unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)))
           AS wanted (kind, namespace, name)
      JOIN object
        ON (object.kind, object.namespace, object.name) = (wanted.kind, coalesce(wanted.namespace, ''), wanted.name)
     ORDER BY object.kind, object.namespace, object.name
       FOR NO KEY UPDATE OF object
)
SELECT held.fence, held.tree_version, found.* FROM held LEFT JOIN found ON true;

-- name: read
SELECT kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status
  FROM object
 WHERE (kind, namespace, name) IN (
           SELECT kind, coalesce(namespace, ''), name
             FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)))
                  AS wanted (kind, namespace, name)
       );

-- name: members_of_gangs
SELECT kind, namespace, name
  FROM object
 WHERE (namespace, gang) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: save_charges
-- What an object holds is not shown in it: no change, no revision.
UPDATE object
   SET charge = line.charge
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::json[])
       AS line (kind, namespace, name, expected, charge)
 WHERE (object.kind, object.namespace, object.name) = (line.kind, line.namespace, line.name)
   AND object.revision = line.expected;

-- name: get
SELECT kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status
  FROM object
 WHERE kind = $1 AND namespace = $2 AND name = $3;

-- name: charges_in
SELECT charge FROM object WHERE kind = ANY($2::text[]) AND namespace = $1 AND charge IS NOT NULL;

-- name: is_used
-- Whether anything lives in a namespace.
SELECT EXISTS (SELECT 1 FROM object WHERE kind = ANY($2::text[]) AND namespace = $1);

-- name: charges
SELECT namespace, charge FROM object WHERE charge IS NOT NULL;

