-- Where the members of a gang were placed, in the order of their ranks: each is told of the others.
ALTER TABLE gang ADD COLUMN peers json;

-- What commands read from their standard input, until they have ended.
CREATE TABLE allocation_stdin (
    uid  text COLLATE "C" NOT NULL,
    data bytea NOT NULL,
    at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT allocation_stdin_key PRIMARY KEY (uid)
);
