-- Requests that must have one effect and one answer.

-- name: begin
-- Sent as one message without parameters: the marker is put in by us, and is plain.
BEGIN;
INSERT INTO request (scope, request_id, fingerprint) VALUES ('batch', '$marker', '') ON CONFLICT DO NOTHING;

-- name: claim
-- Waits for a rival that is claiming the same: afterwards its outcome can be read.
INSERT INTO request (scope, request_id, fingerprint)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[]) AS line (scope, request_id, fingerprint)
 ORDER BY 1, 2
    ON CONFLICT DO NOTHING
RETURNING scope, request_id;

-- name: read
SELECT scope, request_id, fingerprint, outcome
  FROM request
 WHERE (scope, request_id) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: save_outcomes
UPDATE request
   SET outcome = line.outcome
  FROM unnest($1::text[], $2::text[], $3::json[]) AS line (scope, request_id, outcome)
 WHERE (request.scope, request.request_id) = (line.scope, line.request_id);

-- name: forget
DELETE FROM request
 WHERE (scope, request_id) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: expire
-- Markers are needed for seconds, answers for days, and those of the ledger for ever.
DELETE FROM request
 WHERE ctid IN (
     SELECT ctid FROM request
      WHERE left(scope, 7) <> 'ledger:' AND ((scope = 'batch' AND at < $1) OR at < $2)
      LIMIT 10000
 );
