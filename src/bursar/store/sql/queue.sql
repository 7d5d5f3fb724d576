-- Queues, as far as work refers to them.

-- name: count_in
-- What has not ended. A job's allocations go where its template says, and else where the job does.
SELECT count(*) FILTER (WHERE kind = 'Allocation' AND fields ->> 'status.phase' = 'Pending') AS waiting,
       count(*) FILTER (WHERE kind = 'Allocation' AND fields ->> 'status.phase' <> 'Pending') AS placed,
       count(*) FILTER (WHERE kind = 'Job') AS jobs
  FROM object
 WHERE kind IN ('Allocation', 'Job')
   AND coalesce(fields ->> 'spec.template.spec.queue', fields ->> 'spec.queue') = $1
   AND fields ->> 'status.phase' <> ALL($2::text[]);
