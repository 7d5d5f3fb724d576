-- Objects and the changes made to them.

-- name: lock
-- In key order, so that two batches can never deadlock. What is decided from is read in a later statement.
-- Columns travel as texts (store/columns.py).
SELECT kind, namespace, name
  FROM object
 WHERE (kind, namespace, name) IN (
           SELECT kind, coalesce(namespace, ''), name
             FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)))
                  AS wanted (kind, namespace, name)
       )
 ORDER BY kind, namespace, name
   FOR NO KEY UPDATE;

-- name: read
SELECT kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status
  FROM object
 WHERE (kind, namespace, name) IN (
           SELECT kind, coalesce(namespace, ''), name
             FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)))
                  AS wanted (kind, namespace, name)
       );

-- name: members_of_gangs
SELECT kind, namespace, name
  FROM object
 WHERE (namespace, gang) IN (SELECT * FROM unnest($1::text[], $2::text[]));

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

