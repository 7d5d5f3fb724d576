-- Prices, in versions that are never changed. Versions that are not yet in force may be withdrawn.

-- name: read_all
SELECT resource, class, per_second, effective_from FROM price;

-- name: version
SELECT prices FROM ledger;

-- name: list
SELECT resource, class, per_second, effective_from, created_at, created_by
  FROM price
 ORDER BY resource, class, effective_from;

-- name: add
-- In key order, so that two writers of the same prices cannot deadlock.
INSERT INTO price (resource, class, per_second, effective_from, created_by)
SELECT line.resource, line.class, line.per_second, line.effective_from, line.created_by
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[])
       AS line (resource, class, per_second, effective_from, created_by)
 ORDER BY line.resource COLLATE "C", line.class COLLATE "C", line.effective_from
    ON CONFLICT DO NOTHING
RETURNING 1;

-- name: drop
DELETE FROM price
 USING unnest($1::text[], $2::text[], $3::bigint[]) AS line (resource, class, effective_from)
 WHERE (price.resource, price.class, price.effective_from) = (line.resource, line.class, line.effective_from)
RETURNING 1;

-- name: raise_version
-- Locks the ledger's row, as the save of entries does.
UPDATE ledger SET prices = prices + 1 WHERE id = 1;
