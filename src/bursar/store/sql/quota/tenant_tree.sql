-- The tree's row, and what the tree is made of.

-- name: lock_shared
-- Taken by every charge. The table lock that comes with it queues fairly behind a waiting exclusive one.
SELECT version FROM tree WHERE id = 1 FOR SHARE;

-- name: lock_exclusive_table
LOCK TABLE tree IN EXCLUSIVE MODE;

-- name: bump
UPDATE tree SET version = version + 1 WHERE id = 1 RETURNING version;

-- name: begin_era
-- The database was restored from a backup. The era is the second in which it begins, and stands above the tree's version,
-- which every bind holds: no epoch that was given since the backup is given again, however often the same one is restored.
-- Nor can revisions that were seen since then be watched from.
WITH moved AS (
    UPDATE revision SET value = value + 1000000000, floor = value + 1000000000
)
UPDATE tree
   SET version = extract(epoch FROM clock_timestamp())::bigint * 1000000000 + version % 1000000000
 WHERE id = 1;

-- name: version
SELECT tree.version, revision.value AS revision, revision.floor FROM tree, revision;

-- name: objects
SELECT kind, namespace, name, doc
  FROM object
 WHERE kind IN ('Namespace', 'PriorityClass', 'ResourceQuota', 'Settings', 'Tenant', 'Tier');

-- name: changes_since
-- Served by the partial index change_of_tree.
SELECT kind, namespace, name, type, doc, revision
  FROM change
 WHERE revision > $1
   AND kind IN ('Namespace', 'PriorityClass', 'ResourceQuota', 'Settings', 'Tenant', 'Tier')
 ORDER BY revision;

-- name: ended
-- Served by the partial index change_of_tree, once in the life of a process.
SELECT name, revision
  FROM change
 WHERE kind IN ('Namespace', 'ResourceQuota', 'Settings', 'Tenant', 'Tier')
   AND kind = 'Tenant' AND type = 'DELETED'
 ORDER BY revision;
