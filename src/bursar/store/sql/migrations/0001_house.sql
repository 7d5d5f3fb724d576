-- The ground: objects and their change feed, quotas, nodes, requests, tokens.
--
-- No foreign keys on the hot tables: the lock order is the guard. Names sort by bytes, so that the order in which
-- Python sorts keys and the order in which PostgreSQL locks rows are one.

-- The last lock of every writing transaction. Each change takes one number, gapless and in commit order.
-- What a watcher may still ask for begins above `floor`.
CREATE TABLE revision (
    id    integer PRIMARY KEY DEFAULT 1 CONSTRAINT revision_one_row CHECK (id = 1),
    value bigint NOT NULL DEFAULT 0,
    floor bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 10);
INSERT INTO revision DEFAULT VALUES;

-- Every charge holds this row FOR SHARE, so the tree of tenants, tiers, namespaces and quotas stands still meanwhile.
CREATE TABLE tree (
    id      integer PRIMARY KEY DEFAULT 1 CONSTRAINT tree_one_row CHECK (id = 1),
    version bigint NOT NULL DEFAULT 0
);
INSERT INTO tree DEFAULT VALUES;

-- SQL never looks inside `doc` and `status`; neither holds the resourceVersion, which is `revision`.
-- `revision` has no index, so that updates stay on their page.
CREATE TABLE object (
    kind      text COLLATE "C" NOT NULL,
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    uid       text COLLATE "C" NOT NULL,
    tenant    text COLLATE "C" NOT NULL,
    revision  bigint NOT NULL,
    labels    jsonb NOT NULL,
    fields    jsonb NOT NULL,
    gang      text COLLATE "C",
    charge    json,
    doc       json NOT NULL,
    status    json,
    CONSTRAINT object_key PRIMARY KEY (kind, namespace, name)
) WITH (fillfactor = 80);
CREATE INDEX object_of_tenant ON object (tenant, kind);
CREATE INDEX object_of_gang ON object (namespace, gang) WHERE gang IS NOT NULL;

-- The watch feed and the audit log in one.
CREATE TABLE change (
    revision      bigint NOT NULL,
    kind          text COLLATE "C" NOT NULL,
    namespace     text COLLATE "C" NOT NULL,
    name          text COLLATE "C" NOT NULL,
    uid           text COLLATE "C" NOT NULL,
    tenant        text COLLATE "C" NOT NULL,
    type          text NOT NULL,
    labels        jsonb NOT NULL,
    fields        jsonb NOT NULL,
    before_labels jsonb,
    before_fields jsonb,
    before_tenant text COLLATE "C",
    doc           json NOT NULL,
    status        json,
    actor         text NOT NULL,
    verb          text NOT NULL,
    reason        text NOT NULL,
    at            timestamptz NOT NULL,
    CONSTRAINT change_key PRIMARY KEY (revision)
) PARTITION BY RANGE (revision);
-- How a process learns what happened to the tree since it last looked.
CREATE INDEX change_of_tree ON change (revision)
    WHERE kind IN ('Namespace', 'ResourceQuota', 'Settings', 'Tenant', 'Tier');
-- What happened to one object: events.
CREATE INDEX change_of_object ON change (name, namespace);

-- 2^63 − 1 is "unlimited", so that the check against the limit also guards the counter's range.
CREATE TABLE quota (
    scope     text COLLATE "C" NOT NULL,
    dimension text COLLATE "C" NOT NULL,
    hard      bigint NOT NULL DEFAULT 9223372036854775807,
    soft      bigint,
    accepted  bigint NOT NULL DEFAULT 0,
    bound     bigint NOT NULL DEFAULT 0,
    CONSTRAINT quota_key PRIMARY KEY (scope, dimension),
    CONSTRAINT quota_never_negative CHECK (accepted >= 0 AND bound >= 0)
) WITH (fillfactor = 50);

CREATE TABLE gang (
    namespace   text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    min_members integer NOT NULL,
    members     integer NOT NULL DEFAULT 0,
    charged     boolean NOT NULL DEFAULT false,
    CONSTRAINT gang_key PRIMARY KEY (namespace, name),
    CONSTRAINT gang_never_negative CHECK (members >= 0)
);

-- `generation` rises whenever what the node offers or allows changes: a plan made for an older one is stale.
CREATE TABLE node (
    name        text COLLATE "C" NOT NULL,
    uid         text COLLATE "C" NOT NULL,
    generation  bigint NOT NULL DEFAULT 1,
    schedulable boolean NOT NULL DEFAULT true,
    allocatable json NOT NULL,
    allocated   json NOT NULL,
    devices     json NOT NULL,
    CONSTRAINT node_key PRIMARY KEY (name)
) WITH (fillfactor = 50);

CREATE TABLE placement (
    node      text COLLATE "C" NOT NULL,
    uid       text COLLATE "C" NOT NULL,
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    tenant    text COLLATE "C" NOT NULL,
    epoch     bigint NOT NULL DEFAULT 1,
    exclusive boolean NOT NULL DEFAULT false,
    resources json NOT NULL,
    devices   json NOT NULL,
    wanted    boolean NOT NULL DEFAULT true,
    revision  bigint NOT NULL,
    CONSTRAINT placement_key PRIMARY KEY (node, uid)
);
CREATE INDEX placement_of_allocation ON placement (uid);

-- Heartbeats, kept out of the feed.
CREATE TABLE node_seen (
    node text COLLATE "C" PRIMARY KEY,
    at   timestamptz NOT NULL
) WITH (fillfactor = 50);

-- A request is answered once. `outcome` is what it was answered; markers of batches have none.
CREATE TABLE request (
    scope       text COLLATE "C" NOT NULL,
    request_id  text COLLATE "C" NOT NULL,
    fingerprint text COLLATE "C" NOT NULL,
    outcome     json,
    at          timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT request_once PRIMARY KEY (scope, request_id)
);
CREATE INDEX request_age ON request USING brin (at);

-- Only the hash of a secret is kept.
CREATE TABLE token (
    id         text COLLATE "C" PRIMARY KEY,
    hash       bytea NOT NULL,
    role       text NOT NULL,
    tenant     text COLLATE "C" NOT NULL DEFAULT '',
    username   text COLLATE "C" NOT NULL DEFAULT '',
    node       text COLLATE "C" NOT NULL DEFAULT '',
    single_use boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    created_by text NOT NULL,
    expires_at timestamptz,
    used_at    timestamptz,
    revoked_at timestamptz,
    revoked_by text
);

-- What each scope used, by the hour: the last sample of the hour stands.
CREATE TABLE usage_rollup (
    scope     text COLLATE "C" NOT NULL,
    dimension text COLLATE "C" NOT NULL,
    hour      timestamptz NOT NULL,
    hard      bigint NOT NULL,
    accepted  bigint NOT NULL,
    bound     bigint NOT NULL,
    CONSTRAINT usage_rollup_key PRIMARY KEY (scope, dimension, hour)
);
