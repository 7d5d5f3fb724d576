-- Priority classes are part of the tree: whether work may name one is decided under its lock, without asking for it.
-- Whoever writes waits: a partitioned table's index is not made beside them.
-- squawk-ignore require-concurrent-index-deletion
DROP INDEX change_of_tree;
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX change_of_tree ON change (revision)
    WHERE kind IN ('Namespace', 'PriorityClass', 'ResourceQuota', 'Settings', 'Tenant', 'Tier');
-- Processes that read the tree before know nothing of the classes.
UPDATE tree SET version = version + 1 WHERE id = 1;

-- What keeps work off a node stands beside its room: it is checked again, under the lock of the room, when work is bound.
ALTER TABLE node ADD COLUMN gate json;
UPDATE node
   SET gate = json_build_object('taints', (
           SELECT json_agg(json_build_array(taint ->> 'key', coalesce(taint ->> 'value', ''),
                                            coalesce(taint ->> 'effect', 'NoSchedule')))
             FROM json_array_elements(object.doc -> 'spec' -> 'taints') AS taint))
  FROM object
 WHERE object.kind = 'Node' AND object.namespace = '' AND object.name = node.name
   AND json_typeof(object.doc -> 'spec' -> 'taints') = 'array'
   AND json_array_length(object.doc -> 'spec' -> 'taints') > 0;
