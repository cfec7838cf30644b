"""A small registry on loopback that holds its clients to the distribution-spec, and breaks when told to.

It keeps blobs in files, so that what a client holds in memory can be told from what it holds. Each answer to
an upload gives a new Location, and only the latest one is good. What a client does against the spec is
refused as a registry would, and noted in `wrong`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from registry_faults import CutAnswer, CutBody, NoAnswer, Rule, Say, Seen

from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.registry.client import Client
from gpusnap.oci.registry.credentials import Credentials
from gpusnap.oci.registry.repository import Repository

__all__ = ["CutAnswer", "CutBody", "FakeRegistry", "NoAnswer", "Rule", "Say", "Seen"]

PIECE = 64 << 10


class _Cut(Exception):
    """This connection ends here."""


class FakeRegistry:
    """The registry, while the context lasts. `waits` are the waits that its clients were asked to make."""

    def __init__(self, folder: Path, *, certificate: Path | None = None) -> None:
        self.folder = folder
        self.rules: list[Rule] = []
        self.seen: list[Seen] = []
        self.wrong: list[str] = []
        self.waits: list[float] = []
        self.members: dict[str, set[str]] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.uploads: dict[str, str] = {}
        self.chunk_min_length = 0
        # Bytes of a body that is not too much for it; 0 for any. Whether it takes parts of a blob.
        self.largest_put = 0
        self.parts = True
        self.ranges = True
        self.absolute = False
        # Where blobs are to be had instead, such as "http://HOST/data/".
        self.redirect = ""
        # "basic" or "bearer", and who may come in.
        self.login = ""
        self.users: dict[str, str] = {}
        self.identity_token = ""
        self.tokens: dict[str, str] = {}
        # As Quay: a token to pull is good for repositories that are there; one to push makes them.
        self.strict = False
        self.may_mount = True
        # Whether it lists referrers, and how many in one page.
        self.lists_referrers = False
        self.page = 100
        self.realm = ""
        self.lock = threading.Lock()
        for name in ("blobs", "uploads"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._repositories: list[Repository] = []
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def host(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeRegistry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._repositories:
            each.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    def repository(
        self,
        name: str = "team/app",
        *,
        credentials: Credentials | None = None,
        plain_http: bool = True,
        ca_file: str = "",
        attempts: int = 6,
    ) -> Repository:
        """A client of one of its repositories that does not really wait."""
        client = Client(
            self.host,
            credentials=credentials,
            plain_http=plain_http,
            ca_file=ca_file,
            attempts=attempts,
            wait=self.waits.append,
        )
        made = Repository(Reference(self.host, name), client)
        self._repositories.append(made)
        return made

    def rule(self, method: str, path: str, do: Say | CutBody | CutAnswer | NoAnswer, **more: int) -> None:
        """Add a rule."""
        self.rules.append(Rule(method, path, do, **more))

    def asked(self, method: str, path: str = "") -> list[Seen]:
        """The requests of a method whose path fits."""
        return [each for each in self.seen if each.method == method and re.search(path, each.path)]

    def add_blob(self, data: bytes, repository: str = "team/app") -> str:
        """Put a blob there."""
        name = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs" / name).write_bytes(data)
        self.members.setdefault(repository, set()).add(name)
        return f"sha256:{name}"

    def blob(self, digest: str) -> bytes:
        """What it has under that digest."""
        return (self.folder / "blobs" / digest.removeprefix("sha256:")).read_bytes()

    def has(self, digest: str, repository: str = "team/app") -> bool:
        """Whether a repository has that blob."""
        return digest.removeprefix("sha256:") in self.members.get(repository, ())

    def act(self, method: str, path: str) -> Say | CutBody | CutAnswer | NoAnswer | None:
        """What a rule wants done to a request."""
        with self.lock:
            for rule in self.rules:
                if rule.method == method and rule.times and re.search(rule.path, path):
                    if rule.skip:
                        rule.skip -= 1
                        continue
                    rule.times -= 1
                    return rule.do
        return None


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are what many tests are about."""


def _handler(registry: FakeRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        at = registry

    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    at: FakeRegistry
    do: Say | CutBody | CutAnswer | NoAnswer | None

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PATCH = do_PUT = do_GET

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.at.seen.append(Seen(self.command, self.path, headers))
        self.do = self.at.act(self.command, self.path)
        self.parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(self.parts.query).items()}
        self.left = int(self.headers.get("Content-Length") or 0)
        try:
            if isinstance(self.do, Say):
                self._drain()
                self._say(self.do.status, self.do.headers, self.do.body)
            else:
                self._route()
            self._drain()
        except (_Cut, OSError):
            self.close_connection = True

    def _route(self) -> None:
        path = self.parts.path
        if path.startswith("/data/"):
            self._file(path.removeprefix("/data/"))
        elif path == "/token":
            self._token()
        elif self._let_in():
            for pattern, what in _ROUTES.items():
                if match := re.fullmatch(pattern, path):
                    what(self, *match.groups())
                    return
            self._refuse(404, "NAME_UNKNOWN")

    # Bodies

    def _body(self) -> Iterator[bytes]:
        taken = 0
        most = self.do.after if isinstance(self.do, CutBody) else None
        while self.left:
            size = min(PIECE, self.left, PIECE if most is None else most - taken)
            piece = self.rfile.read(size)
            if not piece:
                raise _Cut
            self.left -= len(piece)
            taken += len(piece)
            yield piece
        if most is not None and taken >= most:
            raise _Cut

    def _drain(self) -> None:
        while self.left:
            piece = self.rfile.read(min(PIECE, self.left))
            self.left -= len(piece) or self.left

    def _say(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        if isinstance(self.do, NoAnswer):
            raise _Cut
        self.send_response_only(status)
        standard = {"Date": self.date_time_string(), "Content-Length": str(len(body))}
        for name, value in {**standard, **headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._write(body)

    def _write(self, body: bytes) -> None:
        if isinstance(self.do, CutAnswer):
            self.wfile.write(body[: self.do.after])
            raise _Cut
        self.wfile.write(body)

    def _refuse(
        self, status: int, code: str, message: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._drain()
        body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
        self._say(status, headers or {}, body)

    def _against_the_spec(self, what: str, status: int = 400, code: str = "UNSUPPORTED") -> None:
        self.at.wrong.append(f"{self.command} {self.path}: {what}")
        self._refuse(status, code, what)

    # Credentials

    def _let_in(self) -> bool:
        given = self.headers.get("Authorization", "")
        if not self.at.login:
            if given:
                self.at.wrong.append("credentials for a registry that asked for none")
            return True
        if self.at.login == "basic":
            if given and self._user(given):
                return True
            self._refuse(401, "UNAUTHORIZED", "", {"WWW-Authenticate": 'Basic realm="fake, or not"'})
            return False
        match = re.match(r"/v2/(.+?)/(?:blobs|manifests|referrers|tags)/", self.parts.path)
        needed = f"repository:{match[1] if match else ''}:" + (
            "pull" if self.command in ("GET", "HEAD") and "uploads" not in self.path else "pull,push"
        )
        scopes = self.at.tokens.get(given.removeprefix("Bearer "), "").split()
        if any(each.startswith(needed) for each in scopes):
            return True
        realm = self.at.realm or f"http://{self.at.host}/token"
        challenge = f'Bearer realm="{realm}",service="fake",scope="{needed}"'
        self._refuse(401, "UNAUTHORIZED", "", {"WWW-Authenticate": challenge})
        return False

    def _user(self, given: str) -> str:
        try:
            name, _, password = base64.b64decode(given.removeprefix("Basic ")).decode().partition(":")
        except ValueError:
            return ""
        return name if self.at.users.get(name) == password else ""

    def _token(self) -> None:
        query = parse_qs(self.parts.query)
        if self.command == "POST":
            form = parse_qs(b"".join(self._body()).decode())
            good = form["refresh_token"] == [self.at.identity_token] and form["grant_type"] == [
                "refresh_token"
            ]
            service, scopes, name = form.get("service"), form["scope"][0].split(), "access_token"
        else:
            given = self.headers.get("Authorization", "")
            good = bool(given and self._user(given)) if self.at.users else not given
            service, scopes, name = query.get("service"), query.get("scope", []), "token"
        if not good or service != ["fake"]:
            self._refuse(401, "UNAUTHORIZED", "wrong words")
            return
        if self.at.strict:
            for _, name_of, actions in (each.split(":") for each in scopes):
                if "push" in actions:
                    self.at.members.setdefault(name_of, set())
            scopes = [each for each in scopes if each.split(":")[1] in self.at.members]
        token = secrets.token_urlsafe(12)
        self.at.tokens[token] = " ".join(scopes)
        self._say(200, {"Content-Type": "application/json"}, json.dumps({name: token}).encode())

    # Blobs

    def _blob(self, repository: str, name: str) -> None:
        if not self.at.has(name, repository):
            self._refuse(404, "BLOB_UNKNOWN")
        elif self.at.redirect:
            self._say(307, {"Location": self.at.redirect + name + "?signature=secret"})
        else:
            self._file(name)

    def _file(self, name: str) -> None:
        path = self.at.folder / "blobs" / name
        size, start, status = path.stat().st_size, 0, 200
        headers = {"Content-Type": "application/octet-stream", "Docker-Content-Digest": f"sha256:{name}"}
        match = re.fullmatch(r"bytes=([0-9]+)-", self.headers.get("Range", ""))
        if match and self.at.ranges:
            start, status = int(match[1]), 206
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        if self.command == "GET":
            left = self.do.after if isinstance(self.do, CutAnswer) else size
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(size - start)}.items():
                self.send_header(key, value)
            self.end_headers()
            with path.open("rb") as file:
                file.seek(start)
                while piece := file.read(min(PIECE, left)):
                    self.wfile.write(piece)
                    left -= len(piece)
            if isinstance(self.do, CutAnswer):
                raise _Cut
        else:
            self._say(status, {**headers, "Content-Length": str(size - start)})

    def _begin(self, repository: str) -> None:
        mount, origin = self.query.get("mount", ""), self.query.get("from", "")
        if mount and self.at.may_mount and self.at.has(mount, origin):
            self.at.members.setdefault(repository, set()).add(mount.removeprefix("sha256:"))
            self._say(201, {"Location": f"/v2/{repository}/blobs/{mount}", "Docker-Content-Digest": mount})
            return
        name = secrets.token_hex(8)
        (self.at.folder / "uploads" / name).write_bytes(b"")
        least = str(self.at.chunk_min_length or "")
        self._moved(202, repository, name, {"OCI-Chunk-Min-Length": least})

    def _moved(self, status: int, repository: str, name: str, more: Mapping[str, str]) -> None:
        state = secrets.token_hex(4)
        self.at.uploads[name] = state
        size = (self.at.folder / "uploads" / name).stat().st_size
        base = f"http://{self.at.host}" if self.at.absolute else ""
        location = f"{base}/v2/{repository}/blobs/uploads/{name}?_state={state}%3D&a=b"
        self._say(status, {"Location": location, "Range": f"0-{max(0, size - 1)}", **more})

    def _upload(self, repository: str, name: str) -> None:
        """GET, PATCH or PUT of an upload."""
        if name not in self.at.uploads:
            self._refuse(404, "BLOB_UPLOAD_UNKNOWN")
        elif self.query.get("_state") != self.at.uploads[name] + "=" and self.command != "GET":
            self._against_the_spec("an old Location")
        elif self.command == "GET":
            self._moved(204, repository, name, {})
        elif "Content-Length" not in self.headers:
            self._against_the_spec("no Content-Length")
        elif self.command == "PATCH":
            self._patch(repository, name)
        else:
            self._finish(repository, name)

    def _patch(self, repository: str, name: str) -> None:
        if not self.at.parts:
            self._refuse(416, "RANGE_INVALID", "parts are not taken")
            return
        path = self.at.folder / "uploads" / name
        size = path.stat().st_size
        match = re.fullmatch(r"([0-9]+)-([0-9]+)", self.headers.get("Content-Range", ""))
        if match is None or int(match[2]) - int(match[1]) + 1 != self.left:
            self._against_the_spec("a Content-Range that is not the body's", 416)
        elif int(match[1]) != size:
            self._refuse(416, "RANGE_INVALID", f"{size} bytes are there")
        else:
            self._append(path)
            self._moved(202, repository, name, {})

    def _append(self, path: Path) -> None:
        with path.open("ab") as file:
            for piece in self._body():
                file.write(piece)

    def _finish(self, repository: str, name: str) -> None:
        if self.at.largest_put and self.left > self.at.largest_put:
            self._refuse(413, "SIZE_INVALID", "too much")
            return
        path = self.at.folder / "uploads" / name
        self._append(path)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if self.query.get("digest") != f"sha256:{found}":
            self._against_the_spec("another digest", 400, "DIGEST_INVALID")
            return
        path.rename(self.at.folder / "blobs" / found)
        del self.at.uploads[name]
        self.at.members.setdefault(repository, set()).add(found)
        self._say(201, {"Docker-Content-Digest": f"sha256:{found}", "Location": f"/v2/{repository}/blobs/x"})

    # Manifests

    def _manifest(self, repository: str, name: str) -> None:
        if self.command == "PUT":
            self._put_manifest(repository, name)
            return
        if (repository, name) not in self.at.manifests:
            self._refuse(404, "MANIFEST_UNKNOWN")
            return
        kind, content = self.at.manifests[repository, name]
        if kind not in self.headers.get("Accept", ""):
            self._against_the_spec("a manifest of this type is not accepted")
            return
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._say(
            200,
            {"Content-Type": kind, "Docker-Content-Digest": digest, "Content-Length": str(len(content))},
            content,
        )

    def _put_manifest(self, repository: str, name: str) -> None:
        content = b"".join(self._body())
        value = json.loads(content)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if len(content) > 4 << 20:
            self._against_the_spec("more than 4 MiB", 413)
        elif "manifests" in value and not all(
            (repository, each["digest"]) in self.at.manifests for each in value["manifests"]
        ):
            self._against_the_spec("an index before its manifests", 400, "MANIFEST_UNKNOWN")
        elif "layers" in value and not all(
            self.at.has(each["digest"], repository) for each in [value["config"], *value["layers"]]
        ):
            self._against_the_spec("a manifest before its blobs", 400, "MANIFEST_BLOB_UNKNOWN")
        elif ":" in name and name != digest:
            self._against_the_spec("another digest", 400, "DIGEST_INVALID")
        else:
            kind = self.headers.get("Content-Type", "")
            for each in (name, digest):
                self.at.manifests[repository, each] = (kind, content)
            self._say(201, {"Docker-Content-Digest": digest, "Location": "/v2/x"})

    def _tags(self, repository: str) -> None:
        tags = sorted(name for of, name in self.at.manifests if of == repository and ":" not in name)
        if not tags:
            self._refuse(404, "NAME_UNKNOWN")
            return
        last = unquote(self.query.get("last", ""))
        rest = [tag for tag in tags if tag > last]
        some = rest[: self.at.page]
        more = f'<{self.parts.path}?last={some[-1]}>; rel="next"' if len(some) < len(rest) else ""
        body = json.dumps({"name": repository, "tags": some}).encode()
        headers = {"Content-Type": "application/json", "Link": more}
        self._say(200, {**headers, "Content-Length": str(len(body))}, body)

    def _referrers(self, repository: str, digest: str) -> None:
        if not self.at.lists_referrers:
            self._refuse(404, "NOT_FOUND")
            return
        found = {}
        for (of, _), (kind, content) in self.at.manifests.items():
            value = json.loads(content)
            if of == repository and (value.get("subject") or {}).get("digest") == digest:
                name = f"sha256:{hashlib.sha256(content).hexdigest()}"
                found[name] = {"mediaType": kind, "digest": name, "size": len(content)}
        start = int(self.query.get("n", "0"))
        some, end = list(found.values())[start : start + self.at.page], start + self.at.page
        more = f'<{self.parts.path}?n={end}>; rel="next"' if end < len(found) else ""
        body = json.dumps({"schemaVersion": 2, "manifests": some}).encode()
        headers = {"Content-Type": "application/vnd.oci.image.index.v1+json", "Link": more}
        self._say(200, {**headers, "Content-Length": str(len(body))}, body)


_ROUTES: dict[str, Callable[..., None]] = {
    r"/v2/(.+)/blobs/sha256:([0-9a-f]{64})": _Handler._blob,
    r"/v2/(.+)/blobs/uploads/": _Handler._begin,
    r"/v2/(.+)/blobs/uploads/([0-9a-f]+)": _Handler._upload,
    r"/v2/(.+)/manifests/(.+)": _Handler._manifest,
    r"/v2/(.+)/referrers/(.+)": _Handler._referrers,
    r"/v2/(.+)/tags/list": _Handler._tags,
}
