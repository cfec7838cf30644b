"""One HTTP exchange: TLS checked, bodies as streams in both directions, failures mapped to two exceptions.

urllib3 only makes the connections. Its retries and its redirects are not used, because both could send a body
or a credential to the wrong place.
"""

from __future__ import annotations

import errno
import functools
import http.client
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, LocationValueError, ProtocolError
from urllib3.util import make_headers, parse_url
from urllib3.util.ssl_ import create_urllib3_context

from gpusnap.oci.base.errors import Cancelled, RegistryError, Unreachable, reason
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.registry import certificates
from gpusnap.oci.registry.pace import Limits, Watch
from gpusnap.oci.registry.proxies import proxy_for
from gpusnap.oci.registry.refusals import printable

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

PIECE = 1 << 20
_PORTS = {"http": 80, "https": 443}
# Characters that one parser of URLs takes as a part of the host, and another as its end.
_AMBIGUOUS = compile_later(r"[^\x21-\x7e]|\\")
# Seconds: for a connection, and how much longer a socket waits than gpusnap.oci.registry.pace, which reports
# more.
_CONNECT, _LONGER = 30.0, 5.0
# The rest of a response is read, so that its connection can be reused, if it is no more than this.
_LEFTOVER = 64 << 10
_CONNECTIONS = 32
# Seconds between checks whether a connection in progress is still wanted.
_LOOK = 0.1
_INTERRUPTED = "interrupted"
# Errors if a host or a port does not exist, or does not answer at all.
_NOBODY = (socket.gaierror, ConnectionRefusedError, TimeoutError, urllib3.exceptions.TimeoutError)
# OpenSSL's messages for a peer that does not use TLS, by its version.
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}


class Broken(Exception):
    """An attempt that may succeed the next time; `wait` is how many seconds the other side asks for.

    nobody: the connection was refused, the host's name is not known, or nobody answers.
    """

    def __init__(self, why: str, wait: float = 0.0, *, nobody: bool = False) -> None:
        super().__init__(why)
        self.wait = wait
        self.nobody = nobody


class Pool:
    """Connections for any number of threads, direct or through the proxies in the environment."""

    def __init__(self, context: ssl.SSLContext, limits: Limits | None = None) -> None:
        self._context = context
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        # By the URL of the proxy, "" for none.
        self._made: dict[str, urllib3.PoolManager] = {}
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._over = False

    def clear(self) -> None:
        """End all connections."""
        with self._lock:
            for each in self._made.values():
                each.clear()

    def interrupt(self) -> None:
        """End all exchanges that other threads wait in; they, and all later callers, get Cancelled."""
        with self._lock:
            self._over = True
            watches = list(self._watches)
        for each in watches:
            each.end(_INTERRUPTED)

    def check(self) -> None:
        """Raise Cancelled after `interrupt`."""
        if self._over:
            raise Cancelled(_INTERRUPTED)

    def watch(self, method: str) -> Watch:
        """Return a watch for a new exchange. Raises Cancelled after `interrupt`."""
        made = Watch(self.limits, method)
        with self._lock:
            self.check()
            self._watches.add(made)
        return made

    def get_manager(self, proxy: str) -> urllib3.PoolManager:
        """Return the manager for a proxy, "" for none. Raises RegistryError for an invalid proxy."""
        with self._lock:
            if proxy not in self._made:
                self._made[proxy] = self._make_manager(proxy)
                self._made[proxy].pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
            return self._made[proxy]

    def _make_manager(self, proxy: str) -> urllib3.PoolManager:
        # urllib3 1.26 would use its own default, to verify, instead of the context's.
        checks = "CERT_NONE" if self._context.verify_mode == ssl.CERT_NONE else None
        if not proxy:
            return urllib3.PoolManager(maxsize=_CONNECTIONS, ssl_context=self._context, cert_reqs=checks)
        try:
            auth = unquote(parse_url(proxy).auth or "")
            return urllib3.ProxyManager(
                proxy,
                maxsize=_CONNECTIONS,
                ssl_context=self._context,
                proxy_headers=make_headers(proxy_basic_auth=auth) if auth else None,
                cert_reqs=checks,
            )
        except (HTTPError, ValueError) as error:
            raise RegistryError(
                f"the proxy {host_of(proxy)!r} from the environment cannot be used: {type(error).__name__}"
            ) from error


class _Watched(HTTPConnection):
    """A connection that reports its socket, and the end of the request, to the watch of an exchange."""

    def _new_conn(self) -> socket.socket:
        watch: Watch | None = getattr(_current, "watch", None)
        if watch is None:
            return super()._new_conn()
        made = _connect(super()._new_conn, watch)
        watch.attach(made)
        return made

    def putrequest(self, *args: Any, **more: Any) -> None:
        if self.sock is not None and (watch := getattr(_current, "watch", None)) is not None:
            watch.attach(self.sock)
        super().putrequest(*args, **more)

    def getresponse(self, *args: Any, **more: Any) -> Any:
        if (watch := getattr(_current, "watch", None)) is not None:
            watch.note_sent()
        return super().getresponse(*args, **more)


def _connect(make: Callable[[], socket.socket], watch: Watch) -> socket.socket:
    """Return a new connection, unless the exchange ends or a signal's exception comes before it is ready.

    A separate thread makes it, because nothing ends getaddrinfo(3) or connect(2).
    """
    making: Future[socket.socket] = Future()

    def run() -> None:
        try:
            made = make()
        except BaseException as error:
            with suppress(InvalidStateError):
                making.set_exception(error)
            return
        try:
            making.set_result(made)
        except InvalidStateError:  # nobody waits for it any more
            made.close()

    try:
        threading.Thread(target=run, name="gpusnap-connect", daemon=True).start()
    except RuntimeError:  # no thread can be started
        return make()
    try:
        while not wait([making], _LOOK).done:
            if watch.why:
                raise ConnectionAbortedError(watch.why)
    except BaseException:
        if not making.cancel() and making.exception() is None:
            making.result().close()
        raise
    return making.result()


class _WatchedTls(_Watched, HTTPSConnection):
    """The same with TLS."""


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Watched


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTls


# `watch`: of the exchange that this thread has begun.
_current = threading.local()


def make_pool(
    ca_file: str = "", registry: str = "", limits: Limits | None = None, *, verify: bool = True
) -> Pool:
    """Return connections whose TLS trusts the system's CAs, those in `ca_file`, and those for `registry`.

    Without `verify` it trusts everybody. Raises RegistryError if these cannot be read.
    """
    context, folder = _system_tls(), certificates.folder_of(registry)
    if ca_file or folder or not verify:
        context = _new_tls()
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        if folder:
            certificates.load(context, folder)
        if ca_file:
            certificates.load_ca(context, ca_file)
    return Pool(context, limits)


@functools.cache
def _system_tls() -> ssl.SSLContext:
    """Return TLS that trusts the system's CAs: once for all pools, because reading them takes some 10 ms."""
    return _new_tls()


def _new_tls() -> ssl.SSLContext:
    # urllib3's own kind: 1.26 checks host names itself, and fails if OpenSSL is to do it.
    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_default_certs()
    return context


class Response:
    """The response to one request; a context manager, at whose end the connection can be reused."""

    def __init__(self, response: BaseHTTPResponse, url: str, watch: Watch) -> None:
        self._response, self._watch = response, watch
        self.url = url
        self.status: int = response.status

    def __enter__(self) -> Response:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(broken=kind is not None)

    def header(self, name: str) -> str:
        """Return a header's value; several of one name are joined by commas; "" if it is missing."""
        return str(self._response.headers.get(name, ""))

    def pieces(self) -> Iterator[bytes]:
        """Yield the body in pieces of at most 1 MiB. Raises Broken. A truncated body may just end."""
        while piece := self._read(PIECE):
            yield piece

    def body(self, limit: int) -> bytes:
        """Return the body, or the first `limit` bytes of it. Raises Broken."""
        data = b""
        for piece in self.pieces():
            data += piece
            if len(data) >= limit:
                break
        return data[:limit]

    def close(self, *, broken: bool = False) -> None:
        """Return the connection for reuse, or end it if much is left to read."""
        try:
            if broken or len(self._read(_LEFTOVER)) == _LEFTOVER:
                self._response.close()
        except Broken:
            self._response.close()
        finally:
            self._watch.close()
            self._response.release_conn()

    def _read(self, size: int) -> bytes:
        try:
            with self._watch.count_waiting():
                data = self._response.read(size, decode_content=False)
        except (HTTPError, http.client.HTTPException, OSError) as error:
            why = self._watch.why or _explain(error)
            raise Broken(f"{host_of(self.url)} broke off: {why}") from error
        if self._watch.why:  # what had arrived until then may look complete
            raise Broken(f"{host_of(self.url)} broke off: {self._watch.why}")
        return data


def exchange(
    pool: Pool,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: Iterable[bytes] | None = None,
) -> Response:
    """Send one request and receive the head of its response, whatever its status; no redirect is followed.

    A body in pieces needs its Content-Length among the headers. Raises Broken; Unreachable if another attempt
    would not help; Cancelled; whatever `body` raises, and then the other side never sees the end of the body.
    """
    proxy = proxy_for(url)
    connections = pool.get_manager(proxy)
    limits = pool.limits
    watch = _current.watch = pool.watch(method)
    try:
        with watch.count_waiting():
            response = connections.urlopen(
                method,
                url,
                body=body,
                headers={"User-Agent": "gpusnap", "Accept-Encoding": "identity", **headers},
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=urllib3.Timeout(connect=_CONNECT, read=limits.answer(method) + _LONGER),
            )
    except LocationValueError as error:
        watch.close()
        raise RegistryError(
            f"an address on {host_of(url)} is invalid: {type(error).__name__}", code="GPS-808"
        ) from error
    except (HTTPError, http.client.HTTPException, OSError) as error:
        watch.close()
        pool.check()
        _refuse_tls(error, url)
        by = f" through the proxy {host_of(proxy)}" if proxy else ""
        nobody = any(isinstance(each, _NOBODY) for each in _chain(error)) or bool(watch.why)
        raise Broken(f"{host_of(url)}{by}: {watch.why or _explain(error)}", nobody=nobody) from error
    except BaseException:
        watch.close()
        raise
    finally:
        _current.watch = None
    return Response(response, url, watch)


def _refuse_tls(error: BaseException, url: str) -> None:
    """Raise Unreachable for an error of the other side's TLS that lasts as long as its configuration."""
    for each in _chain(error):
        # By name, because urllib3's error for the name of a host is in another module in each version.
        if isinstance(each, ssl.SSLCertVerificationError) or type(each).__name__ == "CertificateError":
            why = printable(getattr(each, "verify_message", "") or each)
            raise Unreachable(
                f"the certificate of {host_of(url)} is not trusted ({why}): add its CA to the system's "
                f"certificates, or as a .crt file to the registry's directory in {certificates.FOLDERS[0]}",
                code="GPS-805",
            ) from error
        if isinstance(each, ssl.SSLError) and each.reason in _NO_TLS:
            raise Unreachable(
                f"{host_of(url)} does not speak TLS; plain HTTP, which exposes everything to the network, "
                "has to be requested explicitly",
                code="GPS-804",
            ) from error


def clear(text: str) -> bool:
    """Whether a URL, or a part of one, contains no backslashes, blanks or control characters."""
    return not _AMBIGUOUS.search(text)


def address(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of a URL, as `exchange` connects to them; None if they are not clear.

    A malicious URL from a registry may look like one host and connect to another. So one with a user is not
    clear, nor is one that urllib3 and the standard library parse differently.
    """
    if not clear(url):
        return None
    try:
        found, other = parse_url(url), urlsplit(url)
        port = other.port
    except (LocationValueError, ValueError):
        return None
    if found.auth is not None or "@" in other.netloc or not found.host or not found.scheme:
        return None
    host = found.host.strip("[]").lower()
    if (found.scheme, host, found.port) != (other.scheme, other.hostname, port):
        return None
    port = port or _PORTS.get(found.scheme, 0)
    return (found.scheme, host, port) if port else None


def host_of(url: str) -> str:
    """Return the host and port of a URL, for messages, because its path and query may contain secrets."""
    return urlsplit(url).netloc.rpartition("@")[2][:200]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, those that it contains and those that it was raised from, the outermost first."""
    seen: list[BaseException] = []
    ahead: list[object] = [error]
    while ahead:
        each = ahead.pop(0)
        if isinstance(each, BaseException) and each not in seen and len(seen) < 20:
            seen.append(each)
            ahead += [*each.args, each.__cause__, each.__context__]
    yield from seen


def _explain(error: BaseException) -> str:
    """Say why an exchange failed, without addresses of objects."""
    words = "the connection broke"
    for each in _chain(error):
        if isinstance(each, socket.gaierror):
            again = each.errno == socket.EAI_AGAIN
            return "the DNS server does not respond" if again else "the host name is unknown"
        if isinstance(each, ConnectionRefusedError):
            return "nothing listens there (connection refused)"
        if isinstance(each, TimeoutError | urllib3.exceptions.TimeoutError):
            words = "it did not respond in time"
        elif isinstance(each, http.client.RemoteDisconnected):
            return "it closed the connection without a response"
        elif isinstance(each, OSError) and each.errno in errno.errorcode:
            return reason(each)
        elif isinstance(each, http.client.IncompleteRead | ProtocolError):
            words = "the connection ended in the middle" if "Incomplete" in repr(each) else words
    return words
