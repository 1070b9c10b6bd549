"""Which addresses a model of another server may have, and the connection to one that was judged.

A name is resolved once for each connection, every address that it has is judged, and a judged address is what is connected to: a
name that answers otherwise a moment later (DNS rebinding) gains nothing. Redirects and proxies of the environment are not followed.
Knows addresses and sockets; refuses to know what is said over them. Standard library only.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from backends.errors import AddressRefused, RemoteUnreachable

IP = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"http": 80, "https": 443}
ENDINGS = ("/chat/completions", "/completions", "/models", "/embeddings")
NAT64 = ipaddress.ip_network("64:ff9b::/96")
VIA = "x-gainz-via"                     # header of a request: the installations that it came through; one that finds itself there refuses
EXAMPLE = "An address looks like http://127.0.0.1:8000/v1 or https://api.example.com/v1."


@dataclass(frozen=True)
class Address:
    """Where a server's API lies. ``path``: "/v1", without a slash at its end."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """From what a person types: a path that is missing is /v1, one that names a route loses it. AddressRefused."""
        if not isinstance(text, str) or any(ord(sign) <= 32 or ord(sign) == 127 or sign == "\\" for sign in text.strip()):
            raise AddressRefused("This is no address of a server.", field="address", remedy=EXAMPLE)
        try:
            parts = urlsplit(text.strip())
            host, port = (parts.hostname or "").encode("idna").decode("ascii"), parts.port
        except ValueError as error:         # a port that is none, brackets that do not close, a name that cannot be
            raise AddressRefused("This is no address of a server.", field="address", reason=error, remedy=EXAMPLE) from error
        if parts.scheme not in PORTS or not host:
            raise AddressRefused("The address must begin with http:// or https:// and name a host.", field="address", remedy=EXAMPLE)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise AddressRefused("The address holds a user, a query or a fragment.", field="address",
                                 remedy="Give the bare address; a key has a field of its own.")
        path = parts.path.rstrip("/")
        for ending in ENDINGS:
            path = path.removesuffix(ending)
        return cls(parts.scheme, host.lower(), port or PORTS[parts.scheme], path or "/v1")

    @property
    def origin(self) -> str:
        """"https://host:443": what a key belongs to."""
        return f"{self.scheme}://{self._host}:{self.port}"

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def __str__(self) -> str:
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self._host}{port}{self.path}"


def _no_key(origin: str) -> str | None:
    return None


@dataclass(frozen=True)
class Reach:
    """``private``: this machine and private networks are within reach. ``allowed``: hosts ("box", "box:8000"), addresses and
    networks ("10.1.0.0/16") that are, whatever else holds. ``key``: the key of a server, by its origin. ``here``: what this installation
    calls itself in `VIA`, "" = it says nothing."""

    private: bool = False
    allowed: tuple[str, ...] = ()
    key: Callable[[str], str | None] = field(default=_no_key, repr=False)
    here: str = ""

    def refusal(self, host: str, port: int, address: str) -> str:
        """Why ``address``, which ``host`` has, may not be connected to; "": it may."""
        ip = ipaddress.ip_address(address.partition("%")[0])
        if any(_matches(entry, host, port, ip) for entry in self.allowed):
            return ""
        ip = _inner(ip)
        if ip.is_loopback or not ip.is_global and not _is_nobody(ip):
            return "" if self.private else "it belongs to this machine or to a private network"
        return "it is no server's address" if _is_nobody(ip) else ""

    def in_the_open(self, address: Address, peer: str) -> bool:
        """Is ``peer`` somewhere on the internet, and nowhere that the list names?"""
        ip = ipaddress.ip_address(peer.partition("%")[0])
        return _inner(ip).is_global and not any(_matches(entry, address.host, address.port, ip) for entry in self.allowed)

    def resolve(self, address: Address) -> list[tuple]:
        """`socket.getaddrinfo` of the host, all of it judged. AddressRefused, RemoteUnreachable."""
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise RemoteUnreachable(f"The name {address.host} is not known.", address=address, reason=error) from error
        for *_, place in found:
            if reason := self.refusal(address.host, address.port, place[0]):
                raise AddressRefused(f"{address.host} may not be reached from here: {reason}.", field="address", host=address.host,
                                     resolved=place[0])
        return found

    def connect(self, address: Address, seconds: float) -> socket.socket:
        """A connected socket, with TLS where the address says so. Nothing has been sent when this fails."""
        last: OSError | None = None
        for family, kind, proto, _, place in self.resolve(address):
            made = socket.socket(family, kind, proto)
            try:
                made.settimeout(seconds)
                made.connect(place)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return made if address.scheme == "http" else ssl.create_default_context().wrap_socket(made, server_hostname=address.host)
            except OSError as error:        # an SSLError, too
                made.close()
                last = error
        raise RemoteUnreachable(f"Nobody answers at {address.origin}.", address=address, reason=last or "no address") from last


def _matches(entry: str, host: str, port: int, ip: IP) -> bool:
    """One entry of the list against a name, its port, and the address that it has."""
    try:
        return ip in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:                      # a name, or something with a port
        name, sign, number = entry.rpartition(":")
    if not sign or not number.isdecimal():
        return entry.strip("[]").lower() == host
    return int(number) == port and name.strip("[]").lower() in (host, str(ip))


def _inner(ip: IP) -> IP:
    """The IPv4 address inside an IPv6 one that only carries it."""
    if ip.version == 4:
        return ip
    if ip in NAT64:
        return ipaddress.ip_address(ip.packed[-4:])
    teredo = ip.teredo
    return ip.ipv4_mapped or ip.sixtofour or (teredo[1] if teredo else ip)


def _is_nobody(ip: IP) -> bool:
    """Never a model server, and at 169.254.169.254 a cloud's secrets: only the list lets one of these through."""
    return ip.is_link_local or ip.is_unspecified or ip.is_multicast or ip.is_reserved and not ip.is_loopback


def is_loopback(host: str) -> bool:
    """Of an address to listen on: does it stay on this machine?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
