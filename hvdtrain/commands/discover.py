"""`hvdtrain discover`: a script for horovodrun's --host-discovery-script."""

from __future__ import annotations

import argparse

from hvdtrain.commands.arguments import seconds
from hvdtrain.launch.discovery import DEFAULT_PROBE, answering, parse_probe
from hvdtrain.launch.hostfile import read_hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_host_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=2.0,
        metavar="S",
        help="maximum number of seconds to wait for a host (default: %(default)s)",
    )


def add_host_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the arguments that name the hosts and the way to probe them."""
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument("--hosts", metavar="LIST", help="such as node1:8,node2:8")
    source.add_argument(
        "--hostfile", metavar="FILE", help="lines such as 'node1 slots=8'; read again each time"
    )
    source.add_argument("--slurm", action="store_true", help="use the nodes of this Slurm job")
    parser.add_argument(
        "--probe",
        default=DEFAULT_PROBE,
        metavar="ssh|tcp:PORT",
        help="how hosts are checked: a login over ssh, or a port that must accept connections "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    probe = parse_probe(args.probe)
    hosts = read_hosts(args.hosts, args.hostfile, args.slurm)
    # Printing no host is valid too: Horovod's driver gives up if the script fails.
    for host in answering(hosts, probe, args.timeout):
        print(host)
    return 0
