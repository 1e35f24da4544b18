"""Choice between hvdtrain's and Horovod's elastic driver, by the launched command."""

from __future__ import annotations

import shlex

import pytest

from hvdtrain.elastic.horovodrun import serves

OURS = """\
python -m hvdtrain.train --run.id mine
/opt/venv/bin/python3.11 -u -X dev -W ignore -m hvdtrain.train
python -um hvdtrain.train
python -Wignore -mhvdtrain.train
python --check-hash-based-pycs always -m hvdtrain.cli train
hvdtrain train --run.id mine
/opt/venv/bin/hvdtrain train
python /opt/venv/bin/hvdtrain train
python src/hvdtrain/train.py
python src/hvdtrain/cli.py train
numactl --cpunodebind=0 python -m hvdtrain.train
env OMP_NUM_THREADS=1 python -m hvdtrain.train
"""
FOREIGN = """\
python other.py hvdtrain
python other.py -m hvdtrain.train
python other.py --name hvdtrain train
python other.py python -m hvdtrain.train
python -m other hvdtrain.train
python -m hvdtrain.bench
python -c 'print(1)' -m hvdtrain.train
python -X hvdtrain.train other.py
python train.py
python
other hvdtrain train
other --log hvdtrain.train
hvdtrain top runs/mine
"""


@pytest.mark.parametrize("command", OURS.splitlines())
def test_training_command_gets_hvdtrains_driver(command: str) -> None:
    assert serves(shlex.split(command))


@pytest.mark.parametrize("command", FOREIGN.splitlines())
def test_foreign_command_is_left_to_horovods_driver(command: str) -> None:
    assert not serves(shlex.split(command))


def test_script_can_request_hvdtrains_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "1")
    assert serves(["sh", "script.sh"])
