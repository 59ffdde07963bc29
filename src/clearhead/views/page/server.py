"""A page that is served on this machine alone, and answers what it asks for."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from clearhead._core import value_error
from clearhead.views.page.document import html

__all__ = ["PageServer", "serve"]

LOOPBACK = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TEXT = "text/plain; charset=utf-8"


class ChunkSource(Protocol):
    """What is served: a header, and chunks by name."""

    @property
    def header(self) -> dict[str, Any]: ...
    def chunk(self, name: str) -> bytes:
        """Make one chunk; an unknown name is a ValueError."""
        ...


def serve(content: ChunkSource, port: int = 0) -> None:
    """Serve a page until Ctrl-C, which is raised on once the port is free; print the address."""
    with PageServer(content, port) as server:
        print(f"Serving {server.address}  (Ctrl-C stops)", flush=True)
        server.serve_forever()


class PageServer(ThreadingHTTPServer):
    """Serves one page on the loopback, to requests that know its random address.

    Requests whose Host is another name (DNS rebinding), that come
    from another site, or that ask for anything else get an error and no data.
    """

    daemon_threads = True

    def __init__(self, content: ChunkSource, port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise value_error("port", "is a number up to 65535, 0 for any that is free", got=port)
        try:
            super().__init__((LOOPBACK, port), PageRequest)
        except OSError as error:
            hint = "choose another, or none"
            raise value_error("port", f"cannot be used ({error})", got=port, hint=hint) from None
        self.content = content
        self.token = secrets.token_urlsafe(24)
        self.making = threading.Lock()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which it may be asked."""
        return tuple(f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost"))

    def answer(self, path: str) -> tuple[bytes, str] | None:
        """The body and its type; None where the page has nothing of that name."""
        if path == "":
            return html({"title": self.content.header["title"]}, {}, place="server").encode(), (
                "text/html; charset=utf-8"
            )
        if path == "header":
            text = json.dumps(self.content.header, ensure_ascii=True, allow_nan=False)
            return text.encode(), "application/json"
        word, _, name = path.partition("/")
        if word != "chunk":
            return None
        try:
            # One at a time: each may take all the memory that there is.
            with self.making:
                return self.content.chunk(name), "application/octet-stream"
        except ValueError:
            return None


class PageRequest(BaseHTTPRequestHandler):
    """One request; only GET is answered."""

    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "clearhead", ""
    protocol_version = "HTTP/1.1"  # connections are kept: a page asks for many small chunks
    timeout = 30

    def do_GET(self) -> None:
        """Answer, or say what is wrong."""
        refused = self._refused()
        if refused:
            self._send(403, refused.encode(), TEXT)
            return
        # Compared as bytes, in a time that does not depend on how much of it is right.
        token, _, path = urlsplit(self.path).path.lstrip("/").partition("/")
        known = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        found = self.server.answer(unquote(path)) if known else None
        if found is None:
            self._send(404, b"not found", TEXT)
        else:
            self._send(200, *found)

    def _refused(self) -> str:
        """Why the request is refused; empty where it is not."""
        if self.headers.get("Host") not in self.server.hosts:
            return "this page is served under its own address alone"
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}:
            return "another site may not ask"
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "another site may not ask"
        return ""

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the address, which is secret, would be in the log."""
