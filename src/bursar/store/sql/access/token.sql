-- name: insert
INSERT INTO token (id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at,
                   tenants, gates)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);

-- name: find
-- `lives` says whether the tenant of the token still exists; a later tenant of the same name does not count.
-- `member_role` is the role of the token's user as a member of the tenant, beyond which the token gives nothing.
SELECT id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at, used_at,
       used_key, revoked_at, tenants, gates,
       CASE WHEN tenant <> '' THEN (
           SELECT member.fields ->> 'spec.role'
             FROM object AS member
            WHERE member.kind = 'Member' AND member.tenant = token.tenant
              AND member.fields ->> 'spec.user' = token.username
       ) END AS member_role,
       tenant = '' OR EXISTS (
           SELECT FROM object
            WHERE (object.kind, object.namespace, object.name) = ('Tenant', '', token.tenant)
              AND object.uid = token.tenant_uid
       ) AS lives
  FROM token
 WHERE id = ANY($1::text[]);

-- name: list_all
SELECT id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at, used_at,
       used_key, revoked_at, tenants, gates
  FROM token
 ORDER BY created_at, id;

-- name: list_of_tenants
SELECT id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at, used_at,
       used_key, revoked_at, tenants, gates
  FROM token
 WHERE tenant = ANY($1::text[])
 ORDER BY created_at, id;

-- name: revoke
-- The first revocation stands, so that the record says since when the token was invalid. Of two concurrent revocations
-- the second waits for the first and then updates nothing.
UPDATE token
   SET revoked_at = $2, revoked_by = $3
 WHERE id = $1 AND revoked_at IS NULL
RETURNING id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at, used_at,
          used_key, revoked_at, tenants, gates;

-- name: consume
-- Of two concurrent uses the second waits for the first's transaction and then finds the token used.
UPDATE token
   SET used_at = $2, used_key = $3
 WHERE id = $1
   AND single_use
   AND used_at IS NULL
   AND revoked_at IS NULL
   AND (expires_at IS NULL OR expires_at > $2)
RETURNING id;

-- name: reuse
-- A used token is valid again only for the key that it was used for.
SELECT EXISTS (
    SELECT FROM token
     WHERE id = $1 AND used_key = $3 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > $2)
);

-- name: lock_against_writers
-- Serialises servers that start together: the second sees the token that the first has written.
LOCK TABLE token IN SHARE ROW EXCLUSIVE MODE;

-- name: exists_of_role
SELECT EXISTS (SELECT FROM token WHERE role = $1);

-- name: revoke_of_nodes
-- A later node of the same name is a different node.
UPDATE token
   SET revoked_at = now(), revoked_by = 'system'
 WHERE node = ANY($1::text[]) AND revoked_at IS NULL
RETURNING id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at, used_at,
          used_key, revoked_at, tenants, gates;

-- name: revoke_of_users
-- Members were removed. The caller holds the revision's lock, as everybody does who creates a token, so each token was
-- committed before and is found, or belongs to a user who is no member.
UPDATE token
   SET revoked_at = now(), revoked_by = $3
  FROM (
      SELECT id
        FROM token JOIN unnest($1::text[], $2::text[]) AS gone (tenant, username) USING (tenant, username)
       WHERE revoked_at IS NULL AND role IN ('tenant-admin', 'user', 'viewer')
       ORDER BY id
         FOR NO KEY UPDATE OF token
  ) AS live
 WHERE token.id = live.id
RETURNING token.id, hash, role, tenant, tenant_uid, username, node, single_use, created_at, created_by, expires_at,
          used_at, used_key, revoked_at, tenants, gates;

-- name: restore
-- Undoes a use whose purpose failed, unless the same key has succeeded with a repeated request meanwhile.
UPDATE token SET used_at = NULL, used_key = NULL
 WHERE id = $1 AND NOT EXISTS (SELECT FROM node_identity AS identity WHERE identity.token = $1);
