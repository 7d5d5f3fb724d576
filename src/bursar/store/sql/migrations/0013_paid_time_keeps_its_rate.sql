-- The time that a lease holds after that of its present rate: each segment is a rate and so many microseconds. What is
-- paid keeps its rate when the price changes.
ALTER TABLE lease ADD COLUMN ahead json NOT NULL DEFAULT '[]';
ALTER TABLE lease_ended ADD COLUMN ahead json NOT NULL DEFAULT '[]';
