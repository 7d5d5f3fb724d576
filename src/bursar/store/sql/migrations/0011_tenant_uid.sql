-- Accounts, tokens, webhooks, notices and request ids follow a tenant's uid, and not its name.
--
-- While a tenant lives, its name finds them: no two living tenants have one name. When it is deleted they are filed under
-- NAME@UID in the same transaction (store/objects/departure.py), so that a later tenant of that name finds nothing.

ALTER TABLE account ADD COLUMN tenant_uid text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE token ADD COLUMN tenant_uid text COLLATE "C" NOT NULL DEFAULT '';

-- Names that nobody bears now, with the uid of the last tenant that did; the feed may have forgotten it.
CREATE TEMPORARY TABLE tenant_gone ON COMMIT DROP AS
SELECT named.tenant AS name, named.tenant || '@' || coalesce(gone.uid, 'gone') AS filed,
       coalesce(gone.uid, 'gone') AS uid,
       EXISTS (SELECT FROM object WHERE kind = 'Tenant' AND namespace = '' AND name = named.tenant) AS borne
  FROM (SELECT tenant FROM account WHERE id >= 100
         UNION SELECT tenant FROM token
         UNION SELECT tenant FROM webhook
         UNION SELECT tenant FROM notice WHERE spread_at IS NULL) AS named
  LEFT JOIN LATERAL (
        SELECT uid
          FROM change
         WHERE name = named.tenant AND namespace = '' AND kind = 'Tenant' AND type = 'DELETED'
         ORDER BY revision DESC
         LIMIT 1
       ) AS gone ON true
 WHERE named.tenant <> '';

UPDATE account
   SET tenant_uid = tenant.uid
  FROM object AS tenant
 WHERE account.id >= 100 AND (tenant.kind, tenant.namespace, tenant.name) = ('Tenant', '', account.tenant);
UPDATE account
   SET tenant = gone.filed, tenant_uid = gone.uid
  FROM tenant_gone AS gone
 WHERE account.id >= 100 AND account.tenant = gone.name AND NOT gone.borne;

-- A tenant that is deleted has its tokens revoked: one that is older than the tenant, and dead, is its predecessor's.
UPDATE token
   SET tenant_uid = tenant.uid
  FROM object AS tenant
 WHERE (tenant.kind, tenant.namespace, tenant.name) = ('Tenant', '', token.tenant)
   AND (token.revoked_at IS NULL
        OR token.created_at >= (tenant.doc #>> '{metadata,creationTimestamp}')::timestamptz);
UPDATE token
   SET tenant = gone.filed, tenant_uid = gone.uid, revoked_at = coalesce(revoked_at, now()),
       revoked_by = coalesce(revoked_by, 'system')
  FROM tenant_gone AS gone
 WHERE token.tenant = gone.name AND token.tenant_uid = '';

UPDATE webhook SET tenant = gone.filed FROM tenant_gone AS gone WHERE webhook.tenant = gone.name AND NOT gone.borne;
UPDATE notice
   SET tenant = gone.filed
  FROM tenant_gone AS gone
 WHERE notice.spread_at IS NULL AND notice.tenant = gone.name AND NOT gone.borne;

-- Whoever asks again with an id that was answered is given that answer. Ids of names that nobody bears are never asked
-- for again.
UPDATE request
   SET scope = 'ledger:' || tenant.uid || '/' || substr(request.scope, length('ledger:' || tenant.name || '/') + 1)
  FROM object AS tenant
 WHERE left(request.scope, 7) = 'ledger:'
   AND (tenant.kind, tenant.namespace, tenant.name) = ('Tenant', '', split_part(substr(request.scope, 8), '/', 1));
UPDATE request
   SET scope = tenant.uid || '/' || substr(request.scope, length(tenant.name || '/') + 1)
  FROM object AS tenant
 WHERE left(request.scope, 7) <> 'ledger:' AND strpos(request.scope, '/') > 0
   AND (tenant.kind, tenant.namespace, tenant.name) = ('Tenant', '', split_part(request.scope, '/', 1));
