"""Predict files of mindformers in the names of run files. Functions of mappings; mindformers is not imported."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ms_spec.errors import ConfigError, unknown_name
from ms_spec.mindformers_names import (
    DEVICES,
    DTYPES,
    GENERATION,
    MODEL_CONFIG,
    MODES,
    ONLY_ONE,
    PARALLEL,
    READ,
    SECTIONS,
    SWITCHES,
)


def is_mindformers(config: dict[str, Any]) -> bool:
    """Whether these are mindformers' options: with ``run_mode``, ``trainer``, or a ``model`` that is a mapping."""
    return "run_mode" in config or "trainer" in config or isinstance(config.get("model"), dict)


def as_run_file(config: dict[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The same run as a run file, and the names of what has no effect here (entries that switch nothing on left out).

    known: the names of a run file, which may stand beside mindformers' own.

    Raises:
        ConfigError: one line; an entry that is unknown, that cannot be honoured, or that contradicts another.
    """
    return _Translation(config, known).result()


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} = {value!r:.60}: must be an integer")
    return value


class _Translation:
    def __init__(self, config: dict[str, Any], known: Collection[str]) -> None:
        self._config = config
        self._known = known
        self._native: dict[str, Any] = {}
        self._origin: dict[str, str] = {}
        self._no_effect: list[str] = []

    def result(self) -> tuple[dict[str, Any], list[str]]:
        config = self._config
        if config.get("run_mode") not in (None, "predict"):
            raise ConfigError(f"run_mode = {config['run_mode']!r:.60}: must be predict; only such files can be run")
        if config.get("model") is not None and not isinstance(config["model"], dict):
            raise ConfigError(
                f"model = {config['model']!r:.60}: must be a mapping in a file of mindformers; "
                f"use pretrained_model_dir={config['model']}"
            )
        for name in self._own_names():
            self._put(name, config[name], name)
        self._checkpoint()
        self._context(self._section("context"))
        self._parallel(self._section("parallel_config"))
        model = self._section("model")
        self._model_config(self._section("model_config", model, "model."))
        self._prompts()
        self._left_over("model.", {key: value for key, value in model.items() if key != "model_config"})
        theirs = [name for name in config if name in (*SWITCHES, *SECTIONS) and name not in self._native]
        self._left_over("", {name: config[name] for name in theirs})
        return self._native, self._no_effect

    def _own_names(self) -> list[str]:
        """The entries that are a run file's own. Raises for an entry that is nobody's."""
        found = []
        for name, value in self._config.items():
            theirs = name == "model" or (name in SECTIONS and isinstance(value, dict))
            if name in self._known and not theirs:
                found.append(name)
            elif name not in (*READ, *SWITCHES, *SECTIONS):
                raise ConfigError(unknown_name("option", name, self._known, (*READ, *SWITCHES, *SECTIONS)))
        return found

    def _section(self, name: str, owner: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        value = (self._config if owner is None else owner).get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ConfigError(f"{prefix}{name} = {value!r:.60}: must be a mapping")
        return value

    def _put(self, name: str, value: Any, origin: str) -> None:
        if value is None and origin != name:
            return
        if self._native.get(name) is not None and self._native[name] != value:
            raise ConfigError(
                f"{origin} = {value!r:.60} contradicts {self._origin[name]} = {self._native[name]!r:.60}; "
                "give one of them"
            )
        self._native[name], self._origin[name] = value, origin

    def _left_over(self, prefix: str, entries: dict[str, Any]) -> None:
        self._no_effect += [prefix + name for name, value in entries.items() if value]

    def _checkpoint(self) -> None:
        config = self._config
        folder, weights = config.get("pretrained_model_dir"), config.get("load_checkpoint")
        if not folder and not weights:
            raise ConfigError("pretrained_model_dir is missing; it must be a folder in Hugging Face's layout")
        if folder and weights and folder != weights:
            raise ConfigError(
                f"load_checkpoint = {weights!r:.60} contradicts pretrained_model_dir = {folder!r:.60}: config.json, "
                "tokenizer and weights are read from one folder; leave load_checkpoint empty"
            )
        kind = config.get("load_ckpt_format")
        if kind not in (None, "safetensors"):
            if weights:
                raise ConfigError(f"load_ckpt_format = {kind!r:.60}: must be safetensors")
            self._no_effect.append("load_ckpt_format")
        if config.get("adapter_id"):
            raise ConfigError(f"adapter_id = {config['adapter_id']!r:.60}: adapters are not supported; leave it out")
        self._put("model", folder or weights, "pretrained_model_dir" if folder else "load_checkpoint")

    def _context(self, context: dict[str, Any]) -> None:
        rest = dict(context)
        device, mode = rest.pop("device_target", None), rest.pop("mode", None)
        if device is not None:
            if str(device).lower() not in DEVICES:
                raise ConfigError(f"context.device_target = {device!r:.60}: must be Ascend or CPU")
            self._put("device", DEVICES[str(device).lower()], "context.device_target")
        if mode is not None:
            if isinstance(mode, bool) or not isinstance(mode, (int, str)) or mode not in MODES:
                raise ConfigError(f"context.mode = {mode!r:.60}: must be 0 (graphs) or 1 (without graphs)")
            if MODES[mode]:
                self._put("enforce_eager", True, "context.mode")
        number = rest.pop("device_id", None)
        if number is not None and _number("context.device_id", number):
            raise ConfigError(
                f"context.device_id = {number}: must be 0; choose a device by the environment, "
                f"ASCEND_RT_VISIBLE_DEVICES={number}"
            )
        self._left_over("context.", rest)

    def _parallel(self, parallel: dict[str, Any]) -> None:
        rest = dict(parallel)
        for name in rest:
            if name not in PARALLEL:
                raise ConfigError(unknown_name("parallel_config field", name, PARALLEL))
        for name in ONLY_ONE:
            value = rest.pop(name, None)
            if value is not None and _number(f"parallel_config.{name}", value) != 1:
                raise ConfigError(
                    f"parallel_config.{name} = {value}: must be 1; only tensors can be parallel (model_parallel)"
                )
        ranks, parallel_use = rest.pop("model_parallel", None), self._config.get("use_parallel")
        if parallel_use not in (None, True, False):
            raise ConfigError(f"use_parallel = {parallel_use!r:.60}: must be true or false")
        if ranks is not None:
            if _number("parallel_config.model_parallel", ranks) > 1 and parallel_use is False:
                raise ConfigError(
                    f"parallel_config.model_parallel = {ranks} contradicts use_parallel = false; use_parallel=true for "
                    f"{ranks} devices, parallel_config.model_parallel=1 for one"
                )
            self._put("tensor_parallel_size", ranks, "parallel_config.model_parallel")
        self._left_over("parallel_config.", rest)

    def _model_config(self, found: dict[str, Any]) -> None:
        prefix = "model.model_config."
        for name in ("compute_dtype", "params_dtype", "param_init_type"):
            value = found.get(name)
            if value is not None:
                if not isinstance(value, str) or value not in DTYPES:
                    raise ConfigError(f"{prefix}{name} = {value!r:.60}: must be float32, bfloat16 or float16")
                self._put("dtype", DTYPES[value], prefix + name)
        names = {"quantization": "quantization", "block_size": "block_size", "num_blocks": "num_gpu_blocks_override"}
        for name, native in {**names, "seq_length": "max_model_len"}.items():
            self._put(native, found.get(name), prefix + name)
        self._generation({name: found.get(name) for name in GENERATION}, prefix)
        self._left_over(prefix, {name: value for name, value in found.items() if name not in MODEL_CONFIG})

    def _generation(self, found: dict[str, Any], prefix: str) -> None:
        """What the file generates with, under what ``sampling_params`` says."""
        sampling: dict[str, Any] = {}
        samples = found["do_sample"]
        if samples is not None and not isinstance(samples, bool):
            raise ConfigError(f"{prefix}do_sample = {samples!r:.60}: must be true or false")
        chances = {name: found[name] for name in ("temperature", "top_k", "top_p") if found[name] is not None}
        if samples:
            sampling.update({"temperature": 1.0, **chances})
        else:
            sampling.update({} if samples is None else {"temperature": 0.0})
            self._left_over(prefix, chances)
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        for name, native in {**names, "repetition_penalty": "repetition_penalty"}.items():
            if found[name] is not None:
                sampling[native] = found[name]
        for name in ("max_length", "max_decode_length"):  # as with mindformers, the first that is given counts
            if found[name] is not None and "max_tokens" not in sampling:
                self._longest(_number(prefix + name, found[name]), prefix + name)
                sampling["max_tokens"] = None
            elif found[name] is not None:
                self._no_effect.append(prefix + name)
        given = self._native.get("sampling_params")
        if sampling and (given is None or isinstance(given, dict)):
            self._native["sampling_params"] = {**sampling, **(given or {})}

    def _longest(self, length: int, origin: str) -> None:
        """``length`` bounds prompt and answer together, as the engine does."""
        bound = self._native.get("max_model_len")
        if bound is None or (isinstance(bound, int) and length < bound):
            self._native["max_model_len"], self._origin["max_model_len"] = length, origin

    def _prompts(self) -> None:
        for name in ("input_data", "predict_data"):
            value = self._config.get(name)
            if value is not None:
                self._put("prompts", value if isinstance(value, list) else [value], name)
        self._put("batch", self._config.get("predict_batch_size"), "predict_batch_size")
