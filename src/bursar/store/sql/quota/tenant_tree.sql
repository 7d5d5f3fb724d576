-- The tree's row and locks, and the objects that the tree is built from.

-- name: lock_shared
-- Taken by every charge. Its table lock queues fairly behind a waiting exclusive lock.
SELECT version FROM tree WHERE id = 1 FOR SHARE;

-- name: lock_exclusive_table
LOCK TABLE tree IN EXCLUSIVE MODE;

-- name: bump
UPDATE tree SET version = version + 1 WHERE id = 1 RETURNING version;

-- name: begin_era
-- Begins an era after a restore from a backup. The era is the second in which it begins, and is the high part of the
-- tree's version, under which every bind runs: no epoch issued since the backup is issued again, however often the same
-- backup is restored. Watches from revisions since the backup are refused as well.
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
-- Uses the partial index change_of_tree.
SELECT kind, namespace, name, type, doc, revision
  FROM change
 WHERE revision > $1
   AND kind IN ('Namespace', 'PriorityClass', 'ResourceQuota', 'Settings', 'Tenant', 'Tier')
 ORDER BY revision;

-- name: ended
-- Uses the partial index change_of_tree, once in the life of a process.
SELECT name, revision
  FROM change
 WHERE kind IN ('Namespace', 'ResourceQuota', 'Settings', 'Tenant', 'Tier')
   AND kind = 'Tenant' AND type = 'DELETED'
 ORDER BY revision;
