-- What a batch writes.

-- name: save
-- Counters, revisions, objects and changes in one statement: every message to the server costs a busy process a turn.
--
-- `op` says what becomes of the object's row: insert, update, delete, or leave (a later line of the same batch decides).
-- Every line is a change. Guards are repeated: the counts must be what was decided. An increase of a counter never ends
-- above its limit; `guarded` is whether the door refuses what is accepted beyond it (enforcement Reject).
--
-- The revision is the last lock, held until COMMIT, so that numbers become visible in their order: everything that is
-- written needs its number first. The notification is only a hint beside polling; it is sent when the transaction commits.
WITH line AS MATERIALIZED (
    SELECT *
      FROM unnest(
               $1::text[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
               $9::jsonb[], $10::jsonb[], $11::jsonb[], $12::jsonb[], $13::text[], $14::json[], $15::json[],
               $16::json[], $17::text[], $18::text[], $19::text[], $20::text[]
           ) WITH ORDINALITY
               AS line (op, expected, kind, namespace, name, uid, tenant, type, labels, fields, before_labels,
                        before_fields, gang, charge, doc, status, actor, verb, reason, before_tenant, place)
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
                        before_fields, before_tenant, doc, status, actor, verb, reason, at)
    SELECT before + place, kind, namespace, name, uid, tenant, type, labels, fields, before_labels, before_fields,
           before_tenant, doc, status, actor, verb, reason, clock_timestamp()
      FROM line, taken
)
SELECT (SELECT before FROM taken) AS before,
       (SELECT count(*) FROM counted) AS counted,
       (SELECT count(*) FROM inserted) AS inserted,
       (SELECT count(*) FROM updated) AS updated,
       (SELECT count(*) FROM deleted) AS deleted,
       pg_notify('bursar_change', '');
