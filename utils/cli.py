"""The command line of a script: its options are the parameters of one typed function."""

import argparse
import difflib
import errno
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from utils.errors import InputError

# Of a path that was handed in, wherever it is first used. A disk that is full is none of them: status 1.
PATH_ERRORS = {
    getattr(errno, name)
    for name in "EACCES EEXIST EISDIR ELOOP ENAMETOOLONG ENOENT ENOTDIR ENOTEMPTY EPERM EROFS".split()
}

MAX_VALUES = 100_000  # in a file of options


def run(main: Callable, argv: Sequence[str] | None = None) -> None:
    """Call `main` with the options of a command line, and turn what goes wrong into one line and an exit status.

    The parameters of `main` (all typed, described in its Google docstring) are the options; one of them is
    `debug: bool = False`, which adds the traceback to the line. `--config FILE` reads any of them from YAML; flags win
    over files and later files over earlier ones, wherever they stand on the line.

    Args:
        main: the script's function; what it returns is ignored.
        argv: the options, without the program's name; None takes them from `sys.argv`.

    Raises:
        SystemExit: 1 a failure at run time, 2 wrong usage or unusable input, 130 interrupted; 0 after `--help` and
            `--print_config`. A `main` that finishes makes `run` return.
    """
    debug = False
    try:
        options = _parse(main, sys.argv[1:] if argv is None else argv)
        debug = options["debug"]
        main(**options)
    except KeyboardInterrupt:
        _fail(130, "interrupted", debug)
    except InputError as error:
        _fail(2, str(error), debug)
    except OSError as error:
        if error.errno in PATH_ERRORS and error.filename is not None:
            _fail(2, f"{os.fsdecode(error.filename)}: {error.strerror}; pass a path that can be used", debug)
        _fail(1, f"{type(error).__name__}: {error}", debug)
    except Exception as error:
        _fail(1, f"{type(error).__name__}: {error}", debug)


def read_options(main: Callable, config: str | os.PathLike | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a script for a call from Python: checked, converted and completed as on its command line.

    Args:
        main: the script's function.
        config: a YAML file, as for `--config`.
        given: options by name, as Python values; they win over the file.

    Raises:
        InputError: an unknown option, with the nearest there is; a value of a wrong type; a required one left out.
    """
    words = [] if config is None else ["--config", os.fspath(config)]
    for name, value in given.items():
        try:
            text = os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(value, default=os.fspath)
        except TypeError:
            raise InputError(f"{name}: {value!r} is no text, number, list or mapping of those") from None
        words.append(f"--{name}={text}")
    return _parse(main, words)


def _fail(status: int, message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    raise SystemExit(status)


def _parse(main: Callable, argv: Sequence[str]) -> dict:
    from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

    class ConfigFile(ActionConfigFile):
        def __call__(self, parser, cfg, values, option_string=None):
            if not os.path.isfile(values):
                raise InputError(f"--config {values}: there is no such file")
            try:
                _check_aliases(values)
                super().__call__(parser, cfg, values, option_string)
                parser.validate(cfg, skip_required=True)  # here and not at the end, to know which file it was
            except Exception as error:
                raise InputError(f"--config {values}: {_explain(parser, str(error))}") from error

    # a value names no code to import or call
    set_parsing_settings(import_path_denylist=["*"], instantiate_subclass_spec_in_any=False)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action=ConfigFile, help="YAML file with any of these options; may be repeated.")
    parser.add_function_arguments(main, as_group=False, as_positional=False)
    parser.description = (main.__doc__ or "").strip().split("\n\n")[0]
    try:
        options = parser.parse_args(_configs_first(argv))
        options.pop("config")
        if name := next((name for name, value in vars(options).items() if _holds_null(value)), None):
            raise InputError(f"--{name}: holds a null character, which no path or name can")
        return vars(parser.instantiate(options))
    except argparse.ArgumentError as error:
        raise InputError(_explain(parser, str(error))) from error


def _holds_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return any(map(_holds_null, value))
    return isinstance(value, str | os.PathLike) and "\0" in os.fspath(value)


def _check_aliases(path: str) -> None:
    """Refuse YAML whose aliases would make it grow without need: nine lines can stand for a billion values."""
    import yaml

    with open(path, encoding="utf-8") as file:
        root = yaml.compose(file, yaml.SafeLoader)
    sizes: dict[int, float] = {}

    def size(node: yaml.Node) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # what is found of a node that holds itself
            inner = node.value if isinstance(node, yaml.CollectionNode) else []
            inner = chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
            sizes[id(node)] = 1 + sum(map(size, inner))
        return sizes[id(node)]

    if root is not None and size(root) > MAX_VALUES:
        raise ValueError(f"its aliases stand for more than {MAX_VALUES} values, the limit")


def _configs_first(argv: Sequence[str]) -> list[str]:
    """`argv` with every `--config FILE` moved to the front: options are applied in their order on the line."""
    configs, others, words = [], [], iter(argv)
    for word in words:
        if word == "--config":
            configs += [word, *islice(words, 1)]
        else:
            (configs if word.startswith("--config=") else others).append(word)
    return configs + others


def _explain(parser: argparse.ArgumentParser, message: str) -> str:
    """The parser's `message` in the words of the command line; an unknown name with the nearest option there is."""
    if match := re.match(r"unrecognized arguments: ([^\s=]+)", message):
        name = match[1]
        if not name.startswith("-"):
            return f"{name} belongs to no option; options are written --name value"
    elif match := re.match(r"Group '(.+)' does not accept option '(.+)'|Option '(.+)' is not accepted", message):
        name = ".".join(part for part in match.groups() if part)
    elif match := re.match(r"the following arguments are required: (.+)", message):
        return "required: " + ", ".join(f"--{name}" for name in match[1].split(", "))
    elif message.startswith("Unexpected config"):
        return "not a YAML file with lines 'option: value'"
    else:
        return re.sub(r'Parser key "(.+?)":', r"--\1:", message)
    known = {option.strip("-"): option for option in parser._option_string_actions if option[-1] != "+"}
    nearest = difflib.get_close_matches(name.strip("-"), known, n=1, cutoff=0)[0]
    return f"there is no option {name}; the nearest is {known[nearest] if name[0] == '-' else nearest}"
