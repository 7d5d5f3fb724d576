-- Requests under approval gates, apart from their objects: an index on fields of objects would cost every bind.
-- A row exists while a gate is open (`gate`), or while an approval has an end or a notice of it ahead (`due`).
CREATE TABLE approval (
    kind      text COLLATE "C" NOT NULL,
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    tenant    text COLLATE "C" NOT NULL,
    gate      text COLLATE "C" NOT NULL,
    since     text COLLATE "C" NOT NULL,
    due       text COLLATE "C" NOT NULL,
    -- When a reason was last noted at the open gate; empty if nobody has looked at the request there.
    noted     text COLLATE "C" NOT NULL DEFAULT '',
    CONSTRAINT approval_key PRIMARY KEY (kind, namespace, name)
);
CREATE INDEX approval_open ON approval (gate, since, kind, namespace, name) WHERE gate <> '';
CREATE INDEX approval_of_tenant ON approval (tenant, since, kind, namespace, name) WHERE gate <> '';
-- What is due is read in this order, page by page.
CREATE INDEX approval_due ON approval (due, kind, namespace, name) WHERE due <> '';

-- The tenants and the gates that an approver decides for; `*` is every one.
ALTER TABLE token ADD COLUMN tenants text[] NOT NULL DEFAULT '{}';
ALTER TABLE token ADD COLUMN gates text[] NOT NULL DEFAULT '{}';
-- Approvers saw everything, and there was nothing to decide.
UPDATE token SET tenants = '{*}' WHERE role = 'approver';
