-- The change feed: read by watchers, caches and auditors.

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

-- name: with_field_between
-- Changes of objects that have a selectable field, or had it before.
SELECT revision, kind, namespace, name, uid, tenant, type, labels, fields, before_labels, before_fields, before_tenant,
       doc, status, at
  FROM change
 WHERE revision > $1 AND revision <= $2 AND (fields ? $3 OR before_fields ? $3)
 ORDER BY revision
 LIMIT $4;

-- name: tenants_between
SELECT DISTINCT unnest(ARRAY[tenant, before_tenant]) AS tenant FROM change WHERE revision > $1 AND revision <= $2;

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
SELECT revision, kind, namespace, name, uid, tenant, type, actor, verb, reason, at,
       CASE WHEN kind = 'Allocation' AND type = 'MODIFIED' THEN status END AS status
  FROM change
 WHERE name = $1 AND namespace = $2 AND ($3 = '' OR kind = $3)
 ORDER BY revision DESC
 LIMIT $4;

-- name: events
SELECT revision, kind, namespace, name, uid, tenant, type, actor, verb, reason, at,
       CASE WHEN kind = 'Allocation' AND type = 'MODIFIED' THEN status END AS status
  FROM change
 WHERE revision > $1
   AND ($2 = '' OR namespace = $2 OR ($2 = 'default' AND namespace = ''))
   AND ($3::text[] IS NULL OR tenant = ANY($3::text[]))
 ORDER BY revision DESC
 LIMIT $4;

-- name: was_placed
SELECT EXISTS (
    SELECT FROM change
     WHERE name = $2 AND namespace = $1 AND kind = 'Allocation' AND uid = $3
       AND (status::json ->> 'epoch')::bigint = $5
       AND EXISTS (SELECT FROM json_array_elements(status::json -> 'nodes') AS one WHERE one ->> 'name' = $4)
) AS found;

-- name: for_scheduler
-- Most changes of an allocation concern its status, so its document is read only when it is new or was edited. Binds by
-- the scheduler itself come without columns: it knows them already.
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

-- name: note
-- Lines of the audit log about actions without an object. The revision's row is locked last, and the notification is a
-- hint, as for changes of objects.
WITH line AS (
    SELECT *
      FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::json[], $6::text[], $7::text[], $8::text[])
           WITH ORDINALITY AS line (kind, name, tenant, type, doc, actor, verb, reason, place)
), taken AS (
    UPDATE revision SET value = value + (SELECT count(*) FROM line) WHERE id = 1
    RETURNING value - (SELECT count(*) FROM line) AS before
), fed AS (
    INSERT INTO change (revision, kind, namespace, name, uid, tenant, type, labels, fields, before_labels,
                        before_fields, before_tenant, doc, edited, actor, verb, reason, at)
    SELECT before + place, kind, '', name, name, tenant, type, '{}', '{}', CASE WHEN type <> 'ADDED' THEN '{}'::jsonb END,
           CASE WHEN type <> 'ADDED' THEN '{}'::jsonb END, CASE WHEN type <> 'ADDED' THEN tenant END, doc, true, actor,
           verb, reason, clock_timestamp()
      FROM line, taken
)
SELECT pg_notify('bursar_change', (SELECT before + (SELECT count(*) FROM line) FROM taken)::text);
