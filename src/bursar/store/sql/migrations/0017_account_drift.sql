-- The drift of accounts, in hours since 1970: the sum of the absolute adjustments of reconciliation, so that refunds and
-- debits do not cancel out. Rows are written under the account's lock, and only in the present hour; old ones are dropped.
-- `alerted` marks an hour in which the owner got an alert.
CREATE TABLE account_drift (
    account bigint NOT NULL,
    hour    bigint NOT NULL,
    leases  bigint NOT NULL,
    amount  numeric NOT NULL,
    alerted boolean NOT NULL DEFAULT false,
    CONSTRAINT account_drift_key PRIMARY KEY (account, hour)
) WITH (fillfactor = 70);
CREATE INDEX account_drift_by_age ON account_drift (hour);
