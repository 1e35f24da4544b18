"""Fingerprints of large files depend on content, not on where or when it was copied."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.audit.ledger import read as read_ledger
from hvdtrain.audit.lineage import trace
from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.data import files
from hvdtrain.data.files import Fingerprint, of_files
from hvdtrain.data.parquet import ParquetRows
from hvdtrain.data.records import JsonLines
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.errors import UserError
from tests.support.history import History

NAME = "the fingerprint of the training data"


def _lines(directory: Path, answer: str = "a") -> str:
    directory.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": "p", "answer": answer if n == 50 else "a"}) for n in range(100)]
    (directory / "chats.jsonl").write_text("\n".join(lines))
    return JsonLines([str(directory / "chats.jsonl")]).fingerprint()


def _rows(directory: Path, answer: str = "a") -> str:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    directory.mkdir(exist_ok=True)
    table = pa.table({"answer": [answer if n == 50 else "a" for n in range(100)]})
    parquet.write_table(table, directory / "rows.parquet")
    return ParquetRows([str(directory / "rows.parquet")]).fingerprint()


@pytest.mark.parametrize("make", [_lines, _rows])
def test_fingerprint_depends_on_content_and_not_on_timestamps(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    found = make(tmp_path / "here")
    assert len(found) == 16 and make(tmp_path / "there") == found
    for path in (tmp_path / "there").iterdir():
        os.utime(path, (1, 1))
    shutil.copytree(tmp_path / "here", tmp_path / "copied")
    assert make(tmp_path / "copied") == found
    assert make(tmp_path / "here", "b") != found, "as many lines of as many bytes"


def test_fingerprint_of_large_files_reads_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{n}.jsonl" for n in range(3)]
    for path in paths:
        with open(path, "wb") as file:
            file.truncate(1 << 40)  # a terabyte of zeros
    read = []
    monkeypatch.setattr(os, "pread", lambda *args, real=os.pread: read.append(args) or real(*args))
    before = of_files(paths, [1, 1, 1])
    assert sum(size for _, size, _ in read) <= 64 << 20
    for path, place in ((paths[0], 0), (paths[1], (1 << 40) - 1)):  # its ends are always read
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        after = of_files(paths, [1, 1, 1])
        assert after != before and after.former == before.former
        before = after
    monkeypatch.setattr(files, "_BLOCKS", 2)  # with more files than blocks, the ends of files
    assert of_files(paths, [1, 1, 1]) != of_files(paths[:2], [1, 1])


def _state(value: str) -> RunState:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return RunState(model, optimizer, Progress(), {NAME: value})


def test_checkpoint_with_the_former_fingerprint_resumes(tmp_path: Path) -> None:
    now = _lines(tmp_path / "here")
    assert isinstance(now, Fingerprint)
    # As computed by versions that read only names and numbers of lines.
    former = hashlib.sha256(b"chats.jsonl\x00100\n").hexdigest()[:16]
    assert now.former == former
    old: Checkpoint = _state(former).capture()
    _state(now).load(old)
    other = _lines(tmp_path / "here", "b")
    _state(other).load(old)  # such a checkpoint stores nothing more
    with pytest.raises(UserError, match=NAME):
        _state(other).load(_state(now).capture())


def test_audit_accepts_a_run_that_began_with_the_former_fingerprint(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    history.launch(2)
    history.steps(5)
    history.launch(2)
    events = [
        json.loads(li) for li in (history.directory / "events.jsonl").read_text().splitlines()
    ]
    starts = [event for event in events if event["event"] == "start"]
    for former, clean in (("f00", True), ("f01", False)):
        starts[1] |= {"fingerprint": "new", "former_fingerprint": former}
        text = "".join(json.dumps(event) + "\n" for event in events)
        (history.directory / "events.jsonl").write_text(text)
        found = trace(read_ledger(history.directory)).findings
        assert ("identity" not in {finding.kind for finding in found}) == clean
