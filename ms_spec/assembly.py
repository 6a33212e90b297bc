"""From engine arguments to a model that is ready to run."""

from __future__ import annotations

import logging
from typing import Any

from ms_spec.config import EngineConfig
from ms_spec.draft_choice import choose_draft
from ms_spec.hidden_states import open_sink
from ms_spec.limits import Limits, device_of, model_limits
from ms_spec.models.ops import select
from ms_spec.parts import Parts
from ms_spec.proposers.registry import build_host_proposer
from ms_spec.runtime import graph_thread, setup_mindspore

_log = logging.getLogger("ms_spec")


def assemble(config: EngineConfig) -> Parts:
    """Finds, checks and loads the model and compiles its graphs. Raises ValueError (one line) for what cannot work."""
    from ms_spec.models.loading import load

    loaded = load(config.model, config.tokenizer)
    config, draft = choose_draft(config, loaded)
    limits = model_limits(config, loaded.config, draft.kv_numbers if draft else 0)
    if config.max_model_len is None and limits.max_model_len < loaded.config.max_position_embeddings:
        _log.info(
            "max_model_len = %d: as much as the KV cache holds (kv_cache_memory_bytes); the model allows %d",
            limits.max_model_len,
            loaded.config.max_position_embeddings,
        )
    tokenizer, vocab = loaded.tokenizer, loaded.config.vocab_size
    if len(tokenizer) > vocab:
        _log.warning(
            "tokenizer: has %d tokens, the model %d; a text with one of the others is refused; is it the model's?",
            len(tokenizer),
            vocab,
        )
    device = device_of(config)
    sink = open_sink(config, loaded.config, device)
    graph_thread().run(setup_mindspore, device, config.eager)
    backend = select(device)  # on this thread: Ctrl-C ends the compiler of the kernels
    runner = graph_thread().run(_build, config, limits, loaded, draft, backend)
    return Parts(
        runner,
        limits,
        vocab,
        loaded.eos_token_ids,
        tokenizer,
        tokenizer.stream_decoder,
        loaded.generation_defaults,
        build_host_proposer(config.speculative_config, limits.max_model_len) if config.speculative_config else None,
        sink,
    )


def _build(config: EngineConfig, limits: Limits, loaded: Any, draft: Any, backend: Any) -> Any:
    """On the graph thread."""
    from tqdm import tqdm

    from ms_spec.runner import build_runner

    check = graph_thread().check
    runner = build_runner(config, limits, loaded, draft, backend, check)
    with tqdm(total=len(runner.plan()), desc="compiling", delay=2, dynamic_ncols=True) as bar:

        def compiled(graphs: int) -> None:
            bar.update(graphs)
            check()

        runner.warm_up(compiled)
    return runner
