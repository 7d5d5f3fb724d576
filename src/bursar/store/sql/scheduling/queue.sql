-- Counts of allocations and jobs that refer to a queue.

-- name: count_in
-- Work that has not ended. A job's allocations use the queue of its template, else that of the job.
SELECT count(*) FILTER (WHERE kind = 'Allocation' AND fields ->> 'status.phase' = 'Pending') AS waiting,
       count(*) FILTER (WHERE kind = 'Allocation' AND fields ->> 'status.phase' <> 'Pending') AS placed,
       count(*) FILTER (WHERE kind = 'Job') AS jobs
  FROM object
 WHERE kind IN ('Allocation', 'Job')
   AND coalesce(fields ->> 'spec.template.spec.queue', fields ->> 'spec.queue') = $1
   AND fields ->> 'status.phase' <> ALL($2::text[]);

-- name: count_waiting
-- One snapshot: the revision is that of the last counted change.
SELECT (SELECT value FROM revision WHERE id = 1) AS revision, waiting.queue, waiting.depth
  FROM (SELECT coalesce(fields ->> 'spec.queue', 'default') AS queue, count(*) AS depth
          FROM object
         WHERE kind = 'Allocation' AND fields ->> 'status.phase' = 'Pending'
           AND fields ->> 'status.approval.state' IS DISTINCT FROM 'pending'
         GROUP BY 1
         UNION ALL
        SELECT '', 0) AS waiting;
