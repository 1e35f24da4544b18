"""Whose a run is: one process's at a time, by a token in the run's folder.

    RUN/.owner   who owns it, and a count that a thread of the owner raises every 2 s
    RUN/.lock    flock, the quick proof where the file system has it

A lock alone proves too much and too little: a forked helper, or the lease of an NFS server, holds
it past its owner's death, some file systems have none (Lustre without -o flock), and some keep
it from this host alone (NFS with local_lock). So somebody else's run is taken over when

- it is the same elastic job's: its driver has made this process rank 0 of a later generation;
- its owner had the lock, this process has it now, and one kernel gave it to both;
- its count has rested while this process watched: 5 s where it got the owner's lock on another
  host, else 12 s. No clocks of two hosts are compared.

A count that moves is another process that trains this run. And an owner looks itself, with each
beat: where the token is another's it ends at once, and what would be written after a pause (a
stopped process, a suspended host, a disk that blocks) waits until it has looked again.
What stays open: a process that is stopped between its last look and the write that follows at
once, and wakes up after a take-over, does that one write.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.log import logger
from hvdtrain.run_files.file_lock import FileLock
from hvdtrain.run_files.owner_token import Claim, Token, boot, moved, read, who, write
from hvdtrain.runtime import heartbeat

BEAT_SECONDS = 2.0
REST_SECONDS = 12.0
# The same where this process has got the lock that the owner on another host had: its locks
# are either those of all hosts, so that it is dead, or its own.
SHORT_REST_SECONDS = 5.0
# Two that find the run free at the same time, without a lock: the later token counts.
_SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_RELEASE_SECONDS = 2.0


class Ownership:
    """Of one run, by this process; see the top of this file.

    Args:
        folder: the run's.
        name: of the two files, before "owner" and "lock".
        busy: what a process is told that finds it taken.

    Attributes:
        failures: how often the token could not be written.
    """

    def __init__(
        self,
        folder: Path,
        name: str = ".",
        busy: str = "another process trains this run; wait for it",
    ) -> None:
        self.folder = folder
        self._busy = busy
        self.failures = 0
        self._token_path = folder / f"{name}owner"
        self._lock = FileLock(folder / f"{name}lock")
        self._mine: Token | None = None
        self._before: str | None = None  # the owner from whom it was taken over
        self._seen: Token | None = None
        self._seen_at = _now()  # since when the token has been as it is
        self._looked_at = -1.0  # when the token was seen to be this process's
        self._failed = False
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._released = False
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Notes the token: a count that rests from now on need not be waited for later."""
        with suppress(OSError):
            self._note(read(self._token_path))

    def acquire(self, claim: Claim, tolerate_errors: bool = False) -> None:
        """Makes the folder, and the run this process's until `release` or its end.

        Waits for the owner's count to move or to rest, REST_SECONDS at most.

        Args:
            tolerate_errors: others hold a state that would be lost: what cannot be written is only
                logged, and tried again with each beat.

        Raises:
            UserError: another process trains this run; or exit code 1, a later generation of
                this job does.
            OSError: the folder cannot be written.
        """
        own = Token(
            owner=secrets.token_hex(8),
            job=claim.job,
            generation=claim.generation,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=boot(),
            locked=False,
        )
        for part in (self._prepare, self._wait_until_free, self._write, self._settle):
            try:
                part(own)
            except OSError as error:
                if not tolerate_errors:
                    raise
                self._say(error)
        self._mine = own
        self._looked_at = _now()
        self._thread = threading.Thread(target=self._beat_on, name="owner", daemon=True)
        self._thread.start()

    def held(self, seconds: float = 0.0) -> bool:
        """Whether this process may write: it has seen lately that the run is still its own.

        Args:
            seconds: to wait, where it has to look again.
        """
        if self._thread is None:
            return True  # nobody asked for it
        deadline = _now() + seconds
        with self._looked:
            while not self._released and _now() - self._looked_at > 2 * BEAT_SECONDS:
                self._wake.set()
                if not self._looked.wait(max(0.0, deadline - _now())) and _now() >= deadline:
                    return False
        return not self._released

    def confirm(self, seconds: float) -> None:
        """Raises OSError where `held` says no."""
        if not self.held(seconds):
            raise OSError(errno.ESTALE, "it is not known whether the run is still this process's")

    def release(self) -> None:
        """Gives the run back: this process writes nothing any more."""
        if self._thread is None or self._released:
            return
        self._released = True
        self._wake.set()
        self._thread.join(_RELEASE_SECONDS)
        if self._thread.is_alive():
            return  # its disk does not answer
        with suppress(OSError):
            token = read(self._token_path)
            if self._mine is not None and (token is None or self._is_mine(token)):
                self._write(replace(self._mine, ended=True))
        self._lock.close()

    # --- to get it -----------------------------------------------------------

    def _prepare(self, _: Token) -> None:
        """Makes the folder, and tries to get the lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.open()
        self._lock.attempt()

    def _wait_until_free(self, own: Token) -> None:
        began, looked, said = _now(), False, False
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
                raise _superseded(self.folder, token)
            if looked and moved(before, token):
                raise self._taken(token)
            rest = self._rest(own, token, has_locks)
            if _now() - (self._seen_at if token is not None else began) >= rest:
                if token is None:
                    raise self._taken(None)  # all that its owner shows is the lock
                if not token.ended:
                    logger.warning("%s is taken over: %s shows no life", self.folder, who(token))
                    self._before = token.owner
                return
            waits = _now() - began > 2 * BEAT_SECONDS
            if waits and not said and token is not None and not token.ended:
                logger.warning(
                    "%s belongs to %s: it is taken over unless that shows life within %.0f s",
                    self.folder,
                    who(token),
                    rest,
                )
                said = True
            looked = True
            with heartbeat.OWN.waiting():
                time.sleep(_LOOK_SECONDS)

    def _rest(self, own: Token, token: Token | None, has_locks: bool) -> float:
        """How long the token must have been as it is."""
        if token is not None and token.ended:
            # Who has the lock is dead perhaps, or about to write its token.
            return SHORT_REST_SECONDS if has_locks and not self._lock.held else 0.0
        if token is None or not (self._lock.held and token.locked):
            return REST_SECONDS
        return 0.0 if token.boot == own.boot else SHORT_REST_SECONDS

    def _note(self, token: Token | None) -> None:
        if token != self._seen:
            self._seen, self._seen_at = token, _now()

    def _settle(self, own: Token) -> None:
        if self._lock.held or (self._seen is not None and self._seen.job == own.job):
            return
        time.sleep(_SETTLE_SECONDS)
        token = read(self._token_path)
        if token is not None and token.owner not in (own.owner, self._before):
            raise self._taken(token)

    def _taken(self, token: Token | None) -> UserError:
        name = f" (it is {who(token)})" if token is not None else ""
        return UserError(f"{self.folder}: {self._busy}, or choose another --run.id{name}")

    # --- to keep it ----------------------------------------------------------

    def _beat_on(self) -> None:
        while True:
            self._wake.wait(BEAT_SECONDS)
            if self._released:
                return
            self._wake.clear()
            try:
                self._beat()
                self._failed = False
            except OSError as error:
                self._say(error)

    def _beat(self) -> None:
        assert self._mine is not None
        began, token = _now(), read(self._token_path)
        if token is not None and not self._is_mine(token):
            self._lose(token)
        with self._looked:
            self._looked_at = began
            self._looked.notify_all()
        self._prepare(self._mine)  # whoever held the lock may be gone
        self._mine = replace(self._mine, beats=self._mine.beats + 1)
        self._write(self._mine)

    def _is_mine(self, token: Token) -> bool:
        assert self._mine is not None
        if token.job == self._mine.job and token.generation < self._mine.generation:
            return True
        # The last beat of the owner before may come after the take-over.
        return token.owner in (self._mine.owner, self._before)

    def _lose(self, token: Token) -> None:
        if self._released:
            return
        # At once, whatever the other threads are at: they might write.
        print(
            f"hvdtrain: error: {self.folder} was taken over by {who(token)} while this process "
            "was stopped or its disk did not answer: it writes nothing any more and ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_CRASH)

    def _write(self, token: Token) -> None:
        write(self._token_path, replace(token, locked=self._lock.held))

    def _say(self, error: OSError) -> None:
        self.failures += 1
        if not self._failed:
            logger.error(
                "%s cannot be written (%s); training continues, and it is tried again",
                self._token_path,
                error.strerror,
            )
        self._failed = True


def _now() -> float:
    """Seconds; the time in which the host was suspended counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _superseded(folder: Path, token: Token) -> UserError:
    error = UserError(f"{folder} belongs to {who(token)}: this job continues without this process")
    error.exit_code = EXIT_CRASH
    return error
