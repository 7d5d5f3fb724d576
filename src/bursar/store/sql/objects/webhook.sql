-- Events, webhooks and pending deliveries.

-- name: save
INSERT INTO notice (type, tenant, subject, data)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::json[]);

-- name: spread
-- Creates the deliveries of each event once, for the webhooks that exist at that moment. Skips events that a concurrent
-- process has locked.
WITH fresh AS (
    SELECT id, type, tenant
      FROM notice
     WHERE spread_at IS NULL
     ORDER BY id
     LIMIT $1
       FOR UPDATE SKIP LOCKED
), marked AS (
    UPDATE notice SET spread_at = now() FROM fresh WHERE notice.id = fresh.id
), addressed AS (
    INSERT INTO notice_delivery (notice, webhook)
    SELECT fresh.id, webhook.name
      FROM fresh
      JOIN webhook
        ON webhook.direction = 'out' AND webhook.stopped = '' AND webhook.tenant IN ('', fresh.tenant)
       AND (webhook.types = '{}' OR fresh.type = ANY (webhook.types))
        ON CONFLICT DO NOTHING
)
SELECT count(*) FROM fresh;

-- name: claim
-- Claims due deliveries, up to the capacity of each receiver. The claimant must record the outcome by `next_at`;
-- otherwise another one sends the event again.
UPDATE notice_delivery AS delivery
   SET tries = delivery.tries + 1, next_at = now() + $3::double precision * interval '1 second'
  FROM (SELECT due.notice, due.webhook
          FROM unnest($1::text[], $2::integer[]) AS line (webhook, room)
         CROSS JOIN LATERAL (
                   SELECT notice, webhook
                     FROM notice_delivery
                    WHERE notice_delivery.webhook = line.webhook AND next_at <= now()
                    ORDER BY next_at
                    LIMIT line.room
                      FOR UPDATE SKIP LOCKED
               ) AS due) AS chosen
  JOIN notice ON notice.id = chosen.notice
  JOIN webhook ON webhook.name = chosen.webhook
 WHERE (delivery.webhook, delivery.notice) = (chosen.webhook, chosen.notice)
RETURNING notice.id, notice.type, notice.tenant, notice.subject, notice.data, notice.at, webhook.name AS webhook,
          webhook.url, webhook.secret, webhook.allow_local, delivery.tries,
          extract(epoch FROM now() - notice.at)::double precision AS age_seconds;

-- name: delivered
DELETE FROM notice_delivery WHERE (webhook, notice) = ($1, $2);

-- name: failed
-- Only if no other process has claimed the delivery since.
UPDATE notice_delivery
   SET next_at = CASE WHEN $4::double precision < 0 THEN 'infinity' ELSE now() + $4 * interval '1 second' END,
       last_said = $5
 WHERE (webhook, notice) = ($1, $2) AND tries = $3;

-- name: stop
-- Of two concurrent stops the second finds the webhook stopped.
WITH stopped AS (
    UPDATE webhook SET stopped = $2 WHERE name = $1 AND stopped = ''
    RETURNING name, direction, tenant, url, types, allow_local, created_by
), forgotten AS (
    DELETE FROM notice_delivery WHERE webhook = $1
)
SELECT * FROM stopped;

-- name: receivers
SELECT name FROM webhook WHERE direction = 'out' AND stopped = '' ORDER BY name;

-- name: add
INSERT INTO webhook (name, direction, tenant, url, secret, types, allow_local, created_by)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
    ON CONFLICT DO NOTHING
RETURNING created_at;

-- name: remove
WITH removed AS (
    DELETE FROM webhook WHERE name = $1 RETURNING name, direction, tenant, url, types, allow_local, created_by
), forgotten AS (
    DELETE FROM notice_delivery WHERE webhook = $1
)
SELECT * FROM removed;

-- name: list
SELECT webhook.name, direction, tenant, url, types, allow_local, created_by, created_at, stopped,
       (SELECT count(*)
          FROM notice_delivery AS delivery
         WHERE delivery.webhook = webhook.name AND next_at < 'infinity') AS waiting,
       (SELECT count(*)
          FROM notice_delivery AS delivery
         WHERE delivery.webhook = webhook.name AND next_at = 'infinity') AS given_up,
       coalesce((SELECT last_said
                   FROM notice_delivery AS delivery
                  WHERE delivery.webhook = webhook.name AND last_said <> ''
                  ORDER BY next_at DESC
                  LIMIT 1), '') AS last_said
  FROM webhook
 ORDER BY webhook.name;

-- name: save_for
-- Creates an event for one receiver only.
WITH made AS (
    INSERT INTO notice (type, tenant, subject, data, spread_at)
    SELECT $2, tenant, name, $3, now()
      FROM webhook
     WHERE name = $1 AND direction = 'out' AND stopped = ''
    RETURNING id, at
), addressed AS (
    INSERT INTO notice_delivery (notice, webhook) SELECT id, $1 FROM made
)
SELECT id, at FROM made;

-- name: deliveries
-- Pending and abandoned deliveries of a receiver, the oldest first.
SELECT notice.id, notice.type, notice.tenant, notice.subject, notice.at, delivery.tries, delivery.last_said,
       CASE WHEN delivery.next_at < 'infinity' THEN delivery.next_at END AS next_at
  FROM notice_delivery AS delivery
  JOIN notice ON notice.id = delivery.notice
 WHERE delivery.webhook = $1 AND delivery.notice > $2
 ORDER BY delivery.notice
 LIMIT $3;

-- name: payers
-- Senders of payments, with their secrets.
SELECT name, tenant, secret FROM webhook WHERE direction = 'in' AND stopped = '' ORDER BY name;

-- name: forget
WITH old AS (
    SELECT id FROM notice WHERE at < $1 AND spread_at IS NOT NULL LIMIT $2
), forgotten AS (
    DELETE FROM notice_delivery USING old WHERE notice_delivery.notice = old.id
)
DELETE FROM notice USING old WHERE notice.id = old.id;
