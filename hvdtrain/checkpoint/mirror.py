"""A copy of a run's checkpoints in object storage: checkpoint.mirror.

    MIRROR/run.json           the run, and the process that writes
    MIRROR/records/SHA256     chunks of the run's records: metrics.jsonl, events.jsonl, ...
    MIRROR/step_00000100/     the files of a checkpoint, as layout.py describes them, and
        records.json          the chunks of each record at the time of this checkpoint
        complete              uploaded last: without it this is not a checkpoint

Rank 0 does everything: it can read the files of all ranks, because shards of several ranks are
written into one shared directory (format.SharedDirectory). A thread uploads finished checkpoints,
the newest first, and then deletes those that the local rules would delete. A file is compared with
its checksum before and after its upload; files that are complete in the mirror are not sent again.

A mirror belongs to one run, and one process writes at a time: the latest that has written its name
into run.json. An earlier one notices before its next file and stops uploading. Object stores have
no locks, so one file of the earlier process may still arrive; its marker does not.

Training does not depend on the store after the first start: the thread also writes the name, and
what cannot be read or uploaded is logged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Condition, Thread
from typing import Any, TypeVar

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.layout import (
    MARKER,
    STATE,
    SUMS,
    DamagedError,
    checked_sums,
    compare,
    delete,
    directory_name,
    finished,
    hidden_name,
    loss_in,
    loss_of,
    parse_sums,
    retained,
    sha256_of,
    step_of,
)
from hvdtrain.errors import UserError, crash
from hvdtrain.files import sync_directory, write_synced
from hvdtrain.log import logger
from hvdtrain.runtime import heartbeat
from hvdtrain.untrusted import SMALL_FILE_BYTES, checked, is_of, open_regular, parse_json, shown

_CLAIM = "run.json"
_RECORDS = "records"
_LISTED_RECORDS = "records.json"
_PROBE = ".write-test"
# Files of a run that a resumed run continues and that `hvdtrain audit` reads.
RECORDS = (
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "left_metrics.jsonl",
    "ranks.jsonl",
    "left_ranks.jsonl",
    "events.jsonl",
    "wandb.id",
    "mlflow.id",
)
_CHUNK = 8 << 20  # bytes of a record; only the last chunk changes
_READ = 1 << 20  # bytes
# s3fs uploads a file of at least two parts in parts of this size, which its ETag depends on; S3
# accepts 10,000 parts.
_S3_PART = 50 << 20
_S3_MOST_PARTS = 10_000
_S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
_S3_ATTEMPTS = 1  # of s3fs, each with the attempts of botocore
# Four parts of a file are in memory at a time.
_S3: dict[str, Any] = {"config_kwargs": _S3_TIMEOUTS, "max_concurrency": 4}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _S3, "s3a": _S3, "file": {"auto_mkdir": True}}
_DOWNLOADS = 4  # files at a time
# Waits before further attempts of a failed upload.
_RETRY_SECONDS = (1.0, 4.0, 16.0)
_CLOSE_SECONDS = 2.0
_ANSWER_SECONDS = 60.0  # limit for a small object, or a list
_SLOWEST = 1 << 20  # bytes per second; added to this limit for a large object

T = TypeVar("T")


class ObjectStore:
    """Objects below a URL, by name. Errors of any client library are raised as OSError.

    Args:
        url: any that fsspec can write, such as s3://bucket/run.

    Raises:
        UserError: the URL's file system is not installed.
    """

    def __init__(self, url: str) -> None:
        protocol = url.partition("://")[0]
        if find_spec("fsspec") is None:
            raise UserError(_not_installed(url, "fsspec"))
        import fsspec

        options = {"use_listings_cache": False, "skip_instance_cache": True}
        options |= _OPTIONS.get(protocol, {})
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            raise UserError(_not_installed(url, str(error))) from None
        except ValueError as error:
            raise UserError(f"checkpoint.mirror {url}: {error}") from None
        self._in_parts = protocol in ("s3", "s3a")
        if self._in_parts:
            self._fs.retries = _S3_ATTEMPTS
        self._root = root.rstrip("/")
        self.url = url.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if it does not exist."""
        path = f"{self._root}/{name}"
        with self._errors(name):
            try:
                content = bytes(
                    _within_time(
                        partial(self._fs.cat_file, path, start=0, end=SMALL_FILE_BYTES + 1)
                    )
                )
            except FileNotFoundError:
                return None
        if len(content) > SMALL_FILE_BYTES:
            reason = f"it has more than {SMALL_FILE_BYTES} bytes"
            raise OSError(errno.EFBIG, reason, f"{self.url}/{name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, and compare what the store then returns."""
        with self._errors(name):
            _within_time(partial(self._fs.pipe_file, f"{self._root}/{name}", content))
        if self.read(name) != content:
            raise OSError(errno.EIO, "it differs from what was written", f"{self.url}/{name}")

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the size of each object, by name."""
        with self._errors(below):
            where = f"{self._root}/{below}".rstrip("/")
            try:
                found = _within_time(partial(self._fs.find, where, detail=True))
            except FileNotFoundError:
                return {}
        skipped = len(self._root) + 1
        return {path[skipped:]: info["size"] or 0 for path, info in found.items()}

    def delete(self, name: str, recursive: bool = False) -> None:
        """Delete an object, or everything below a name; neither need exist."""
        with self._errors(name), suppress(FileNotFoundError):
            _within_time(partial(self._fs.rm, f"{self._root}/{name}", recursive=recursive))

    def send(self, path: Path, wanted: Mapping[str, Any], name: str) -> int:
        """Upload a file unless the mirror has it already; return the number of bytes sent.

        Args:
            wanted: {"bytes": int, "sha256": str}.

        Raises:
            DamagedError: the local file differs.
            OSError: the upload failed, or what arrived differs.
        """
        sha256, tag = _digests(path)
        compare(path.parent, path.name, wanted, path.stat().st_size, sha256)
        if self._has(name, wanted, tag):
            return 0
        from fsspec.callbacks import Callback

        sent, options, unit = Callback(), dict[str, Any](), int(wanted["bytes"])
        if self._in_parts:
            options["chunksize"] = _part_bytes(unit)
            unit = min(unit, _S3["max_concurrency"] * options["chunksize"])
        with self._errors(name):
            put = partial(
                self._fs.put_file, str(path), f"{self._root}/{name}", callback=sent, **options
            )
            _within_time(put, _ANSWER_SECONDS + unit / _SLOWEST, lambda: sent.value)
        if not self._has(name, wanted, tag):
            raise OSError(
                errno.EIO, "it differs from the local file after the upload", f"{self.url}/{name}"
            )
        return int(wanted["bytes"])

    def receive(self, name: str, path: Path, size: int) -> None:
        """Download a file; each chunk counts as progress of this rank.

        Args:
            size: expected number of bytes.
        """
        from fsspec.callbacks import Callback

        received = Callback(hooks={"advance": lambda *_, **__: heartbeat.HEARTBEAT.advance()})
        # s3fs writes several parts of a file at once, and the files share the connection.
        unit = _DOWNLOADS * min(size, _S3["max_concurrency"] * _S3_PART)

        def progress() -> int:
            with suppress(FileNotFoundError):
                return int(received.value + path.stat().st_size)  # some report it, some write it
            return int(received.value)

        with self._errors(name):
            get = partial(self._fs.get_file, f"{self._root}/{name}", str(path), callback=received)
            _within_time(get, _ANSWER_SECONDS + unit / _SLOWEST, progress)

    def _has(self, name: str, wanted: Mapping[str, Any], tag: str) -> bool:
        """Whether an object has this content.

        An S3 store's ETag proves it without reading, unless the bucket is encrypted with keys of
        its own; any other object is read.
        """
        with self._errors(name):
            try:
                info = self._info(name)
                if info["size"] != wanted["bytes"]:
                    return False
                if str(info.get("ETag", "")).strip('"') == tag:
                    return True
                return bool(self._sha256(name, info["size"]) == wanted["sha256"])
            except FileNotFoundError:
                return False

    def _sha256(self, name: str, size: int) -> str:
        digest, count = hashlib.sha256(), 0

        def read() -> None:
            nonlocal count
            with self._fs.open(f"{self._root}/{name}", "rb", block_size=_S3_PART) as file:
                while block := file.read(_READ):
                    digest.update(block)
                    count += len(block)

        _within_time(read, _ANSWER_SECONDS + min(size, _S3_PART) / _SLOWEST, lambda: count)
        return digest.hexdigest()

    def _info(self, name: str) -> dict[str, Any]:
        return dict(_within_time(partial(self._fs.info, f"{self._root}/{name}")))

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError):  # RankLostError, from `receive`
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise OSError(errno.EIO, reason, f"{self.url}/{name}") from None


def _within_time(
    request: Callable[[], T],
    seconds: float | None = None,
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """Return the result of a request. The client libraries limit only some of their own waits.

    Args:
        seconds: limit of the time without progress; default: _ANSWER_SECONDS.

    Raises:
        TimeoutError: the limit has passed; the request continues in its thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(request())
        except Exception as error:
            outcome.set_exception(error)

    Thread(target=run, name="mirror request", daemon=True).start()
    limit, before = _ANSWER_SECONDS if seconds is None else seconds, progress()
    while not wait_for([outcome], limit).done:
        if progress() == before:
            raise TimeoutError(f"no answer for {limit:.0f} s")
        before = progress()
    return outcome.result()


def _not_installed(url: str, missing: str) -> str:
    return f"checkpoint.mirror {url}: {missing}; `pip install 'hvdtrain[remote]'` installs s3://"


def _part_bytes(size: int) -> int:
    """Size of the parts of a file of `size` bytes: a multiple of _READ."""
    return max(_S3_PART, -(-size // (_S3_MOST_PARTS * _READ)) * _READ)


def _digests(path: Path) -> tuple[str, str]:
    """Return the sha256 of a file, and the ETag of an S3 store for it.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
    """
    digest, parts, part_bytes = hashlib.sha256(), [], _part_bytes(path.stat().st_size)
    whole = path.stat().st_size < 2 * part_bytes
    with open_regular(path) as file:
        part, size = hashlib.md5(usedforsecurity=False), 0
        while block := file.read(_READ):
            digest.update(block)
            part.update(block)
            size += len(block)
            if not whole and size % part_bytes == 0:
                parts.append(part.digest())
                part = hashlib.md5(usedforsecurity=False)
    if whole:
        return digest.hexdigest(), part.hexdigest()
    if size % part_bytes:
        parts.append(part.digest())
    tag = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return digest.hexdigest(), f"{tag}-{len(parts)}"


@dataclass(frozen=True)
class MirrorClaim:
    """Content of run.json.

    Args:
        run: the run's ID.
        started: unix time of the run's first start: two runs may have the same ID.
        job: of the writer, common to all generations of an elastic job.
        writer: unique to the writing process.
        host: of the writer.
        time: unix time at which the writer began.
    """

    run: str
    started: float
    job: int
    writer: str
    host: str
    time: float


class _TakenOverError(Exception):
    """Another process writes into the mirror, or has written checkpoints that must be kept."""


def check_mirror(url: str, run_id: str) -> None:
    """Check before the start, on one rank, that a run can use a mirror.

    Raises:
        UserError: it cannot be written, or belongs to another run.
    """
    store = ObjectStore(url)
    try:
        with heartbeat.HEARTBEAT.waiting():  # each request has a limit
            _check_run(store, _read_claim(store), run_id)
            store.write(_PROBE, b"test")
            store.delete(_PROBE)
    except OSError as error:
        raise UserError(
            f"checkpoint.mirror {url} cannot be written ({_reason(error)}); check its name and the "
            "credentials in the environment, or omit checkpoint.mirror"
        ) from None


def _read_claim(store: ObjectStore) -> MirrorClaim | None:
    content = store.read(_CLAIM)
    if content is None:
        return None
    try:
        found = parse_json(content)
        if not is_of(found, dict[str, Any]):
            raise ValueError("it is not a JSON object")
        return checked(MirrorClaim, found)
    except ValueError as error:
        raise UserError(f"{store.url}/{_CLAIM} was not written by hvdtrain ({error})") from None


def _check_run(store: ObjectStore, claim: MirrorClaim | None, run_id: str) -> None:
    if claim is not None and claim.run != run_id:
        raise UserError(
            f"checkpoint.mirror {store.url} holds the run {shown(claim.run)}, not {run_id!r}: "
            "name another mirror, or continue the other run with --run.id"
        )


def _reason(error: Exception) -> str:
    """The message of an error, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__


@dataclass
class _Mirrored:
    """A complete checkpoint in the mirror."""

    loss: float | None = None
    chunks: set[str] = field(default_factory=set)


class Mirror:
    """The mirror of one run, on rank 0.

    Args:
        run: the run directory.
        url: checkpoint.mirror.
        config: which checkpoints are kept.
        job: of this process, see MirrorClaim.

    Attributes:
        uploading: the local checkpoint that is being uploaded: it must not be deleted.
        newest_step: step of the newest complete checkpoint in the mirror; 0 if there is none.
        failures: checkpoints whose upload was given up; a later start tries again.
        sent_bytes: bytes sent so far.
        restored: step, bytes and seconds of the restored checkpoint, and the names of newer ones
            that are damaged, for the run's events.
    """

    def __init__(self, run: Path, url: str, config: CheckpointConfig, job: int) -> None:
        self._run = run
        self._root = run / "checkpoints"
        self._config = config
        self._job = job
        self._store = ObjectStore(url)
        self._writer = secrets.token_hex(8)
        self._started: float | None = None
        self._continued_after: int | None = None  # to be done, see `supersede`
        self._unread = False  # by `restore`
        self._claimed = False
        self._emit: Callable[..., None] = lambda *_, **__: None
        self._mirrored: dict[int, _Mirrored] = {}
        self._given_up: set[int] = set()
        self._changed = Condition()
        self._requested = self._final = self._closed = self._taken_over = False
        self._idle = True
        self._thread: Thread | None = None
        self.uploading: Path | None = None
        self.newest_step = 0
        self.failures = 0
        self.sent_bytes = 0
        self.restored: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return self._store.url

    # --- the start of a run ---------------------------------------------------

    def restore(self, started: float | None, fresh: bool) -> None:
        """Download the newest intact checkpoint and the run's records, if they are newer.

        Args:
            started: time of the run's first start, if the run directory knows it.
            fresh: the run must not have begun before (run.resume never).

        Raises:
            UserError: the mirror belongs to another run, contains only damaged checkpoints, or
                cannot be read and the run directory has no checkpoint either.
        """
        local = max((step_of(path) for path in finished(self._root)), default=0)
        try:
            with heartbeat.HEARTBEAT.waiting():  # each request has a limit
                claim = _read_claim(self._store)
                _check_run(self._store, claim, self._run.name)
                steps = self._complete_steps()
                if fresh and steps:
                    raise UserError(
                        f"checkpoint.mirror {self.url} already contains this run, and run.resume "
                        "is never; choose another --run.id and mirror, or omit run.resume to "
                        "resume it"
                    )
                if steps and local:
                    self._check_start(claim, started)
                self._restore_newest([step for step in steps if step > local], bool(local))
        except OSError as error:
            why = f"checkpoint.mirror {self.url} cannot be read ({_reason(error)})"
            if not local:
                raise crash(why) from None
            self._unread = True
            logger.error(
                "%s; the run continues from its own checkpoints, the newest of step %d", why, local
            )

    def _check_start(self, claim: MirrorClaim | None, started: float | None) -> None:
        """Refuse a mirror that holds another run of the same ID."""
        if claim is None or started is None:
            return
        if claim.job == self._job or claim.started == started:
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(claim.started))
        raise UserError(
            f"checkpoint.mirror {self.url} holds another run of the ID {self._run.name}, which "
            f"began at {when} on {shown(claim.host)}: name another mirror"
        )

    def _complete_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        markers = (name.split("/") for name in self._store.sizes())
        named = (parts[0] for parts in markers if len(parts) == 2 and parts[1] == MARKER)
        numbers = (name.removeprefix("step_") for name in named if name.startswith("step_"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def _restore_newest(self, steps: list[int], has_local: bool) -> None:
        damaged = []
        for step in reversed(steps):
            began = time.monotonic()
            try:
                size = self._fetch(step, with_records=True)
            except DamagedError as error:
                logger.warning("%s; trying the one before it", error)
                damaged.append(directory_name(step))
                continue
            seconds = time.monotonic() - began
            self.restored = {"step": step, "bytes": size, "seconds": seconds, "damaged": damaged}
            logger.info(
                "restored the checkpoint of step %d and the run's records from %s: %.1f MB in "
                "%.1f s",
                step,
                self.url,
                size / 1e6,
                seconds,
            )
            return
        if damaged and not has_local:
            raise UserError(
                f"no checkpoint in {self.url} is intact ({', '.join(damaged)}); to start over, use "
                "another run.id and mirror"
            )

    def replace(self, directory: Path) -> bool:
        """Replace a damaged local checkpoint by the mirror's copy.

        Returns:
            Whether the mirror has an intact copy; otherwise the local one is unchanged.
        """
        try:
            with heartbeat.HEARTBEAT.waiting():  # each request has a limit
                if step_of(directory) not in self._complete_steps():
                    return False
                self._fetch(step_of(directory), with_records=False)
        except DamagedError as error:
            logger.warning("%s", error)
            return False
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.url, _reason(error))
            return False
        logger.info("%s is restored from %s", directory, self.url)
        return True

    def _fetch(self, step: int, with_records: bool) -> int:
        """Download a checkpoint below a hidden name, verify it and rename it.

        Returns:
            Its size in bytes.

        Raises:
            DamagedError: an object is missing or differs from what was uploaded.
            OSError: the mirror cannot be read, or the local directory not written.
        """
        name = directory_name(step)
        final, where = self._root / name, f"{self.url}/{name}"
        listed, marker = (self._existing(f"{name}/{file}") for file in (SUMS, MARKER))
        sums = parse_sums(listed, marker, where)
        hidden = hidden_name(final)
        hidden.mkdir(parents=True)
        try:
            with ThreadPoolExecutor(_DOWNLOADS) as pool:
                list(pool.map(partial(self._fetch_file, name, hidden), sums.items()))
            if with_records:  # first: a run with a checkpoint must have its records
                self._fetch_records(name, hidden)
            write_synced(hidden / SUMS, listed)
            write_synced(hidden / MARKER, marker)
            sync_directory(hidden)
            if final.exists():
                delete(final)
            os.rename(hidden, final)
            sync_directory(self._root)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        return sum(wanted["bytes"] for wanted in sums.values())

    def _fetch_file(self, name: str, to: Path, listed: tuple[str, dict[str, Any]]) -> None:
        file, wanted = listed
        try:
            self._store.receive(f"{name}/{file}", to / file, wanted["bytes"])
        except FileNotFoundError:
            raise DamagedError(f"checkpoint {self.url}/{name}: {file} is missing") from None
        sha256 = sha256_of(to / file)
        compare(f"{self.url}/{name}", file, wanted, (to / file).stat().st_size, sha256)
        with open(to / file, "rb") as synced:
            os.fsync(synced.fileno())

    def _fetch_records(self, name: str, to: Path) -> None:
        """Replace the run's records, all of them or none; `to`: directory for their download."""
        content = self._existing(f"{name}/{_LISTED_RECORDS}")
        where = f"checkpoint {self.url}/{name}: {_LISTED_RECORDS}"
        try:
            listed = parse_json(content)
        except ValueError as error:
            raise DamagedError(f"{where}: {error}") from None
        if not is_of(listed, dict[str, list[str]]) or not set(listed) <= set(RECORDS):
            raise DamagedError(f"{where} was altered")
        for record, chunks in listed.items():
            with open(to / f".{record}", "wb") as file:
                for chunk in chunks:
                    part = self._existing(f"{_RECORDS}/{chunk}", where)
                    if hashlib.sha256(part).hexdigest() != chunk:
                        raise DamagedError(f"{where}: {record} was altered (checksum differs)")
                    file.write(part)
                    heartbeat.HEARTBEAT.advance()
                file.flush()
                os.fsync(file.fileno())
        for record in RECORDS:
            if record in listed:
                os.replace(to / f".{record}", self._run / record)
            else:  # of a start without a checkpoint
                (self._run / record).unlink(missing_ok=True)

    def _existing(self, name: str, where: str = "") -> bytes:
        content = self._store.read(name)
        if content is None:
            raise DamagedError(f"{where or f'checkpoint {self.url}'}: {name} is missing")
        return content

    # --- training -------------------------------------------------------------

    def open(self, started: float, resumed_at: int, emit: Callable[..., None]) -> None:
        """Begin to claim the mirror for this process and to upload what it lacks; return at once.

        Args:
            started: time of the run's first start.
            resumed_at: the mirror's checkpoints of later steps are deleted: the run continues from
                before them.
            emit: called from the thread with "mirrored" (step, seconds, bytes, sent_bytes),
                "mirror_failed" (step, error) and "mirror_lost" (error).
        """
        self._started, self._resumed_at, self._emit = started, resumed_at, emit
        self.supersede(resumed_at)
        self._thread = Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Upload what the mirror lacks; returns at once."""
        with self._changed:
            self._requested, self._idle = True, False
            self._changed.notify_all()

    def supersede(self, after: int) -> None:
        """Have the mirror's checkpoints of later steps deleted, which the run repeats."""
        self._continue_after(after)
        self.notify()

    def wait(self, seconds: float) -> bool:
        """Return whether nothing is left to upload, after at most this time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle, seconds)

    def finish(self, seconds: float) -> None:
        """Upload the final records of the run; wait at most this time.

        Nothing is waited for if an upload has not finished: the ranks have waited already.
        """
        if not self.wait(0.0):
            return
        with self._changed:
            self._final = True
        self.notify()
        with heartbeat.HEARTBEAT.waiting():
            self.wait(seconds)

    def close(self) -> None:
        """Stop uploading."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def describe(self) -> str:
        """Message for users: the newest checkpoint in the mirror."""
        step = self.newest_step
        if not step:
            return "the mirror has no checkpoint"
        return f"the newest checkpoint in the mirror is of step {step}"

    # --- the thread -----------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle = not self._requested
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._requested or self._closed)
                if self._closed:
                    self._idle = True
                    self._changed.notify_all()
                    return
                self._requested = False
            if self._continued_after is not None and not self._taken_over:
                self._leave()
            try:
                while not self._taken_over and (directory := self._next()) is not None:
                    self._attempt(directory)
            except OSError as error:
                logger.error("%s: %s; nothing is uploaded", self._root, error.strerror)
            if self._final and not self._taken_over:
                self._final = False
                self._upload_final_records()

    def _continue_after(self, step: int) -> None:
        with self._changed:
            earlier = self._continued_after
            self._continued_after = step if earlier is None else min(step, earlier)

    def _leave(self) -> None:
        """Delete the mirror's checkpoints of later steps; after a failure, with the next upload.

        The first call claims the mirror.
        """
        after = self._continued_after
        try:
            self._take()
        except _TakenOverError:
            return  # the next upload reports it
        except Exception as error:
            if not self._claimed:
                logger.error("%s: %s; training continues", self.url, _reason(error))
                return
            logger.warning(
                "%s: checkpoints after step %d, which the run repeats, could not be deleted (%s)",
                self.url,
                after,
                _reason(error),
            )

    def _take(self) -> None:
        """Confirm the claim, and delete checkpoints that the run has left: before any upload."""
        self._confirm()
        with self._changed:
            after, self._continued_after = self._continued_after, None
        if after is None:
            return
        self._given_up = {step for step in self._given_up if step <= after}
        try:
            self._remove_after(after)
        except Exception:
            self._continue_after(after)
            raise

    def _remove_after(self, step: int) -> None:
        for later in [one for one in self._mirrored if one > step]:
            self._remove(later)
            logger.warning(
                "%s/%s is deleted: the run continues from before it",
                self.url,
                directory_name(later),
            )
        self.newest_step = max(self._mirrored, default=0)

    def _next(self) -> Path | None:
        """Return the newest local checkpoint that the mirror lacks and would keep."""
        if self._closed:
            return None
        local = {step_of(path): path for path in finished(self._root)}
        best = self._config.keep_best
        losses = self._losses() | {s: loss_of(path) if best else None for s, path in local.items()}
        wanted = retained(dict(sorted(losses.items())), self._config.keep)
        missing = wanted & local.keys() - self._mirrored.keys() - self._given_up
        return local[max(missing)] if missing else None

    def _losses(self) -> dict[int, float | None]:
        """Step -> validation loss of the mirror's checkpoints, as `retained` requires."""
        best = self._config.keep_best
        return {step: m.loss if best else None for step, m in sorted(self._mirrored.items())}

    def _attempt(self, directory: Path) -> None:
        """Upload a checkpoint; give up after a few attempts."""
        self.uploading = directory
        step, began, before = step_of(directory), time.monotonic(), self.sent_bytes
        try:
            size = self._upload_or_retry(directory)
            seconds, sent = time.monotonic() - began, self.sent_bytes - before
            self._emit("mirrored", step=step, seconds=seconds, bytes=size, sent_bytes=sent)
            logger.debug("step %d: checkpoint uploaded to %s in %.1f s", step, self.url, seconds)
        except _TakenOverError as error:
            self._taken_over = True
            self._emit("mirror_lost", step=step, error=str(error))
            logger.error("%s; this process no longer uploads, training continues", error)
        except Exception as error:  # no error is worth stopping the training
            self._given_up.add(step)
            if self._closed or not directory.exists():
                return
            self.failures += 1
            self._emit("mirror_failed", step=step, error=f"{type(error).__name__}: {error}")
            logger.error(
                "checkpoint of step %d could not be uploaded to %s (%s: %s); training continues, "
                "later checkpoints are uploaded",
                step,
                self.url,
                type(error).__name__,
                error,
            )
        finally:
            self.uploading = None

    def _upload_or_retry(self, directory: Path) -> int:
        for seconds in (*_RETRY_SECONDS, None):
            try:
                return self._upload(directory)
            except OSError as error:
                if seconds is None or self._closed:
                    raise
                logger.debug("%s: %s; next attempt in %.0f s", self.url, error, seconds)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, seconds)
        raise AssertionError("not reached")

    def _upload(self, directory: Path) -> int:
        """Upload a checkpoint, its marker last; return its size in bytes."""
        self._take()
        name = directory.name
        sums = checked_sums(directory)
        for file, wanted in sums.items():
            self._confirm()
            self.sent_bytes += self._store.send(directory / file, wanted, f"{name}/{file}")
        self._store.write(f"{name}/{SUMS}", (directory / SUMS).read_bytes())
        chunks = self._upload_records(name)
        self._confirm()
        self._store.write(f"{name}/{MARKER}", (directory / MARKER).read_bytes())
        self._mirrored[step_of(directory)] = _Mirrored(loss_of(directory), chunks)
        self.newest_step = max(self._mirrored)
        try:
            self._clean_up()
        except OSError as error:
            logger.warning("%s: an old checkpoint could not be deleted: %s", self.url, error)
        return sum(wanted["bytes"] for wanted in sums.values())

    def _upload_records(self, name: str) -> set[str]:
        """Upload the run's records as they are now; return the names of their chunks."""
        there = self._store.sizes(_RECORDS)
        listed: dict[str, list[str]] = {}
        for record in RECORDS:
            with suppress(FileNotFoundError), open_regular(self._run / record) as file:
                listed[record] = []
                while chunk := file.read(_CHUNK):
                    digest = hashlib.sha256(chunk).hexdigest()
                    if there.get(f"{_RECORDS}/{digest}") != len(chunk):
                        self._store.write(f"{_RECORDS}/{digest}", chunk)
                        self.sent_bytes += len(chunk)
                    listed[record].append(digest)
        self._store.write(f"{name}/{_LISTED_RECORDS}", json.dumps(listed, indent=1).encode())
        return {chunk for chunks in listed.values() for chunk in chunks}

    def _upload_final_records(self) -> None:
        """Add the end of the run to the records of its newest checkpoint."""
        if not self._mirrored:
            return
        newest = max(self._mirrored)
        try:
            self._confirm()
            self._mirrored[newest].chunks = self._upload_records(directory_name(newest))
        except Exception as error:
            logger.warning(
                "%s does not have the end of the run's records (%s)", self.url, _reason(error)
            )

    def _clean_up(self) -> None:
        """Delete checkpoints beyond those to keep, incomplete ones, and unused records."""
        losses = self._losses()
        for step in losses.keys() - retained(losses, self._config.keep):
            self._remove(step)
        known = {directory_name(step) for step in self._mirrored}
        known |= {path.name for path in finished(self._root)}
        used = {chunk for found in self._mirrored.values() for chunk in found.chunks}
        for name in {name.partition("/")[0] for name in self._store.sizes()} - known:
            if name.startswith("step_"):
                self._store.delete(name, recursive=True)
        for name in self._store.sizes(_RECORDS):
            if name.removeprefix(f"{_RECORDS}/") not in used:
                self._store.delete(name)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint in the mirror, its marker first."""
        name = directory_name(step)
        self._store.delete(f"{name}/{MARKER}")
        self._mirrored.pop(step, None)
        self._store.delete(name, recursive=True)

    # --- ownership ------------------------------------------------------------

    def _claim(self) -> None:
        """Write this process's name into the mirror, and read what the mirror has."""
        assert self._started is not None
        before = _read_claim(self._store)
        _check_run(self._store, before, self._run.name)
        steps = self._complete_steps()
        if steps:
            self._check_start(before, self._started)
            if before is not None and before.job == self._job:
                self._started = before.started
            elif self._unread and steps[-1] > self._resumed_at:
                raise _TakenOverError(
                    f"{self.url} has the checkpoint of step {steps[-1]}, but could not be read "
                    f"when this run continued from step {self._resumed_at}; start the run again "
                    "to continue from the mirror"
                )
        claim = MirrorClaim(
            self._run.name,
            self._started,
            self._job,
            self._writer,
            socket.gethostname(),
            time.time(),
        )
        self._store.write(_CLAIM, json.dumps(asdict(claim), indent=1).encode())
        self._claimed = True
        self._mirrored = {step: self._known(step) for step in steps}

    def _known(self, step: int) -> _Mirrored:
        """Loss and records of a checkpoint that an earlier process has uploaded."""
        name, found = directory_name(step), _Mirrored()
        with suppress(ValueError):
            listed = parse_json(self._store.read(f"{name}/{_LISTED_RECORDS}") or b"{}")
            if is_of(listed, dict[str, list[str]]):
                found.chunks = {chunk for chunks in listed.values() for chunk in chunks}
            if self._config.keep_best:
                found.loss = loss_in(parse_json(self._store.read(f"{name}/{STATE}") or b"{}"))
        return found

    def _confirm(self) -> None:
        """Check that the mirror still belongs to this process.

        Raises:
            _TakenOverError: it does not.
        """
        if not self._claimed:
            self._claim()
        claim = _read_claim(self._store)
        if claim is None or claim.writer != self._writer:
            raise _TakenOverError(
                f"{self.url} is written by another process now"
                + (f", on {shown(claim.host)}" if claim else "")
            )
