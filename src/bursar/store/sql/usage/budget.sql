-- Remaining budgets of tenants, from external sources.

-- name: claim
-- Of concurrent readers one wins; the database's clock decides.
INSERT INTO budget_source (name, due_at)
VALUES ($1, clock_timestamp() + make_interval(secs => $2::double precision))
    ON CONFLICT (name) DO UPDATE SET due_at = excluded.due_at
 WHERE budget_source.due_at <= clock_timestamp()
RETURNING clock_timestamp() AS at;

-- name: save
-- Deletes the budgets of tenants that the source no longer names. A delayed reader does not overwrite a newer reading.
WITH said AS (
    SELECT * FROM unnest($4::text[], $5::double precision[], $6::double precision[]) AS line (tenant, gpu_hours, node_hours)
), dropped AS (
    DELETE FROM budget_remaining AS old
     WHERE old.source = $1 AND old.read_at < $2
       AND NOT EXISTS (SELECT FROM said WHERE said.tenant = old.tenant)
), answered AS (
    UPDATE budget_source SET answered_at = $2, fault = '' WHERE name = $1
)
INSERT INTO budget_remaining (tenant, source, gpu_hours, node_hours, read_at, fresh_until)
SELECT tenant, $1, gpu_hours, node_hours, $2, $2::timestamptz + make_interval(secs => $3::double precision)
  FROM said
 ORDER BY tenant
    ON CONFLICT (tenant, source) DO UPDATE
   SET gpu_hours = excluded.gpu_hours, node_hours = excluded.node_hours,
       read_at = excluded.read_at, fresh_until = excluded.fresh_until
 WHERE budget_remaining.read_at <= excluded.read_at;

-- name: withdraw
-- Budgets read before the source failed become invalid.
WITH dropped AS (
    DELETE FROM budget_remaining WHERE source = $1 AND read_at < $2
)
UPDATE budget_source SET fault = $3 WHERE name = $1;

-- name: remaining
-- The latest of several sources; a tenant seldom has more than one.
SELECT DISTINCT ON (tenant) tenant, source, gpu_hours, node_hours
  FROM budget_remaining
 WHERE fresh_until > clock_timestamp() AND ($1::text[] IS NULL OR tenant = ANY($1))
 ORDER BY tenant, read_at DESC;

-- name: sources
-- A source that nobody reads any more counts as not answering.
SELECT name, answered_at IS NOT NULL AND fault = '' AND due_at > clock_timestamp() - interval '1 minute' AS answers, fault
  FROM budget_source
 ORDER BY name;
