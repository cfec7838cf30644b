"""Which proxy a request uses, according to the environment, in the same way as other tools.

HTTPS_PROXY and HTTP_PROXY, or in lower case, by the scheme of the URL. NO_PROXY contains hosts, domains,
host:port and, as in Go's tools (golang.org/x/net/http/httpproxy), networks such as 10.0.0.0/8. Requests to
this host use no proxy.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def proxy_for(url: str) -> str:
    """Return the URL of the proxy for a request to `url`; "" for none."""
    parts = urlsplit(url)
    proxies: dict[str, str] = getproxies()
    proxy = proxies.get(parts.scheme, "").strip()
    host = parts.hostname or ""
    address = None
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
    if not proxy or host == "localhost" or (address is not None and address.is_loopback):
        return ""
    excepted = proxies.get("no", "")
    if address is not None and any(_is_within(address, each.strip()) for each in excepted.split(",")):
        return ""
    if proxy_bypass(host if parts.port is None else f"{host}:{parts.port}", proxies):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_within(address: ipaddress.IPv4Address | ipaddress.IPv6Address, network: str) -> bool:
    try:
        return "/" in network and address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
