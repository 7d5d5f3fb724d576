-- Identities by the user that they are mapped to: every read of a user lists them.
CREATE INDEX identity_of_user ON object ((doc -> 'user' ->> 'uid')) WHERE kind = 'Identity';
