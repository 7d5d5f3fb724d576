-- Objects and the changes made to them.

-- name: lock
-- In key order, so that two batches can never deadlock. What is decided from is read in a later statement.
SELECT count(*) FROM (
    SELECT 1
      FROM object
     WHERE (kind, namespace, name) IN (SELECT * FROM unnest($1::text[], $2::text[], $3::text[]))
     ORDER BY kind, namespace, name
       FOR NO KEY UPDATE
) AS locked;

-- name: read
SELECT kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status
  FROM object
 WHERE (kind, namespace, name) IN (SELECT * FROM unnest($1::text[], $2::text[], $3::text[]));

-- name: members_of_gangs
SELECT kind, namespace, name
  FROM object
 WHERE (namespace, gang) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: take_revisions
-- The last lock: held until COMMIT, so that numbers become visible in their order.
-- The notification is only a hint beside polling; PostgreSQL sends it when the transaction commits.
WITH taken AS (
    UPDATE revision SET value = value + $1 WHERE id = 1 RETURNING value - $1 AS before
)
SELECT before, pg_notify('bursar_change', '') FROM taken;

-- name: save
-- `op` says what becomes of the object's row: insert, update, delete, or leave (a later line of the same batch decides).
-- Every line is a change. Guards are repeated: the counts must be what was decided.
WITH line AS MATERIALIZED (
    SELECT *
      FROM unnest(
               $1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
               $9::text[], $10::jsonb[], $11::jsonb[], $12::jsonb[], $13::jsonb[], $14::text[], $15::json[],
               $16::json[], $17::json[], $18::text[], $19::text[], $20::text[], $21::text[]
           ) AS line (op, expected, revision, kind, namespace, name, uid, tenant, type, labels, fields, before_labels,
                      before_fields, gang, charge, doc, status, actor, verb, reason, before_tenant)
), inserted AS (
    INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status)
    SELECT kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status
      FROM line WHERE op = 'insert'
        ON CONFLICT DO NOTHING
    RETURNING 1
), updated AS (
    UPDATE object
       SET revision = line.revision, tenant = line.tenant, labels = line.labels, fields = line.fields,
           charge = line.charge, doc = line.doc, status = line.status
      FROM line
     WHERE line.op = 'update'
       AND (object.kind, object.namespace, object.name) = (line.kind, line.namespace, line.name)
       AND object.revision = line.expected
    RETURNING 1
), deleted AS (
    DELETE FROM object USING line
     WHERE line.op = 'delete'
       AND (object.kind, object.namespace, object.name) = (line.kind, line.namespace, line.name)
       AND object.revision = line.expected
    RETURNING 1
), fed AS (
    INSERT INTO change (revision, kind, namespace, name, uid, tenant, type, labels, fields, before_labels,
                        before_fields, before_tenant, doc, status, actor, verb, reason, at)
    SELECT revision, kind, namespace, name, uid, tenant, type, labels, fields, before_labels, before_fields,
           before_tenant, doc, status, actor, verb, reason, clock_timestamp()
      FROM line
)
SELECT (SELECT count(*) FROM inserted) AS inserted,
       (SELECT count(*) FROM updated) AS updated,
       (SELECT count(*) FROM deleted) AS deleted;

-- name: save_charges
-- What an object holds is not shown in it: no change, no revision.
UPDATE object
   SET charge = line.charge
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::json[])
       AS line (kind, namespace, name, expected, charge)
 WHERE (object.kind, object.namespace, object.name) = (line.kind, line.namespace, line.name)
   AND object.revision = line.expected;

-- name: get
SELECT kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status
  FROM object
 WHERE kind = $1 AND namespace = $2 AND name = $3;

-- name: charges_in
SELECT charge FROM object WHERE kind = ANY($2::text[]) AND namespace = $1 AND charge IS NOT NULL;

-- name: is_used
-- Whether anything lives in a namespace.
SELECT EXISTS (SELECT 1 FROM object WHERE kind = ANY($2::text[]) AND namespace = $1);

-- name: charges
SELECT namespace, charge FROM object WHERE charge IS NOT NULL;

