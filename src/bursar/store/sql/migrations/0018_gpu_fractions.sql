-- A node that says that it takes parts of devices is no longer one that says nothing of them: that depends on settings.
UPDATE node
   SET gate = (coalesce(gate::jsonb, '{}'::jsonb) || '{"whole_only": false}'::jsonb)::json
  FROM object
 WHERE object.kind = 'Node' AND object.namespace = '' AND object.name = node.name
   AND object.doc -> 'spec' ->> 'gpuFractions' IN ('Trusted', 'Enforced');
