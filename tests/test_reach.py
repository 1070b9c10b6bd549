"""Which addresses a model of another server may have: what a person types, what a name resolves to, what the list lets through."""

from __future__ import annotations

import socket

import pytest

from backends.base import AddressRefused, RemoteUnreachable
from backends.reach import Address, Reach, is_loopback


@pytest.mark.parametrize("typed, meant", [
    ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"), ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
    ("https://api.example.com/v1/", "https://api.example.com/v1"), ("https://api.example.com:443/v1", "https://api.example.com/v1"),
    ("http://box:8000/v1/chat/completions", "http://box:8000/v1"), ("http://box/v1/models", "http://box/v1"),
    ("https://Example.COM/api/v1", "https://example.com/api/v1"), ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
    ("  http://box:80  ", "http://box/v1"), ("https://bücher.example/v1", "https://xn--bcher-kva.example/v1")])
def test_an_address_is_what_a_person_means(typed, meant):
    assert str(Address.parse(typed)) == meant


@pytest.mark.parametrize("typed", [
    "", "box:8000", "ftp://box/v1", "file:///etc/passwd", "http://", "http:///v1", "http://user:pw@box/v1", "http://box@evil/v1",
    "http://box/v1?key=1", "http://box/v1#x", "http://box:99999/v1", "http://box:x/v1", "http://[::1/v1", "http://a b/v1",
    "http://box\r\nhost: evil/v1", "http://box\\@evil/v1", "gopher://127.0.0.1:6379/_", "http://\x00/"])
def test_what_is_no_address_is_refused(typed):
    with pytest.raises(AddressRefused):
        Address.parse(typed)


PRIVATE = ["127.0.0.1", "127.8.9.1", "::1", "10.0.0.5", "172.16.0.1", "192.168.1.1", "fd00::1", "100.64.0.1", "::ffff:127.0.0.1",
           "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::1"]
NOBODY = ["169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "0.0.0.0", "::", "fe80::1", "224.0.0.1", "ff02::1", "240.0.0.1",
          "255.255.255.255"]
PUBLIC = ["8.8.8.8", "2606:4700:4700::1111", "1.1.1.1", "64:ff9b::808:808"]


def allowed(reach: Reach, ip: str) -> bool:
    return not reach.refusal("host", 80, ip)


@pytest.mark.parametrize("ip", PRIVATE)
def test_private_addresses_need_a_server_of_ours_on_loopback(ip):
    assert not allowed(Reach(), ip) and allowed(Reach(private=True), ip)


@pytest.mark.parametrize("ip", NOBODY)
def test_what_is_no_servers_address_only_the_list_lets_through(ip):
    assert not allowed(Reach(private=True), ip) and allowed(Reach(allowed=("host",)), ip)


@pytest.mark.parametrize("ip", PUBLIC)
def test_public_addresses_are_within_reach(ip):
    assert allowed(Reach(), ip)


@pytest.mark.parametrize("entry, host, port, ip, passes", [
    ("box", "box", 80, "10.0.0.1", True), ("BOX", "box", 80, "10.0.0.1", True), ("box:8000", "box", 8000, "10.0.0.1", True),
    ("box:8000", "box", 8001, "10.0.0.1", False), ("box", "other", 80, "10.0.0.1", False), ("10.0.0.0/8", "x", 80, "10.9.9.9", True),
    ("10.0.0.0/8", "x", 80, "192.168.0.1", False), ("10.0.0.1", "x", 80, "10.0.0.1", True), ("10.0.0.1:80", "x", 80, "10.0.0.1", True),
    ("10.0.0.1:80", "x", 81, "10.0.0.1", False), ("[::1]:80", "::1", 80, "::1", True), ("::1", "x", 80, "::1", True),
    ("fd00::/8", "x", 1, "fd12::1", True), ("fd00::/8", "x", 1, "10.0.0.1", False)])
def test_the_list_names_hosts_ports_and_networks(entry, host, port, ip, passes):
    assert (not Reach(allowed=(entry,)).refusal(host, port, ip)) is passes


def answers(*addresses):
    return lambda host, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]


def test_a_name_counts_by_everything_it_resolves_to(monkeypatch):
    where = Address.parse("http://inside.example:8000/v1")
    for found, passes in ((["8.8.8.8"], True), (["10.0.0.1"], False), (["8.8.8.8", "127.0.0.1"], False)):
        monkeypatch.setattr(socket, "getaddrinfo", answers(*found))
        if passes:
            assert len(Reach().resolve(where)) == len(found)
        else:
            with pytest.raises(AddressRefused, match="private network") as caught:
                Reach().resolve(where)
            assert caught.value.evidence["resolved"] == found[-1] and "remote_hosts" in caught.value.remedy


def test_a_number_that_means_loopback_is_loopback():
    """2130706433 and 0x7f.1 are ways to write 127.0.0.1."""
    for host in ("2130706433", "0x7f.1", "localhost"):
        with pytest.raises((AddressRefused, RemoteUnreachable)):
            Reach().resolve(Address.parse(f"http://{host}:9/v1"))


def test_what_was_judged_is_what_is_connected_to(monkeypatch):
    """A name that answers otherwise at the second look (rebinding) is looked at once only."""
    server = socket.create_server(("127.0.0.1", 0))
    port, looks = server.getsockname()[1], []

    def resolve(host, number, **_):
        looks.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1" if len(looks) == 1 else "10.255.255.1", number))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    made = Reach(private=True).connect(Address.parse(f"http://rebind.example:{port}/v1"), 5)
    assert made.getpeername() == ("127.0.0.1", port) and looks == ["rebind.example"]
    made.close()
    server.close()


def test_nobody_there_is_said_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(RemoteUnreachable, match="Nobody answers") as caught:
        Reach(private=True).connect(Address.parse(f"http://127.0.0.1:{port}/v1"), 2)
    assert "refused" in str(caught.value.evidence["reason"]).lower()


@pytest.mark.parametrize("host, inside", [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
                                          ("192.168.0.2", False), ("box", False)])
def test_which_addresses_to_listen_on_stay_here(host, inside):
    assert is_loopback(host) is inside


def test_a_reach_does_not_show_its_keys():
    assert "secret" not in repr(Reach(key=lambda origin: "secret"))
