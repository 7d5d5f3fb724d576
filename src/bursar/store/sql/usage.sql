-- Hours used, from the hourly samples of what was bound.

-- name: hours
SELECT substr(scope, 8) AS tenant,
       coalesce(sum(bound) FILTER (WHERE dimension = 'nvidia.com/gpu'), 0) / 1000.0 AS gpu_hours,
       coalesce(sum(bound) FILTER (WHERE dimension = 'nodes'), 0) / 1000.0 AS node_hours
  FROM usage_rollup
 WHERE scope LIKE 'tenant:%' AND dimension IN ('nvidia.com/gpu', 'nodes') AND hour > $1
 GROUP BY scope;
