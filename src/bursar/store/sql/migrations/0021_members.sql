-- Members of tenants, by user: every authentication of an identity without a tenant asks for them.
CREATE INDEX member_of_user ON object ((fields ->> 'spec.user')) WHERE kind = 'Member';

-- The tokens of a user of a tenant, which end with the membership.
CREATE INDEX token_of_user ON token (tenant, username);
