-- Monthly partitions of usage records.

-- name: partitions
SELECT child.relname AS name
  FROM pg_inherits
  JOIN pg_class AS child ON child.oid = pg_inherits.inhrelid
 WHERE pg_inherits.inhparent = 'usage_record'::regclass
 ORDER BY 1;

-- name: raise_records_from
UPDATE usage_rolled SET records_from = greatest(records_from, $1) WHERE id = 1;

-- name: has_strays
-- Whether records of a month are in the default partition.
SELECT EXISTS (SELECT FROM usage_record_other WHERE ended_at >= $1 AND ended_at < $2);

-- name: lock_all
LOCK TABLE usage_record IN ACCESS EXCLUSIVE MODE;

-- name: add_stray
-- Rows to be moved wait in a temporary table that the transaction drops.
CREATE TEMPORARY TABLE usage_stray (LIKE usage_record) ON COMMIT DROP;

-- name: take_strays
WITH gone AS (DELETE FROM usage_record_other WHERE ended_at >= $1 AND ended_at < $2 RETURNING *)
INSERT INTO usage_stray SELECT * FROM gone;

-- name: put_strays
INSERT INTO usage_record SELECT * FROM usage_stray;
