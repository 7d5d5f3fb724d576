-- Keys that sign what is granted to nodes.

-- name: believed
-- Oldest first: the last of them signs. A key that is to be retired is believed until then.
SELECT id, private_key, created_at, retired_at,
       extract(epoch FROM clock_timestamp() - created_at)::double precision AS age_seconds
  FROM signing_key
 WHERE retired_at IS NULL OR retired_at > clock_timestamp()
 ORDER BY created_at, id;

-- name: lock_against_writers
-- Two that make a key at the same time: the second sees what the first has written.
LOCK TABLE signing_key IN SHARE ROW EXCLUSIVE MODE;

-- name: insert
-- By the clock and not by the beginning of the transaction, which may have waited for the lock: the order of keys is
-- the order in which they were made.
INSERT INTO signing_key (id, private_key, created_at, created_by) VALUES ($1, $2, clock_timestamp(), $3);

-- name: retire_others
-- What is to be retired sooner stays so.
UPDATE signing_key
   SET retired_at = clock_timestamp() + make_interval(secs => $2)
 WHERE id <> $1 AND (retired_at IS NULL OR retired_at > clock_timestamp() + make_interval(secs => $2));

-- name: forget_retired
-- A private half that signs nothing any more is only good for being stolen.
DELETE FROM signing_key WHERE retired_at <= clock_timestamp();
