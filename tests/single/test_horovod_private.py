"""Private parts of Horovod that hvdtrain relies on: a test fails if Horovod changes one."""

from __future__ import annotations

from unittest.mock import patch

from horovod.runner.elastic.discovery import HostDiscoveryScript

from hvdtrain.elastic.processes import find_hosts


def test_discovery_script_is_run_without_horovod() -> None:
    discovery = HostDiscoveryScript("echo node1; echo node2:3", 4)
    with patch.object(discovery, "find_available_hosts_and_slots") as slow:
        assert find_hosts(discovery) == {"node1": 4, "node2": 3}
    assert not slow.called, "Horovod runs the script, and starts a new Python for each call"
