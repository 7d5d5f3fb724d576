-- Lists of leases, open and ended.

-- name: list_open
SELECT lease.id
  FROM lease
 WHERE lease.id > $6
   AND ($1::bigint IS NULL OR lease.account = $1)
   AND ($2::text[] IS NULL OR lease.account IN (
       SELECT id FROM account WHERE tenant = ANY($2) AND ($3::text[] IS NULL OR username = ANY($3))))
   AND ($4 = '' OR lease.node = $4)
   AND ($5 = '' OR lease.job = $5)
 ORDER BY lease.id
 LIMIT $7;

-- name: list_ended
-- The latest first: the table holds years of leases.
SELECT id
  FROM lease_ended
 WHERE account = $1 AND ($2 = '' OR job = $2) AND (closed_at, id) < ($3, $4)
 ORDER BY closed_at DESC, id DESC
 LIMIT $5;
