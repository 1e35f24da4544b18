"""A real S3 server on this machine (moto's), which checks credentials."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import boto3

BUCKET = "training"
_START_SECONDS = 60.0
_SETUP_CALLS = 3  # without credentials: the user, its rights, its key
_POLICY = """{"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}"""


@dataclass(frozen=True)
class S3Server:
    """The server, with one bucket.

    Args:
        env: environment with the server's address and credentials.
    """

    client: Any
    env: dict[str, str]

    def objects(self, below: str = "") -> dict[str, int]:
        """Name -> size of the objects in the bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=below)
        return {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", ())}

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def flip_last_bit(self, key: str) -> None:
        content = bytearray(self.get(key))
        content[-1] ^= 1
        self.put(key, bytes(content))


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Start a server; its address and credentials are in os.environ meanwhile."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with open(directory / "s3.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(_SETUP_CALLS)},
            stdout=log,
            stderr=log,
        )
    try:
        _wait_for(port, server)
        env = _env(url, _new_key(url))
        with mock.patch.dict(os.environ, env):
            client = _client("s3", url, env)
            client.create_bucket(Bucket=BUCKET)
            yield S3Server(client, env)
    finally:
        server.kill()
        server.wait(10)


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline, "no S3 server"
            time.sleep(0.05)


def _new_key(url: str) -> dict[str, str]:
    iam = _client("iam", url, _env(url, {"AccessKeyId": "none", "SecretAccessKey": "none"}))
    iam.create_user(UserName="trainer")
    iam.put_user_policy(UserName="trainer", PolicyName="s3", PolicyDocument=_POLICY)
    return dict(iam.create_access_key(UserName="trainer")["AccessKey"])


def _env(url: str, key: dict[str, str]) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _client(service: str, url: str, env: dict[str, str]) -> Any:
    return boto3.client(
        service,
        endpoint_url=url,
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env["AWS_DEFAULT_REGION"],
    )
