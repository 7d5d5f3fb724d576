-- Standard input of commands.

-- name: save
-- Only for an existing allocation of this uid, and only the first input.
INSERT INTO allocation_stdin (uid, data)
SELECT object.uid, $2
  FROM object
 WHERE object.kind = 'Allocation' AND object.namespace = $3 AND object.name = $4 AND object.uid = $1
    ON CONFLICT DO NOTHING
RETURNING uid;

-- name: is_there
SELECT EXISTS (SELECT FROM allocation_stdin WHERE uid = $1);

-- name: forget
-- Input of allocations that have ended or are deleted.
DELETE FROM allocation_stdin
 WHERE NOT EXISTS (
           SELECT FROM object
            WHERE object.kind = 'Allocation' AND object.uid = allocation_stdin.uid
              AND object.fields ->> 'status.phase' NOT IN ('Succeeded', 'Failed', 'Cancelled')
       );
