-- Other sessions of ours.

-- name: end_stuck
-- Whoever is stopped does not read what it is sent, and the server waits with what it has locked until it is read: no
-- timeout of ours ends that. Only sessions that lock are ended, and none that has only just begun to answer.
SELECT count(pg_terminate_backend(pid))
  FROM pg_stat_activity
 WHERE datname = current_database()
   AND usename = current_user
   AND application_name = $1
   AND wait_event = 'ClientWrite'
   AND query_start < clock_timestamp() - make_interval(secs => $2::double precision);
