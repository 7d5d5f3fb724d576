-- Deletion of a tenant: its records are renamed to NAME@UID, which no later tenant can have.

-- name: file
-- The accounts are locked already. Nobody creates a token or a webhook meanwhile, because that needs the tree's shared
-- lock.
WITH accounts AS (
    UPDATE account SET tenant = $2 WHERE tenant = $1
), webhooks AS (
    UPDATE webhook SET tenant = $2 WHERE tenant = $1
), budgets AS (
    DELETE FROM budget_remaining WHERE tenant = $1
), notices AS (
    UPDATE notice SET tenant = $2 WHERE tenant = $1 AND spread_at IS NULL
), tokens AS (
    UPDATE token
       SET tenant = $2, revoked_at = coalesce(token.revoked_at, now()),
           revoked_by = coalesce(token.revoked_by, 'system')
      FROM (SELECT id, revoked_at FROM token WHERE tenant = $1 ORDER BY id FOR NO KEY UPDATE) AS was
     WHERE token.id = was.id
    RETURNING token.id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at,
              used_at, used_key, token.revoked_at, tenants, gates, was.revoked_at IS NULL AS lived
)
SELECT id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at, used_at,
       used_key, revoked_at, tenants, gates
  FROM tokens
 WHERE lived
 ORDER BY id;
