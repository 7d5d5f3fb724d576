-- Quota counters: limits and usage of each scope, one row per dimension.

-- name: ensure
-- A tenant's counter is created at its first use of a dimension.
INSERT INTO quota (scope, dimension, hard)
SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[]) AS line (scope, dimension, hard)
 ORDER BY 1, 2
    ON CONFLICT DO NOTHING;

-- name: lock
-- The whole counter is in its row, and a lock that had to wait returns the row's latest version, so the statement that
-- locks a counter may also read it. Columns travel as texts (store/db/columns.py), and each counter comes once.
SELECT quota.scope, quota.dimension, hard, soft, accepted, bound
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31))) AS wanted (scope, dimension)
  JOIN quota ON (quota.scope, quota.dimension) = (wanted.scope, wanted.dimension)
 ORDER BY quota.scope, quota.dimension
   FOR NO KEY UPDATE OF quota;

-- name: read_scopes
SELECT scope, dimension, hard, soft, accepted, bound FROM quota WHERE scope = ANY($1::text[]);

-- name: read_tenants
SELECT scope, dimension, hard, soft, accepted, bound FROM quota WHERE scope = 'system' OR scope LIKE 'tenant:%';

-- name: read_all
SELECT scope, dimension, hard, soft, accepted, bound FROM quota;

-- name: put
INSERT INTO quota (scope, dimension, hard, soft, accepted, bound)
SELECT *
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
       AS line (scope, dimension, hard, soft, accepted, bound)
 ORDER BY 1, 2
    ON CONFLICT (scope, dimension) DO UPDATE
   SET hard = excluded.hard, soft = excluded.soft, accepted = excluded.accepted, bound = excluded.bound;

-- name: remove
DELETE FROM quota
 WHERE (scope, dimension) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: prune
-- Counters of dimensions without usage and limits.
DELETE FROM quota
 WHERE accepted = 0 AND bound = 0 AND hard = 9223372036854775807 AND soft IS NULL AND scope LIKE 'tenant:%';

-- name: trend
-- Usage a day ago: the nearest sample at or before that hour, if there is one.
SELECT DISTINCT ON (scope, dimension) scope, dimension, hard, accepted
  FROM usage_rollup
 WHERE scope = ANY($1::text[]) AND hour <= $2 AND hour > $2 - interval '6 hours'
 ORDER BY scope, dimension, hour DESC;

-- name: sample
INSERT INTO usage_rollup (scope, dimension, hour, hard, accepted, bound)
SELECT scope, dimension, date_trunc('hour', $1::timestamptz), hard, accepted, bound FROM quota
    ON CONFLICT (scope, dimension, hour) DO UPDATE
   SET hard = excluded.hard, accepted = excluded.accepted, bound = excluded.bound;

-- name: forget_samples
DELETE FROM usage_rollup
 WHERE ctid = ANY (ARRAY(SELECT ctid FROM usage_rollup WHERE hour < $1 LIMIT $2));

-- name: read_limited
SELECT scope, dimension, hard, soft, accepted, bound FROM quota WHERE hard < 9223372036854775807;
