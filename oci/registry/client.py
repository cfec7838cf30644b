"""Requests to one registry: authenticated with its tokens, redirected as it says, repeated after failures.

- Credentials are sent to the registry's own scheme, host and port, and to its token service, nowhere else:
  most registries redirect the reader of a blob to an object store.
- Nothing is sent over plain HTTP unless the whole registry is used that way.
- A failed attempt is repeated after a wait that doubles each time, with jitter, and is no shorter than the
  registry asks for. Attempts that made progress (a MiB more than ever before) do not count. If other requests
  succeed meanwhile, there are twice as many attempts: among the tens of thousands of a large artifact, some
  fail many times in a row.
- If the name or the port of a registry that has never answered this process does not exist, or nobody answers
  there, it may be misspelt: then there are only two attempts.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urljoin

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.errors import RegistryError, Unreachable
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.registry.auth import Tokens
from gpusnap.oci.registry.credentials import Credentials
from gpusnap.oci.registry.http import PIECE, Broken, Response, address, clear, exchange, host_of, make_pool
from gpusnap.oci.registry.pace import Limits
from gpusnap.oci.registry.refusals import BODY_LIMIT, is_worth_retrying, make_refusal, parse_retry_after
from gpusnap.oci.registry.response_checks import make_not_registry

T = TypeVar("T")

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
# Seconds: the first wait, gpusnap's longest wait, and the longest that a registry may ask for.
_FIRST, _LONGEST, _PATIENCE = 0.5, 30.0, 300.0
# Attempts if nobody is there, and never was.
_STRANGE = 2
# The addresses of registries that have answered this process; adding to it needs no lock.
_MET: set[str] = set()
# A wait is divided into these, so that it can be cancelled.
_STEP = 1.0
# Answers of servers in Go, nginx and Apache on a TLS port to a client without TLS.
_TLS_WANTED = compile_later(
    rb"HTTP request (?:to an|was sent to) HTTPS|SSL-enabled server port", re.IGNORECASE
)
# Docker Hub's registry has another host name than the one in references.
_HOSTS = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}


def lacks_tls(registry: str, limits: Limits | None = None) -> bool:
    """Whether a registry that needs no TLS answers only by plain HTTP: TLS is tried first.

    False if nobody answers: the next request reports why.
    """
    pool = make_pool("", registry, limits, verify=False)
    try:
        for scheme in ("https", "http"):
            with (
                suppress(Broken, RegistryError),
                exchange(pool, "GET", f"{scheme}://{_HOSTS.get(registry, registry)}/v2/", {}),
            ):
                return scheme == "http"
    finally:
        pool.clear()
    return False


@dataclass(frozen=True, slots=True)
class Request:
    """A request; `what` says, for messages, what the registry does not do if it refuses."""

    method: str
    url: str
    what: str
    scopes: tuple[str, ...]
    accepted: tuple[int, ...] = (200,)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[], Iterable[bytes]] | None = None
    """Makes the body, anew each time it is sent; its Content-Length is among the headers."""


class Client:
    """One registry, by host[:port]; threads may share it.

    plain_http: use HTTP without TLS; nothing else enables that. verify: its certificate must be trusted.
    ca_file: PEM of a CA that is trusted in addition to the system's. limits: how slow it may be. attempts:
    how many may fail before a call fails. wait: waits that many seconds.
    """

    def __init__(
        self,
        registry: str,
        *,
        credentials: Credentials | None = None,
        plain_http: bool = False,
        verify: bool = True,
        ca_file: str = "",
        limits: Limits | None = None,
        attempts: int = 6,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._schemes = ("https", "http") if plain_http else ("https",)
        self.base = f"{self._schemes[-1]}://{_HOSTS.get(registry, registry)}/v2/"
        self._pool = make_pool(ca_file, registry, limits, verify=verify)
        self._tokens = Tokens(registry, self._pool, credentials=credentials, plain_http=plain_http)
        self._attempts = attempts
        self._wait = wait
        self._random = random.Random()
        self._lock = threading.Lock()
        # Successful calls. Threads may lose a count here, which does no harm.
        self._served = 0

    def close(self) -> None:
        """End all connections."""
        self._pool.clear()

    def interrupt(self) -> None:
        """End what other threads wait for; they, and all later callers, get Cancelled."""
        self._pool.interrupt()

    def ask(self, request: Request) -> Response:
        """Make one attempt; return a response of an accepted status, which must be closed.

        Raises Broken; Unauthorized, NotInRegistry, Rejected, Unreachable, RegistryError; what the body does.
        """
        shown = self._tokens.header(request.scopes)
        response = self._follow(request, shown)
        if response.status == 401 and self._is_own(response.url):
            with response:
                header = response.header("WWW-Authenticate")
            shown = self._tokens.answer_challenge(shown, header, request.scopes)
            response = self._follow(request, shown)
            if response.status == 401 and shown.startswith("Basic ") and self._is_own(response.url):
                with response:
                    self._tokens.answer_challenge(shown, response.header("WWW-Authenticate"), request.scopes)
        if response.status in request.accepted:
            return response
        with response:
            if is_worth_retrying(response.status):
                wait = parse_retry_after(response.header("Retry-After"), response.header("Date"))
                raise Broken(f"{host_of(response.url)} answered {response.status}", wait)
            body = response.body(BODY_LIMIT)
            if response.status == 400 and response.url.startswith("http:") and _TLS_WANTED.search(body):
                raise Unreachable(
                    f"{host_of(response.url)} speaks TLS, but was asked over plain HTTP; {request.what}",
                    code="GPS-804",
                )
            if response.status < 400:
                how = f"it responds to {request.method} with status {response.status}"
                raise make_not_registry(host_of(response.url), how, request.what)
            raise make_refusal(response.status, body, request.what)

    def persist(
        self,
        attempt: Callable[[], T],
        what: str,
        *,
        reached: Callable[[], int] = lambda: 0,
        check: Callable[[], object] = lambda: None,
    ) -> T:
        """Make attempts until one does not raise Broken, and return its result.

        reached: how many bytes have arrived so far. check: called before each attempt and while waiting; what
        it raises ends everything. Raises Unreachable after the last one, and whatever else an attempt raises.
        """
        broken, furthest, served = 0, reached(), self._served
        while True:
            check()
            self._pool.check()
            try:
                done = attempt()
            except Broken as error:
                if reached() >= furthest + PIECE:
                    broken, furthest = 0, reached()
                broken += 1
                if error.wait > _PATIENCE:
                    raise Unreachable(
                        f"{error}, and asks to wait {error.wait:.0f} s before the next attempt: try again "
                        f"then; {what}"
                    ) from error
                most = self._attempts * (1 if self._served == served else 2)
                if error.nobody and self.base not in _MET:
                    most = min(most, _STRANGE)
                if broken >= most:
                    tries = "1 attempt" if broken == 1 else f"{broken} attempts"
                    raise Unreachable(f"{error}; {what} ({tries})") from error
                self._pause(max(error.wait, self._backoff(broken)), check)
            else:
                self._served += 1
                return done

    def resolve_location(self, base: str, location: str) -> str:
        """Return the URL of a Location header. Raises RegistryError if it cannot be used."""
        try:
            url = urljoin(base, location)
            found = address(url) if location and clear(location) else None
        except ValueError:
            found = None
        if found is None or found[0] not in self._schemes:
            raise RegistryError(
                f"{host_of(base)} redirects to an address without TLS, or to no valid address", code="GPS-809"
            )
        return url

    def _follow(self, request: Request, shown: str) -> Response:
        """Return the response to a request, following the registry's redirects."""
        url = request.url
        for _ in range(_MOST_REDIRECTS + 1):
            headers = dict(request.headers)
            if shown and self._is_own(url):
                headers["Authorization"] = shown
            body = None if request.body is None else request.body()
            response = exchange(self._pool, request.method, url, headers, body)
            _MET.add(self.base)
            if request.method not in ("GET", "HEAD") or response.status not in _REDIRECTS:
                return response
            with response:
                location = response.header("Location")
            url = self.resolve_location(url, location)
        raise RegistryError(f"{request.what}: more than {_MOST_REDIRECTS} redirects", code="GPS-808")

    def _is_own(self, url: str) -> bool:
        """Whether a URL is the registry's own, and not that of another host."""
        return address(url) == address(self.base) is not None

    def _backoff(self, broken: int) -> float:
        longest = min(_LONGEST, _FIRST * 2.0 ** (broken - 1))
        with self._lock:
            return self._random.uniform(longest / 2, longest)

    def _pause(self, seconds: float, check: Callable[[], object]) -> None:
        while seconds > 0:
            check()
            self._pool.check()
            self._wait(min(seconds, _STEP))
            seconds -= _STEP
