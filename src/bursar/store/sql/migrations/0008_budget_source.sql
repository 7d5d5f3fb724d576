-- What is left of tenants' budgets where somebody else keeps them.
--
-- Neither table outlives a crash: until the source is read again, hours are counted as without it. So they are not
-- logged.

-- When a source is read next: whoever moves `due_at` on is the one who reads. `fault` is empty while it answers.
CREATE UNLOGGED TABLE budget_source (
    name        text COLLATE "C" NOT NULL,
    due_at      timestamptz NOT NULL,
    answered_at timestamptz,
    fault       text NOT NULL DEFAULT '',
    CONSTRAINT budget_source_key PRIMARY KEY (name)
);

-- Counts until `fresh_until`: a reader that died is not believed for long. `read_at` is from before it was asked for.
CREATE UNLOGGED TABLE budget_remaining (
    tenant      text COLLATE "C" NOT NULL,
    source      text COLLATE "C" NOT NULL,
    gpu_hours   double precision,
    node_hours  double precision,
    read_at     timestamptz NOT NULL,
    fresh_until timestamptz NOT NULL,
    CONSTRAINT budget_remaining_key PRIMARY KEY (tenant, source)
);
