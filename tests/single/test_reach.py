"""Which hosts a rank cannot connect to: real sockets of this host."""

from __future__ import annotations

import resource
import socket
import threading
from unittest.mock import patch

from hvdtrain.elastic import reach

NOWHERE = ("255.255.255.255", 9)  # the kernel refuses to connect to it


def test_only_hosts_that_do_not_answer_are_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = "127.0.0.1", closed.getsockname()[1]
    with reach.listening() as place:
        assert place is not None and place[0] == "127.0.0.1"
        places = {"here": place, "ended": gone, "parted": NOWHERE}
        assert reach.unreachable(places) == ("parted",)


def test_host_that_does_not_answer_in_time_is_unreachable() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        place = full.getsockname()
        with socket.create_connection(place), patch.object(reach, "_CONNECT_SECONDS", 0.2):
            assert reach.unreachable({"silent": place}) == ("silent",)


def test_more_hosts_than_the_kernel_queues_reach_a_rank() -> None:
    with patch.object(reach, "_BACKLOG", 0), reach.listening() as place:
        assert place is not None
        for _ in range(5):
            assert reach.unreachable({"here": place}) == ()
    assert not [thread for thread in threading.enumerate() if thread.name == "reach"]


def test_lack_of_descriptors_is_not_a_lack_of_connections() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with reach.listening() as place, socket.socket() as last:
        assert place is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, limits[1]))
        try:
            with reach.listening() as none:
                assert none is None
            assert reach.unreachable({"here": place}) == ()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
