-- Objects and their changes.

-- name: lock
-- In key order, so that two batches can never deadlock. The whole object is in its row, and a lock that had to wait
-- returns the row's latest version, so the statement that locks an object may also read it. An object that was deleted
-- meanwhile is not found, even if another of the same name was created since: its creator fails when it saves. Columns
-- travel as texts (store/db/columns.py), and each key comes once.
SELECT object.kind, object.namespace, object.name, uid, tenant, revision, labels, fields, gang, charge, doc, status
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)))
       AS wanted (kind, namespace, name)
  JOIN object
    ON (object.kind, object.namespace, object.name) = (wanted.kind, coalesce(wanted.namespace, ''), wanted.name)
 ORDER BY object.kind, object.namespace, object.name
   FOR NO KEY UPDATE OF object;

-- name: lock_under_tree
-- `lock`, after taking the tree's shared lock (`lock_shared` in tenant_tree.sql). Objects come out of a join with the
-- tree's row, so none is locked before the tree is. There is at least one line, which has the tree's version.
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
-- `lock_under_tree`, after locking the leader's row (`lock_with_tree` in leader.sql).
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
-- A charge is not a visible field, so this writes no change and takes no revision.
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
-- Whether a namespace contains any object.
SELECT EXISTS (SELECT 1 FROM object WHERE kind = ANY($2::text[]) AND namespace = $1);

-- name: charges
SELECT namespace, charge FROM object WHERE charge IS NOT NULL;

-- name: owned
-- Objects without a namespace that end with their tenant, whose tree lock the caller holds.
SELECT kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status
  FROM object
 WHERE tenant = $1 AND kind = ANY($2::text[])
 ORDER BY kind, namespace, name
   FOR NO KEY UPDATE;
