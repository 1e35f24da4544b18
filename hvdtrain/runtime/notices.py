"""Notices that this host is about to be reclaimed, such as for a cloud's spot instances.

A thread polls for them with a timeout, so a source that hangs does not delay a step.

- AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html,
  by tokens (IMDSv2): /latest/meta-data/spot/instance-action is 404 until there is a notice;
- Google: https://cloud.google.com/compute/docs/instances/create-use-preemptible
  (instance/preempted, TRUE or FALSE);
- Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events, an event that
  names this machine, of a kind that ends its processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from hvdtrain.errors import require
from hvdtrain.log import logger

EVERY_SECONDS = 2.0
_REQUEST_SECONDS = 2.0
_COMMAND_SECONDS = 10.0
_METADATA = "http://169.254.169.254"
_AWS_TOKEN = ("X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token")
_AZURE_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
_LONGEST_ANSWER = 1 << 20

# Whether there is a notice now; may raise any exception if that is unknown.
Source = Callable[[], bool]


def parse_source(text: str, metadata: str = _METADATA) -> Source:
    """Return the source `aws`, `gcp`, `azure`, `file:PATH`, `command:COMMAND` or an http(s) URL.

    Args:
        metadata: address of the cloud's metadata service.

    Raises:
        ValueError: `text` is none of these.
    """
    clouds = {"aws": _aws, "gcp": _gcp, "azure": _azure}
    kind, _, rest = text.partition(":")
    known = text in clouds or (kind in ("file", "command", "http", "https") and rest.strip("/ "))
    require(
        bool(known),
        "preempt.notice is aws, gcp, azure, file:PATH, command:COMMAND or an http address, not "
        f"{text!r}",
    )
    if text in clouds:
        return partial(clouds[text], metadata)
    if kind == "file":
        return Path(rest).exists
    return partial(_succeeds, rest) if kind == "command" else partial(_answers, text)


def watch(text: str, source: Source, on_notice: Callable[[str], None]) -> None:
    """Poll a source every 2 s in a thread, until there is a notice.

    Args:
        text: name of the source in messages.
        on_notice: called with a message, in that thread; called again if it raises an error.
    """
    threading.Thread(
        target=_watch, args=(text, source, on_notice), name="notices", daemon=True
    ).start()


def _watch(text: str, source: Source, on_notice: Callable[[str], None]) -> None:
    warned = False
    while True:
        try:
            if source():
                on_notice(f"notice from {text}: this host is about to be reclaimed")
                return
            warned = False
        except Exception as error:  # after any error, the next answer may be a notice
            if not warned:
                logger.warning("preempt.notice %s: %s; retrying", text, error)
            warned = True
        time.sleep(EVERY_SECONDS)


def _request(address: str, headers: Mapping[str, str], method: str = "GET") -> tuple[int, str]:
    """Return the status and text of a response.

    Raises:
        OSError: there is no response.
    """
    # Imported on demand: commands that must be fast import this module to check a configuration.
    import urllib.error
    import urllib.request

    request = urllib.request.Request(address, headers=dict(headers), method=method)
    # Metadata belong to this host: a proxy would return its own host's metadata.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_REQUEST_SECONDS) as answer:
            return answer.status, answer.read(_LONGEST_ANSWER).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def _expect(address: str, status: int) -> None:
    require(status == 200, f"{address} returned status {status}")


def _aws(metadata: str) -> bool:
    asked, given = _AWS_TOKEN
    status, token = _request(f"{metadata}/latest/api/token", {asked: "60"}, "PUT")
    _expect(f"{metadata}/latest/api/token", status)
    address = f"{metadata}/latest/meta-data/spot/instance-action"
    status, _ = _request(address, {given: token})
    if status != 404:
        _expect(address, status)
    return status == 200


def _gcp(metadata: str) -> bool:
    address = f"{metadata}/computeMetadata/v1/instance/preempted"
    status, text = _request(address, {"Metadata-Flavor": "Google"})
    _expect(address, status)
    return text.strip() == "TRUE"


def _azure(metadata: str) -> bool:
    header = {"Metadata": "true"}
    address = f"{metadata}/metadata/scheduledevents?api-version=2020-07-01"
    status, text = _request(address, header)
    _expect(address, status)
    events = [e for e in json.loads(text)["Events"] if e.get("EventType") in _AZURE_ENDS]
    if not events:
        return False
    address = f"{metadata}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    status, name = _request(address, header)
    _expect(address, status)
    return any(name.strip() in event.get("Resources", []) for event in events)


def _answers(address: str) -> bool:
    return _request(address, {})[0] == 200


def _succeeds(command: str) -> bool:
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(_COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including the shell's children
        with suppress(subprocess.TimeoutExpired):  # SIGKILL does not end it
            process.wait(_COMMAND_SECONDS)
        raise OSError(f"it ran longer than {_COMMAND_SECONDS:.0f} s") from None
    if code in (126, 127):
        raise OSError(f"exit code {code}: the command cannot be started")
    return code == 0
