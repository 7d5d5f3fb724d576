-- Gangs: number of members, and whether they are charged as a set.

-- name: ensure
INSERT INTO gang (namespace, name, min_members)
SELECT * FROM unnest($1::text[], $2::text[], $3::integer[]) AS line (namespace, name, min_members)
 ORDER BY 1, 2
    ON CONFLICT DO NOTHING;

-- name: lock
SELECT count(*) FROM (
    SELECT 1
      FROM gang
     WHERE (namespace, name) IN (SELECT * FROM unnest($1::text[], $2::text[]))
     ORDER BY namespace, name
       FOR NO KEY UPDATE
) AS locked;

-- name: read
SELECT namespace, name, min_members, members, charged, peers
  FROM gang
 WHERE (namespace, name) IN (SELECT * FROM unnest($1::text[], $2::text[]));

-- name: save
UPDATE gang
   SET min_members = line.min_members, members = line.members, charged = line.charged, peers = line.peers::json
  FROM unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::boolean[], string_to_array($6, chr(31)))
       AS line (namespace, name, min_members, members, charged, peers)
 WHERE (gang.namespace, gang.name) = (line.namespace, line.name);

-- name: remove_empty
DELETE FROM gang
 WHERE members = 0 AND (namespace, name) IN (SELECT * FROM unnest($1::text[], $2::text[]));
