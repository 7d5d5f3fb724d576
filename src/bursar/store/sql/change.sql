-- The feed: what watchers, caches and auditors read.

-- name: since
SELECT revision, kind, namespace, name, uid, tenant, type, labels, fields, before_labels, before_fields, before_tenant,
       doc, status, at
  FROM change
 WHERE revision > $1
 ORDER BY revision
 LIMIT $2;

-- name: of_kind_between
SELECT revision, kind, namespace, name, uid, tenant, type, labels, fields, before_labels, before_fields, before_tenant,
       doc, status, at
  FROM change
 WHERE revision > $1 AND revision <= $2 AND kind = $3 AND ($4 = '' OR namespace = $4)
 ORDER BY revision
 LIMIT $5;

-- name: position
SELECT value, floor FROM revision WHERE id = 1;

-- name: partitions
SELECT child.relname AS name
  FROM pg_inherits
  JOIN pg_class AS child ON child.oid = pg_inherits.inhrelid
 WHERE pg_inherits.inhparent = 'change'::regclass;

-- name: raise_floor
UPDATE revision SET floor = greatest(floor, $1) WHERE id = 1;

-- name: events_of_object
SELECT revision, kind, namespace, name, uid, tenant, type, actor, verb, reason, at
  FROM change
 WHERE name = $1 AND namespace = $2 AND ($3 = '' OR kind = $3)
 ORDER BY revision DESC
 LIMIT $4;

-- name: events
SELECT revision, kind, namespace, name, uid, tenant, type, actor, verb, reason, at
  FROM change
 WHERE revision > $1
   AND ($2 = '' OR namespace = $2 OR ($2 = 'default' AND namespace = ''))
   AND ($3::text[] IS NULL OR tenant = ANY($3::text[]))
 ORDER BY revision DESC
 LIMIT $4;

-- name: tenants_gone
-- When tenants of these names last went. What was dropped of the feed since is older than all that is left of it.
SELECT name, max(revision) AS revision
  FROM change
 WHERE name = ANY($1::text[]) AND namespace = '' AND kind = 'Tenant' AND type = 'DELETED'
 GROUP BY name;

-- name: for_scheduler
-- Of an allocation mostly the status changes: its document is told when it is new, or was edited. What the scheduler bound
-- itself it knows already: of that, the bare line is enough.
SELECT revision, kind, namespace, name, uid, tenant, type,
       CASE WHEN own THEN '' ELSE labels::text END AS labels,
       CASE WHEN own THEN '' ELSE fields::text END AS fields,
       CASE WHEN kind = 'Allocation' AND type <> 'ADDED' AND NOT edited THEN NULL ELSE doc END AS doc,
       CASE WHEN own THEN NULL ELSE status END AS status,
       own
  FROM change, LATERAL (SELECT kind = 'Allocation' AND verb = 'bind' AND actor = $3) AS binding (own)
 WHERE revision > $1
 ORDER BY revision
 LIMIT $2;
