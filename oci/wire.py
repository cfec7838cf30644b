"""One HTTP exchange: TLS checked, bodies as streams both ways, what can break mapped to two exceptions.

urllib3 does the connections, and nothing else here: neither its retries nor its redirects are used, because
both would send a body or a credential where it should not go.
"""

from __future__ import annotations

import errno
import functools
import http.client
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, LocationValueError, ProtocolError
from urllib3.util.ssl_ import create_urllib3_context

from oci.errors import RegistryError, Unreachable, reason
from oci.refusals import printable

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

__all__ = ["Answer", "Broken", "exchange", "host_of", "make_pool"]

PIECE = 1 << 20
# Seconds. A registry may take long to answer the end of an upload: it moves the blob, or hashes it again.
_CONNECT, _READ = 30.0, 180.0
# What is left of an answer is read, so that its connection can serve again, where it is no more than this.
_LEFTOVER = 64 << 10
_CONNECTIONS = 32
# OpenSSL's words for a peer that does not speak TLS, by its version.
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}


class Broken(Exception):
    """An attempt that may go better the next time; `wait` is how many seconds the other side asks for."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def make_pool(ca_file: str = "") -> urllib3.PoolManager:
    """Connections for any number of threads. TLS trusts the system's CAs, and those in the PEM `ca_file`.

    Raises RegistryError where that cannot be read.
    """
    context = _system_tls()
    if ca_file:
        context = _new_tls()
        try:
            context.load_verify_locations(ca_file)
        except ssl.SSLError as error:
            raise RegistryError(f"the CA file {ca_file} holds no certificate in PEM") from error
        except OSError as error:
            raise RegistryError(f"the CA file {ca_file} cannot be read: {reason(error)}") from error
    return urllib3.PoolManager(maxsize=_CONNECTIONS, ssl_context=context)


@functools.cache
def _system_tls() -> ssl.SSLContext:
    """TLS that trusts the system's CAs: once for all pools, since to read them takes tens of milliseconds."""
    return _new_tls()


def _new_tls() -> ssl.SSLContext:
    # urllib3's own kind: 1.26 checks the names of hosts itself, and fails where OpenSSL is to do it.
    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_default_certs()
    return context


class Answer:
    """The answer to one request; a context manager, at whose end the connection is free again."""

    def __init__(self, response: BaseHTTPResponse, url: str) -> None:
        self._response = response
        self.url = url
        self.status: int = response.status

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(broken=kind is not None)

    def header(self, name: str) -> str:
        """A header's value; several of one name with commas between; "" where it is missing."""
        return str(self._response.headers.get(name, ""))

    def pieces(self) -> Iterator[bytes]:
        """The body in pieces of at most 1 MiB. Raises Broken. A body cut short may just end."""
        while piece := self._read(PIECE):
            yield piece

    def body(self, limit: int) -> bytes:
        """The body, or the first `limit` bytes of it. Raises Broken."""
        data = b""
        for piece in self.pieces():
            data += piece
            if len(data) >= limit:
                break
        return data[:limit]

    def close(self, *, broken: bool = False) -> None:
        """Give the connection back, or end it where much is left to read."""
        try:
            if broken or len(self._read(_LEFTOVER)) == _LEFTOVER:
                self._response.close()
        except Broken:
            self._response.close()
        finally:
            self._response.release_conn()

    def _read(self, size: int) -> bytes:
        try:
            return self._response.read(size, decode_content=False)
        except (HTTPError, http.client.HTTPException, OSError) as error:
            raise Broken(f"{host_of(self.url)} broke off: {_why(error)}") from error


def exchange(
    pool: urllib3.PoolManager,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: Iterable[bytes] | None = None,
) -> Answer:
    """Send one request and take the head of its answer, whatever its status; no redirect is followed.

    A body in pieces needs its Content-Length among the headers. Raises Broken; Unreachable where another
    attempt would not help; whatever `body` raises, and then the other side never sees its end.
    """
    try:
        response = pool.urlopen(
            method,
            url,
            body=body,
            headers={"User-Agent": "gpusnap", "Accept-Encoding": "identity", **headers},
            redirect=False,
            retries=False,
            preload_content=False,
            decode_content=False,
            timeout=urllib3.Timeout(connect=_CONNECT, read=_READ),
        )
    except LocationValueError as error:
        raise RegistryError(f"an address on {host_of(url)} is none: {type(error).__name__}") from error
    except (HTTPError, http.client.HTTPException, OSError) as error:
        _refuse_tls(error, url)
        raise Broken(f"{host_of(url)}: {_why(error)}") from error
    return Answer(response, url)


def _refuse_tls(error: BaseException, url: str) -> None:
    """Raise Unreachable for what is wrong with the other side's TLS for as long as it is set up like that."""
    for each in _chain(error):
        # By name: what urllib3 raises for the name of a host comes from another place in each version.
        if isinstance(each, ssl.SSLCertVerificationError) or type(each).__name__ == "CertificateError":
            why = printable(getattr(each, "verify_message", "") or each)
            raise Unreachable(
                f"the certificate of {host_of(url)} is not trusted ({why}): "
                "have its CA among the system's, or name the file of its CA"
            ) from error
        if isinstance(each, ssl.SSLError) and each.reason in _NO_TLS:
            raise Unreachable(
                f"{host_of(url)} does not speak TLS: plain HTTP, which shows everything to the network, "
                "has to be asked for"
            ) from error


def host_of(url: str) -> str:
    """The host and port of a URL, for messages: its path and query may hold secrets."""
    return urlsplit(url).netloc.rpartition("@")[2][:200]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it holds and what it was raised from, the outermost first."""
    seen: list[BaseException] = []
    ahead: list[object] = [error]
    while ahead:
        each = ahead.pop(0)
        if isinstance(each, BaseException) and each not in seen and len(seen) < 20:
            seen.append(each)
            ahead += [*each.args, each.__cause__, each.__context__]
    yield from seen


def _why(error: BaseException) -> str:
    """Why an exchange broke, in words without addresses of objects."""
    words = "the connection broke"
    for each in _chain(error):
        if isinstance(each, socket.gaierror):
            return "its name is not known"
        if isinstance(each, TimeoutError | urllib3.exceptions.TimeoutError):
            words = "it did not answer in time"
        elif isinstance(each, http.client.RemoteDisconnected):
            return "it closed the connection without an answer"
        elif isinstance(each, OSError) and each.errno in errno.errorcode:
            return reason(each)
        elif isinstance(each, http.client.IncompleteRead | ProtocolError):
            words = "the connection ended in the middle" if "Incomplete" in repr(each) else words
    return words
