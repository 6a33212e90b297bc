"""Runs mypy on ``ms_spec`` as it is installed.

The folders ``models``, ``proposers`` and ``verify`` are subpackages of ``ms_spec`` only once installed, which mypy
cannot know from the checkout. So it gets a folder of links that has the installed layout.
"""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def mirror(target: Path) -> None:
    """Makes ``target`` look like a site-packages that holds this checkout."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    places = [line.split("=") for line in config["options"]["package_dir"].split("\n") if "=" in line]
    shutil.rmtree(target, ignore_errors=True)
    for package, folder in places:
        into = target.joinpath(*package.strip().split("."))
        into.mkdir(parents=True, exist_ok=True)
        for file in (ROOT / folder.strip()).iterdir():
            if file.suffix in (".py", ".pyi") or file.name == "py.typed":
                (into / file.name).symlink_to(file)


def main() -> int:
    target = ROOT / "build" / "typecheck"
    mirror(target)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "ms_spec"]
    return subprocess.call([*command, *sys.argv[1:]], cwd=target, env={**os.environ, "MYPYPATH": str(target)})


if __name__ == "__main__":
    sys.exit(main())
