-- Agents: who signs their certificates, when each was last heard of, and what their work has used.

-- The authority that signs nodes' certificates: made once, on the first start.
CREATE TABLE authority (
    id          integer PRIMARY KEY DEFAULT 1 CONSTRAINT authority_one_row CHECK (id = 1),
    certificate text NOT NULL,
    key         text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
);

-- Which of a node's certificates count: those of its present generation. Enrolling the node anew, disowning or deleting it
-- begins the next one. The row outlives the node: a later one of the same name is another. `token` is the one that the
-- present generation was begun with.
CREATE TABLE node_identity (
    node       text COLLATE "C" PRIMARY KEY,
    generation bigint NOT NULL DEFAULT 1,
    begun_at   timestamptz NOT NULL DEFAULT now(),
    token      text COLLATE "C" NOT NULL DEFAULT ''
);

-- The fingerprint of the key that a token for one use was used for. Whoever has that key may ask again, should the answer
-- have been lost.
ALTER TABLE token ADD COLUMN used_key bytea;

-- A beat is one update of a small row without indices: beats never enter the feed. `session` is the stream that the node
-- speaks on: of two, the younger one counts. `granted_until` is until when its leased work may run at the latest, by our
-- own clock: what was granted is written before it is told.
ALTER TABLE node_seen
    ADD COLUMN session text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN address text NOT NULL DEFAULT '',
    ADD COLUMN agent text NOT NULL DEFAULT '',
    ADD COLUMN granted_until timestamptz NOT NULL DEFAULT '-infinity';

-- What each placement has used on its node so far, by the node's own measure.
CREATE TABLE allocation_usage (
    uid              text COLLATE "C" NOT NULL,
    epoch            bigint NOT NULL,
    node             text COLLATE "C" NOT NULL,
    seconds          double precision NOT NULL,
    cpu_seconds      double precision NOT NULL,
    memory_bytes     bigint NOT NULL,
    memory_bytes_max bigint NOT NULL,
    gpu_seconds      double precision NOT NULL,
    at               timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT allocation_usage_key PRIMARY KEY (uid, epoch, node)
) WITH (fillfactor = 70);
-- For what is old enough to be forgotten. It is small, and from PostgreSQL 16 on keeps no row from being updated in place.
CREATE INDEX allocation_usage_at ON allocation_usage USING brin (at) WITH (autosummarize = on);
