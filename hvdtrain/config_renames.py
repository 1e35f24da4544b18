"""Keys of earlier versions: their current names, and what replaces keys that were dropped.

`RENAMED` and `DROPPED` are the only place that knows old keys. Files, flags and tasks' defaults may
use them for one release, each with a warning; the configurations in run directories may use them
forever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.untrusted import parse_yaml, shown

_MISSING = object()


@dataclass(frozen=True)
class Renamed:
    """Old keys that one current key replaces.

    Args:
        old: the old keys.
        new: the current key.
        value: computes the value of `new` from the values of `old`, None for those that are not
            given; returns None if they switch `new` off. None: the value is the same.
        wins: the old keys take precedence over `new`, which earlier versions also had.
        on: whether a value of `new` is one that the old keys switch on and off.
    """

    old: tuple[str, ...]
    new: str
    value: Callable[..., Any] | None = None
    wins: bool = False
    on: Callable[[Any], bool] = lambda value: False


def _moved(old: str, new: str) -> Renamed:
    return Renamed((old,), new)


def _stage(zero: Any, reshard: Any) -> Any:
    if zero not in (None, 0):
        return zero
    return 3 if reshard is None or reshard is True else 2 if reshard is False else reshard


def _duration(steps: Any, epochs: Any) -> Any:
    if steps and epochs:
        raise UserError(
            f"train.epochs {epochs} excludes train.steps {steps}: set only train.duration"
        )
    if epochs:
        return f"{epochs}epochs"
    return steps


RENAMED = (
    # one group for the data of all tasks
    _moved("image.data", "data.train"),
    _moved("image.validation", "data.validation"),
    _moved("image.validation_fraction", "data.validation_fraction"),
    _moved("image.cache", "data.cache"),
    _moved("tabular.data", "data.train"),
    _moved("tabular.validation", "data.validation"),
    _moved("tabular.validation_fraction", "data.validation_fraction"),
    # patterns of attention
    _moved("model.attention", "model.attention.pattern"),
    _moved("model.segment_lengths", "model.attention.segment_lengths"),
    _moved("model.dilation_rates", "model.attention.dilation_rates"),
    _moved("model.block_size", "model.attention.block_size"),
    _moved("model.local_blocks", "model.attention.local_blocks"),
    _moved("model.global_blocks", "model.attention.global_blocks"),
    # the three stages of ZeRO
    Renamed(("parallel.zero", "parallel.reshard_after_forward"), "parallel.shard.stage", _stage),
    _moved("parallel.shard", "parallel.shard.degree"),
    _moved("parallel.zero_copies", "parallel.shard.copies"),
    _moved("parallel.offload", "parallel.shard.offload"),
    # one key instead of several
    Renamed(
        ("train.steps", "train.epochs"),
        "train.duration",
        _duration,
        on=lambda duration: "epoch" in str(duration),
    ),
    Renamed(
        ("memory.fit",),
        "batch.micro_size",
        lambda fit: "auto" if fit is True else None,
        wins=True,
        on=lambda size: size == "auto",
    ),
    _moved("compile.enabled", "compile"),
)

# Old key -> what happens instead.
DROPPED = {
    "exchange.error_feedback": "what compression omits is always added to the next gradient",
    "huggingface.weights": "training starts from the weights in the directory, if it has any",
    "loader.prefetch": "each worker loads 2 micro-batches ahead",
    "parallel.place": "ranks of the axes tensor, context, shard, pipeline are placed in this order",
    "telemetry.linger_seconds": "a scraped rank waits at most 30 s for a final scrape",
    "telemetry.straggler_threshold": "ranks with a straggler score below 0.75 are slow",
}


# Built-in task -> its section that has had old keys. Other tasks may have a section of that name.
TASK_SECTIONS = {
    "language_model": "model",
    "image": "image",
    "huggingface": "huggingface",
    "tabular": "tabular",
}


def describe_old(key: str) -> str:
    """Say what an old key is now; "" for any other key."""
    new = next((rule.new for rule in RENAMED if key in rule.old), "")
    return f"which is now {new}" if new else "which has no effect now" if key in DROPPED else ""


def recorded(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current form of the configuration in a run directory, which may be old.

    The own sections of a task that is not built in stay as they are.
    """
    own = dict[str, Any]()
    if content.get("task", "language_model") not in TASK_SECTIONS:
        own = {name: content[name] for name in TASK_SECTIONS.values() if name in content}
    rest = {name: value for name, value in content.items() if name not in own}
    try:
        return current_content(rest, None, "")[0] | own
    except UserError:  # a file that was edited
        return dict(content)


def _nothing(key: str) -> Any:
    return None


def current_content(
    content: Mapping[str, Any],
    known: Collection[str] | None,
    where: str,
    before: Callable[[str], Any] = _nothing,
) -> tuple[dict[str, Any], list[str]]:
    """Return a mapping of keys, such as a YAML file, with current keys, and what was replaced.

    Args:
        content: keys may be nested or dotted; values are not checked.
        known: keys of the task that are not groups; a task may use an old key for its own
            purposes. None: unknown.
        where: where the keys are, for messages.
        before: returns the value of a current key that `content` overrides, if it is known.

    Raises:
        UserError: an old and a current key contradict each other, or an old key switches off a
            value from before.
    """
    found = deepcopy(dict(content))
    given = {}
    for key in old_keys(known):
        value = _get(found, key)
        if value is not _MISSING and not (isinstance(value, Mapping) and _is_group(key)):
            given[key] = value
            _remove(found, key)
    values, notes = _replace(given, lambda key: _get(found, key), where, before)
    for key, value in values.items():
        _remove(found, key)
        _set(found, key, value)
    return found, notes


def current_flags(
    flags: Sequence[str],
    known: Collection[str],
    where: str,
    before: Callable[[str], Any] = _nothing,
) -> tuple[list[str], list[str]]:
    """Do the same as `current_content` for flags, `--key value` or `--key=value`.

    The order of flags stays; keys whose value is computed from several keys come last.
    """
    names = {rule.old[0]: rule.new for rule in RENAMED if rule.value is None}
    replacements = {rule.new for rule in RENAMED}
    old, rest = old_keys(known), list[str]()
    given: dict[str, Any] = {}
    current: dict[str, Any] = {}
    arguments = iter(flags)
    for argument in arguments:
        name, assigned, text = argument.removeprefix("--").partition("=")
        key = name.rstrip("+")
        if not argument.startswith("--") or key not in {*old, *replacements}:
            rest.append(argument)
            continue
        words = [argument] if assigned else [argument, *islice(arguments, 1)]
        text = text if assigned else "".join(words[1:])
        value = _value(text)
        if key not in old or (isinstance(value, Mapping) and _is_group(key)):
            rest += words
            current[key] = value
            continue
        if not text:
            raise UserError(f"{key}: a value is expected, not nothing")
        given[key] = value
        if key in names:
            rest.append(f"--{names[key]}{name[len(key) :]}={text}")
    values, notes = _replace(given, lambda key: current.get(key, _MISSING), where, before)
    computed = {rule.new for rule in RENAMED if rule.value is not None}
    return [*rest, *(f"--{k}={v}" for k, v in values.items() if k in computed)], notes


def old_keys(known: Collection[str] | None) -> list[str]:
    """Old keys that are not current keys of the task, and whose replacement the task has."""
    rules = [rule for rule in RENAMED if known is None or rule.new in known]
    found = [*DROPPED, *(old for rule in rules for old in rule.old)]
    if known is None:
        return found
    groups = {key.partition(".")[0] for key in known}
    return [key for key in found if key not in known and key.partition(".")[0] in groups]


def _is_group(key: str) -> bool:
    return any(rule.new.startswith(f"{key}.") for rule in RENAMED)


def _replace(
    given: Mapping[str, Any],
    current: Callable[[str], Any],
    where: str,
    before: Callable[[str], Any],
) -> tuple[dict[str, Any], list[str]]:
    """Return values of current keys, and a sentence for each old key.

    Args:
        given: old key -> value.
        current: returns the value that is also given for a current key.
        before: returns the value that is overridden.
    """
    values: dict[str, Any] = {}
    notes = [f"{key} has no effect now: {DROPPED[key]}" for key in given if key in DROPPED]
    for rule in RENAMED:
        if given.keys().isdisjoint(rule.old):
            continue
        own = [given.get(old) for old in rule.old]
        value = own[0] if rule.value is None else rule.value(*own)
        names = " and ".join(f"{old} {shown(given[old])}" for old in rule.old if old in given)
        other = current(rule.new)
        if value is None and rule.value is not None:
            kept = before(rule.new) if other is _MISSING else other
            if rule.on(kept):
                raise UserError(
                    f"{names} {where}: {rule.new} would remain {shown(kept)}; set {rule.new}, "
                    "which replaces the old key"
                )
            notes.append(f"{names} has no effect now: set {rule.new}")
            continue
        if other is not _MISSING and other != value and not rule.wins:
            raise UserError(
                f"{names} and {rule.new} {shown(other)}, both {where}: {rule.new} replaces the old "
                "key; give it alone"
            )
        values[rule.new] = value
        notes.append(f"{names} is now {rule.new} {shown(value)}")
    return values, notes


def _value(text: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def _get(content: Mapping[str, Any], key: str) -> Any:
    """Value of a dotted key in a mapping, nested or dotted itself; _MISSING if it has none."""
    if key in content:
        return content[key]
    for parent, inner in content.items():
        if isinstance(inner, Mapping) and key.startswith(f"{parent}."):
            found = _get(inner, key[len(str(parent)) + 1 :])
            if found is not _MISSING:
                return found
    return _MISSING


def _remove(content: dict[str, Any], key: str) -> None:
    """Remove a key, and the groups that are then empty."""
    if content.pop(key, _MISSING) is not _MISSING:
        return
    for parent, inner in [*content.items()]:
        if isinstance(inner, dict) and key.startswith(f"{parent}."):
            _remove(inner, key[len(str(parent)) + 1 :])
            if not inner:
                del content[parent]


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    parent, dot, rest = key.partition(".")
    if not dot:
        content[key] = value
    elif isinstance(inner := content.setdefault(parent, {}), dict):
        _set(inner, rest, value)
