-- Nodes that are claimed for sensitive work. Who holds a node is kept with its room: it is locked, read and decided on
-- together with it.

ALTER TABLE node ADD COLUMN claim json;
-- Nobody writes while a schema is made.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX node_claimed ON node (name) WHERE claim IS NOT NULL;
