"""Authenticated connection between the driver and an agent: frames of JSON over TCP.

    both sides   PREAMBLE and 32 random bytes, the nonce
    then frames  length (4 bytes), HMAC-SHA256 (32 bytes), JSON object of that length

Both sides derive one key per direction from the job's secret and both nonces. The HMAC covers the
frame's number in its direction, so a frame of another connection, a repeated, reordered or altered
frame, and a frame sent back to its sender are all rejected. Nothing is unpickled. Neither the job's
secret nor the environment of a user is sent. Frames are encrypted with TLS on request only.

Ranks send copies of their shards over such connections too (parallel/copies.py). Their bytes follow
a frame that contains the SHA-256 of these bytes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import ssl
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.untrusted import parse_json

PREAMBLE = b"hvdtrain agent 1\n"
NONCE_BYTES = 32
MAX_FRAME_BYTES = 1 << 20
HANDSHAKE_SECONDS = 5.0
# Interval between two heartbeats, and the longest silence before a connection is given up.
BEAT_SECONDS = 0.25
SILENT_SECONDS = 3.0
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_DIGEST_BYTES = 32
_TLS_NAME = "driver.hvdtrain"  # in its certificate, which agents know from the driver's file
# Repeat a lost packet several times without longer and longer pauses (tcp(7); Linux 2.6.34):
# otherwise a link that failed for 0.7 s looks like one that failed for 1.4 s.
_TCP_THIN_LINEAR_TIMEOUTS = 16
# Of a rank's environment: the name of the Unix socket of its agent, which `connect_to_agent` uses.
AGENT_VARIABLE = "HVDTRAIN_AGENT"
# The first byte from such a process: what it is.
RANK, WATCHDOG = b"r", b"w"

Message = dict[str, Any]


class ProtocolError(OSError):
    """The other side does not have the job's secret, or the connection was tampered with."""


class Channel:
    """One side of a connection after the exchange of nonces; use `connect` or `accept`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        send_key: bytes,
        receive_key: bytes,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0

    @property
    def own_address(self) -> str:
        """This side's IP address of the connection."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        return str(self._writer.get_extra_info("peername")[0])

    def waiting_bytes(self) -> int:
        """Bytes that `send` has queued because the other side reads slowly."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message.

        Raises:
            ValueError: it is longer than MAX_FRAME_BYTES.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(body)} bytes")
        digest = _digest(self._send_key, self._sent, body)
        self._sent += 1
        self._writer.write(_LENGTH.pack(len(body)) + digest + body)

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            ProtocolError: a frame is too long, or was not sent by the other side now.
            OSError: the connection was closed.
        """
        try:
            head = await self._reader.readexactly(_LENGTH.size + _DIGEST_BYTES)
            (length,) = _LENGTH.unpack_from(head)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes")
            body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the connection was closed") from None
        digest = _digest(self._receive_key, self._received, body)
        if not hmac.compare_digest(digest, head[_LENGTH.size :]):
            raise ProtocolError("a frame is not signed with this job's secret")
        self._received += 1
        try:
            message = parse_json(body)
        except ValueError as error:
            raise ProtocolError(f"a frame is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ProtocolError("a frame is not a JSON object")
        return message

    def send_content(self, content: bytes | memoryview) -> None:
        """Queue bytes outside of frames; an earlier message contains their SHA-256."""
        self._writer.write(content)

    async def receive_content(self, into: memoryview) -> None:
        """Fill `into` with bytes from `send_content`, whose SHA-256 the caller checks.

        Raises:
            OSError: the connection was closed.
        """
        while into:
            received = await self._reader.read(len(into))
            if not received:
                raise ConnectionResetError("the connection was closed")
            into[: len(received)] = received
            into = into[len(received) :]

    async def flush(self) -> None:
        """Wait until the kernel has all that was sent; raises OSError if the connection broke."""
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection after what was sent."""
        self._writer.close()

    def abort(self) -> None:
        """Close the connection at once; a `receive` that waits raises OSError."""
        self._writer.transport.abort()


async def connect(
    address: str, port: int, secret: bytes, seconds: float, certificate: str = ""
) -> Channel:
    """Connect an agent to the driver within `seconds`.

    Args:
        certificate: the driver's (PEM), for TLS; "": no TLS.

    Raises:
        OSError: nothing responds as a driver does. A wrong secret is noticed with the first frame.
    """
    try:
        return await asyncio.wait_for(_connect(address, port, secret, certificate), seconds)
    except asyncio.TimeoutError:
        raise TimeoutError(f"{address}:{port} does not respond") from None


async def _connect(address: str, port: int, secret: bytes, certificate: str) -> Channel:
    if certificate:
        trusted = ssl.create_default_context(cadata=certificate)
        opened = asyncio.open_connection(address, port, ssl=trusted, server_hostname=_TLS_NAME)
    else:
        opened = asyncio.open_connection(address, port)
    reader, writer = await opened
    try:
        return await _exchange_nonces(reader, writer, secret, is_driver=False)
    except BaseException:
        writer.transport.abort()
        raise


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> Channel:
    """Accept an agent's connection in the driver.

    Raises:
        OSError: the other side does not behave as an agent, or is too slow.
    """
    exchange = _exchange_nonces(reader, writer, secret, is_driver=True)
    try:
        return await asyncio.wait_for(exchange, HANDSHAKE_SECONDS)
    except asyncio.TimeoutError:
        raise TimeoutError("no nonce") from None


async def _exchange_nonces(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, is_driver: bool
) -> Channel:
    connection: socket.socket = writer.get_extra_info("socket")
    for option in (socket.TCP_NODELAY, _TCP_THIN_LINEAR_TIMEOUTS):
        connection.setsockopt(socket.IPPROTO_TCP, option, 1)
    own = os.urandom(NONCE_BYTES)
    writer.write(PREAMBLE + own)
    try:
        received = await reader.readexactly(len(PREAMBLE) + NONCE_BYTES)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the connection was closed") from None
    if not received.startswith(PREAMBLE):
        raise ProtocolError("another program, or another version of hvdtrain")
    other = received[len(PREAMBLE) :]
    nonces = own + other if is_driver else other + own
    to_agent = hmac.digest(secret, b"driver to agent" + nonces, "sha256")
    to_driver = hmac.digest(secret, b"agent to driver" + nonces, "sha256")
    keys = (to_agent, to_driver) if is_driver else (to_driver, to_agent)
    return Channel(reader, writer, *keys)


def new_certificate() -> tuple[ssl.SSLContext, str]:
    """Return what a driver serves TLS with, and its certificate (PEM). No copy of the key is kept.

    Raises:
        UserError: the package cryptography is missing.
    """
    import tempfile  # agents need neither
    from datetime import datetime, timedelta, timezone

    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UserError(
            "--tls requires the package cryptography: pip install 'hvdtrain[tls]'"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _TLS_NAME)])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        # Hosts' clocks differ, and a run may last for months.
        .not_valid_before(now - timedelta(days=365))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_TLS_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(
        prefix="hvdtrain-"
    ) as directory:  # accessible to this user only
        file = Path(directory, "driver.pem")
        file.write_bytes(private + pem)
        context.load_cert_chain(file)
    return context, pem.decode()


def connect_to_agent(role: bytes) -> socket.socket:
    """Connect a process of a rank, RANK or WATCHDOG, to the agent of its host; see agent.py.

    Raises:
        OSError: no agent is reached.
    """
    name = os.environ.get(AGENT_VARIABLE)
    if not name:
        raise OSError(f"{AGENT_VARIABLE} is not set")
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        agent.connect(f"\0{name}")
        agent.sendall(role)
    except OSError:
        agent.close()
        raise
    return agent


def rendezvous_secret(secret: bytes) -> str:
    """Return the secret of the ranks' rendezvous, which each host derives for itself."""
    return hmac.digest(secret, b"rendezvous", "sha256").hex()


def _digest(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + body, "sha256")
