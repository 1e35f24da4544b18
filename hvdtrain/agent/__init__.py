"""Agents: one small process per host that starts and ends the host's ranks for the driver.

    protocol.py      an authenticated connection between the driver and an agent
    driver_file.py   RUN/.driver.json: where the driver is, and the job's secret
    agent.py         the agent: one process per host
    guard.py         parent of one rank, forked by the agent; nothing of the rank outlives it
    hub.py           the driver's side: all agents, their hosts and processes
    failure_detector.py  decides when a silent host counts as gone
    output.py        the ranks' output on the driver's own output
    started.py       agents that horovodrun starts, over ssh
    invitation.py    what such an agent reads from stdin

An agent imports neither torch nor Horovod: it starts at once and needs little memory.
"""
