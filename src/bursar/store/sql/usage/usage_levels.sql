-- Usage hours: starts and ends of work, and usage in a window.
--
-- Usage until a time is the sum of amounts times seconds. Where it does not come from buckets, it is written as
-- moments: an amount enters with a sign at each time between which it was in use, and the sum of `weight × time` is the
-- usage. Moments are grouped by the prices in force (`segment`), so that the cost follows from their sums.

-- name: begin
-- Columns travel as texts (store/db/columns.py). Usage that is recorded already is not recorded twice.
WITH opened AS (
    INSERT INTO usage_open (uid, node, epoch, tenant, username, namespace, name, amounts, class, started_at, lease)
    SELECT uid, node, epoch, coalesce(tenant, ''), username, coalesce(namespace, ''), coalesce(name, ''), amounts,
           coalesce(class, ''), to_timestamp(at), nullif(lease, 0)
      FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, ',')::bigint[],
                  string_to_array($4, chr(31)), string_to_array($5, chr(31)), string_to_array($6, chr(31)),
                  string_to_array($7, chr(31)), string_to_array($8, chr(31))::json[], string_to_array($9, chr(31)),
                  string_to_array($10, ',')::bigint[], string_to_array($11, ',')::bigint[])
           AS line (uid, node, epoch, tenant, username, namespace, name, amounts, class, at, lease)
     ORDER BY 1, 2
        ON CONFLICT DO NOTHING
    RETURNING tenant, username, amounts, class, started_at
)
INSERT INTO usage_step (tenant, username, resource, class, at, delta)
SELECT tenant, whose, taken.key, CASE WHEN strpos(taken.key, '/') > 0 THEN class ELSE '' END, started_at,
       sum(taken.value::bigint)
  FROM opened, json_each_text(amounts) AS taken, unnest(ARRAY[username, '']) AS whose
 GROUP BY 1, 2, 3, 4, 5;

-- name: end
-- The end is at least the start, whatever clocks say. Usage that did not begin is not ended.
WITH closed AS (
    DELETE FROM usage_open AS open
     USING unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, ',')::bigint[],
                  string_to_array($4, chr(31)), string_to_array($5, chr(31))) AS line (uid, node, at, phase, reason)
     WHERE (open.uid, open.node) = (line.uid, line.node)
    RETURNING open.uid, open.node, open.epoch, open.tenant, open.username, open.namespace, open.name, open.amounts,
              open.class, open.started_at, greatest(to_timestamp(line.at), open.started_at) AS ended_at,
              coalesce(line.phase, '') AS phase, coalesce(line.reason, '') AS reason, open.lease
), recorded AS (
    INSERT INTO usage_record (uid, node, epoch, tenant, username, namespace, name, amounts, class, started_at,
                              ended_at, phase, reason, lease)
    SELECT uid, node, epoch, tenant, username, namespace, name, amounts, class, started_at, ended_at, phase, reason,
           lease
      FROM closed
)
INSERT INTO usage_step (tenant, username, resource, class, at, delta)
SELECT tenant, whose, taken.key, CASE WHEN strpos(taken.key, '/') > 0 THEN class ELSE '' END, ended_at,
       -sum(taken.value::bigint)
  FROM closed, json_each_text(amounts) AS taken, unnest(ARRAY[username, '']) AS whose
 GROUP BY 1, 2, 3, 4, 5;

-- name: lock_rolled
-- One process rolls up the steps of all, so others need not wait.
SELECT at, clock_timestamp() AS now FROM usage_rolled WHERE id = 1 FOR UPDATE SKIP LOCKED;

-- name: set_rolled
UPDATE usage_rolled SET at = $1 WHERE id = 1;

-- name: change_past
UPDATE usage_rolled SET past = past + 1 WHERE id = 1;

-- name: past
-- While `past` is unchanged and no step before that time waits to be rolled up, usage before that time is unchanged.
SELECT past, EXISTS (SELECT FROM usage_step WHERE usage_step.at < $1) AS is_open FROM usage_rolled WHERE id = 1;

-- name: lag
-- Open usage is rolled up after each hour, and steps all the time: returns the larger lag of the two.
SELECT greatest(0, extract(epoch FROM clock_timestamp() - least(
           at + interval '1 hour', (SELECT min(step.at) FROM usage_step AS step)
       )))::double precision AS seconds
  FROM usage_rolled
 WHERE id = 1;

-- name: take_steps
-- Merges steps of the same second. Later steps are left: buckets are never ahead of the requested time.
WITH taken AS (
    DELETE FROM usage_step
     WHERE id = ANY(ARRAY(SELECT id FROM usage_step WHERE at <= $1 ORDER BY id LIMIT $2))
    RETURNING tenant, username, resource, class, at, delta
)
SELECT tenant, username, resource, class, extract(epoch FROM at)::bigint AS at, sum(delta)::bigint AS delta,
       count(*) AS count
  FROM taken
 GROUP BY tenant, username, resource, class, taken.at;

-- name: levels
SELECT level.tenant, level.username, level.resource, level.class, level.amount,
       extract(epoch FROM level.since)::bigint AS since
  FROM usage_level AS level
  JOIN unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)),
              string_to_array($4, chr(31))) AS wanted (tenant, username, resource, class)
    ON (level.tenant, level.username, level.resource, level.class)
       = (coalesce(wanted.tenant, ''), coalesce(wanted.username, ''), wanted.resource, coalesce(wanted.class, ''));

-- name: levels_behind
-- Open usage that is not rolled up until that time.
SELECT tenant, username, resource, class, amount, extract(epoch FROM since)::bigint AS since
  FROM usage_level
 WHERE amount <> 0 AND since < $1
 LIMIT $2;

-- name: put_levels
INSERT INTO usage_level (tenant, username, resource, class, amount, since)
SELECT tenant, coalesce(username, ''), resource, coalesce(class, ''), amount, to_timestamp(since)
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)),
              string_to_array($4, chr(31)), string_to_array($5, ',')::bigint[], string_to_array($6, ',')::bigint[])
       AS line (tenant, username, resource, class, amount, since)
    ON CONFLICT (tenant, username, resource, class) DO UPDATE SET amount = excluded.amount, since = excluded.since;

-- name: add_hours
INSERT INTO usage_hour AS kept (tenant, resource, class, at, total, cost, peak, last)
SELECT tenant, resource, coalesce(class, ''), to_timestamp(at), total, cost, peak, rise
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)),
              string_to_array($4, ',')::bigint[], string_to_array($5, ',')::numeric[],
              string_to_array($6, ',')::numeric[], string_to_array($7, ',')::bigint[],
              string_to_array($8, ',')::bigint[])
       AS line (tenant, resource, class, at, total, cost, peak, rise)
    ON CONFLICT (tenant, at, resource, class) DO UPDATE
   SET total = kept.total + excluded.total, cost = kept.cost + excluded.cost,
       peak = greatest(kept.peak, excluded.peak), last = kept.last + excluded.last;

-- name: add_days
INSERT INTO usage_day AS kept (tenant, username, resource, class, at, total, cost, peak, last)
SELECT tenant, coalesce(username, ''), resource, coalesce(class, ''), to_timestamp(at), total, cost, peak, rise
  FROM unnest(string_to_array($1, chr(31)), string_to_array($2, chr(31)), string_to_array($3, chr(31)),
              string_to_array($4, chr(31)), string_to_array($5, ',')::bigint[], string_to_array($6, ',')::numeric[],
              string_to_array($7, ',')::numeric[], string_to_array($8, ',')::bigint[],
              string_to_array($9, ',')::bigint[])
       AS line (tenant, username, resource, class, at, total, cost, peak, rise)
    ON CONFLICT (tenant, username, at, resource, class) DO UPDATE
   SET total = kept.total + excluded.total, cost = kept.cost + excluded.cost,
       peak = greatest(kept.peak, excluded.peak), last = kept.last + excluded.last;

-- name: keep_hours
-- Records first from when on hours are kept, so that no window misses an hour.
UPDATE usage_rolled SET hours_from = greatest(hours_from, date_trunc('hour', $1::timestamptz, 'UTC')) WHERE id = 1
RETURNING hours_from;

-- name: forget_hours
DELETE FROM usage_hour WHERE ctid = ANY (ARRAY(SELECT ctid FROM usage_hour WHERE at < $1 LIMIT $2));

-- name: window
-- Usage from each of these times until $4, which is at or after everything that is rolled up, to the second. It is the
-- sum of whole days, whole hours up to the first day, and the rest of the hour in which the window begins (that hour's
-- last level, minus the steps that came later in it), plus usage in no bucket yet: levels since they were rolled up,
-- and steps. It is one statement, so that a concurrent roll-up counts nothing twice.
--
-- `is_first` marks windows that begin with their tenant: earlier usage in that hour belongs to a deleted tenant of the
-- same name. If there was any, the hour's peak may be that tenant's, so its last level is returned instead.
--
-- Users have no hours, and hours of long ago are dropped: there the day takes the hour's place. Where records are
-- dropped too, a window begins with its day.
WITH wanted AS MATERIALIZED (
    SELECT place, tenant, username, edge.begin, by_hour,
           is_first AND EXISTS (
               SELECT FROM usage_record AS kept
                WHERE kept.tenant = asked.tenant AND kept.ended_at <= edge.begin
                  AND kept.ended_at > CASE WHEN by_hour THEN hour ELSE day END
           ) AS is_shared,
           CASE WHEN by_hour THEN hour ELSE day END AS edge,
           CASE WHEN by_hour THEN hour + interval '1 hour' ELSE day + interval '24 hours' END AS edge_end,
           CASE WHEN by_hour AND hour < edge.begin THEN hour + interval '1 hour' ELSE edge.begin END AS first_hour,
           CASE WHEN day < edge.begin THEN day + interval '24 hours' ELSE day END AS first_day
      FROM unnest($1::text[], $2::text[], $3::timestamptz[], $6::boolean[]) WITH ORDINALITY
               AS asked (tenant, username, begin, is_first, place)
     CROSS JOIN usage_rolled
     CROSS JOIN LATERAL (
               SELECT CASE WHEN asked.begin < records_from THEN date_trunc('day', asked.begin, 'UTC')
                           ELSE asked.begin END AS begin,
                      username = '' AND asked.begin >= hours_from AS by_hour
           ) AS edge
     CROSS JOIN LATERAL (
               SELECT date_trunc('hour', edge.begin, 'UTC') AS hour, date_trunc('day', edge.begin, 'UTC') AS day
           ) AS bucket
), whole AS (
    -- Each by its index, here and below: OFFSET 0 prevents a join of a few tenants with the whole table.
    SELECT place, kept.*
      FROM wanted
     CROSS JOIN LATERAL (
               SELECT resource, class, sum(total) AS total, sum(cost) AS cost, max(peak) AS peak
                 FROM usage_day AS kept
                WHERE kept.tenant = wanted.tenant AND kept.username = wanted.username AND kept.at >= first_day
                GROUP BY resource, class
               OFFSET 0
           ) AS kept
     UNION ALL
    SELECT place, kept.*
      FROM wanted
     CROSS JOIN LATERAL (
               SELECT resource, class, sum(total), sum(cost), max(peak)
                 FROM usage_hour AS kept
                WHERE kept.tenant = wanted.tenant AND kept.at >= first_hour AND kept.at < first_day
                GROUP BY resource, class
               OFFSET 0
           ) AS kept
     WHERE by_hour
), edge AS MATERIALIZED (
    SELECT place, begin, edge_end, tenant, username, resource, class, last,
           CASE WHEN is_shared THEN last ELSE peak END AS peak
      FROM wanted
     CROSS JOIN LATERAL (
               SELECT resource, class, last, peak
                 FROM usage_hour AS kept
                WHERE kept.tenant = wanted.tenant AND kept.at = edge
               OFFSET 0
           ) AS kept
     WHERE by_hour AND begin > edge
     UNION ALL
    SELECT place, begin, edge_end, tenant, username, resource, class, last,
           CASE WHEN is_shared THEN last ELSE peak END
      FROM wanted
     CROSS JOIN LATERAL (
               SELECT resource, class, last, peak
                 FROM usage_day AS kept
                WHERE kept.tenant = wanted.tenant AND kept.username = wanted.username AND kept.at = edge
               OFFSET 0
           ) AS kept
     WHERE NOT by_hour AND begin > edge
), cut AS (
    SELECT DISTINCT tenant, begin, edge_end FROM wanted WHERE begin > edge
), came AS (
    -- Starts and ends in the rest of the hour in which the window begins, up to now: a node's clock may be ahead.
    SELECT cut.tenant, cut.begin, edge_end, step.*
      FROM cut
     CROSS JOIN LATERAL (
               SELECT username, amounts, class, started_at AS at, 1 AS sign
                 FROM usage_record AS kept
                WHERE kept.tenant = cut.tenant AND started_at > cut.begin AND started_at < edge_end
                  AND ended_at > cut.begin AND started_at <= $4
               OFFSET 0
           ) AS step
     UNION ALL
    SELECT cut.tenant, cut.begin, edge_end, step.*
      FROM cut
     CROSS JOIN LATERAL (
               SELECT username, amounts, class, ended_at, -1
                 FROM usage_record AS kept
                WHERE kept.tenant = cut.tenant AND ended_at > cut.begin AND ended_at < edge_end AND ended_at <= $4
               OFFSET 0
           ) AS step
     UNION ALL
    SELECT cut.tenant, cut.begin, edge_end, step.*
      FROM cut
     CROSS JOIN LATERAL (
               SELECT username, amounts, class, started_at, 1
                 FROM usage_open AS kept
                WHERE kept.tenant = cut.tenant AND started_at > cut.begin AND started_at < edge_end
                  AND started_at <= $4
               OFFSET 0
           ) AS step
), moved AS MATERIALIZED (
    SELECT tenant, begin, edge_end, username, taken.key AS resource,
           CASE WHEN strpos(taken.key, '/') > 0 THEN class ELSE '' END AS class,
           width_bucket(at, $5::timestamptz[]) AS segment, sum(sign * taken.value::numeric) AS delta,
           sum(sign * taken.value::numeric * extract(epoch FROM at)) AS moment
      FROM came, json_each_text(amounts) AS taken
     GROUP BY 1, 2, 3, 4, 5, 6, 7
), stepped AS MATERIALIZED (
    SELECT place, step.resource, step.class, step.delta, begin,
           -- Steps in no bucket were subtracted with the rest of the hour; they are added again here.
           CASE WHEN at > begin AND begin > edge AND at < edge_end THEN begin ELSE greatest(begin, at) END AS since
      FROM wanted
     CROSS JOIN LATERAL (
               SELECT resource, class, delta, at
                 FROM usage_step AS kept
                WHERE kept.tenant = wanted.tenant AND kept.username = wanted.username AND kept.at <= $4
               OFFSET 0
           ) AS step
), level AS MATERIALIZED (
    SELECT place, resource, class, amount, since, begin
      FROM wanted
     CROSS JOIN LATERAL (
               SELECT resource, class, amount, since
                 FROM usage_level AS kept
                WHERE kept.tenant = wanted.tenant AND kept.username = wanted.username
               OFFSET 0
           ) AS kept
), moment AS (
    SELECT edge.place, edge.resource, edge.class, mark.at, mark.sign * edge.last AS weight
      FROM edge
      JOIN level USING (place, resource, class)
     CROSS JOIN LATERAL (VALUES (least(edge_end, level.since), 1), (edge.begin, -1)) AS mark (at, sign)
     WHERE level.since > edge.begin
     UNION ALL
    SELECT place, resource, class, mark.at, mark.sign * amount
      FROM level
     CROSS JOIN LATERAL (VALUES ($4::timestamptz, 1), (greatest(begin, since), -1)) AS mark (at, sign)
     WHERE since < $4 AND amount <> 0
     UNION ALL
    SELECT place, resource, class, mark.at, mark.sign * delta
      FROM stepped
     CROSS JOIN LATERAL (VALUES ($4::timestamptz, 1), (since, -1)) AS mark (at, sign)
), gathered AS (
    SELECT place, resource, class, width_bucket(at, $5::timestamptz[]) AS segment, sum(weight) AS weight,
           sum(weight * extract(epoch FROM at)) AS moment
      FROM moment
     GROUP BY 1, 2, 3, 4
     UNION ALL
    SELECT place, resource, moved.class, segment, -sum(delta), -sum(moment)
      FROM wanted
      JOIN moved USING (tenant, begin, edge_end)
     WHERE wanted.username = ''
     GROUP BY 1, 2, 3, 4
     UNION ALL
    SELECT place, resource, moved.class, segment, -delta, -moment
      FROM wanted
      JOIN moved USING (tenant, begin, edge_end, username)
     UNION ALL
    SELECT place, resource, moved.class, width_bucket(begin, $5::timestamptz[]), sum(delta),
           sum(delta) * extract(epoch FROM begin)
      FROM wanted
      JOIN moved USING (tenant, begin, edge_end)
     WHERE wanted.username = ''
     GROUP BY 1, 2, 3, begin
     UNION ALL
    SELECT place, resource, moved.class, width_bucket(begin, $5::timestamptz[]), delta,
           delta * extract(epoch FROM begin)
      FROM wanted
      JOIN moved USING (tenant, begin, edge_end, username)
)
SELECT place::integer, resource, class, segment, weight, moment, total, cost, peak, current
  FROM (SELECT place, resource, class, segment, sum(weight) AS weight, sum(moment) AS moment, 0 AS total, 0 AS cost,
               0 AS peak, 0 AS current
          FROM gathered
         GROUP BY 1, 2, 3, 4
         UNION ALL
        SELECT place, resource, class, 0, 0, 0, total, cost, peak, 0 FROM whole
         UNION ALL
        SELECT place, resource, class, 0, 0, 0, 0, 0, peak, 0 FROM edge
         UNION ALL
        SELECT place, resource, class, 0, 0, 0, 0, 0, 0, sum(amount)
          FROM (SELECT place, resource, class, amount FROM level
                 UNION ALL
                SELECT place, resource, class, delta FROM stepped) AS now
         GROUP BY 1, 2, 3) AS line;

-- name: window_of_days
-- A cheaper variant of `window` for windows that begin with a day: nodes and devices only, without costs.
SELECT wanted.tenant, used.resource, sum(used.total) AS total
  FROM unnest($1::text[]) AS wanted (tenant)
 CROSS JOIN LATERAL (
           SELECT resource, total
             FROM usage_day AS kept
            WHERE kept.tenant = wanted.tenant AND username = '' AND at >= $2
            UNION ALL
           SELECT resource, amount * extract(epoch FROM $3 - greatest(since, $2))
             FROM usage_level AS kept
            WHERE kept.tenant = wanted.tenant AND username = '' AND since < $3
            UNION ALL
           SELECT resource, delta * extract(epoch FROM $3 - greatest(at, $2))
             FROM usage_step AS kept
            WHERE kept.tenant = wanted.tenant AND username = '' AND at <= $3
           OFFSET 0
       ) AS used
 WHERE used.resource = 'nodes' OR strpos(used.resource, '/') > 0
 GROUP BY 1, 2;

-- name: steps_from
-- The level of nodes and devices at a time, as steps at that time, and the steps from then on until another time of the
-- same hour, by second. The level is the last one of the hour (of the day, where hours are dropped) minus the steps
-- that came later in it; if nothing later is rolled up, it is the current level. The whole hour or day must be rolled
-- up. Returns nothing where records are dropped: there windows begin with a day.
WITH edge AS MATERIALIZED (
    SELECT tenant, by_hour, begin,
           begin + CASE WHEN by_hour THEN interval '1 hour' ELSE interval '24 hours' END AS until
      FROM unnest($1::text[]) AS wanted (tenant)
     CROSS JOIN usage_rolled
     CROSS JOIN LATERAL (
               SELECT $2 >= hours_from AS by_hour,
                      date_trunc(CASE WHEN $2 >= hours_from THEN 'hour' ELSE 'day' END, $2::timestamptz, 'UTC') AS begin
           ) AS bucket
     WHERE $2 >= records_from
), level AS (
    SELECT edge.tenant, kept.resource, kept.amount
      FROM edge
     CROSS JOIN LATERAL (
               SELECT level.resource, CASE WHEN level.since > $2 THEN bucket.last ELSE level.amount END AS amount
                 FROM usage_level AS level
                 LEFT JOIN LATERAL (
                          SELECT last
                            FROM usage_hour AS hour
                           WHERE by_hour AND (hour.tenant, hour.at, hour.resource, hour.class)
                                             = (level.tenant, edge.begin, level.resource, level.class)
                           UNION ALL
                          SELECT last
                            FROM usage_day AS day
                           WHERE NOT by_hour AND (day.tenant, day.username, day.at, day.resource, day.class)
                                                 = (level.tenant, '', edge.begin, level.resource, level.class)
                      ) AS bucket ON true
                WHERE level.tenant = edge.tenant AND level.username = ''
               OFFSET 0
           ) AS kept
), came AS (
    SELECT edge.tenant, step.*
      FROM edge
     CROSS JOIN LATERAL (
               SELECT amounts, started_at AS at, 1 AS sign
                 FROM usage_record AS kept
                WHERE kept.tenant = edge.tenant AND started_at > $2 AND started_at < until AND ended_at > $2
                UNION ALL
               SELECT amounts, ended_at, -1
                 FROM usage_record AS kept
                WHERE kept.tenant = edge.tenant AND ended_at > $2 AND ended_at < until
                UNION ALL
               SELECT amounts, started_at, 1
                 FROM usage_open AS kept
                WHERE kept.tenant = edge.tenant AND started_at > $2 AND started_at < until
               OFFSET 0
           ) AS step
), moved AS MATERIALIZED (
    SELECT tenant, taken.key AS resource, at, sum(sign * taken.value::numeric) AS delta
      FROM came, json_each_text(amounts) AS taken
     GROUP BY 1, 2, 3
)
SELECT tenant, resource, extract(epoch FROM at)::bigint AS at, sum(delta) AS delta
  FROM (SELECT tenant, resource, $2 AS at, amount AS delta FROM level
         UNION ALL
        SELECT tenant, resource, $2, -delta FROM moved
         UNION ALL
        SELECT tenant, resource, at, delta FROM moved WHERE at < $3) AS step
 WHERE resource = 'nodes' OR strpos(resource, '/') > 0
 GROUP BY tenant, resource, step.at
HAVING sum(delta) <> 0;

-- name: users
-- Users with any usage, of these tenants or of all.
SELECT tenant, username FROM usage_level
 WHERE username <> '' AND ($1::text IS NULL OR username = $1) AND ($2::text[] IS NULL OR tenant = ANY($2))
 UNION
SELECT tenant, username FROM usage_step
 WHERE username <> '' AND ($1::text IS NULL OR username = $1) AND ($2::text[] IS NULL OR tenant = ANY($2));

-- name: created
-- Creation times of the existing tenants among these.
SELECT name, doc FROM object WHERE kind = 'Tenant' AND namespace = '' AND name = ANY($1::text[]);

-- name: tenants
SELECT name, doc FROM object WHERE kind = 'Tenant' AND namespace = '' ORDER BY name;

-- name: series_hours
-- Buckets, and for usage in no bucket yet: levels since they were rolled up, and steps.
SELECT 'bucket' AS what, tenant, resource, class, extract(epoch FROM at)::bigint AS at, total, cost, peak
  FROM usage_hour
 WHERE tenant = ANY($1::text[]) AND at >= $2 AND at < $3
 UNION ALL
SELECT 'level', tenant, resource, class, extract(epoch FROM since)::bigint, amount, 0, 0
  FROM usage_level
 WHERE tenant = ANY($1::text[]) AND username = $4
 UNION ALL
SELECT 'step', tenant, resource, class, extract(epoch FROM at)::bigint, sum(delta), 0, 0
  FROM usage_step
 WHERE tenant = ANY($1::text[]) AND username = $4 AND at < $5
 GROUP BY tenant, resource, class, usage_step.at;

-- name: series_days
SELECT 'bucket' AS what, tenant, resource, class, extract(epoch FROM at)::bigint AS at, total, cost, peak
  FROM usage_day
 WHERE tenant = ANY($1::text[]) AND username = $4 AND at >= $2 AND at < $3
 UNION ALL
SELECT 'level', tenant, resource, class, extract(epoch FROM since)::bigint, amount, 0, 0
  FROM usage_level
 WHERE tenant = ANY($1::text[]) AND username = $4
 UNION ALL
SELECT 'step', tenant, resource, class, extract(epoch FROM at)::bigint, sum(delta), 0, 0
  FROM usage_step
 WHERE tenant = ANY($1::text[]) AND username = $4 AND at < $5
 GROUP BY tenant, resource, class, usage_step.at;

-- name: recompute
-- Computed from records and open usage, without buckets.
WITH kept AS (
    SELECT amounts, class, greatest(started_at, $2) AS begin, least(ended_at, $3) AS end
      FROM usage_record
     WHERE tenant = $1 AND ended_at > $2 AND started_at < $3 AND $4 IN ('', username)
     UNION ALL
    SELECT amounts, class, greatest(started_at, $2), $3
      FROM usage_open
     WHERE tenant = $1 AND started_at < $3 AND $4 IN ('', username)
)
SELECT taken.key AS resource, CASE WHEN strpos(taken.key, '/') > 0 THEN class ELSE '' END AS class,
       width_bucket(mark.at, $5::timestamptz[]) AS segment, sum(mark.sign * taken.value::numeric) AS weight,
       sum(mark.sign * taken.value::numeric * extract(epoch FROM mark.at)) AS moment
  FROM kept
 CROSS JOIN LATERAL json_each_text(amounts) AS taken
 CROSS JOIN LATERAL (VALUES (kept.end, 1), (kept.begin, -1)) AS mark (at, sign)
 GROUP BY 1, 2, 3;
