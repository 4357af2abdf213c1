"""What a user's transform or decode is, as a hash that trainer and worker compare. Code itself never travels."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.identity import canonical, digest

REMEDY = "move it to the top level of a module that workers have too, with functools.partial for its options"


def function_id(option: str, function: Any) -> str:
    """A hash of ``module:qualname``, the source of that module and the arguments of a partial; empty for no function."""
    if function is None:
        return ""
    arguments: list[Any] = []
    while isinstance(function, functools.partial):
        arguments.append([list(function.args), function.keywords])
        function = function.func
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    if not name or "<" in name:
        raise ConfigError(
            f"{option} {name or repr(function)} cannot be named on the command line of a worker; {REMEDY}"
        )
    try:
        source = Path(getattr(module, "__file__", None) or "").read_bytes()
        return digest(f"{_module_name(module)}:{name}", source, canonical(arguments))
    except OSError as error:
        raise ConfigError(f"{option} {name} has no source file to compare with that of workers; {REMEDY}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{option} {name} has options that are not plain values ({error}); {REMEDY}") from error


def _module_name(module: Any) -> str:
    """As another process would import it, also if it is the script that runs here."""
    if module.__name__ != "__main__":
        return str(module.__name__)
    spec = getattr(module, "__spec__", None)
    return str(spec.name) if spec is not None else Path(module.__file__).stem


def check_functions(wanted: dict[str, str], own: dict[str, str]) -> None:
    """Refuses to work with other functions than the trainer."""
    for option in sorted({*wanted, *own}):
        theirs, ours = wanted.get(option, ""), own.get(option, "")
        if theirs == ours:
            continue
        if not ours:
            raise ConfigError(f"this run has a {option}; give --{option} module:function, the same as in the trainer")
        if not theirs:
            raise ConfigError(f"this run has no {option}; leave --{option} out")
        raise ConfigError(
            f"--{option} is not what the trainer runs (hash {ours}, the run has {theirs}); give the same function, in the same "
            "version of its file"
        )
