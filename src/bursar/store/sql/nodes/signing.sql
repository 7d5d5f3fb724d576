-- Keys that sign lease tokens for nodes.

-- name: believed
-- Oldest first: the last one signs. A key that will be retired is valid until then.
SELECT id, private_key, created_at, retired_at,
       extract(epoch FROM clock_timestamp() - created_at)::double precision AS age_seconds
  FROM signing_key
 WHERE retired_at IS NULL OR retired_at > clock_timestamp()
 ORDER BY created_at, id;

-- name: lock_against_writers
-- Serialises concurrent creation of keys: the second process sees the first one's key.
LOCK TABLE signing_key IN SHARE ROW EXCLUSIVE MODE;

-- name: insert
-- Uses the clock instead of the transaction's begin, which may precede a wait for the lock: keys are ordered by
-- creation.
INSERT INTO signing_key (id, private_key, created_at, created_by) VALUES ($1, $2, clock_timestamp(), $3);

-- name: retire_others
-- An earlier retirement stands.
UPDATE signing_key
   SET retired_at = clock_timestamp() + make_interval(secs => $2)
 WHERE id <> $1 AND (retired_at IS NULL OR retired_at > clock_timestamp() + make_interval(secs => $2));

-- name: forget_retired
-- A private key that signs nothing any more can only be stolen.
DELETE FROM signing_key WHERE retired_at <= clock_timestamp();
