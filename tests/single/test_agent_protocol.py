"""Connections between the driver and agents: only the job's own frames are accepted, each once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.agent import driver_file, protocol
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.agent.protocol import MAX_FRAME_BYTES, Channel, ProtocolError
from hvdtrain.errors import UserError

SECRET = b"s" * 32
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Wire:
    """A proxy between an agent and the driver that passes on, records and alters frames."""

    def __init__(self) -> None:
        self.driver: Channel
        self.agent: Channel
        self.to_driver: asyncio.StreamWriter
        self.frames: list[bytes] = []


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(1 << 16):
        writer.write(block)
    writer.close()


async def _connected(secret: bytes = SECRET) -> Wire:
    """Connect an agent, whose secret is `secret`, to a driver through a proxy.

    The proxy passes on everything that the driver sends, and the agent's nonce.
    """
    wire, accepted = Wire(), asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(await protocol.accept(reader, writer, SECRET))

    server = await asyncio.start_server(serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    tasks = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_driver, wire.to_driver = await asyncio.open_connection("127.0.0.1", port)
        tasks.append(asyncio.create_task(_pass_on(from_driver, writer)))
        wire.to_driver.write(await reader.readexactly(len(protocol.PREAMBLE) + 32))
        while head := await reader.read(36):
            wire.frames.append(head + await reader.readexactly(int.from_bytes(head[:4], "big")))

    proxied = await asyncio.start_server(proxy, "127.0.0.1")
    where = proxied.sockets[0].getsockname()[1]
    wire.agent = await protocol.connect("127.0.0.1", where, secret, 5)
    wire.driver = await accepted
    return wire


async def _frame(wire: Wire, message: protocol.Message) -> bytes:
    """Return the frame by which the agent sends a message; the driver has not received it."""
    count = len(wire.frames)
    wire.agent.send(message)
    while len(wire.frames) == count:
        await asyncio.sleep(0.001)
    return wire.frames[-1]


def _run(test: Callable[[], Awaitable[None]]) -> None:
    async def within_limit() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(within_limit())


def test_messages_arrive_in_both_directions_in_order() -> None:
    async def test() -> None:
        wire = await _connected()
        for number in range(3):
            wire.to_driver.write(await _frame(wire, {"number": number, "text": "ü\n"}))
            wire.driver.send({"number": -number})
        for number in range(3):
            assert await wire.driver.receive() == {"number": number, "text": "ü\n"}
            assert await wire.agent.receive() == {"number": -number}

    _run(test)


def test_wrong_secret_is_rejected_by_both_sides() -> None:
    async def test() -> None:
        wire = await _connected(secret=b"x" * 32)
        wire.to_driver.write(await _frame(wire, {"type": "register"}))
        wire.driver.send({"type": "start", "command": ["true"]})
        for side in (wire.driver, wire.agent):
            with pytest.raises(ProtocolError, match="secret"):
                await side.receive()

    _run(test)


def test_frame_is_rejected_when_it_is_sent_again() -> None:
    async def test() -> None:
        wire = await _connected()
        frame = await _frame(wire, {"type": "exit"})
        wire.to_driver.write(frame + frame)
        assert await wire.driver.receive() == {"type": "exit"}
        with pytest.raises(ProtocolError, match="secret"):
            await wire.driver.receive()

    _run(test)


def test_frame_of_another_connection_is_rejected() -> None:
    async def test() -> None:
        first, second = await _connected(), await _connected()
        second.to_driver.write(await _frame(first, {"type": "exit"}))
        with pytest.raises(ProtocolError, match="secret"):
            await second.driver.receive()

    _run(test)


@pytest.mark.parametrize("order", [(1, 0), (1,)], ids=["reordered", "omitted"])
def test_frame_out_of_order_is_rejected(order: tuple[int, ...]) -> None:
    async def test() -> None:
        wire = await _connected()
        frames = [await _frame(wire, {"number": number}) for number in range(2)]
        wire.to_driver.write(b"".join(frames[i] for i in order))
        with pytest.raises(ProtocolError, match="secret"):
            await wire.driver.receive()

    _run(test)


def test_altered_frame_is_rejected() -> None:
    async def test() -> None:
        wire = await _connected()
        frame = await _frame(wire, {"number": 1})
        wire.to_driver.write(frame.replace(b"1", b"2"))
        with pytest.raises(ProtocolError, match="secret"):
            await wire.driver.receive()

    _run(test)


def test_frame_sent_back_to_its_sender_is_rejected() -> None:
    async def test() -> None:
        wire = await _connected()
        # The driver's first frame, as another driver would send it to this one.
        body = json.dumps({"type": "finish"}).encode()
        mirrored = protocol._digest(wire.driver._send_key, 0, body)
        wire.to_driver.write(len(body).to_bytes(4, "big") + mirrored + body)
        with pytest.raises(ProtocolError, match="secret"):
            await wire.driver.receive()

    _run(test)


def test_oversized_frame_is_rejected_before_it_is_read() -> None:
    async def test() -> None:
        wire = await _connected()
        wire.to_driver.write((MAX_FRAME_BYTES + 1).to_bytes(4, "big") + bytes(32))
        with pytest.raises(ProtocolError, match="a frame of"):
            await wire.driver.receive()
        with pytest.raises(ValueError, match="bytes"):
            wire.agent.send({"text": "x" * MAX_FRAME_BYTES})

    _run(test)


@pytest.mark.parametrize("cut", [0, 10, 40])
def test_cut_connection_ends_a_receive(cut: int) -> None:
    async def test() -> None:
        wire = await _connected()
        wire.to_driver.write((await _frame(wire, {"number": 1}))[:cut])
        wire.to_driver.close()
        with pytest.raises(ConnectionResetError):
            await wire.driver.receive()

    _run(test)


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n" + bytes(99), b""])
def test_other_programs_are_not_accepted(greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_SECONDS", 0.2)

    async def test() -> None:
        found = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                found.set_result(await protocol.accept(reader, writer, SECRET))
            except OSError as error:
                found.set_exception(error)

        server = await asyncio.start_server(serve, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(greeting)
        with pytest.raises((ProtocolError, TimeoutError)):
            await found

    _run(test)


def test_tls_hides_messages_and_accepts_only_the_drivers_certificate() -> None:
    async def test() -> None:
        tls, certificate = protocol.new_certificate()
        accepted: list[Channel] = []
        seen = bytearray()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.append(await protocol.accept(reader, writer, SECRET))

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers, to_driver = await asyncio.open_connection("127.0.0.1", port)
            answered = asyncio.create_task(_pass_on(answers, writer))
            while block := await reader.read(1 << 16):
                seen.extend(block)
                to_driver.write(block)
            await answered

        server = await asyncio.start_server(serve, "127.0.0.1", ssl=tls)
        port = server.sockets[0].getsockname()[1]
        proxied = await asyncio.start_server(proxy, "127.0.0.1")
        where = proxied.sockets[0].getsockname()[1]
        agent = await protocol.connect("127.0.0.1", where, SECRET, 5, certificate)
        agent.send({"text": "of a rank"})
        while not accepted:
            await asyncio.sleep(0.001)
        assert await accepted[0].receive() == {"text": "of a rank"}
        assert seen and b"of a rank" not in seen
        for other in (protocol.new_certificate()[1], ""):
            with pytest.raises(OSError):
                await protocol.connect("127.0.0.1", port, SECRET, 2, other)
        assert len(accepted) == 1

    _run(test)


# --- RUN/.driver.json --------------------------------------------------------------------------

CONTENT = DriverFile(["10.0.0.1"], 1234, driver_file.new_secret(), "launch")


def test_driver_file_is_read_as_written_and_only_by_its_user(tmp_path: Path) -> None:
    assert driver_file.read(tmp_path) is None
    driver_file.write(tmp_path, CONTENT)
    assert driver_file.read(tmp_path) == CONTENT
    assert (tmp_path / driver_file.NAME).stat().st_mode & 0o777 == 0o600
    assert CONTENT.secret not in repr(CONTENT)


def test_driver_file_of_a_host_with_many_addresses_is_read(tmp_path: Path) -> None:
    addresses = [f"192.168.{n // 250}.{n % 250}" for n in range(5000)]
    certificate = protocol.new_certificate()[1]
    content = replace(CONTENT, addresses=addresses, certificate=certificate)
    driver_file.write(tmp_path, content)
    found = driver_file.read(tmp_path)
    assert found is not None and (found.certificate, found.key) == (certificate, CONTENT.key)
    assert found.addresses == addresses[: len(found.addresses)] and len(found.addresses) >= 500


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o655])
def test_driver_file_others_can_read_is_made_private_again(
    tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    driver_file.write(tmp_path, CONTENT)
    path = tmp_path / driver_file.NAME
    path.chmod(mode)
    assert driver_file.read(tmp_path) == driver_file.read(tmp_path) == CONTENT
    assert path.stat().st_mode & 0o777 == 0o600
    said = capsys.readouterr().err
    assert said.count("could be read by other users") == 1 and CONTENT.secret not in said


@pytest.mark.parametrize("mode", [0o602, 0o606, 0o620])
def test_driver_file_others_can_write_is_not_trusted(tmp_path: Path, mode: int) -> None:
    driver_file.write(tmp_path, CONTENT)
    (tmp_path / driver_file.NAME).chmod(mode)
    with pytest.raises(UserError, match="0600"):
        driver_file.read(tmp_path)


def test_driver_file_behind_a_link_is_not_read(tmp_path: Path) -> None:
    driver_file.write(tmp_path, CONTENT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / driver_file.NAME).symlink_to(tmp_path / driver_file.NAME)
    with pytest.raises(OSError, match="symbolic links"):
        driver_file.read(tmp_path / "other")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": 1}', '{"addresses": 3}'])
def test_incomplete_driver_file_counts_as_absent(tmp_path: Path, text: str) -> None:
    driver_file.write(tmp_path, CONTENT)
    (tmp_path / driver_file.NAME).write_text(text)
    assert driver_file.read(tmp_path) is None
