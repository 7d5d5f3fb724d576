-- Jobs: the state of the allocations that they created.

-- name: members
-- By name, because a job knows the names of its allocations: a query by label would read the whole namespace.
SELECT name, fields, doc, status
  FROM object
 WHERE kind = 'Allocation' AND namespace = $1 AND name = ANY($2::text[])
 LIMIT $3;

-- name: shown
SELECT name, fields
  FROM object
 WHERE kind = 'Allocation' AND namespace = $1 AND name = ANY($2::text[]) AND labels @> $3::jsonb
 ORDER BY name;

-- name: boosts
SELECT job.namespace, job.name, job.uid, job.status -> 'boost' AS boost
  FROM object AS job
  JOIN unnest($1::text[], $2::text[], $3::text[]) AS wanted (namespace, name, uid) USING (namespace, name, uid)
 WHERE job.kind = 'Job' AND job.status -> 'boost' IS NOT NULL;
