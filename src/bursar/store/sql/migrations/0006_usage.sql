-- Hours: who used what and for how long. What runs is a level, which steps up at a start and down at an end; time is
-- entered in buckets as it passes. A record of each placement outlives its object, and proves the buckets.

-- What runs on a node, since when, and for whom it counts.
CREATE TABLE usage_open (
    uid        text COLLATE "C" NOT NULL,
    node       text COLLATE "C" NOT NULL,
    epoch      bigint NOT NULL,
    tenant     text COLLATE "C" NOT NULL,
    username   text COLLATE "C" NOT NULL,
    namespace  text COLLATE "C" NOT NULL,
    name       text COLLATE "C" NOT NULL,
    amounts    json NOT NULL,
    class      text COLLATE "C" NOT NULL DEFAULT '',
    started_at timestamptz NOT NULL,
    lease      bigint,
    CONSTRAINT usage_open_key PRIMARY KEY (uid, node)
);
CREATE INDEX usage_open_since ON usage_open (tenant, started_at);

-- The same when it is over; never changed.
CREATE TABLE usage_record (
    uid        text COLLATE "C" NOT NULL,
    node       text COLLATE "C" NOT NULL,
    epoch      bigint NOT NULL,
    tenant     text COLLATE "C" NOT NULL,
    username   text COLLATE "C" NOT NULL,
    namespace  text COLLATE "C" NOT NULL,
    name       text COLLATE "C" NOT NULL,
    amounts    json NOT NULL,
    class      text COLLATE "C" NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at   timestamptz NOT NULL,
    phase      text NOT NULL,
    reason     text NOT NULL DEFAULT '',
    lease      bigint,
    CONSTRAINT usage_record_once PRIMARY KEY (uid, node, epoch, ended_at)
) PARTITION BY RANGE (ended_at);
CREATE INDEX usage_record_ended ON usage_record (tenant, ended_at);
CREATE INDEX usage_record_started ON usage_record (tenant, started_at);
-- A month each, made ahead. What ends at a time for which there is none is not refused for that.
CREATE TABLE usage_record_other PARTITION OF usage_record DEFAULT;
DO $$
DECLARE
    month timestamptz := date_trunc('month', now(), 'UTC');
BEGIN
    FOR ahead IN 0..2 LOOP
        EXECUTE format('CREATE TABLE usage_record_%s PARTITION OF usage_record FOR VALUES FROM (%L) TO (%L)',
                       to_char((month + ahead * interval '1 month') AT TIME ZONE 'UTC', 'YYYY_MM'),
                       month + ahead * interval '1 month', month + (ahead + 1) * interval '1 month');
    END LOOP;
END $$;

-- Steps that are in no bucket yet.
CREATE TABLE usage_step (
    id       bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT usage_step_key PRIMARY KEY,
    tenant   text COLLATE "C" NOT NULL,
    username text COLLATE "C" NOT NULL,
    resource text COLLATE "C" NOT NULL,
    class    text COLLATE "C" NOT NULL,
    at       timestamptz NOT NULL,
    delta    bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX usage_step_of ON usage_step (tenant, username);
CREATE INDEX usage_step_of_user ON usage_step (username) WHERE username <> '';

-- What there is, and until when it is in buckets. Without a user: all of the tenant's together.
CREATE TABLE usage_level (
    tenant   text COLLATE "C" NOT NULL,
    username text COLLATE "C" NOT NULL,
    resource text COLLATE "C" NOT NULL,
    class    text COLLATE "C" NOT NULL,
    amount   bigint NOT NULL,
    since    timestamptz NOT NULL,
    CONSTRAINT usage_level_key PRIMARY KEY (tenant, username, resource, class)
) WITH (fillfactor = 70);
CREATE INDEX usage_level_of_user ON usage_level (username) WHERE username <> '';

-- Amount times seconds, of tenants by the hour and of tenants and users by the day (UTC). `last` is the level at the
-- end, as far as it is entered; `cost` is nanocredits times the resource's unit (thousandths, or bytes of a GiB).
CREATE TABLE usage_hour (
    tenant   text COLLATE "C" NOT NULL,
    resource text COLLATE "C" NOT NULL,
    class    text COLLATE "C" NOT NULL,
    at       timestamptz NOT NULL,
    total    numeric NOT NULL,
    cost     numeric NOT NULL,
    peak     bigint NOT NULL,
    last     bigint NOT NULL,
    CONSTRAINT usage_hour_key PRIMARY KEY (tenant, at, resource, class)
);
CREATE INDEX usage_hour_age ON usage_hour USING brin (at) WITH (autosummarize = on);
CREATE TABLE usage_day (
    tenant   text COLLATE "C" NOT NULL,
    username text COLLATE "C" NOT NULL,
    resource text COLLATE "C" NOT NULL,
    class    text COLLATE "C" NOT NULL,
    at       timestamptz NOT NULL,
    total    numeric NOT NULL,
    cost     numeric NOT NULL,
    peak     bigint NOT NULL,
    last     bigint NOT NULL,
    CONSTRAINT usage_day_key PRIMARY KEY (tenant, username, at, resource, class)
);
CREATE INDEX usage_day_of_user ON usage_day (username, at) WHERE username <> '';

-- Who enters steps holds this row: one at a time. `at` is until when all that goes on is entered. From `hours_from` on
-- every hour is kept, and from `records_from` on every record. `past` counts how often something was entered for a day
-- before that on which it was: as long as it stays, days that are over have stayed as they were.
CREATE TABLE usage_rolled (
    id           integer PRIMARY KEY DEFAULT 1 CONSTRAINT usage_rolled_one_row CHECK (id = 1),
    at           timestamptz NOT NULL DEFAULT date_trunc('hour', now(), 'UTC'),
    hours_from   timestamptz NOT NULL DEFAULT '-infinity',
    records_from timestamptz NOT NULL DEFAULT '-infinity',
    past         bigint NOT NULL DEFAULT 0
);
INSERT INTO usage_rolled DEFAULT VALUES;

-- What runs already counts from now on: what it takes of each node, as it was given, and its part of that node.
INSERT INTO usage_open (uid, node, epoch, tenant, username, namespace, name, amounts, class, started_at, lease)
SELECT placement.uid, placement.node, placement.epoch, placement.tenant,
       coalesce(nullif(object.status->>'user', ''), '-'), placement.namespace, placement.name, taken.amounts,
       coalesce(nullif(host.labels->>'bursar.io/gpu-class', ''), nullif(host.labels->>'gpu-type', ''),
                nullif(host.labels->>'nvidia.com/gpu.product', ''), ''),
       date_trunc('second', now()), placement.lease
  FROM placement
  JOIN object ON (object.kind, object.namespace, object.name) = ('Allocation', placement.namespace, placement.name)
             AND object.uid = placement.uid AND object.status->>'startTime' IS NOT NULL
  JOIN node ON node.name = placement.node
  LEFT JOIN object AS host ON (host.kind, host.namespace, host.name) = ('Node', '', placement.node)
 CROSS JOIN LATERAL (
           SELECT json_object_agg(part.resource, part.amount) AS amounts
             FROM (SELECT given.key AS resource, given.value::bigint AS amount
                     FROM json_each_text(placement.resources) AS given
                    WHERE given.key NOT IN ('pods', 'exclusive') AND given.value::bigint > 0
                    UNION ALL
                   SELECT 'nodes', CASE WHEN placement.exclusive THEN 1000 ELSE least(1000, greatest(1, (
                              SELECT max(ceil(given.value::numeric * 1000 / whole.value::numeric))
                                FROM json_each_text(placement.resources) AS given
                                JOIN json_each_text(node.allocatable) AS whole USING (key)
                               WHERE given.key NOT IN ('pods', 'exclusive') AND whole.value::bigint > 0
                          ))) END::bigint) AS part (resource, amount)
       ) AS taken;
INSERT INTO usage_step (tenant, username, resource, class, at, delta)
SELECT tenant, whose, taken.key, CASE WHEN strpos(taken.key, '/') > 0 THEN class ELSE '' END, started_at,
       sum(taken.value::bigint)
  FROM usage_open, json_each_text(amounts) AS taken, unnest(ARRAY[username, '']) AS whose
 GROUP BY 1, 2, 3, 4, 5;
