"""What is installed: all packages and kernels, light imports, a wheel that works away from the checkout."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ms_spec", "models", "proposers", "verify")
HEAVY = {"mindformers", "transformers", "torch", "mindspore"}


def package_dir() -> dict[str, str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [line.split("=") for line in config["options"]["package_dir"].split("\n") if "=" in line]
    packages = config["options"]["packages"].split()
    mapped = {package.strip(): folder.strip() for package, folder in lines}
    assert sorted(mapped) == sorted(packages)
    return mapped


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import ms_spec",
        "import ms_spec.cli",
        "import ms_spec.config, ms_spec.runfile, ms_spec.models.config",
        "from ms_spec.proposers.suffix import SuffixProposer; SuffixProposer()",
    ],
)
def test_imports_are_light(statement: str) -> None:
    assert not imported_by(statement) & HEAVY


def test_the_engine_needs_neither_torch_nor_mindformers() -> None:
    assert not imported_by("import ms_spec; ms_spec.LLM") & {"torch", "mindformers", "transformers"}


def test_every_folder_with_code_is_a_package() -> None:
    there = {str(file.parent.relative_to(ROOT)) for top in FOLDERS for file in (ROOT / top).rglob("*.py")}
    assert there == set(package_dir().values())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(target), "."]
    subprocess.run(command, cwd=source, check=True)
    (built,) = target.glob("ms_spec-*.whl")
    return built


def test_the_wheel_holds_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in package_dir().items():
        for file in (ROOT / folder).iterdir():
            if file.suffix == ".py":
                assert f"{package.replace('.', '/')}/{file.name}" in names
    for folder in ("models/ops/cpu/kernels", "proposers/native"):
        sources = [file.name for file in (ROOT / folder).iterdir() if file.suffix in (".cpp", ".h")]
        assert sources and all(f"ms_spec/{folder}/{name}" in names for name in sources)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ms_spec"}
    assert any(name.endswith(("licenses/LICENSE", "dist-info/LICENSE")) for name in names)


def test_the_wheel_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import ms_spec, ms_spec.models.config, ms_spec.proposers, ms_spec.verify, ms_spec.models.ops.cpu as cpu;"
        "from pathlib import Path;"
        "assert list((Path(cpu.__file__).parent / 'kernels').glob('*.cpp'));"
        "print(ms_spec.__file__, ms_spec.models.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(place.startswith(str(site)) for place in done.stdout.split())
    command = [sys.executable, "-m", "ms_spec", "--version"]
    assert subprocess.check_output(command, cwd=tmp_path, env=environment, text=True).startswith("ms-spec ")
