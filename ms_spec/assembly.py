"""From engine arguments to a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ms_spec.async_scheduling import runs_ahead
from ms_spec.config import EngineConfig
from ms_spec.fitting import fit
from ms_spec.hidden_states import open_sink
from ms_spec.limits import Limits, device_of
from ms_spec.models.ops import select
from ms_spec.parts import Parts
from ms_spec.proposers.registry import build_host_proposer
from ms_spec.runtime import graph_thread, setup_mindspore
from ms_spec.world import world

if TYPE_CHECKING:
    from ms_spec.group import Group
    from ms_spec.models.drafts import Draft
    from ms_spec.models.loading import Loaded
    from ms_spec.runner import ModelRunner

_log = logging.getLogger("ms_spec")


def _nothing() -> None:
    pass


def assemble(config: EngineConfig) -> Parts:
    """Finds, checks and loads the model and compiles its graphs. Raises ValueError (one line) for what cannot work."""
    asked = config
    config, loaded, draft, limits = _found(asked)
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
    if world() is not None:
        for one in (loaded, draft):
            if one is not None:
                one.checkpoint.identity()  # all is read for it, once: the others find it in the cache
    graph_thread().run(setup_mindspore, device, config.eager)
    backend = select(device)  # on this thread: Ctrl-C ends the compiler of the kernels
    runner, close = graph_thread().run(_build, asked, config, limits, loaded, draft, backend)
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
        runs_ahead(config),
        close,
    )


def assemble_part(config: EngineConfig, group: Group, engine: int) -> ModelRunner:
    """This worker's part of model number ``engine``, which rank 0 assembles. On the graph thread."""
    from ms_spec.runner import build_runner

    config, loaded, draft, limits = _found(config)
    backend = select(device_of(config))
    return build_runner(config, limits, loaded, draft, backend, group.keep_up, (group, engine))


def _found(config: EngineConfig) -> tuple[EngineConfig, Loaded, Draft | None, Limits]:
    """What is on disk, and what comes of it."""
    from ms_spec.models.loading import load

    loaded = load(config.model, config.tokenizer)
    config, draft, limits = fit(config, loaded)
    return config, loaded, draft, limits


def _build(
    asked: EngineConfig, config: EngineConfig, limits: Limits, loaded: Loaded, draft: Draft | None, backend: Any
) -> tuple[ModelRunner, Callable[[], None]]:
    """On the graph thread: the runner, and how to let it go. Other workers build it as it was ``asked`` for."""
    if world() is None:
        return _compiled(config, limits, loaded, draft, backend, None), _nothing
    from ms_spec.group import join
    from ms_spec.parallel_runner import announced, dismiss

    group = join()
    if group is None:
        return _compiled(config, limits, loaded, draft, backend, None), _nothing
    with announced(group, asked) as engine:
        runner = _compiled(config, limits, loaded, draft, backend, (group, engine))
    return runner, lambda: graph_thread().run(dismiss, group, engine)


def _compiled(
    config: EngineConfig, limits: Limits, loaded: Loaded, draft: Draft | None, backend: Any, here: Any
) -> ModelRunner:
    from tqdm import tqdm

    from ms_spec.runner import build_runner

    check = graph_thread().check

    def progress() -> None:
        check()
        if here is not None:
            here[0].keep_up()

    runner = build_runner(config, limits, loaded, draft, backend, progress, here)
    with tqdm(total=len(runner.plan()), desc="compiling", delay=2, dynamic_ncols=True) as bar:

        def compiled(graphs: int) -> None:
            bar.update(graphs)
            check()

        runner.warm_up(compiled)
    return runner
