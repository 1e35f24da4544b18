"""The README shows what runs: its task is trained, its table is the configuration."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from hvdtrain.config import parse
from tests.support.runs import metrics

README = Path(__file__).parents[2] / "README.md"


def test_the_own_task_of_the_readme_trains_as_it_stands_there(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    (tmp_path / "bits.py").write_text(code)
    flags = ["--task", "bits:Majority", "--hidden", "64", "--run.id", "own", "--telemetry.port=0"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.train", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    last = metrics(tmp_path / "runs" / "own")[-1]
    assert last["step"] == 300
    assert last["validation_accuracy"] > 0.9  # it learns, not only runs


def test_the_configuration_table_names_every_key_and_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", README.read_text(), re.MULTILINE)
    table = {key: value.strip("`") for key, value in rows}
    resolved = yaml.safe_load(parse([]).resolved)
    keys = {
        f"{group}.{key}" if isinstance(content, dict) else group: value
        for group, content in resolved.items()
        for key, value in (content.items() if isinstance(content, dict) else [("", content)])
    }
    assert table.keys() == keys.keys()
    task_sets = {"train.steps": "1000", "optim.lr": "0.001"}
    for key, value in keys.items():
        if value in (None, []):  # the table says in words what stands for it
            continue
        expected = task_sets.get(key, str(value))
        assert table[key] == expected, key
