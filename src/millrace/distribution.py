"""The distribution that this package is part of: its name, its version, and the command that installs an extra.

Every message about a missing package ends with ``install_command``; ``millrace doctor`` shows
``old_distribution_advice``. The version is a constant, so that it is also right where the package runs from its sources.
"""

from __future__ import annotations

import os

NAME = "millrace-data"
OLD_NAME = "millrace"  # until 0.1; on PyPI that name is another project's
__version__ = "0.2.0"

_FOLDER = os.path.dirname(__file__)
_QUOTE = '"' if os.name == "nt" else "'"  # cmd.exe knows no single quotes; other shells would read [...] as a pattern


def is_checkout() -> bool:
    """Whether the package runs from its sources: an editable install, or none."""
    source = os.path.dirname(_FOLDER)
    return os.path.basename(source) == "src" and os.path.isfile(os.path.join(source, "../pyproject.toml"))


def installed_name() -> str:
    """The name under which the package is installed; ``NAME`` where nothing says so."""
    from importlib import metadata  # with email and zipfile, which an import of the package should not load

    names = metadata.packages_distributions().get(os.path.basename(_FOLDER), [])
    return NAME if NAME in names else next((name for name in names if name != OLD_NAME), NAME)


def install_command(extra: str) -> str:
    """The command that installs what an extra needs.

    >>> install_command("images")  # in a checkout; elsewhere pip install 'millrace-data[images]'
    "pip install '.[images]'"
    """
    where = "." if is_checkout() else installed_name()
    return f"pip install {_QUOTE}{where}[{extra}]{_QUOTE}"


def old_distribution_advice() -> str | None:
    """What to do about a distribution with the old name that is installed too; None if there is none."""
    from importlib import metadata

    build_leftovers = os.path.dirname(_FOLDER) if is_checkout() else None  # metadata in src/, which is no installation
    for old in metadata.distributions(name=OLD_NAME):
        if os.path.normpath(str(old.locate_file(""))) != build_leftovers:
            # To uninstall it removes files of ours too: both have millrace/ and the command.
            again = "-e ." if is_checkout() else installed_name()
            return (
                f"{OLD_NAME} {old.version} is installed beside {NAME}, and both write the same files; "
                f"run: pip uninstall -y {OLD_NAME}, then: pip install --force-reinstall --no-deps {again}"
            )
    return None
