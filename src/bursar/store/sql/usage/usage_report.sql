-- Queries of usage reports other than windows.

-- name: tenants
-- All names with any usage, deleted ones included. An index skip scan: it jumps from name to name, past the days of
-- each.
WITH RECURSIVE known AS (
    (SELECT tenant FROM usage_day ORDER BY tenant LIMIT 1)
     UNION ALL
    SELECT (SELECT day.tenant FROM usage_day AS day WHERE day.tenant > known.tenant ORDER BY day.tenant LIMIT 1)
      FROM known
     WHERE known.tenant IS NOT NULL
)
SELECT tenant FROM known WHERE tenant IS NOT NULL
 UNION
SELECT tenant FROM usage_step
 ORDER BY tenant;

-- name: namesakes
-- Users of this name, of any tenant or of none.
SELECT username FROM usage_level WHERE username = $1 OR right(username, length($1) + 1) = '/' || $1
 UNION
SELECT username FROM usage_step WHERE username = $1 OR right(username, length($1) + 1) = '/' || $1
 ORDER BY username;
