"""`hvdtrain deploy`: its output is read back by hvdtrain's own parsers and by bash."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import hvdtrain
from hvdtrain import cli
from hvdtrain.commands import agent, launch
from hvdtrain.config import Config, parse
from hvdtrain.deploy.job import TARGETS, Job
from hvdtrain.elastic.command import training_command
from tests.support.runs import REPOSITORY

KEYS = ["--config", "gpt-nano", "--train.duration", "30", "--data.train", "it's $HOME.txt"]
BATCH = ["slurm", "pbs", "lsf"]
HOSTS = ["--hosts", "node1:8,node2:4"]
# Stub that prints its arguments and exits as configured.
STUB = """\
#!/usr/bin/env python3
import json, os, sys
if sys.argv[1:3] in (["job", "id"], ["getattr", "size"]):  # of flux
    sys.exit(print(7 if sys.argv[1] == "job" else 2))
if sys.argv[1:4] == ["--parent", "job", "info"]:
    sys.exit(print(os.environ["STUB_JOBSPEC"]))
if sys.argv[1] == "-c":  # of python
    sys.argv[:] = sys.argv[2:]
    sys.exit(exec(sys.argv[0]))
if sys.argv[1:] == ["--version"]:
    sys.exit(print(os.environ.get("STUB_MPI", "mpirun (Open MPI) 4.1.4")))
if "STUB_SIGNAL" in os.environ and sys.argv[1] == "run":  # the script of flux batch
    os.kill(os.getppid(), int(os.environ["STUB_SIGNAL"]))
with open(os.environ["STUB_CALLS"], "a") as file:
    read = [sys.stdin.read()] if sys.argv[1:4] == ["--parent", "job", "submit"] else []
    read += [open(word).read() for word in sys.argv if word.startswith("/proc/")]
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:], *read]) + "\\n")
sys.exit(int(os.environ.get("STUB_EXIT", "0")) if "hvdtrain" in " ".join(sys.argv[1:]) else 0)
"""
SCHEDULERS = {
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS": "16"},
    "pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": "nodes"},
    "lsf": {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "nodes"},
    "flux": {"FLUX_ENCLOSING_ID": "7"},
    "mpirun": {},
}
DIRECTORIES = {"slurm": "SLURM_SUBMIT_DIR", "pbs": "PBS_O_WORKDIR", "lsf": "LS_SUBCWD"}

Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Written:
    """Call `hvdtrain deploy TARGET ...` for a file in this test's directory; return its path."""

    def written(target: str, *options: str, keys: list[str] = KEYS) -> Path:
        out = tmp_path / f"train-{target}"
        own = ["--venv", ".venv"] if target in SCHEDULERS else []
        assert cli.main(["deploy", target, *own, *options, f"--out={out}", "--", *keys]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        return out

    return written


def call(script: Path, target: str, **env: str) -> tuple[int, list[list[str]]]:
    """Run a script with stubs of schedulers and launchers; return its exit code and their calls."""
    directory = script.parent
    for name in ("bin", ".venv/bin"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    for name in ("srun", "mpirun", "mpiexec.hydra", "qsub", "scontrol", "flux", "apptainer"):
        (directory / "bin" / name).write_text(STUB)
        (directory / "bin" / name).chmod(0o755)
    python = directory / ".venv/bin/python"
    python.write_text(STUB.replace("/usr/bin/env python3", sys.executable))
    python.chmod(0o755)
    (directory / ".venv/bin/activate").write_text(f"PATH={python.parent}:$PATH\n")
    calls = directory / "calls"
    calls.unlink(missing_ok=True)
    own = SCHEDULERS[target] | (
        {DIRECTORIES[target]: str(directory)} if target in DIRECTORIES else {}
    )
    path = f"{directory}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "STUB_CALLS": str(calls), **own, **env}
    command = ["bash", str(script)]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60
    )
    lines = calls.read_text().splitlines() if calls.exists() else []
    assert lines, done.stderr
    return done.returncode, [json.loads(line) for line in lines]


def trained(words: list[str]) -> Config:
    """Return the configuration with which a launcher's command starts training."""
    at = words.index("-m") - 1 if "-m" in words else words.index("hvdtrain")
    command = training_command(["python", *words[at + 1 :]])
    assert command is not None, words
    return parse(command.flags).config


def launched(words: list[str]) -> argparse.Namespace:
    """Return the arguments of `hvdtrain launch` in a command, parsed by its own parser."""
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    args = parser.parse_args(words[words.index("launch") + 1 :])
    args.config = parse(args.training[1:]).config
    return args


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["deploy", name, "--help"])
    assert end.value.code == 0
    assert "--out" in capsys.readouterr().out


def test_slurm_script_of_the_repository_matches_deploy_output() -> None:
    file = Path("slurm/train.sbatch")
    (text,) = TARGETS["slurm"](Job(out=file)).values()
    assert text == (REPOSITORY / file).read_text(), f"hvdtrain deploy slurm --out {file}"


def test_flux_script_starts_one_agent_per_node_and_is_resubmitted(written: Written) -> None:
    script = written("flux", "--ranks", "2", "--module", "a")
    script.write_text(script.read_text().replace("module load a", ""))
    code, (words,) = call(script, "flux")
    assert code == 0
    assert words[:5] == ["flux", "run", "--nodes=2", "--exclusive", "-o"]
    args = launched(words)
    assert args.slots == 2 and not (args.hosts or args.hostfile or args.slurm)
    assert args.config.train.steps == 30 and args.config.run.id == "7"
    assert KEYS[-1] in words, "bash has read a key"
    # The original jobspec has the options, the script and its arguments, and the environment.
    job = {
        "attributes": {"system": {"environment": {"HOME": "/home/a"}, "queue": "gpu"}},
        "tasks": [{"command": ["flux", "broker", "{{tmpdir}}/script", "--optim.lr", "0.1"]}],
    }
    code, (_, again) = call(script, "flux", STUB_EXIT="75", STUB_JOBSPEC=json.dumps(job))
    assert code == 75 and again[:-1] == ["flux", "--parent", "job", "submit"]
    new = {"HOME": "/home/a", "HVDTRAIN_RUN": "7", "HVDTRAIN_RESTARTS": "1"}
    job["attributes"]["system"]["environment"] = new
    assert json.loads(again[-1]) == job
    code, (words,) = call(script, "flux", STUB_EXIT="75", HVDTRAIN_RUN="f1", HVDTRAIN_RESTARTS="20")
    assert code == 75 and launched(words).config.run.id == "f1"
    code, calls = call(script, "flux", STUB_EXIT="2")
    assert code == 2 and len(calls) == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_flux_script_is_resubmitted_after_a_signal(number: int, written: Written) -> None:
    jobspec = json.dumps({"attributes": {"system": {"environment": {}}}})
    env = {"STUB_EXIT": "75", "STUB_JOBSPEC": jobspec, "STUB_SIGNAL": str(int(number))}
    script = written("flux")
    for _ in range(5):  # bash sometimes loses the code of a launcher that ends at this moment
        code, (_, again) = call(script, "flux", **env)
        assert code == 75 and again[:-1] == ["flux", "--parent", "job", "submit"]


@pytest.mark.parametrize(
    "target", [t for t in TARGETS if t not in ("malleable", "kubernetes", "trainjob")]
)
def test_script_contains_only_what_was_asked_for(target: str, written: Written) -> None:
    lines = written(target, *(HOSTS if target == "mpirun" else [])).read_text().splitlines()
    directives = ("#SBATCH", "#PBS", "#BSUB", "#flux:", "# module")
    assert not [line for line in lines if line.startswith(tuple(f"#{d}" for d in directives))]
    assert not [line for line in lines if "NAME" in line or "edit" in line or "docs/" in line]
    assert not any("module" in line for line in lines)


def test_malleable_scripts_hold_the_run_and_lend_a_node(tmp_path: Path) -> None:
    options = [
        "--ranks",
        "4",
        "--donor-time",
        "00:10:00",
        "--donor-queue",
        "low",
        "--venv",
        ".venv",
    ]
    keys = ["--run.id", "mine", "--run.root", "/data/runs"]
    assert cli.main(["deploy", "malleable", *options, f"--out={tmp_path}", "--", *keys]) == 0
    _, (words,) = call(tmp_path / "run.sbatch", "slurm", SLURM_NNODES="1")
    assert launched(words).config.run.id == "mine"
    donor = tmp_path / "donor.sbatch"
    _, (words,) = call(donor, "slurm")
    parser = argparse.ArgumentParser()
    agent.add_arguments(parser)
    args = parser.parse_args(words[words.index("agent") + 1 :])
    assert (str(args.run), args.slots, args.task) == ("/data/runs/mine", 4, False)
    directives = donor.read_text()
    assert "--partition=low\n" in directives and "--time=00:10:00\n" in directives
    assert call(donor, "slurm", STUB_EXIT="75")[0] == 0, "the node has left the run"
    assert call(donor, "slurm", STUB_EXIT="2")[0] == 2


@pytest.mark.parametrize(
    ("options", "keys", "problem"),
    [
        ([], [], "run.id is missing"),
        (["--donor-time", "00:00:59"], ["--run.id", "a"], "--donor-time"),
        (["--donor-time", "10"], ["--run.id", "a"], "--donor-time 10: [DAYS-]HH:MM:SS"),
    ],
)
def test_invalid_malleable_job_is_refused(
    options: list[str],
    keys: list[str],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["deploy", "malleable", *options, f"--out={tmp_path}/x", "--", *keys]
    assert cli.main(argv) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("target", [*BATCH, "mpirun"])
@pytest.mark.parametrize("launcher", ["srun", "mpirun", "launch"])
def test_script_passes_valid_arguments_to_launcher_and_training(
    written: Written, target: str, launcher: str
) -> None:
    if launcher == "srun" and target != "slurm":
        return
    script = written(target, *(HOSTS if target == "mpirun" else []))
    code, (words, *others) = call(script, target, LAUNCHER=launcher, OMP_NUM_THREADS="1")
    assert code == 0 and not others
    if launcher == "launch":
        args = launched(words)
        config = args.config
        source = {"slurm": args.slurm, "pbs": args.hostfile, "lsf": args.hostfile}
        assert source.get(target, args.hosts) in (True, "nodes", HOSTS[1])
    else:
        config = trained(words)
        assert words[0] == launcher
    if launcher == "mpirun" and target != "slurm":
        np = words[words.index("-np") + 1]
        assert np == ("12" if target == "mpirun" else "16")
        assert "OMP_NUM_THREADS" in words and "OMP_NUM_THREADS=1" not in words
    assert config.train.steps == 30 and config.preempt.grace_seconds == 120
    assert config.run.id == {"mpirun": "hvdtrain"}.get(target, f"{target}-7")
    assert KEYS[-1] in words, "bash has read a key"


@pytest.mark.parametrize("key", [["--run.id=8"], ["--run.id", "8"]], ids=["=", "two words"])
@pytest.mark.parametrize("target", [*SCHEDULERS, "compose"])
def test_run_id_of_the_user_is_written_once(target: str, key: list[str], written: Written) -> None:
    script = written(target, *(HOSTS if target == "mpirun" else []), keys=[*key, *KEYS])
    if target == "compose":
        words = yaml.safe_load(script.read_text())["x-node"]["command"]
    else:
        _, (words, *_) = call(script, target)
    at = [number for number, word in enumerate(words) if word.startswith("--run.id")]
    assert [words[number : number + 2] for number in at] == [["--run.id", "8"]]
    assert KEYS[-1].replace("$", "$$" if target == "compose" else "$") in words


@pytest.mark.parametrize("target", [*BATCH, "mpirun"])
@pytest.mark.parametrize(
    ("version", "program", "binding"),
    [
        ("mpirun (Open MPI) 5.0.11", "mpirun", "--bind-to none --map-by slot"),
        ("HYDRA build details:\n    Version:  5.0.2", "mpirun", "-bind-to none"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)",
            "mpiexec.hydra",
            "-genv I_MPI_PIN 0",
        ),
    ],
)
def test_script_gives_each_mpi_its_own_options(
    written: Written, target: str, version: str, program: str, binding: str
) -> None:
    script = written(target, *(HOSTS if target == "mpirun" else []))
    env = {"STUB_MPI": version, "OMP_NUM_THREADS": "1"}
    _, (words, *_) = call(script, target, LAUNCHER="mpirun", **env)
    assert words[0] == program and f" {binding} " in " ".join(words)
    assert ("-x" in words) == ("Open MPI" in version and target != "slurm")
    if target == "mpirun" and "Intel" in version:  # it reads slots from a file only
        assert "-machinefile" in words and words[-1] == HOSTS[1].replace(",", "\n") + "\n"
    elif target == "mpirun":
        assert words[words.index("-H" if "Open MPI" in version else "-hosts") + 1] == HOSTS[1]
    elif target != "slurm":
        option = "-machinefile" if "Intel" in version else "--hostfile"
        assert words[words.index(option) + 1] == "nodes"


@pytest.mark.parametrize("target", [*BATCH, "mpirun"])
def test_script_uses_the_container_and_loads_the_modules(written: Written, target: str) -> None:
    hosts = HOSTS if target == "mpirun" else []
    script = written(target, *hosts, "--image", "hvdtrain.sif", "--module", "a", "--module", "b/2")
    loaded = script.parent / "loaded"
    bash = f'module() {{ echo "$@" >> {loaded}; }}; export -f module; bash {script}'
    wrapper = script.with_name("wrapper")
    wrapper.write_text(f"{bash}\n")
    _, (words, *_) = call(wrapper, target, LAUNCHER="mpirun")
    at = words.index("apptainer")
    assert words[at : at + 4] == ["apptainer", "exec", "hvdtrain.sif", "python"]
    assert loaded.read_text() == "load a\nload b/2\n"


def test_directives_match_the_requested_resources(written: Written) -> None:
    asked = shlex.split(
        "--name big --nodes 4 --ranks 2 --cpus 3 --gpus --time 1-02:30:00 --queue gpu"
    )
    expected = {
        "slurm": "--job-name=big --nodes=4 --ntasks-per-node=2 --cpus-per-task=3 "
        "--gpus-per-node=2 --partition=gpu --time=26:30:00 --signal=B:USR1@60",
        "pbs": "-N big -l select=4:ncpus=6:mpiprocs=2:ngpus=2 -l walltime=26:30:00 -q gpu",
        "lsf": '-J big -n 8 -R "span[ptile=2]" -R "affinity[core(3)]" -gpu "num=2" -W 26:30 '
        '-q gpu -Q "75"',
        "flux": "--job-name=big --nodes=4 --exclusive --nslots=4 --cores-per-slot=6 "
        "--gpus-per-slot=2 --queue=gpu --time-limit=95400s --signal=SIGUSR1@60s",
    }
    for target, words in expected.items():
        lines = written(target, *asked, "--grace", "60").read_text().splitlines()
        marker = {"slurm": "#SBATCH ", "pbs": "#PBS ", "lsf": "#BSUB ", "flux": "#flux: "}[target]
        given = " ".join(line.removeprefix(marker) for line in lines if line.startswith(marker))
        for word in words.replace(" -", "\n-").split("\n"):
            assert word in given, (target, word)


def test_lsf_time_limit_is_rounded_down_to_minutes(
    written: Written,
) -> None:
    text = written("lsf", "--nodes", "1", "--time", "00:03:30", "--grace", "60").read_text()
    assert "#BSUB -W 00:03\n" in text and re.search(r"^LIMIT_SECONDS=180 ", text, re.MULTILINE)


def test_preempted_job_is_resubmitted_up_to_a_limit(written: Written) -> None:
    script = written("pbs")
    code, (_, again) = call(script, "pbs", STUB_EXIT="75")
    assert code == 75
    assert again == ["qsub", "-v", "HVDTRAIN_RUN=pbs-7,HVDTRAIN_RESTARTS=1", str(script)]
    code, (words, _) = call(script, "pbs", STUB_EXIT="75", HVDTRAIN_RUN="pbs-3", PBS_JOBID="8.s")
    assert trained(words).run.id == "pbs-3", "the run of its first start"
    for number in (0, 1, 2):
        code, calls = call(script, "pbs", STUB_EXIT=str(number))
        assert code == number and len(calls) == 1
    code, calls = call(script, "pbs", STUB_EXIT="75", HVDTRAIN_RESTARTS="20")
    assert code == 75 and len(calls) == 1, "without end"
    # LSF itself requeues it after this exit code.
    code, calls = call(written("lsf"), "lsf", STUB_EXIT="75")
    assert code == 75 and len(calls) == 1


def test_compose_file_matches_the_repository_and_its_run_parses(
    written: Written,
) -> None:
    ours = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())
    made = yaml.safe_load(written("compose", "--nodes", "3", "--ranks", "2").read_text())
    assert made["volumes"] == {"runs": ours["volumes"]["runs"]}
    assert made["services"].keys() == {"node1", "node2", "node3"}
    same = ("image", "init", "restart", "cap_drop", "security_opt", "volumes", "hostname")
    for name in ("node1", "node2"):
        theirs, own = ours["services"][name], made["services"][name]
        assert {key: own.get(key) for key in same} == {key: theirs.get(key) for key in same}
    words = [word.replace("$$", "$") for word in made["services"]["node3"]["command"]]
    assert KEYS[-1] in words
    args = launched(words)
    assert args.slots == 2 and args.hosts is None
    assert (args.config.run.root, args.config.train.steps) == ("/runs", 30)
    gpus = yaml.safe_load(written("compose", "--gpus").read_text())["services"]["node1"]
    (device,) = gpus["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 8 and gpus["image"] == "hvdtrain:cuda"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("slrum", "unknown target 'slrum'; did you mean slurm?"),
        ("slurm --nods 2", "unknown argument --nods; did you mean --nodes?"),
        ("mpirun --hosts a:1 --time 1", "unknown argument --time; "),
        ("mpirun --hosts a:x", "--hosts a:x: a host and its slots are expected"),
        ("slurm --name Big", "--name Big: at most 40 lower-case letters"),
        ("kubernetes --name null", "--name null: at most 40 lower-case letters"),
        ("slurm --time 1h", "--time 1h: [DAYS-]HH:MM:SS is expected, such as 12:00:00"),
        ("slurm --time 00:02:00", "--time 00:02:00 leaves less than a minute before the 120 s"),
        ("slurm --queue a;b", "--queue: 'a;b' is not a name or path without spaces"),
        ("slurm -- --run.id a$b", "run.id: 'a$b' is not a name or path without spaces"),
        ("slurm -- --train.durations 3", "did you mean train.duration?"),
        ("kubernetes --min-nodes 3", "--min-nodes 3 is more than --nodes 2"),
        ("slurm --out /dev/null/x", "/dev/null/x cannot be written"),
    ],
)
def test_invalid_command_line_is_one_line_and_exits_with_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = cli.main(["deploy", *shlex.split(line)])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert message in said.err and said.err.count("\n") == 1, said.err


def test_docs_and_compose_use_the_images_that_deploy_names() -> None:
    compose = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())
    assert Job().container == f"hvdtrain:{hvdtrain.__version__}" == compose["x-node"]["image"]
    assert f"-t {Job().gpu_image} " in (REPOSITORY / "docker/README.md").read_text()


def test_script_uses_the_environment_that_generated_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # without a .venv
    assert cli.main(["deploy", "slurm"]) == 0
    assert f"VENV=${{VENV:-{sys.prefix}}}" in capsys.readouterr().out
