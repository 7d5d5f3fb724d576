-- Requests under approval gates.

-- name: put
INSERT INTO approval (kind, namespace, name, tenant, gate, since, noted, due)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[])
 ORDER BY 1, 2, 3
    ON CONFLICT ON CONSTRAINT approval_key DO UPDATE
   SET tenant = excluded.tenant, gate = excluded.gate, since = excluded.since, noted = excluded.noted,
       due = excluded.due;

-- name: remove
DELETE FROM approval
 USING unnest($1::text[], $2::text[], $3::text[]) AS gone (kind, namespace, name)
 WHERE (approval.kind, approval.namespace, approval.name) = (gone.kind, gone.namespace, gone.name);

-- name: list_open
-- Undecided requests of these tenants and gates (NULL: of all), oldest first, after one of them.
SELECT approval.kind, approval.namespace, approval.name, approval.tenant, approval.gate, approval.since,
       object.revision, object.gang, object.charge, object.doc, object.status
  FROM approval
  JOIN object USING (kind, namespace, name)
 WHERE approval.gate <> ''
   AND ($1::text[] IS NULL OR approval.tenant = ANY($1))
   AND ($2::text[] IS NULL OR approval.gate = ANY($2))
   AND (approval.since, approval.kind, approval.namespace, approval.name) > ($3, $4, $5, $6)
 ORDER BY approval.since, approval.kind, approval.namespace, approval.name
 LIMIT $7;

-- name: charges
-- The charges and gangs of some requests as they are now.
SELECT kind, namespace, name, gang, charge
  FROM object
 WHERE (kind, namespace, name) IN (SELECT * FROM unnest($1::text[], $2::text[], $3::text[]));

-- name: list_due
SELECT kind, namespace, name, due
  FROM approval
 WHERE due <> '' AND due <= $1 AND (due, kind, namespace, name) > ($2, $3, $4, $5)
 ORDER BY due, kind, namespace, name
 LIMIT $6;

-- name: next_due
SELECT min(due) FROM approval WHERE due <> '' AND due > $1;

-- name: count_open
SELECT gate, count(*) AS open, min(since) AS oldest, min(since) FILTER (WHERE noted = '') AS unanswered
  FROM approval
 WHERE gate <> ''
 GROUP BY gate;
