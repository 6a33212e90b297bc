"""The entries of mindformers' configuration files, and what of them means something here."""

from __future__ import annotations

DTYPES = {"float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16"}
DTYPES.update({"bfloat16": "bfloat16", "bf16": "bfloat16"})
DEVICES = {"ascend": "ascend", "cpu": "cpu"}
MODES = {0: False, "GRAPH_MODE": False, 1: True, "PYNATIVE_MODE": True}
"""Whether ``context.mode`` runs without compiled graphs."""
ONLY_ONE = ("data_parallel", "pipeline_stage", "expert_parallel", "context_parallel")
PARALLEL = (
    *ONLY_ONE,
    *("model_parallel", "micro_batch_num", "seq_split_num", "use_seq_parallel", "optimizer_shard", "mem_coeff"),
    *("gradient_aggregation_group", "vocab_emb_dp", "context_parallel_algo", "ulysses_degree_in_cp"),
)
GENERATION = (
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty"),
    *("max_new_tokens", "min_new_tokens", "max_length", "max_decode_length"),
)
MODEL_CONFIG = (
    *("compute_dtype", "params_dtype", "param_init_type", "quantization", "block_size", "num_blocks", "seq_length"),
    *GENERATION,
)
"""Entries of ``model.model_config`` that mean something here."""
READ = (
    *("run_mode", "seed", "use_parallel", "pretrained_model_dir", "load_checkpoint", "load_ckpt_format", "adapter_id"),
    *("context", "parallel_config", "model", "input_data", "predict_data", "predict_batch_size"),
)
SECTIONS = (
    *("trainer", "parallel", "processor", "moe_config", "generation_config", "runner_config", "runner_wrapper"),
    *("recompute_config", "swap_config", "optimizer", "lr_schedule", "metric", "callbacks", "eval_callbacks"),
    *("train_dataset", "train_dataset_task", "eval_dataset", "eval_dataset_task", "monitor_config"),
    "stable_rank_config",
)
SWITCHES = (
    *("output_dir", "use_legacy", "use_legacy_format", "auto_trans_ckpt", "only_save_strategy", "load_ckpt_async"),
    *("transform_process_num", "src_strategy_path_or_dir", "balanced_load", "reshard_worker_num", "resume_training"),
    *("do_eval", "eval_step_interval", "eval_epoch_interval", "ignore_data_skip", "data_skip_steps", "profile"),
    *("profile_communication", "profile_memory", "init_start_profile", "profile_start_step", "profile_stop_step"),
    *("profile_rank_ids", "profile_pipeline", "profile_level", "mstx", "layer_scale", "layer_decay", "lr_scale"),
    *("lr_scale_factor", "micro_batch_interleave_num", "remote_save_url", "save_file", "exclude_cann_cpu"),
    *("train_precision_sync", "infer_precision_sync", "postprocess_use_numpy", "print_separate_loss"),
    *("auto_tune", "filepath_prefix", "autotune_per_step"),
)
"""Top-level entries that mindformers knows and that mean nothing here."""
