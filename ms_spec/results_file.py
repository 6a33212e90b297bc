"""The results of a run in a file: none is lost once it is there, and a run that ended early can go on.

While a run goes on its lines are in ``NAME.part``, in the order in which they came. When all are there they become
``NAME``, in the order of the prompts. A line has the prompt's ``index``, its ``key`` (see :func:`result_keys`) and the
answer, and nothing that depends on a clock or on what ran beside it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ms_spec.config import EngineConfig
from ms_spec.errors import ConfigError, OutputError
from ms_spec.job import Job
from ms_spec.prompts import Prompt
from ms_spec.result_lines import as_line, result_of
from ms_spec.result_streams import ResultStream
from ms_spec.sampling_params import SamplingParams
from ms_spec.terminal import complain, note

ONLY_HOW = {
    *("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "block_size", "compilation_config"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "enforce_eager"),
    *("async_scheduling", "enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats"),
    *("served_model_name", "distributed_executor_backend", "trust_remote_code", "generation_config"),
    "seed",  # it has become the requests' own
}
"""Engine arguments that change how a request is answered, but not what the answer is."""


def result_keys(job: Job, params: list[SamplingParams]) -> list[str]:
    """For each prompt a digest of all that its answer depends on: 16 hexadecimal digits.

    Defaults do not count, so that a later version's new field changes no key.
    """
    engine = EngineConfig.parse(**job.engine).model_dump(exclude_defaults=True, exclude=ONLY_HOW)
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    keys = []
    for prompt, one in zip(job.prompts, params):
        sampling = {name: getattr(one, name) for name in defaults if getattr(one, name) != defaults[name]}
        said = json.dumps([engine, job.chat, prompt.content, sampling], sort_keys=True, default=str)
        keys.append(hashlib.blake2b(said.encode(), digest_size=8).hexdigest())
    return keys


class ResultsFile:
    """Takes results as a printer does. ``lines``: what is there by the prompt's index, without line ends."""

    def __init__(self, path: Path, keys: list[str], lines: dict[int, bytes], stream: ResultStream) -> None:
        self._path, self._keys, self._stream = path, keys, stream
        self.lines = lines

    def start(self, tokenizer: Any) -> None:
        """Needs none."""

    def update(self, index: int, prompt: Prompt, output: Any) -> None:
        if not output.finished:
            return
        complain(index, output)
        record = {"index": index, "key": self._keys[index], **result_of(prompt, output)}
        line = as_line(record).encode()
        self._stream.write_bytes(line + b"\n")
        self.lines[index] = line

    def close(self) -> None:
        """Nothing waits to be shown."""

    def publish(self) -> None:
        """Gives the whole file its name."""
        whole = self._path.with_name(self._path.name + ".new")
        try:
            with whole.open("wb") as file:
                file.writelines(self.lines[index] + b"\n" for index in sorted(self.lines))
                file.flush()
                os.fsync(file.fileno())  # the other copy is about to go
            whole.replace(self._path)
            _partial(self._path).unlink()
        except OSError as error:
            with suppress(OSError):
                whole.unlink()
            raise OutputError(f"{whole} cannot be written: {error.strerror}") from None


@contextmanager
def results_file(path: Path, keys: list[str], resume: bool = False) -> Iterator[ResultsFile]:
    """A file for the results of the prompts with these keys. When all is done it is whole; else NAME.part stays.

    resume: what is there of the same run is kept, but for prompts that failed; otherwise the run begins anew, and
    NAME is replaced when the new one is whole.

    Raises:
        ConfigError: it cannot be written, another run writes it, or it holds what is not of this run.
        OutputError: it cannot be written any more.
    """
    partial = _partial(path)
    lines, size = _kept(path, keys) if resume else ({}, 0)
    try:
        stream = ResultStream(partial.open("ab"), str(partial))
    except OSError as error:
        raise ConfigError(f"output: {partial} cannot be written: {error.strerror}") from None
    try:
        _claim(stream, partial)
        results = ResultsFile(path, keys, lines, stream)
        try:
            os.truncate(partial, size)
            if not size:  # a whole file's lines are wanted should this run end early, too
                stream.write_bytes(b"".join(line + b"\n" for line in lines.values()))
            yield results
            if len(lines) == len(keys):
                results.publish()
        except BaseException:
            _tell(partial, len(lines), len(keys))
            raise
    finally:
        with suppress(OSError, OutputError):  # it has been told
            stream.close()


def answered(path: Path, keys: list[str]) -> set[int]:
    """The indices of prompts whose answers are there. Raises ConfigError where there is what is not of this run."""
    return set(_kept(path, keys)[0])


def complete(path: Path, keys: list[str]) -> bool:
    """Whether ``path`` is the whole file of this run, without a prompt that failed. Raises as :func:`answered`."""
    return not _partial(path).exists() and len(answered(path, keys)) == len(keys)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _claim(stream: ResultStream, partial: Path) -> None:
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"output: {partial} is being written by another run; wait for it, or stop it") from None
    except OSError:  # a file system without locks
        pass


def _kept(path: Path, keys: list[str]) -> tuple[dict[int, bytes], int]:
    """The answers that are there by index, and the size of what is whole of NAME.part, 0 where it is not the source.

    A line that is cut off at the end is left out: the run was killed while it wrote.
    """
    partial = _partial(path)
    source = partial if partial.exists() and partial.stat().st_size else path
    if not source.exists():
        return {}, 0
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ConfigError(f"output: {source} cannot be read: {error.strerror}") from None
    size = content.rfind(b"\n") + 1
    lines: dict[int, bytes] = {}
    for number, line in enumerate(content[:size].splitlines(), 1):
        index, failed = _read(line, keys, f"output: {source}, line {number}")
        if not failed:
            lines[index] = line
    return lines, size if source == partial else 0


def _read(line: bytes, keys: list[str], where: str) -> tuple[int, bool]:
    """The prompt of a line, and whether it failed."""
    try:
        record = json.loads(line)
        index, key = record["index"], record["key"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{where}: no result of a run; without --resume the run begins anew") from None
    if not isinstance(index, int) or not 0 <= index < len(keys) or keys[index] != key:
        raise ConfigError(
            f"{where}: the result of another run, with other prompts or another configuration; without --resume the "
            "run begins anew"
        )
    return index, "error" in record


def _tell(partial: Path, count: int, total: int) -> None:
    """What is left of a run that ended early."""
    if count:
        note(f"[{count} of {total} results are in {partial}; --resume goes on from there]")
    else:
        with suppress(OSError):
            partial.unlink()
