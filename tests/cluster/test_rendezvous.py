"""The launcher of an elastic job: access control, number of requests, choice of network."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.support.cluster import REPOSITORY, SUBNET, Cluster
from tests.support.faults import ElasticJob

RANKS = 4
ONE_EACH: dict[str, Any] = {"hosts": "node1:1 node2:1", "np": 2}
FAST = "10.209.0"
REFUSED = r"refused a request of \S+: '(\w+ \S+) HTTP/1.1' is not signed.*; (\d+) refused so far"
# Return the status of a request from another host, with a body and, given a key, a signature.
REQUEST = """
import hashlib, hmac, http.client, sys
host, port, key, method, path = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port), timeout=5)
body = b"x" * 100 if method in ("PUT", "POST") else b""
digest = hashlib.sha256(body).hexdigest()
signature = hmac.new(key.encode(), f"{method} {path} {digest}".encode(), "sha256").hexdigest()
headers = {"Horovod-Signature": f"{digest} {signature}"} if key else {}
connection.request(method, path, body, headers)
print(connection.getresponse().status)
"""


def test_launcher_refuses_requests_without_its_secret(
    cluster: Cluster, job: Callable[..., ElasticJob]
) -> None:
    running = job(**ONE_EACH)
    running.wait_for_step(5)
    environment = psutil.Process(running.process(0).pid).environ()
    host, port = (environment[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    secret = environment.get("HOROVOD_RENDEZVOUS_SECRET", "")
    requests = {
        "GET /join/0": "",
        "GET /news/0": "",
        "PUT /global/0": "",
        "POST /global/0/2/0": "",
        "HEAD /README.md": "",
        "GET /join/1": "0" * 64,
    }

    def ask(key: str, request: str) -> str:
        arguments = [host, port, key, *request.split()]
        return cluster.run("node2", ["python", "-c", REQUEST, *arguments]).stdout.strip()

    answers = {request: ask(key, request) for request, key in requests.items()}
    assert set(answers.values()) == {str(http.client.FORBIDDEN)}, answers
    assert ask(secret, "GET /news/0") == str(http.client.OK)
    running.wait_for_more(5, 30)
    assert {line["world_size"] for line in running.lines()} == {2}
    done = running.end()
    # The first request is logged, the requests of the next minute are not.
    assert re.findall(REFUSED, done.stderr) == [("GET /join/0", "1")], done


def test_requests_of_a_generation_grow_linearly_with_world_size(
    job: Callable[..., ElasticJob],
) -> None:
    counting = REPOSITORY / "tests/support/counting"
    running = job(env={"PYTHONPATH": f"{counting}:{REPOSITORY}"})
    running.wait_for_step(5)
    done = running.end()
    found = json.loads(done.stdout.partition("requests by scope: ")[2].splitlines()[0])
    # Before it exchanges addresses, a rank asks for its ranks, repeatedly while other ranks start.
    assert set(found) - {"GET news"} == {"POST join", "POST global"}, found
    assert found["POST global"] <= 2 * RANKS, found


@contextlib.contextmanager
def _second_network(cluster: Cluster) -> Iterator[None]:
    """Another link between the hosts, with other interface names."""
    names = {"node1": "fast1", "node2": "ib0"}
    cluster.cable(names, FAST)
    try:
        yield
    finally:
        cluster.run("node1", ["ip", "link", "delete", "fast1"])


def _networks(cluster: Cluster, job: ElasticJob) -> set[str]:
    """Return the networks, such as 10.207.0, over which ranks are connected to other hosts."""
    found = set()
    for name in cluster.names:
        pids = {process.pid for process in cluster.ranks(name)}
        assert pids, job.job.output()
        table = cluster.run(name, ["ss", "-Htn", "state", "established"]).stdout
        for line in table.splitlines():
            own, peer = (word.rpartition(":") for word in line.split()[2:4])
            if own[0] != peer[0] and "22" not in (own[2], peer[2]):
                found.add(own[0].rpartition(".")[0])
    return found


@pytest.mark.parametrize("by", ["option", "variable"])
def test_network_named_by_the_user_is_used(
    cluster: Cluster, job: Callable[..., ElasticJob], by: str
) -> None:
    with _second_network(cluster):
        if by == "option":
            running = job(**ONE_EACH, options="--network-interfaces ib0,fast1")
        else:
            running = job(**ONE_EACH, env={"HOROVOD_GLOO_IFACE": "ib0,fast1"})
        running.wait_for_step(3)
        networks = _networks(cluster, running)
        running.end()
    assert networks == {FAST}, networks


def test_host_joins_despite_loopback_name_and_other_interface_names(
    cluster: Cluster, job: Callable[..., ElasticJob]
) -> None:
    # As on Debian, where a host's own name resolves to loopback.
    names = f"127.0.0.1 localhost\n127.0.1.1 node1\n{SUBNET}.2 node2\n"
    cluster.file("node1", "/run/hosts").write_text(names)
    cluster.run("node1", ["mount", "--bind", "/run/hosts", "/etc/hosts"])
    rename = "ip link set {0} down; ip link set {0} name {1}; ip link set {1} up".format
    cluster.run("node2", ["sh", "-c", rename("eth0", "ens5")])
    try:
        running = job(hosts="node1:1", np=1)
        running.wait_for_step(5)
        running.set_hosts("node1:1 node2:1")
        running.wait_for_world(2, 30)
        running.end()
    finally:
        cluster.run("node1", ["umount", "/etc/hosts"])
        cluster.run("node2", ["sh", "-c", rename("ens5", "eth0")])
