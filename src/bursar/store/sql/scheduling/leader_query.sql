-- Queries to the leader and its answers.

-- name: ask
-- Inserts queries only if there is a leader. The leader is notified once per statement.
WITH leads AS (
    SELECT 1 FROM leader WHERE until > clock_timestamp()
), asked AS (
    INSERT INTO inquiry (question)
    SELECT line.question
      FROM unnest($1::json[]) WITH ORDINALITY AS line (question, number), leads
     ORDER BY line.number
    RETURNING id
), told AS (
    SELECT pg_notify('bursar_inquiry', '') FROM asked LIMIT 1
)
SELECT asked.id FROM asked LEFT JOIN told ON true ORDER BY asked.id;

-- name: unanswered
-- Reads without locks: if two processes believe to lead, only the one whose term is valid can answer. Clients of older
-- queries have given up.
SELECT id, question
  FROM inquiry
 WHERE answered_at IS NULL AND asked_at > clock_timestamp() - make_interval(secs => $2::double precision)
 ORDER BY id
 LIMIT $1;

-- name: answer
-- Clients may be gone; each is notified of the ids of its answers. A leader whose term is over does not answer, because
-- its state may be outdated.
WITH done AS (
    UPDATE inquiry
       SET answer = line.answer, answered_at = clock_timestamp()
      FROM unnest($1::bigint[], $2::json[]) AS line (id, answer), leader
     WHERE inquiry.id = line.id AND inquiry.answered_at IS NULL
       AND ($3::bigint IS NULL OR (leader.fence = $3 AND leader.until > clock_timestamp()))
    RETURNING inquiry.id
)
SELECT pg_notify('bursar_answer', string_agg(id::text, ',')) FROM done HAVING count(*) > 0;

-- name: collect
DELETE FROM inquiry WHERE id = ANY($1::bigint[]) AND answered_at IS NOT NULL RETURNING id, answer;

-- name: withdraw
DELETE FROM inquiry WHERE id = ANY($1::bigint[]);

-- name: forget
DELETE FROM inquiry WHERE asked_at < clock_timestamp() - make_interval(secs => $1::double precision);
