-- Members of tenants.

-- name: find
-- Members and tenants in one statement, so that no membership counts in a later tenant of the same name. A member that
-- is marked for deletion is none any more.
SELECT member.fields ->> 'spec.user' AS username, member.tenant, tenant.uid AS tenant_uid,
       member.fields ->> 'spec.role' AS role
  FROM object AS member
  JOIN object AS tenant ON (tenant.kind, tenant.namespace, tenant.name) = ('Tenant', '', member.tenant)
 WHERE member.kind = 'Member'
   AND substring(member.name FROM '[^.]*$') = ANY($2::text[])
   AND member.fields ->> 'spec.user' = ANY($1::text[])
   AND member.doc -> 'metadata' ->> 'deletionTimestamp' IS NULL
 ORDER BY member.tenant;
