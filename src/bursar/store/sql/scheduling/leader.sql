-- The leader's row. Terms are measured by the database's clock alone.

-- name: renew
-- Only `until` moves, so this does not wait for the binds that hold the row FOR KEY SHARE.
UPDATE leader
   SET until = clock_timestamp() + make_interval(secs => $2::double precision)
 WHERE holder = $1 AND until > clock_timestamp()
RETURNING fence;

-- name: take
-- The fence is a key: this waits for the binds that hold the row FOR KEY SHARE, and those that come after it find the
-- new fence. Of two concurrent takeovers the second finds the first one's term.
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
-- Waits for a takeover under way, and sees what it wrote: the row itself is all that is looked at.
SELECT fence FROM leader WHERE id = 1 FOR KEY SHARE;

-- name: lock_with_tree
-- The leader's row, and the tree held shared (`lock_shared` in tree.sql): each is seen as the last transaction left it.
-- The table lock of the tree comes before both. It cannot deadlock: changes of the tree do not touch this row,
-- and a takeover has no other lock.
SELECT leader.fence, tree.version
  FROM leader, tree
 WHERE leader.id = 1 AND tree.id = 1
   FOR KEY SHARE OF leader
   FOR SHARE OF tree;
