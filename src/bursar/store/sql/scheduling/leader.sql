-- The leader's row. Terms are measured by the database's clock only.

-- name: renew
-- Changes only `until`, which is no key column, so it does not wait for binds that hold the row FOR KEY SHARE.
UPDATE leader
   SET until = clock_timestamp() + make_interval(secs => $2::double precision)
 WHERE holder = $1 AND until > clock_timestamp()
RETURNING fence;

-- name: take
-- The fence is a key column: this waits for binds that hold the row FOR KEY SHARE, and later binds read the new fence.
-- Of two concurrent takeovers the second finds the first one's term.
UPDATE leader
   SET holder = $1,
       fence = fence + 1,
       until = clock_timestamp() + make_interval(secs => $2::double precision),
       at = clock_timestamp()
 WHERE until <= clock_timestamp()
RETURNING fence;

-- name: resign
UPDATE leader SET holder = '', until = clock_timestamp() WHERE holder = $1 RETURNING fence;

-- name: lock
-- Waits for a concurrent takeover and returns the row that it wrote; it reads no other rows.
SELECT fence FROM leader WHERE id = 1 FOR KEY SHARE;

-- name: lock_with_tree
-- Locks the leader's row and the tree (`lock_shared` in tenant_tree.sql); each is read as last committed. PostgreSQL
-- takes the table lock of the tree before both. This cannot deadlock: changes of the tree do not lock the leader's row,
-- and a takeover holds no other lock.
SELECT leader.fence, tree.version
  FROM leader, tree
 WHERE leader.id = 1 AND tree.id = 1
   FOR KEY SHARE OF leader
   FOR SHARE OF tree;
