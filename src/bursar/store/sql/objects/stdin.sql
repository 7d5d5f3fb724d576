-- What commands read from their standard input.

-- name: save
-- Of what is there, under this uid, and only the first that is sent.
INSERT INTO allocation_stdin (uid, data)
SELECT object.uid, $2
  FROM object
 WHERE object.kind = 'Allocation' AND object.namespace = $3 AND object.name = $4 AND object.uid = $1
    ON CONFLICT DO NOTHING
RETURNING uid;

-- name: is_there
SELECT EXISTS (SELECT FROM allocation_stdin WHERE uid = $1);

-- name: forget
-- What has ended, or is gone, reads nothing any more.
DELETE FROM allocation_stdin
 WHERE NOT EXISTS (
           SELECT FROM object
            WHERE object.kind = 'Allocation' AND object.uid = allocation_stdin.uid
              AND object.fields ->> 'status.phase' NOT IN ('Succeeded', 'Failed', 'Cancelled')
       );
