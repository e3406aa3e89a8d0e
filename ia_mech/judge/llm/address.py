"""Where a server is and which key opens it: from flags and environment, checked, never shown."""

import os
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from ia_mech.errors import UserError

KEY = "OPENAI_API_KEY"  # goes to OpenAI, or to the server that $OPENAI_BASE_URL names with it
OPENAI = "https://api.openai.com/v1"
_OPENAI_HOST = "api.openai.com"
NO_KEY = "no-key"  # what servers without keys are sent: the protocol wants one


@dataclass(frozen=True)
class Address:
    """A server's address.

    Attributes:
        url: for the client, without its query.
        query: of the address as given (some services want an API version there).
        shown: for people and files: no user, no password, no query.
        api_key_env: the environment variable that holds the key.
        wants_key: whether going without one is an error.
    """

    url: str = field(repr=False)
    query: dict[str, str] = field(repr=False)
    shown: str
    api_key_env: str | None
    wants_key: bool

    @classmethod
    def of(cls, base_url: str | None, api_key_env: str | None) -> "Address":
        """The address given, or ``$OPENAI_BASE_URL``, or OpenAI's.

        A server that is named here is sent no key unless its variable is named too: a key for
        OpenAI in the environment is not for everybody.

        Raises:
            UserError: it isn't an http address.
        """
        given = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI
        try:
            parts = urlsplit(given.strip())
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            name = "--base-url" if base_url else "$OPENAI_BASE_URL"
            raise UserError(
                f"{name} is not the address of a server",
                "give one such as http://localhost:8000/v1",
            )
        path = parts.path.rstrip("/")
        place = f"[{host}]" if ":" in host else host
        place += f":{port}" if port else ""
        return cls(
            url=urlunsplit((parts.scheme, parts.netloc, path, "", "")),
            query=dict(parse_qsl(parts.query)),
            shown=urlunsplit((parts.scheme, place, path, "", "")),
            api_key_env=api_key_env or (None if base_url and host != _OPENAI_HOST else KEY),
            wants_key=bool(api_key_env) or host == _OPENAI_HOST,
        )

    def key(self) -> str:
        """The key; a server other than OpenAI's may do without.

        Raises:
            UserError: none is set, or it can't be sent.
        """
        if self.api_key_env is None:
            return NO_KEY
        key = os.environ.get(self.api_key_env, "").strip()
        if not key and self.wants_key:
            raise UserError(
                f"no key for {self.shown}: the environment variable {self.api_key_env} is not set",
                "set it, name another with --api-key-env, or give --base-url for a server of yours",
            )
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"the environment variable {self.api_key_env} holds characters that no key has",
                "set it to the key alone",
            )
        return key or NO_KEY
