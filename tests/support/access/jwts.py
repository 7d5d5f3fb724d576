"""JWTs of an identity provider whose keys are in a file."""

import json
import time
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.jwk import OKPKey

from bursar.api.http.oidc_settings import OidcSettings


class Issuer:
    """An identity provider: it signs claims, and its keys are where its settings say."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._key = OKPKey.generate_key("Ed25519", {"kid": "k"})
        keys = directory / "keys.json"
        keys.write_text(json.dumps({"keys": [self._key.as_dict(private=False)]}))
        self.settings = OidcSettings(issuer="https://idp.example", audience="bursar", jwks=str(keys), **settings)

    def sign(self, user: str, **claims: Any) -> str:
        """A JWT of a user; a claim of None is left out."""
        at = int(time.time())
        named = {"iss": "https://idp.example", "aud": "bursar", "sub": user, "exp": at + 900, "iat": at, **claims}
        said = {name: value for name, value in named.items() if value is not None}
        return jwt.encode({"alg": "Ed25519", "kid": "k"}, said, self._key, algorithms=["Ed25519"])
