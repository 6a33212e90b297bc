"""What the method ``extract_hidden_states`` wants of a configuration. The names are vLLM's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ms_spec.config_errors import shown
from ms_spec.errors import unknown_name

METHOD = "extract_hidden_states"
CONNECTOR = "ExampleHiddenStatesConnector"
LAYER_IDS = "draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids"
FOLDER = "kv_transfer_config.kv_connector_extra_config.shared_storage_path"
_STORAGE = ("shared_storage_path", "num_writer_threads")
MAX_THREADS = 64


@dataclass(frozen=True)
class Storage:
    """Where hidden states go: a folder, and how many threads write at once."""

    folder: str
    threads: int = 4


def layer_ids(draft_model_config: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The states to extract, rising, each once: 0 is the embeddings, k what layer k leaves.

    Raises:
        ValueError: they are missing, or they are no list of integers >= 0.
    """
    hf_config = (draft_model_config or {}).get("hf_config")
    given = hf_config.get(LAYER_IDS.rpartition(".")[2]) if isinstance(hf_config, Mapping) else None
    if given is None:
        raise ValueError(f"{LAYER_IDS} is missing; with method '{METHOD}' it must be a list such as [2, 18, 34]")
    whole = isinstance(given, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
    if not whole or not given or min(given) < 0:
        raise ValueError(f"{LAYER_IDS} = {shown(given)}: must be a list of integers >= 0, at least one, as [2, 18, 34]")
    return tuple(sorted(set(given)))


def check_speculation(num_speculative_tokens: int | None, draft_model_config: Mapping[str, Any] | None) -> None:
    """Raises ValueError for fields of ``speculative_config`` with which nothing can be extracted."""
    if num_speculative_tokens != 1:
        wrong = "is missing; it" if num_speculative_tokens is None else f"= {num_speculative_tokens}:"
        raise ValueError(f"num_speculative_tokens {wrong} must be 1 with '{METHOD}', which drafts nothing; use 1")
    layer_ids(draft_model_config)


def storage(kv_transfer_config: Mapping[str, Any] | None) -> Storage:
    """Where the states go.

    Raises:
        ValueError: the fields do not say that, or say more.
    """
    name = "kv_transfer_config"
    if kv_transfer_config is None:
        example = {"kv_connector": CONNECTOR, "kv_role": "kv_producer"}
        example["kv_connector_extra_config"] = {_STORAGE[0]: "FOLDER"}  # type: ignore[assignment]
        raise ValueError(f"{name} is missing; with method '{METHOD}' it must be {example}")
    wanted = {"kv_connector": CONNECTOR, "kv_role": "kv_producer"}
    for field, value in wanted.items():
        if kv_transfer_config.get(field) != value:
            given = shown(kv_transfer_config.get(field))
            raise ValueError(f"{name}.{field} = {given}: must be {shown(value)} with method '{METHOD}'")
    known = (*wanted, "kv_connector_extra_config")
    for field in kv_transfer_config:
        if field not in known:
            raise ValueError(unknown_name(f"{name} field", field, known))
    extra = kv_transfer_config.get(known[-1]) or {}
    for field in extra:
        if field not in _STORAGE:
            raise ValueError(unknown_name(f"{name}.{known[-1]} field", field, _STORAGE))
    folder, threads = extra.get(_STORAGE[0]), extra.get(_STORAGE[1], Storage.threads)
    if folder is None:
        raise ValueError(f"{FOLDER} is missing; it must be the folder where hidden states go")
    if not isinstance(folder, str) or not folder or not _can_be_a_path(folder):
        raise ValueError(f"{FOLDER} = {shown(folder)}: must be a folder")
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MAX_THREADS:
        raise ValueError(
            f"{name}.{known[-1]}.{_STORAGE[1]} = {shown(threads)}: must be an integer from 1 to {MAX_THREADS}"
        )
    return Storage(folder, threads)


def _can_be_a_path(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False
