-- When a reason was last noted at the open gate; empty if nobody has looked at the request there.
ALTER TABLE approval ADD COLUMN noted text COLLATE "C" NOT NULL DEFAULT '';

-- What is due is read in this order, page by page.
DROP INDEX approval_due;
CREATE INDEX approval_due ON approval (due, kind, namespace, name) WHERE due <> '';
