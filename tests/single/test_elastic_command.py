"""Choice between hvdtrain's and Horovod's elastic driver, by the launched command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hvdtrain.elastic.command import horovod_script
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


OWN_LOOPS = [
    "import hvdtrain\nhvdtrain.training()",
    "import torch, hvdtrain\nhvdtrain.training()",
    "import torch as t,hvdtrain as h, os\nh.training()",
    "import torch; import hvdtrain\nhvdtrain.training()",
    "if True:\n    from hvdtrain import training",
    "from hvdtrain import *\ntraining()",
]
NO_OWN_LOOPS = [
    "import my_hvdtrain\nmy_hvdtrain.training()",
    "import torch  # not hvdtrain.training",
    "# import hvdtrain for training",
    "import os\nhvdtrain.training()",
    "from hvdtrain import *\nrun()",
    "from .....common import other",
]


@pytest.mark.parametrize("text", [*OWN_LOOPS, *NO_OWN_LOOPS])
def test_script_with_its_own_loop_is_recognized(text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert serves(["python", str(script)]) == (text in OWN_LOOPS)


IMPORTS = [
    "import loop",
    "from loop import main",
    "if True:\n    import a.b.deep",
    "from a.b import deep",
    "from a import b",
    "import a.relative",
    "from namespace.part import loop",
]


@pytest.mark.parametrize("text", [*IMPORTS, "import b", "import loops", "import a, missing"])
@pytest.mark.parametrize("used", ["hvdtrain.training()", "hvd.elastic.run(print)"])
def test_loop_in_a_module_that_the_script_imports_is_recognized(
    text: str, used: str, tmp_path: Path
) -> None:
    loop = f"import hvdtrain, horovod.torch as hvd\n{used}"
    files = {
        "loop.py": loop,
        "a/__init__.py": "",
        "a/relative.py": "from .b import deep",
        "a/b/__init__.py": "from .. import b\nfrom ..b.deep import other",
        "a/b/deep.py": loop,
        "namespace/part/loop.py": loop,
        "loops.py": "import os\nfrom . import nothing",
        "main.py": text,
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    command = ["python", "-u", str(tmp_path / "main.py"), "--lr", "0.1"]
    assert serves(command) == (text in IMPORTS)
    assert (horovod_script(command) is not None) == (text in IMPORTS and "elastic" in used)


def test_module_of_a_project_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {
        "project/__main__.py": "from project import loop",
        "project/__init__.py": "",
        "project/loop.py": "from hvdtrain import training",
        "project/tool.py": "import torch",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert serves(["python", "-m", "project.loop", "--lr", "0.1"])
    assert serves(["python", "-u", "-m", "project"])
    assert capsys.readouterr().err == ""
    assert not serves(["python", "-m", "project.tool"])
    assert "if it trains with hvdtrain, set HVDTRAIN_ELASTIC=1" in capsys.readouterr().err
    monkeypatch.chdir("/")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert serves(["python", "-m", "project.loop"])


def test_script_can_request_hvdtrains_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "1")
    assert serves(["sh", "script.sh"])


ELASTIC = [
    "import horovod.torch as hvd\n@hvd.elastic.run\ndef train(state): ...",
    "import horovod.torch as h\nstate = h.elastic.TorchState()",
    "from horovod.torch.elastic import TorchState, run",
    "from horovod.torch import elastic",
    "if True:\n    import horovod.torch.elastic",
    "import horovod.torch\nhorovod.torch.elastic.run(print)",
    "# -*- coding: latin-1 -*-\nimport horovod.torch as hvd\nhvd.elastic.run('\\d')",
    "import horovod.torch as hvd\nimport hvdtrain  # not for training\nhvd.elastic.run(print)",
]
NOT_ELASTIC = [
    "import horovod.torch as hvd\nhvd.init()",
    "import torch\nelastic.run()",
    "import horovod.torch as hvd\nelastic = True",
    "import horovod\nimport hvdtrain\nhvdtrain.training  # in place of hvd.elastic",
    "import horovod.torch as hvd\nhvd.init()  # without hvd.elastic",
    "import horovod.torch as hvd, torch\n@torch.distributed.elastic.record\ndef main(): ...",
    "import horovod\nfrom torch.distributed.elastic.multiprocessing.errors import record",
    "import horovod.torch as hvd\nhvd.elastic.run(print",
    "import horovod.torch as hvd\nfrom hvdtrain import training\nhvd.elastic.run(print)",
]


@pytest.mark.parametrize("text", ELASTIC)
def test_script_of_horovods_elastic_api_is_recognized(text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    command = ["env", "A=1", "python", "-u", "-W", "ignore", str(script), "--lr", "0.1"]
    assert serves(command)
    module = ["-m", "hvdtrain.elastic.horovod_script"]
    assert horovod_script(command) == [*command[:6], *module, *command[6:]]


@pytest.mark.parametrize("text", NOT_ELASTIC)
def test_other_script_is_not_one_of_horovods_elastic_api(text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert horovod_script(["python", str(script)]) is None


def test_script_that_starts_hvdtrain_is_no_unchanged_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ELASTIC[0])
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "1")
    assert horovod_script(["python", str(script)]) is None
