"""What stands before every request: only the page itself, from this machine's own address, is let in."""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_HEADER = "x-vos"  # a page of another site cannot send it without being asked first, and is then refused
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware that refuses what no page of this server asks for.

    - A Host that is not ours: another site's name can be made to point here (DNS rebinding).
    - An Origin or Sec-Fetch-Site of another site, and changes without our own header (cross-site requests).

    Args:
        app: what is guarded.
        hosts: names that a person may use for this server; with an unspecified address (0.0.0.0) among them, every
            numeric address is one.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]):
        self.app = app
        self._hosts = {host.lower() for host in hosts}
        self._any_address = any(_address(host) and _address(host).is_unspecified for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        problem = self._problem(scope["method"], Headers(scope=scope))
        answer = JSONResponse({"error": problem}, 403) if problem else self.app
        await answer(scope, receive, send_with_headers)

    def _problem(self, method: str, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if not self._known(host):
            return "this server does not go by that name; use the address that it printed"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return "requests of other sites are refused"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "requests of other sites are refused"
        if method not in ("GET", "HEAD") and TOKEN_HEADER not in headers:
            return "only the page itself may change anything"
        return None

    def _known(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._hosts or self._any_address and _address(name) is not None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
