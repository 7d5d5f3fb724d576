-- Other sessions of Bursar.

-- name: stuck
-- A stopped process does not read its results, and the server keeps its locks until they are read; no timeout ends
-- that. Only sessions that write or lock have a transaction id.
SELECT pid, query_start
  FROM pg_stat_activity
 WHERE datname = current_database()
   AND usename = current_user
   AND application_name = $1
   AND wait_event = 'ClientWrite'
   AND backend_xid IS NOT NULL
   AND query_start < clock_timestamp() - make_interval(secs => $2::double precision);

-- name: end_stuck
-- Terminates those of them whose result is still not read.
SELECT count(pg_terminate_backend(one.pid))
  FROM pg_stat_activity AS one
  JOIN unnest($1::integer[], $2::timestamptz[]) AS seen (pid, query_start)
    ON (one.pid, one.query_start) = (seen.pid, seen.query_start)
 WHERE one.wait_event = 'ClientWrite';
