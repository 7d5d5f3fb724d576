-- A node that is claimed for sensitive work is wiped first, unless it is known to be clean. Nobody knows that of nodes
-- that were here before this was recorded.
ALTER TABLE node ADD COLUMN soiled boolean NOT NULL DEFAULT false;
UPDATE node SET soiled = true;
