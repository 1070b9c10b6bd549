"""Addresses and names of hosts: which are addresses, which stay on this machine. Standard library only."""

from __future__ import annotations

import ipaddress


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or is_address(host) and ipaddress.ip_address(host).is_loopback
