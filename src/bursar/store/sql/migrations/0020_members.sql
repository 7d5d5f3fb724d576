-- Members of tenants, by user: every authentication of an identity without a tenant asks for them. The last part of a
-- member's name stands for the user. An index on `fields` would cost every update of every object.
CREATE INDEX member_of_user ON object (substring(name FROM '[^.]*$')) WHERE kind = 'Member';

-- The tokens of a user of a tenant, which end with the membership.
CREATE INDEX token_of_user ON token (tenant, username);
