"""`hvdtrain completion bash | zsh`: a script that completes words without starting Python."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

# The place whose words are configuration keys: arguments of `train`, and arguments after `--`.
_KEYS = "train"
# Both shells source these functions. `place` is the subcommand, such as "ckpt list".
_SHARED = """\
_hvdtrain_place() {
    local place="" word
    for word in "$@"; do
        case "$word" in
            --) place=train ;;
            -*) ;;
            *)
                case " $(_hvdtrain_commands "$place") " in
                    *" $word "*) place="${place:+$place }$word" ;;
                esac
                ;;
        esac
    done
    printf %s "$place"
}
_hvdtrain_candidates() {
    local values
    values=$(_hvdtrain_values "$1 $2")
    if [ -n "$values" ]; then
        printf %s "$values"
        return
    fi
    case "$3" in
        -*) _hvdtrain_options "$1" ;;
        *) _hvdtrain_commands "$1" ;;
    esac
}
"""
# In bash the = of --key=value is a separate word.
_BASH = """\
_hvdtrain() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} place found
    place=$(_hvdtrain_place "${COMP_WORDS[@]:1:COMP_CWORD-1}")
    if [ "$current" = "=" ]; then
        current=""
    elif [ "$previous" = "=" ]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    found=$(_hvdtrain_candidates "$place" "$previous" "$current")
    COMPREPLY=($(compgen -W "$found" -- "$current"))
}
complete -o default -F _hvdtrain hvdtrain
"""
_ZSH = """\
_hvdtrain() {
    local current=${words[CURRENT]} previous=${words[CURRENT-1]} key="" place
    local -a found
    place=$(_hvdtrain_place "${(@)words[2,CURRENT-1]}")
    if [[ $current == --*=* ]]; then
        key=${current%%=*}
        previous=$key
        current=${current#*=}
    fi
    found=(${=$(_hvdtrain_candidates "$place" "$previous" "$current")})
    [[ -z $key ]] || found=(${found/#/$key=})
    compadd -a found || _files
}
if [ "$funcstack[1]" = "_hvdtrain" ]; then
    _hvdtrain "$@"
else
    compdef _hvdtrain hvdtrain
fi
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "to install for bash:  hvdtrain completion bash > "
        "~/.local/share/bash-completion/completions/hvdtrain\n"
        'to install for zsh:   hvdtrain completion zsh > "${fpath[1]}/_hvdtrain"'
    )


def run(args: argparse.Namespace) -> int:
    places = [*_places(args.parser, ""), _of_configuration()]
    tables = (
        _table("commands", {place.name: place.commands for place in places}),
        _table("options", {place.name: place.options for place in places}),
        _table("values", {f"{p.name} {o}": words for p in places for o, words in p.values.items()}),
    )
    head, driver = ("#compdef hvdtrain\n", _ZSH) if args.shell == "zsh" else ("", _BASH)
    print(head + "".join(tables) + _SHARED + driver, end="")
    return 0


@dataclass(frozen=True)
class _Place:
    """Words that may follow a subcommand.

    Args:
        name: the words of the subcommand, such as "ckpt list".
        values: option -> its values, if it is a choice.
    """

    name: str
    commands: list[str]
    options: list[str]
    values: dict[str, list[str]]


def _places(parser: argparse.ArgumentParser, name: str) -> Iterator[_Place]:
    commands: dict[str, argparse.ArgumentParser] = {}
    choices: list[str] = []
    options: dict[str, list[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands = dict(action.choices)
        elif not action.option_strings:
            choices += map(str, action.choices or ())
        elif action.help != argparse.SUPPRESS:
            options[action.option_strings[-1]] = [*map(str, action.choices or ())]
    if name != _KEYS:
        values = {option: words for option, words in options.items() if words}
        yield _Place(name, [*commands, *choices], [*options], values)
    for word, subparser in commands.items():
        yield from _places(subparser, f"{name} {word}".strip())


def _of_configuration() -> _Place:
    """The configuration keys of hvdtrain and of its built-in tasks."""
    from hvdtrain.config import Config, presets
    from hvdtrain.tasks import BUILT_IN, installed, load_class, optional

    owners = [Config, *(optional(load_class(task), "Config") for task in BUILT_IN)]
    found = {"--config": [*presets()], "--help": ["all"], "--print_config": []}
    for owner in filter(None, owners):
        for key, hint in _keys(owner, ""):
            found[f"--{key}"] = _choices(hint)
    found["--task"] = [*installed()]
    return _Place(_KEYS, [], [*found], {key: words for key, words in found.items() if words})


def _keys(owner: type, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(owner)
    for field in fields(owner):
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _keys(hint, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hint


def _choices(hint: Any) -> list[str]:
    """Names of the values of a type that has only a few."""
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    return [word for inner in get_args(hint) for word in _choices(inner)] if _is_union(hint) else []


def _is_union(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _table(name: str, rows: dict[str, list[str]]) -> str:
    """A shell function that prints the words of a place."""
    lines = [
        f"        {shlex.quote(key)}) printf %s {shlex.quote(' '.join(words))} ;;"
        for key, words in rows.items()
        if words
    ]
    return "\n".join([f"_hvdtrain_{name}() {{", '    case "$1" in', *lines, "    esac", "}", ""])
