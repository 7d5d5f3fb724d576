-- Identities of registered users.

-- name: of_users
-- By uid: an identity of an earlier user of the name is not the present user's.
SELECT name, doc -> 'user' ->> 'uid' AS user_uid
  FROM object
 WHERE kind = 'Identity' AND doc -> 'user' ->> 'uid' = ANY($1::text[])
 ORDER BY name;
