-- The tree's row, and what the tree is made of.

-- name: lock_shared
-- Taken by every charge. The table lock that comes with it queues fairly behind a waiting exclusive one.
SELECT version FROM tree WHERE id = 1 FOR SHARE;

-- name: lock_exclusive_table
LOCK TABLE tree IN EXCLUSIVE MODE;

-- name: bump
UPDATE tree SET version = version + 1 WHERE id = 1 RETURNING version;

-- name: version
SELECT tree.version, revision.value AS revision, revision.floor FROM tree, revision;

-- name: objects
SELECT kind, namespace, name, doc
  FROM object
 WHERE kind IN ('Namespace', 'ResourceQuota', 'Settings', 'Tenant', 'Tier');

-- name: changes_since
-- Served by the partial index change_of_tree.
SELECT kind, namespace, name, type, doc, revision
  FROM change
 WHERE revision > $1
   AND kind IN ('Namespace', 'ResourceQuota', 'Settings', 'Tenant', 'Tier')
 ORDER BY revision;
