"""The launcher: what it refuses, and what it does when a process of a job dies, hangs or goes its own way."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_drafts as td
from tiny import tiny_model

from ms_spec import LLM, launch, watch
from ms_spec.heartbeat import FOLDER, Heartbeat, path_of
from ms_spec.watch import Job, Process

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ["bash", str(ROOT / "scripts" / "msrun_launch.sh")]
SLEEP = "import time; time.sleep(600)"
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "MS_SPEC_THREADS": "1"}


def refused(capsys: Any, *arguments: str) -> str:
    assert launch.main(arguments) == 2
    said: str = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_what_cannot_be_started(capsys, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    assert "must be a run file (.yaml, .yml) or a Python program (.py)" in refused(capsys, "2", "model")
    assert "nowhere.yaml: no such file" in refused(capsys, "2", "nowhere.yaml")
    assert "N = 0: must be at least 1" in refused(capsys, "0", str(script))
    assert "port 'x': must be a number" in refused(capsys, "--port", "x", "2", str(script))


def test_a_busy_port_is_named_at_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        begin = time.monotonic()
        done = subprocess.run(
            [*LAUNCHER, "2", str(script)],
            env={**ENVIRONMENT, "MS_SPEC_PORT": port},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2 and time.monotonic() - begin < 20
    assert f"port {port} cannot be used (Address already in use)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["snippet.py", "run.yaml"])
def test_a_program_that_is_started_alone_says_how(command, monkeypatch):
    arguments = ["snippet.py", "some words"] if command == "snippet.py" else ["/bin/ms-spec", "run", "run.yaml", "a=1"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.chdir(ROOT)
    told = "snippet.py 'some words'" if command == "snippet.py" else "run.yaml a=1"
    with pytest.raises(ValueError, match=f"= 4: .*start it with: bash scripts/msrun_launch.sh 4 {told}$"):
        LLM("nothing", tensor_parallel_size=4)


def test_another_number_of_workers(monkeypatch):
    for name, value in {"MS_ROLE": "MS_WORKER", "RANK_ID": "0", "MS_WORKER_NUM": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 4: this job has 2 workers; use .* = 2, or start"):
        LLM("nothing", tensor_parallel_size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size = 1: this job has 2 workers"):
        LLM("nothing")


# A job of processes that only sleep, with heartbeats written by hand


@pytest.fixture
def job(tmp_path) -> Iterator[Job]:
    made = Job(tmp_path / "beats", tmp_path)
    made.beats.mkdir()
    yield made
    made.kill()


def add(job: Job, code: str, name: str | None = None) -> None:
    log = job.logs / f"{len(job.processes)}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    job.processes.append(Process(name or f"rank {len(job.processes) - 1}", process, log))


def started(job: Job, *codes: str) -> Job:
    add(job, SLEEP, "scheduler")
    for code in codes:
        add(job, code)
    return job


def ended(job: Job) -> bool:
    return all(process.code is not None for process in job.processes)


def test_a_program_that_ends_ends_the_job(job, capsys):
    assert watch.watch(started(job, "", SLEEP)) == 0
    job.kill()
    assert ended(job) and capsys.readouterr().err == ""


def test_a_program_that_fails(job, capsys):
    assert watch.watch(started(job, "raise SystemExit(3)", SLEEP)) == 3
    assert ended(job) and "rank 0 ended with exit code 3; all workers" in capsys.readouterr().err


def test_a_worker_that_raises(job, capsys):
    assert watch.watch(started(job, SLEEP, "print(1); raise ValueError('no luck')", SLEEP)) == 1
    assert ended(job) and "rank 1 ended with exit code 1: ValueError: no luck; all workers" in capsys.readouterr().err


def test_a_worker_that_is_killed(job, capsys):
    started(job, SLEEP, SLEEP)
    job.processes[2].process.kill()
    assert watch.watch(job) == 1
    assert ended(job) and "rank 1 was killed by SIGKILL; all workers" in capsys.readouterr().err


def beats(job: Job, *states: tuple[int, int, bytes]) -> None:
    """What each worker has begun and ended, and what its last call gave."""
    for rank, (begun, calls, last) in enumerate(states):
        heartbeat = Heartbeat(None, rank)
        heartbeat._file = os.open(path_of(job.beats, rank), os.O_WRONLY | os.O_CREAT)
        for call in range(begun):
            heartbeat.begin()
            if call < calls:
                heartbeat.end(last if call == calls - 1 else b"same")
        os.close(heartbeat._file)


@pytest.mark.parametrize("calls", [3, 16, 40])
def test_a_worker_that_diverges(job, capsys, calls):
    started(job, SLEEP, SLEEP)
    beats(job, (calls, calls, b"this"), (calls, calls, b"this"))
    assert watch._Look(job).trouble() is None
    beats(job, (calls + 1, calls, b"this"), (calls, calls, b"that"))
    assert watch.watch(job) == 1
    assert f"rank 1 diverges: after {calls} graph calls its results are not those of rank 0" in capsys.readouterr().err


def test_workers_that_are_a_call_apart_agree_on_the_last_mark(job):
    started(job, SLEEP, SLEEP)
    beats(job, (33, 33, b"last"), (34, 34, b"other"))
    assert watch._Look(job).trouble() is None


def test_a_worker_that_falls_behind(job, capsys, monkeypatch):
    monkeypatch.setattr(watch, "BEHIND_S", 1.0)
    started(job, SLEEP, SLEEP, SLEEP)
    beats(job, (9, 8, b""), (8, 8, b""), (9, 8, b""))
    assert watch.watch(job) == 1
    assert "rank 1 hangs: it has not begun graph call 9" in capsys.readouterr().err


def test_a_worker_that_does_not_move(job, capsys, monkeypatch):
    monkeypatch.setattr(watch, "SILENT_S", 1.0)
    lives = f"from ms_spec.heartbeat import Heartbeat; Heartbeat({str(job.beats)!r}, {{}}).begin(); {SLEEP}"
    started(job, lives.format(0), lives.format(1))
    deadline = time.monotonic() + 20
    while not all(watch.read_beat(path_of(job.beats, rank)) for rank in (0, 1)) and time.monotonic() < deadline:
        time.sleep(0.1)
    monkeypatch.setattr(watch, "SILENT_S", 4.0)
    os.kill(job.processes[2].process.pid, signal.SIGSTOP)
    assert watch.watch(job) == 1
    assert "rank 1 hangs: it has not moved" in capsys.readouterr().err
    assert ended(job)


# A job of real workers

GENERATE = """
from ms_spec import LLM, SamplingParams

llm = LLM({model!r}, tensor_parallel_size=2, max_model_len=512, max_num_seqs=1, max_num_batched_tokens=64)
print("ready", flush=True)
while True:
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), use_tqdm=False)
"""
UNLUCKY = """
import os

if os.environ.get("RANK_ID") == "1" and os.environ.get("MS_ROLE") == "MS_WORKER":
    from ms_spec.heartbeat import Heartbeat

    begin = Heartbeat.begin

    def unlucky(self):
        begin(self)
        if self._begun == 60:
            raise RuntimeError("out of luck")

    Heartbeat.begin = unlucky
"""


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_real_worker_dies_while_text_is_generated(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GENERATE.format(model=str(tiny_model())))
    environment = dict(ENVIRONMENT)
    if how == "raises":
        (tmp_path / "sitecustomize.py").write_text(UNLUCKY)
        environment["PYTHONPATH"] = str(tmp_path)
    launcher = subprocess.Popen(
        [*LAUNCHER, "2", str(script)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    children = psutil.Process(launcher.pid).children(recursive=True)
    assert len(children) == 3
    begin = time.monotonic()
    if how == "killed":
        time.sleep(0.5)
        (victim,) = [one for one in children if one.environ().get("DEVICE_ID") == "1"]
        victim.kill()
    _, errors = launcher.communicate(timeout=60)
    assert time.monotonic() - begin < 60
    assert launcher.returncode == 1
    told = [line for line in errors.splitlines() if line.startswith("msrun_launch: error:")]
    wanted = "rank 1 was killed by SIGKILL" if how == "killed" else "rank 1 ended with exit code 1: RuntimeError: out"
    assert len(told) == 1 and wanted in told[0]
    assert not psutil.wait_procs(children, 1)[1]


SNIPPET = """
from ms_spec import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model={model!r},
    tensor_parallel_size=4,
    distributed_executor_backend="mp",
    enforce_eager=True,
    async_scheduling=True,
    speculative_config={{
        "method": "eagle",
        "model": {draft!r},
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 2,
    }},
)

outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")
"""
"""As it is written for vLLM, but for the import and the paths."""


def test_a_script_tells_how_to_start_it_and_runs_so(tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPET.format(model=str(td.target(layers=2)), draft=str(td.eagle())))
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": ENVIRONMENT,
        "capture_output": True,
        "text": True,
        "check": False,
    }
    alone = subprocess.run([sys.executable, script.name], **options)
    assert alone.returncode == 1
    command = alone.stderr.strip().rpartition("start it with: ")[2]
    assert command.endswith("msrun_launch.sh 4 snippet.py")
    done = subprocess.run(shlex.split(command), timeout=600, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert re.fullmatch(r"Prompt: 'The future of AI is', Generated text: (['\"]).*\1\n", done.stdout)


def test_a_heartbeat_that_nobody_looks_at_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    heartbeat = Heartbeat(os.environ.get(FOLDER), 0)
    heartbeat.begin()
    heartbeat.end(b"1")
    assert list(tmp_path.iterdir()) == []
