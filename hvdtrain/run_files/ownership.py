"""Ownership of a run by one process at a time, through a token in the run directory.

    RUN/.owner   the owner, and a heartbeat count that a thread of the owner increases every 2 s
    RUN/.lock    flock, a faster proof if the file system supports it

A lock alone is not reliable. A forked helper, or the lease of an NFS server, holds it after its
owner's death; some file systems have no locks (Lustre without -o flock); and some have locks only
within a host (NFS with local_lock). A process therefore takes over another owner's run if
- it belongs to the same elastic job: the driver has made this process rank 0 of a later generation;
- the owner had the lock, this process has it now, and both run on the same booted kernel;
- its count has not changed while this process watched: for 5 s if this process got the lock of an
  owner on another host, else for 12 s. Clocks of two hosts are never compared.

A changing count means that another process trains this run. An owner also checks the token with
each heartbeat. If the token belongs to another process, the owner exits at once. Writes after a
pause (a stopped process, a suspended host, a disk that blocks) wait until the token is checked
again.

Remaining gap: a process that is stopped between its last check and the write that follows
immediately does that one write if it wakes up after a take-over.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError, crash
from hvdtrain.files import FileLock
from hvdtrain.log import logger
from hvdtrain.run_files.owner_token import Claim, Token, boot, moved, now, read, who, write
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.queued_output import flush, say

BEAT_SECONDS = 2.0
STALE_SECONDS = 12.0
# The same if this process got the lock that the owner on another host had: either locks are shared
# by all hosts, so the owner is dead, or each host has its own locks.
SHORT_STALE_SECONDS = 5.0


class TokenPace(NamedTuple):
    """How often an owner renews its token, and when others take an unchanged token over.

    Args:
        beat: seconds between heartbeats.
        stale, short_stale: see STALE_SECONDS and SHORT_STALE_SECONDS.
        lease: the owner exits when it has not renewed the token for `patience` seconds of its own
            time, and a check counts only if the token was written, too. Exit code 75: another
            process continues its job.
    """

    beat: float = BEAT_SECONDS
    stale: float = STALE_SECONDS
    short_stale: float = SHORT_STALE_SECONDS
    lease: bool = False
    patience: float = STALE_SECONDS


NORMAL_PACE = TokenPace()
# For two processes that find the run free at the same time, without a lock: the later token wins.
_SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_RELEASE_SECONDS = 2.0
_EXIT_SECONDS = 0.5  # for the message of a process that exits because it has lost the run


class Ownership:
    """Ownership of one run by this process; see the top of this file.

    Args:
        directory: the run directory.
        name: prefix of the two files, before "owner" and "lock".
        busy: error message for a process that finds the run owned.
        pace: of the heartbeats.

    Attributes:
        failures: how often the token could not be written.
    """

    def __init__(
        self,
        directory: Path,
        name: str = ".",
        busy: str = "another process trains this run; wait for it",
        pace: TokenPace = NORMAL_PACE,
    ) -> None:
        self.directory = directory
        self._pace = pace
        self._busy = busy
        self.failures = 0
        self._token_path = directory / f"{name}owner"
        self._lock = FileLock(directory / f"{name}lock")
        self._mine: Token | None = None
        self._device: int | None = None  # of the directory
        self._before: str | None = None  # the previous owner, after a take-over
        self._seen: Token | None = None
        self._seen_at = now()  # time of the token's last observed change
        self._looked_at = -1.0  # time of the last check that found this process as the owner
        self._failed = False
        self._renewals = 0  # heartbeats that the disk has answered
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._released = False
        self._thread: threading.Thread | None = None

    def look(self, known: Token | None = None, since: float = 0.0) -> None:
        """Read the token now, so that the time without heartbeats counts from here.

        Args:
            known: the token that another process of this host read at the time `since` (`now`): if
                it is unchanged, the time counts from then.
        """
        with suppress(OSError):
            self._note(read(self._token_path))
            if known is not None and self._seen == known:
                self._seen_at = min(self._seen_at, since)

    def recognize(self, strict: bool = True) -> None:
        """Check that the path names the directory of the run, and remember its disk.

        Without its mount, the path names an empty directory, in which a run would begin again. A
        disk that is mounted again may have another number, and contains the token. On a host that
        does not share run.root, the directory never has one.

        Args:
            strict: a directory without a token, whose disk is not known, is refused, too.

        Raises:
            OSError: it names another directory, or cannot be read.
        """
        self._recognize(read(self._token_path), strict)

    def _recognize(self, token: Token | None, strict: bool = True) -> None:
        device = _device(self.directory)
        if token is not None or device == self._device:
            self._device = device
        elif strict or self._device is not None:
            raise OSError(errno.ENODEV, "the disk of the run directory is not mounted")
        elif self.directory.is_dir():
            self._device = device

    def has_lost(self) -> bool:
        """Whether the directory was there and is not: see `recognize`."""
        if self._device is None:
            return False
        try:
            self.recognize()
        except OSError:
            return True
        return False

    def acquire(self, claim: Claim, tolerate_errors: bool = False) -> None:
        """Create the directory, and own the run until `release` or the end of the process.

        Waits until the owner's heartbeat count changes or is found stale, STALE_SECONDS at most.

        Args:
            tolerate_errors: log failed writes and retry them with each heartbeat, because other
                ranks hold state that would be lost.

        Raises:
            UserError: another process trains this run; or, with exit code 1, a later generation of
                this job does.
            OSError: the directory cannot be written, or its disk, which this process has seen, is
                not mounted.
        """
        if not tolerate_errors:
            self.recognize(strict=False)
        own = Token(
            owner=secrets.token_hex(8),
            job=claim.job,
            generation=claim.generation,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=boot(),
            locked=False,
        )
        for phase in (self._prepare, self._wait_until_free, self._write, self._settle):
            try:
                phase(own)
            except OSError as error:
                if not tolerate_errors:
                    raise
                self._report(error)
        self._mine = own
        with suppress(OSError):  # the first heartbeat that succeeds tells it
            self.recognize()
        self._looked_at = now()
        self._thread = threading.Thread(target=self._beat_on, name="owner", daemon=True)
        self._thread.start()
        if self._pace.lease:
            threading.Thread(target=self._end_without_lease, name="lease", daemon=True).start()

    def held(self, seconds: float = 0.0) -> bool:
        """Whether this process may write: a recent check has found that it still owns the run.

        Args:
            seconds: how long to wait for a new check if necessary.
        """
        if self._thread is None:
            return True  # `acquire` was never called
        deadline = now() + seconds
        with self._looked:
            while not self._released and now() - self._looked_at > 2 * self._pace.beat:
                self._wake.set()
                if not self._looked.wait(max(0.0, deadline - now())) and now() >= deadline:
                    return False
        return not self._released

    def wait_for_renewal(self) -> None:
        """Wait until a check that begins now finds that this process owns the run.

        A process with a lease exits if none does, see `TokenPace`.
        """
        since = now()
        with self._looked:
            while self._thread is not None and not self._released and self._looked_at < since:
                self._wake.set()
                self._looked.wait(_LOOK_SECONDS)

    def confirm(self, seconds: float) -> None:
        """Check that this process may write, and that the path names the run's directory now.

        Raises:
            OSError: `held` returns False, or as `recognize`.
        """
        if not self.held(seconds):
            raise OSError(errno.ESTALE, "it is unknown whether this process still owns the run")
        if self._thread is not None:
            self.recognize()

    def release(self) -> None:
        """Release the run; this process must not write to it afterwards."""
        if self._thread is None or self._released:
            return
        self._released = True
        self._wake.set()
        self._thread.join(_RELEASE_SECONDS)
        if self._thread.is_alive():
            return  # its disk does not respond
        with suppress(OSError):
            token = read(self._token_path)
            if self._mine is not None and (token is None or self._is_mine(token)):
                self._write(replace(self._mine, ended=True))
        self._lock.close()

    # --- acquisition -----------------------------------------------------------

    def _prepare(self, _: Token) -> None:
        """Create the directory, and try to get the lock."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock.open()
        self._lock.attempt()

    def _wait_until_free(self, own: Token) -> None:
        began, looked, logged = now(), False, False
        while True:
            has_locks = self._lock.attempt()
            before, token = self._seen, read(self._token_path)
            self._note(token)
            if token is None and (self._lock.held or not has_locks):
                return
            if token is not None and token.job == own.job and not token.ended:
                if token.generation <= own.generation:
                    self._before = token.owner
                    return
                raise _superseded(self.directory, token)
            if looked and moved(before, token):
                raise self._taken(token)
            stale_after = self._stale_after(own, token, has_locks)
            if now() - (self._seen_at if token is not None else began) >= stale_after:
                if token is None:
                    raise self._taken(None)  # the lock is the only sign of its owner
                if not token.ended:
                    logger.warning(
                        "%s is taken over: %s has stopped sending heartbeats",
                        self.directory,
                        who(token),
                    )
                    self._before = token.owner
                return
            waits = now() - began > 2 * self._pace.beat
            if waits and not logged and token is not None and not token.ended:
                logger.warning(
                    "%s belongs to %s: it is taken over unless a heartbeat arrives within %.0f s",
                    self.directory,
                    who(token),
                    stale_after,
                )
                logged = True
            looked = True
            with heartbeat.HEARTBEAT.waiting():
                time.sleep(_LOOK_SECONDS)

    def _stale_after(self, own: Token, token: Token | None, has_locks: bool) -> float:
        """How long the token must have been unchanged, in seconds."""
        if token is not None and token.ended:
            # The holder of the lock may be dead, or about to write its token.
            return self._pace.short_stale if has_locks and not self._lock.held else 0.0
        if token is None or not (self._lock.held and token.locked):
            return self._pace.stale
        return 0.0 if token.boot == own.boot else self._pace.short_stale

    def _note(self, token: Token | None) -> None:
        if token != self._seen:
            self._seen, self._seen_at = token, now()

    def _settle(self, own: Token) -> None:
        if self._lock.held or (self._seen is not None and self._seen.job == own.job):
            return
        time.sleep(_SETTLE_SECONDS)
        token = read(self._token_path)
        if token is not None and token.owner not in (own.owner, self._before):
            raise self._taken(token)

    def _taken(self, token: Token | None) -> UserError:
        name = f" (it is {who(token)})" if token is not None else ""
        return UserError(f"{self.directory}: {self._busy}, or choose another --run.id{name}")

    # --- maintenance -----------------------------------------------------------

    def _beat_on(self) -> None:
        while True:
            self._wake.wait(self._pace.beat)
            if self._released:
                return
            self._wake.clear()
            try:
                self._beat()
                self._failed = False
            except OSError as error:
                self._report(error)

    def _beat(self) -> None:
        assert self._mine is not None
        began, token = now(), read(self._token_path)
        if token is not None and not self._is_mine(token):
            self._lose(token)
        self._recognize(token)
        if not self._pace.lease:
            self._note_check(began)
        self._prepare(self._mine)  # the previous holder of the lock may have exited
        self._mine = replace(self._mine, beats=self._mine.beats + 1)
        self._write(self._mine)
        self._renewals += 1
        if self._pace.lease:
            self._note_check(began)

    def _note_check(self, began: float) -> None:
        with self._looked:
            self._looked_at = began
            self._looked.notify_all()

    def _end_without_lease(self) -> None:
        """Exit when the token cannot be renewed: another process may own the run.

        A slow disk, whose answers come too late for `held`, does not count: this process decides
        nothing meanwhile, and each answer shows that no other one has the token.
        """
        unsure, began, renewals = 0.0, now(), self._renewals
        while not self._released:
            time.sleep(_LOOK_SECONDS)
            # Time in which this process was suspended does not count: it checks the token first.
            passed, began = min(now() - began, 2 * _LOOK_SECONDS), now()
            unsure = 0.0 if self.held() or renewals != self._renewals else unsure + passed
            renewals = self._renewals
            if unsure > self._pace.patience - 2 * self._pace.beat:
                self._exit(
                    f"{self._token_path} could not be renewed for {self._pace.patience:.0f} s, so "
                    "another process may have taken over: this process exits"
                )

    def _is_mine(self, token: Token) -> bool:
        assert self._mine is not None
        if token.job == self._mine.job and token.generation < self._mine.generation:
            return True
        # The previous owner's last heartbeat may arrive after the take-over.
        return token.owner in (self._mine.owner, self._before)

    def _lose(self, token: Token) -> None:
        if self._released:
            return
        self._exit(
            f"{self.directory} was taken over by {who(token)} while this process was stopped or "
            "its disk did not respond: this process exits without writing"
        )

    def _exit(self, reason: str) -> None:
        """Exit at once, because other threads might write."""
        say(f"error: {reason}")
        flush(_EXIT_SECONDS)
        os._exit(EXIT_PREEMPTED if self._pace.lease else EXIT_CRASH)

    def _write(self, token: Token) -> None:
        write(self._token_path, replace(token, locked=self._lock.held))

    def _report(self, error: OSError) -> None:
        self.failures += 1
        if not self._failed:
            logger.error(
                "%s cannot be written (%s); training continues, and the write is retried",
                self._token_path,
                error.strerror,
            )
        self._failed = True


def _device(directory: Path) -> int | None:
    """Return the device of a directory, or of the closest one above it that exists."""
    for path in (directory, *directory.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.stat(path).st_dev
    return None


def _superseded(directory: Path, token: Token) -> UserError:
    return crash(f"{directory} belongs to {who(token)}: this job continues without this process")
