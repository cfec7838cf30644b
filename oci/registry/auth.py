"""Authentication for a registry: a password, or a token of the service that it names.

A request is refused with 401 and `WWW-Authenticate: Bearer realm="…",service="…",scope="…"`. The token for
these scopes comes from the realm: by GET with the password (distribution, docs/spec/auth/token.md), or by
POST with an identity token (docs/spec/auth/oauth.md). It is kept until shortly before it expires, or is
refused.
"""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlencode, urlsplit

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.errors import RegistryError, Unauthorized
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.registry.credentials import Credentials
from gpusnap.oci.registry.http import Broken, Pool, Response, address, exchange, host_of
from gpusnap.oci.registry.refusals import BODY_LIMIT, is_worth_retrying, make_refusal, parse_retry_after

_CLIENT = "gpusnap"
# Seconds that a token is valid if its service does not say it (token.md: at least 60), and the share of them
# after which another is fetched, so that none expires in the middle of an upload.
_SHORTEST, _SHARE = 60.0, 0.75
_FOREVER = 1 << 30
_LONGEST = 1 << 16
# RFC 9110, 11.3: a scheme, then parameters, whose values are tokens or quoted. The possessive quantifiers
# (*+, ++) prevent backtracking: a header of 64 KiB of blanks would take minutes.
_PARAMETER = compile_later(
    r"\s*+,?\s*+([\w!#$%&'*+.^`|~-]++)\s*+=\s*+(?:\"((?:[^\"\\]|\\.)*)\"|([^\s\",]+))", re.ASCII
)
_SCHEME = compile_later(r"\s*+,?\s*+([A-Za-z][\w-]*)(?=[\s,]|$)", re.ASCII)
_TOKEN = compile_later(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Challenge:
    """One authentication method that a registry offers: the scheme and the parameters, in lower case."""

    scheme: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, repr=False)
class _Token:
    header: str
    until: float


def challenges(text: str) -> tuple[Challenge, ...]:
    """Parse the challenges in a WWW-Authenticate header, up to the first invalid one."""
    found: list[tuple[str, dict[str, str]]] = []
    text, at = text[:_LONGEST], 0
    while at < len(text):
        parameter = _PARAMETER.match(text, at) if found else None
        match = parameter or _SCHEME.match(text, at)
        if match is None:
            break
        if parameter is None:
            found.append((match[1].lower(), {}))
        else:
            quoted = parameter[2]
            value = parameter[3] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            found[-1][1].setdefault(parameter[1].lower(), value)
        at = match.end()
    return tuple(Challenge(scheme, parameters) for scheme, parameters in found)


class Tokens:
    """The Authorization header for the requests to one registry, by their scopes; threads may share it."""

    def __init__(
        self,
        registry: str,
        pool: Pool,
        *,
        credentials: Credentials | None = None,
        plain_http: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._credentials = credentials
        self._plain_http = plain_http
        self._clock = clock
        self._lock = threading.Lock()
        self._challenge: Challenge | None = None
        self._tokens: dict[tuple[str, ...], _Token] = {}

    def header(self, scopes: tuple[str, ...]) -> str:
        """Return the header for a request of these scopes; "" until the registry has asked for one.

        A scope is "repository:NAME:ACTION,…". Raises Broken, Unauthorized, RegistryError.
        """
        with self._lock:
            return "" if self._challenge is None else self._answer(self._challenge, scopes, "")

    def answer_challenge(self, refused: str, header: str, scopes: tuple[str, ...]) -> str:
        """Return the header for another try, after `refused` (or "") was refused, with that WWW-Authenticate.

        Raises Unauthorized if there is none; Broken, RegistryError.
        """
        known = {each.scheme: each for each in reversed(challenges(header))}
        challenge = known.get("bearer") or known.get("basic")
        if challenge is None:
            raise Unauthorized(
                f"{self._registry} denies access, and offers no supported authentication scheme"
            )
        with self._lock:
            # Its scope is that of this request only.
            rest = {name: value for name, value in challenge.parameters.items() if name != "scope"}
            self._challenge = Challenge(challenge.scheme, rest)
            return self._answer(challenge, scopes, refused)

    def _answer(self, challenge: Challenge, scopes: tuple[str, ...], refused: str) -> str:
        if challenge.scheme == "basic":
            return self._answer_basic(refused)
        token = self._tokens.get(scopes)
        if token is None or token.header == refused or self._clock() >= token.until:
            token = self._tokens[scopes] = self._fetch_token(challenge, scopes)
        return token.header

    def _answer_basic(self, refused: str) -> str:
        found = self._credentials
        if found is None or not found.username:
            raise Unauthorized(
                f"{self._registry} requires a user name and password, but none are known for it: log in "
                f"first (podman login {self._registry})"
            )
        header = _basic_header(found)
        if header == refused:
            raise Unauthorized(f"{self._registry} does not accept {_name_user(found)}: log in again")
        return header

    def _fetch_token(self, challenge: Challenge, scopes: tuple[str, ...]) -> _Token:
        realm = challenge.parameters.get("realm", "")
        self._check_realm(realm)
        service = challenge.parameters.get("service", "")
        asked = [*scopes, *(challenge.parameters.get("scope", "").split())]
        # Each once, ours first.
        wanted = list(dict.fromkeys(asked))
        begun = self._clock()
        with self._ask(realm, service, wanted) as response:
            value, seconds = self._parse_token(response, realm)
        return _Token(f"Bearer {value}", begun + seconds * _SHARE)

    def _check_realm(self, realm: str) -> None:
        """Raise Unauthorized for a token service that must not be asked, or must not get credentials.

        With TLS any host is allowed: the registry, whose certificate was checked, names it. Without TLS it
        must be the host of a registry that is itself used without TLS, where the network can read as much.
        """
        found = address(realm)
        if found is not None and found[0] == "https":
            return
        if found is None or found[0] != "http" or not self._plain_http:
            raise Unauthorized(
                f"{self._registry} names a token service without TLS, which is sent no credentials: "
                f"{host_of(realm) if found is not None else 'it has no address'}",
                code="GPS-809",
            )
        own = address(f"http://{self._registry}/")
        if self._credentials is not None and (own is None or own[1] != found[1]):
            raise Unauthorized(
                f"{self._registry} names a token service without TLS on another host, which is sent no "
                f"credentials: {host_of(realm)}",
                code="GPS-809",
            )

    def _ask(self, realm: str, service: str, scopes: list[str]) -> Response:
        found = self._credentials
        head = {"service": service} if service else {}
        if found is not None and found.identity_token:
            form = {"grant_type": "refresh_token", "client_id": _CLIENT, "scope": " ".join(scopes), **head}
            body = urlencode({**form, "refresh_token": found.identity_token}).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
            return exchange(self._pool, "POST", realm, headers, [body])
        headers = {}
        if found is not None and found.username:
            headers["Authorization"] = _basic_header(found)
            head["account"] = found.username
        query = urlencode([*head.items(), *(("scope", each) for each in scopes)])
        return exchange(self._pool, "GET", realm + ("&" if urlsplit(realm).query else "?") + query, headers)

    def _parse_token(self, response: Response, realm: str) -> tuple[str, float]:
        """Return the token of a response and the seconds that it is valid."""
        where, body = host_of(realm), response.body(BODY_LIMIT)
        if is_worth_retrying(response.status):
            wait = parse_retry_after(response.header("Retry-After"), response.header("Date"))
            raise Broken(f"the token service {where} responded with status {response.status}", wait)
        if response.status in (400, 401, 403) and self._credentials is not None:
            raise Unauthorized(
                f"the token service {where} of {self._registry} does not accept "
                f"{_name_user(self._credentials)}: log in again"
            )
        if response.status != 200:
            raise make_refusal(
                response.status, body, f"the token service {where} of {self._registry} issues no token"
            )
        try:
            found = parse_json(body)
            value = found.get("token") or found.get("access_token")
            seconds = found.get("expires_in")
        except (ValueError, RecursionError, AttributeError):
            value, seconds = None, None
        if not isinstance(value, str) or not _TOKEN.fullmatch(value):
            raise RegistryError(
                f"the token service {where} of {self._registry} responded without a token", code="GPS-808"
            )
        # An integer may be too large for a float.
        given = isinstance(seconds, int | float) and seconds > _SHORTEST
        return value, float(min(seconds, _FOREVER)) if given else _SHORTEST


def _basic_header(found: Credentials) -> str:
    both = f"{found.username}:{found.password}".encode()
    return f"Basic {base64.b64encode(both).decode()}"


def _name_user(found: Credentials) -> str:
    return found.source if found.source.startswith("the ") else f"the credentials of {found.source}"
