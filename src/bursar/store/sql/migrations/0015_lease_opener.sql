-- Whoever opened a lease by name may extend and close it, also after an account of their own pays for them. Only open ones
-- are asked for it.
ALTER TABLE lease ADD COLUMN opened_by text COLLATE "C" NOT NULL DEFAULT '';
