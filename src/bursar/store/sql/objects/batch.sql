-- Saving a batch.

-- name: save
-- Counters, revisions, objects and changes in one statement, because each round trip costs a busy process one turn of
-- its event loop. Columns travel as texts (store/db/columns.py).
--
-- `op` is the operation on the object's row: insert, update, delete, or leave (a later line of the same batch writes
-- it). Every line is a change. Missing labels and documents are those that are stored, before and after the change.
-- Guards are repeated: the numbers of affected rows must be those that were decided. An increase of a counter never
-- ends above its limit; `guarded` says whether admission refuses work beyond the limit (enforcement Reject).
--
-- The revision's row is the last lock, held until COMMIT, so that changes become visible in the order of their
-- revisions. Rows are inserted only after it, because each contains its revision. The notification is only a hint beside
-- polling, and carries the last revision; it is sent when the transaction commits.
--
-- Where work is placed, `placing` and `placing_told` replace the two comment lines of these names, so that other
-- batches do not pay for them.
WITH line AS MATERIALIZED (
    SELECT line.op, line.expected, line.kind, coalesce(line.namespace, '') AS namespace, line.name, line.uid,
           coalesce(line.tenant, '') AS tenant, line.type, coalesce(line.labels, was.labels) AS labels, line.fields,
           coalesce(line.before_labels, was.labels) AS before_labels,
           coalesce(line.before_fields, was.fields) AS before_fields, line.gang, line.charge,
           coalesce(line.doc, was.doc) AS doc, line.doc IS NOT NULL AS edited, line.status, coalesce(line.actor, '') AS actor,
           coalesce(line.verb, '') AS verb, coalesce(line.reason, '') AS reason,
           coalesce(line.before_tenant, '') AS before_tenant, line.place
      FROM unnest(
               string_to_array($1, chr(31)), string_to_array($2, ',')::bigint[], string_to_array($3, chr(31)),
               string_to_array($4, chr(31)), string_to_array($5, chr(31)), string_to_array($6, chr(31)),
               string_to_array($7, chr(31)), string_to_array($8, chr(31)),
               string_to_array($9, chr(31), '')::jsonb[], string_to_array($10, chr(31), '')::jsonb[],
               string_to_array($11, chr(31), '')::jsonb[], string_to_array($12, chr(31), '')::jsonb[],
               string_to_array($13, chr(31), ''), string_to_array($14, chr(31), '')::json[],
               string_to_array($15, chr(31), '')::json[], string_to_array($16, chr(31), '')::json[],
               string_to_array($17, chr(31)), string_to_array($18, chr(31)), string_to_array($19, chr(31)),
               string_to_array($20, chr(31))
           ) WITH ORDINALITY
               AS line (op, expected, kind, namespace, name, uid, tenant, type, labels, fields, before_labels,
                        before_fields, gang, charge, doc, status, actor, verb, reason, before_tenant, place)
      LEFT JOIN object AS was
             ON was.revision = line.expected
            AND (was.kind, was.namespace, was.name) = (line.kind, coalesce(line.namespace, ''), line.name)
), counted AS (
    UPDATE quota
       SET accepted = quota.accepted + delta.accepted,
           bound = quota.bound + delta.bound
      FROM unnest($21::text[], $22::text[], $23::bigint[], $24::bigint[], $25::boolean[])
           AS delta (scope, dimension, accepted, bound, guarded)
     WHERE (quota.scope, quota.dimension) = (delta.scope, delta.dimension)
       AND (delta.accepted <= 0 OR NOT delta.guarded OR quota.hard - delta.accepted >= quota.accepted)
       AND (delta.bound <= 0 OR quota.hard - delta.bound >= quota.bound)
    RETURNING 1
), taken AS (
    UPDATE revision SET value = value + (SELECT count(*) FROM line) WHERE id = 1
    RETURNING value - (SELECT count(*) FROM line) AS before
), inserted AS (
    INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, gang, charge, doc, status)
    SELECT kind, namespace, name, uid, tenant, before + place, labels, fields, gang, charge, doc, status
      FROM line, taken WHERE op = 'insert'
        ON CONFLICT DO NOTHING
    RETURNING 1
), updated AS (
    UPDATE object
       SET revision = taken.before + line.place, tenant = line.tenant, labels = line.labels, fields = line.fields,
           charge = line.charge, doc = line.doc, status = line.status
      FROM line, taken
     WHERE line.op = 'update'
       AND (object.kind, object.namespace, object.name) = (line.kind, line.namespace, line.name)
       AND object.revision = line.expected
    RETURNING 1
), deleted AS (
    DELETE FROM object USING line
     WHERE line.op = 'delete'
       AND (object.kind, object.namespace, object.name) = (line.kind, line.namespace, line.name)
       AND object.revision = line.expected
    RETURNING 1
), fed AS (
    INSERT INTO change (revision, kind, namespace, name, uid, tenant, type, labels, fields, before_labels,
                        before_fields, before_tenant, doc, edited, status, actor, verb, reason, at)
    SELECT before + place, kind, namespace, name, uid, tenant, type, labels, fields,
           CASE WHEN type <> 'ADDED' THEN before_labels END, CASE WHEN type <> 'ADDED' THEN before_fields END,
           CASE WHEN type <> 'ADDED' THEN before_tenant END, doc, edited, status, actor, verb, reason,
           clock_timestamp()
      FROM line, taken
)
-- placing
SELECT (SELECT before FROM taken) AS before,
       (SELECT count(*) FROM counted) AS counted,
       (SELECT count(*) FROM inserted) AS inserted,
       (SELECT count(*) FROM updated) AS updated,
       (SELECT count(*) FROM deleted) AS deleted,
       -- placing_told
       pg_notify('bursar_change', (SELECT before + (SELECT count(*) FROM line) FROM taken)::text);

-- name: placing
-- Free resources of nodes, and placements. The nodes are locked, and only their free resources have changed. A
-- placement has the revision of its allocation's last change, which is found by its line number.
, used AS (
    UPDATE node
       SET allocated = room.allocated, devices = room.devices, soiled = room.soiled
      FROM unnest(string_to_array($26, chr(31)), string_to_array($27, chr(31))::json[],
                  string_to_array($28, chr(31))::json[], string_to_array($29, ',')::boolean[])
           AS room (name, allocated, devices, soiled)
     WHERE node.name = room.name
    RETURNING 1
), put AS (
    INSERT INTO placement (node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, revision,
                           lease)
    SELECT node, uid, namespace, name, coalesce(tenant, ''), epoch, exclusive, resources, devices, wanted,
           taken.before + place, nullif(lease, 0)
      FROM taken,
           unnest(string_to_array($30, chr(31)), string_to_array($31, chr(31)), string_to_array($32, chr(31)),
                  string_to_array($33, chr(31)), string_to_array($34, chr(31)), string_to_array($35, ',')::bigint[],
                  string_to_array($36, ',')::boolean[], string_to_array($37, chr(31))::json[],
                  string_to_array($38, chr(31))::json[], string_to_array($39, ',')::boolean[],
                  string_to_array($40, ',')::bigint[], string_to_array($41, ',')::bigint[])
           AS part (node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, place, lease)
     ORDER BY 1, 2
        ON CONFLICT (node, uid) DO UPDATE
       SET wanted = excluded.wanted, revision = excluded.revision, epoch = excluded.epoch, lease = excluded.lease
)

-- name: placing_told
(SELECT count(*) FROM used) AS used,
