"""What else a process may have done before, or does beside: other users of protobuf, forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from tiny import CORPUS, copy_of, tiny_model

from ms_spec.models.user_cache import cache_root

MADE = """
import os, sys
from ms_spec import LLM, SamplingParams

def made():
    return LLM(sys.argv[1], max_num_seqs=1, enforce_eager=True)

def said(llm):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
"""


def run(code: str, model: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MADE + code, str(model)]
    environment = {**os.environ, "GLOG_v": "3", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def test_a_sentencepiece_model_is_converted_before_mindspore_is_there(tmp_path: Path) -> None:
    """Both import protobuf, each in a form of its own unless it is told."""
    path = copy_of(tiny_model("llama"))
    (path / "tokenizer.json").unlink()
    (tmp_path / "corpus.txt").write_text(CORPUS)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(path / "tokenizer"), vocab_size=60, minloglevel=2
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_root() / "kernels")
    done = run("print(said(made()))", path, MS_SPEC_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_protobuf_that_was_there_first() -> None:
    code = """
import google.protobuf.descriptor_pb2
try:
    made()
except ValueError as error:
    print(error)
"""
    environment = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
    command = [sys.executable, "-c", MADE + code, str(tiny_model())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("protobuf: ") and "import mindspore first" in done.stdout


@pytest.mark.parametrize("then", ["said(llm)", "made()"])
def test_a_forked_process_is_told(then: str) -> None:
    code = f"""
llm = made()
said(llm)
child = os.fork()
if not child:
    try:
        {then}
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(said(llm))
"""
    done = run(code, tiny_model())
    assert done.returncode == 0, done.stderr
    told, after = done.stdout.splitlines()
    assert "forked" in told and "spawn" in told and after == "4"
