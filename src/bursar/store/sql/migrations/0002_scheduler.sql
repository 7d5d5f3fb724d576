-- Who decides for all: one row, held for a term by one controller.
--
-- `fence` rises with every takeover and is part of a key. So a takeover, which changes it, waits for those who hold the
-- row FOR KEY SHARE: binds that are checking it. A renewal, which only moves `until`, does not wait for them.
CREATE TABLE leader (
    id     integer PRIMARY KEY DEFAULT 1 CONSTRAINT leader_one_row CHECK (id = 1),
    holder text COLLATE "C" NOT NULL DEFAULT '',
    fence  bigint NOT NULL DEFAULT 0,
    until  timestamptz NOT NULL DEFAULT '-infinity',
    at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT leader_fence UNIQUE (fence)
) WITH (fillfactor = 10);
INSERT INTO leader DEFAULT VALUES;

-- Every allocation is written again when it is placed. With room for that on its page no index is touched; and its row,
-- a little above the size from which PostgreSQL compresses, is left as it is: compressing costs more than all the rest.
ALTER TABLE object SET (fillfactor = 50, toast_tuple_target = 4080);
