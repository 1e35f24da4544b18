"""Root configuration, and its parser for YAML and flags.

Precedence: defaults < task's defaults < preset or YAML < flags. This module does not import torch,
so that errors are reported at once; only a user's own task may import torch when it is loaded.
"""

from __future__ import annotations

import difflib
import re
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from importlib import resources
from operator import getitem
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.config_checks import check_together
from hvdtrain.config_files import dotted, flag_names, read_yaml, readable
from hvdtrain.config_tiers import basic, tiers_of
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.elastic.config import ElasticConfig
from hvdtrain.engine.config import (
    EvalConfig,
    IntegrityConfig,
    MemoryConfig,
    PreemptConfig,
    RunConfig,
    TrainConfig,
)
from hvdtrain.errors import UserError, require
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.launch.hostfile import parse_hosts
from hvdtrain.optim.config import OptimConfig, PrecisionConfig, ScheduleConfig
from hvdtrain.parallel.config import AXES, ParallelConfig
from hvdtrain.runtime.config import RuntimeConfig
from hvdtrain.runtime.mesh import Grid
from hvdtrain.tasks import load_class, optional
from hvdtrain.telemetry.config import ProfileConfig, TelemetryConfig

LAYOUT = "--print_layout"


@dataclass
class Config:
    """All keys except the task's own.

    Args:
        task: a built-in task's name, or `package.module:Class`
        seed: the only seed, for the initial weights, the order of samples and dropout
        run: the run directory
        batch: the global batch
        loader: loading of the training data
        train: the training loop
        integrity: detection of hosts that compute wrongly
        eval: evaluation
        optim: the optimizer
        schedule: the learning-rate schedule
        precision: number formats of the model's computations
        compile: compile each of the model's blocks by torch.compile in its first pass; requires a
            C++ compiler on each host, and Triton on GPUs
        memory: memory of activations
        exchange: gradient synchronization
        parallel: models that span ranks
        runtime: the process of a rank
        checkpoint: checkpoints
        elastic: detection of ranks that died or hang
        preempt: preemption
        telemetry: metrics, their exporter and their sinks
        profile: traces of selected steps
    """

    task: str = basic("language_model")
    seed: int = basic(1234)
    run: RunConfig = field(default_factory=RunConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    compile: bool = False
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    preempt: PreemptConfig = field(default_factory=PreemptConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        require(self.seed >= 0, f"seed must be >= 0, not {self.seed}")
        check_together(self)

    @property
    def depends_on_ranks(self) -> str:
        """Keys that make the loss curve depend on the number of ranks; "" if there are none."""
        per_rank = f"batch.per_rank_size {self.batch.per_rank_size}"
        if self.optim.scale_lr != "none":
            per_rank += f" with optim.scale_lr {self.optim.scale_lr}"
        found = (per_rank if self.batch.per_rank_size else "", self.exchange.depends_on_ranks)
        return ", ".join(filter(None, found))


@dataclass
class Settings:
    """A complete, checked configuration.

    Args:
        config: the keys that every task has
        task_class: the class that `config.task` names
        task_config: the task's own keys as an instance of its `Config`, or None
        resolved: the whole configuration as YAML that reproduces it
        unread: flags that a script with its own loop keeps to itself, although they are keys
    """

    config: Config
    task_class: type
    task_config: Any
    resolved: str
    unread: tuple[str, ...] = ()

    @property
    def warning(self) -> str:
        """What to change because of unread keys; "" if there are none."""
        if not self.unread:
            return ""
        names = " and ".join(f"--{name}" for name in self.unread)
        are, them = ("is", "it") if len(self.unread) == 1 else ("are", "them")
        return (
            f"{names} {are} left to the script; to set {them} for hvdtrain, pass config= to "
            "hvdtrain.training"
        )


def parse(argv: Sequence[str], before: Sequence[str] = ()) -> Settings:
    """Parse flags and the YAML files that they name.

    Args:
        before: flags that `argv` overrides.

    Raises:
        UserError: an unknown key, a wrong type or an impossible value.
        SystemExit: after --help, --print_config or --print_layout.
    """
    argv, only_basic = _wanted_help(argv)
    argv, hosts = _layout_hosts(argv)
    names, flags = _config_files(argv)
    files = [_config_file(name) for name in names]
    contents = [read_yaml(path) for path in files]
    task_class = load_class(_task_name(flags, contents))
    parser = build_parser(task_class, only_basic)
    known = _known_keys(parser)
    groups = _groups(known)
    for path, content in zip(files, contents, strict=True):
        _check_keys(dotted(content), known, f"in {path}")
        for key in groups.intersection(dotted(content)):
            value = content[key] if key in content else reduce(getitem, key.split("."), content)
            raise UserError(f"{path}: {key} is a group of keys, not {value!r}")
    _check_keys(flag_names(before), known, "in config")
    _check_keys(flag_names(flags), known, "on the command line")
    try:
        namespace = parser.parse_args([*(f"--config={path}" for path in files), *before, *flags])
        made = parser.instantiate(namespace)
        config = Config(**{f.name: made[f.name] for f in fields(Config)})
        own = optional(task_class, "Config")
        task_config = own and own(**{f.name: made[f.name] for f in fields(own)})
    except (ArgumentError, ValueError) as error:
        raise UserError(readable(str(error))) from None
    if hosts:
        print(_layout(config, hosts))
        raise SystemExit(0)
    resolved = parser.dump(namespace, skip_unset=False)
    return Settings(config, task_class, task_config, resolved)


class _HelpFormatter(DefaultHelpFormatter):
    """Help formatter that puts most keys and their descriptions on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40)


def build_parser(task_class: type, only_basic: bool = False) -> ArgumentParser:
    """Build the parser of all keys, including the task's own.

    Args:
        only_basic: for --help, which then shows only basic keys; hidden keys are not dumped.

    Raises:
        UserError: the task's Config has a key that already exists.
    """
    program = "hvdtrain train"
    parser = ArgumentParser(
        prog=program,
        usage=f"{program} [--config FILE_OR_PRESET] [--section.key VALUE ...]",
        description="Train a task on one process, or on all processes that a launcher starts.",
        formatter_class=_HelpFormatter,
        exit_on_error=False,
    )
    parser.add_argument(
        "--config",
        action="config",
        metavar="FILE_OR_PRESET",
        help=f"a YAML file, or a preset: {', '.join(presets())}",
    )
    parser._option_string_actions["--help"].help = "show the basic keys; --help all: all keys"
    parser._option_string_actions[
        "--print_config"
    ].help = (
        "print the configuration and exit; skip_default: only values that differ from the defaults"
    )
    parser.add_argument(
        LAYOUT,
        metavar="HOSTS",
        default=SUPPRESS,
        help="print which rank of node1:8,node2:8 holds which shard of the model, and exit",
    )
    own = optional(task_class, "Config")
    for owner in filter(None, (Config, own)):
        texts = dict(re.findall(r"^ +(\w+): (.*)$", owner.__doc__ or "", re.MULTILINE))
        instance = owner()
        for f in fields(owner):
            if owner is own and f.name in {g.name for g in fields(Config)}:
                raise UserError(
                    f"task: {task_class.__name__}.Config has {f.name}, a key of hvdtrain"
                )
            parser.add_argument(
                f"--{f.name}",
                type=get_type_hints(owner)[f.name],
                default=getattr(instance, f.name),
                help=texts.get(f.name, f.name),
            )
    known = _known_keys(parser)
    hidden = _groups(known)  # --optim FILE and similar
    parser.set_defaults(optional(task_class, "defaults"))
    if only_basic:
        tiers = [*tiers_of(Config), *(tiers_of(own) if own else ())]
        shown = [key for key, tier in tiers if tier == "basic"]
        hidden |= {o[2:] for o in parser._option_string_actions if o.endswith(".help")}
        hidden |= {key for key, _ in tiers}.difference(shown)
        parser.epilog = f"These are {len(shown)} of {len(tiers)} keys; `--help all` shows all."
    for key in hidden:
        parser._option_string_actions[f"--{key}"].help = SUPPRESS
    return parser


def presets() -> dict[str, Path]:
    """Return name -> file of the presets in the package."""
    directory = Path(str(resources.files("hvdtrain") / "presets"))
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def _config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of `--config`, and the other arguments, which override these files."""
    files, rest = [], []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            files.append(next(arguments, ""))
        elif argument.startswith("--config="):
            files.append(argument.partition("=")[2])
        else:
            rest.append(argument)
    return files, rest


def _wanted_help(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without `all` after --help, and whether only basic keys are wanted."""
    rest = [*argv]
    for place, argument in enumerate(rest):
        if argument in ("-h", "--help") and rest[place + 1 : place + 2] == ["all"]:
            return [*rest[: place + 1], *rest[place + 2 :]], False
        if argument == "--help=all":
            return [*rest[:place], "--help", *rest[place + 1 :]], False
    return rest, "-h" in rest or "--help" in rest


def _config_file(name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    if name in presets():
        return presets()[name]
    raise UserError(f"--config {name}: no such file, and no preset ({', '.join(presets())})")


def _layout_hosts(argv: Sequence[str]) -> tuple[list[str], str]:
    """Return the arguments without --print_layout, and its value."""
    rest, hosts = [], ""
    arguments = iter(argv)
    for argument in arguments:
        if argument.partition("=")[0] == LAYOUT:
            hosts = argument.partition("=")[2] or next(arguments, "")
        else:
            rest.append(argument)
    return rest, hosts


def _layout(config: Config, hosts: str) -> str:
    """Describe the layout; raises UserError if the ranks do not form whole replicas."""
    names = [host.name for host in parse_hosts(hosts) for _ in range(host.slots)]
    return Grid.of(names, config.parallel.degrees, AXES).describe(names)


def _task_name(argv: Sequence[str], contents: Iterable[Mapping[str, Any]]) -> str:
    name = Config.task
    for content in contents:
        name = content.get("task", name)
    for flag, following in zip(argv, [*argv, ""][1:], strict=True):
        if flag == "--task":
            name = following
        elif flag.startswith("--task="):
            name = flag.partition("=")[2]
    return str(name)


def _known_keys(parser: ArgumentParser) -> set[str]:
    options = {option[2:] for option in parser._option_string_actions if option.startswith("--")}
    # Of a dictionary of dataclasses, such as data.mixture, whose keys are not known.
    return {option for option in options if not option.endswith(".help")}


def _groups(known: Iterable[str]) -> set[str]:
    return {".".join(key.split(".")[:n]) for key in known for n in range(1, key.count(".") + 1)}


def _check_keys(keys: Iterable[str], known: set[str], where: str) -> None:
    groups = _groups(known)
    for key in keys:
        parents = {".".join(key.split(".")[:n]) for n in range(1, key.count(".") + 1)}
        in_a_value = parents & known - groups  # a key whose value is itself a mapping
        if key not in known and not in_a_value:
            raise UserError(f"unknown key {key} {where}; {_hint(key, known)}")


def _hint(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "`--help all` lists all keys"
