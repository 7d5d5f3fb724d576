-- Questions that API processes put to the leader, and what it answers.
--
-- Neither outlives a crash: whoever asked asks again. So the table is not logged, and costs little more than memory.
CREATE UNLOGGED TABLE inquiry (
    id          bigint GENERATED ALWAYS AS IDENTITY,
    question    json NOT NULL,
    asked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    answer      json,
    answered_at timestamptz,
    CONSTRAINT inquiry_key PRIMARY KEY (id)
) WITH (fillfactor = 50);
