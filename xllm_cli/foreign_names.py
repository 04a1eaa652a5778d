"""Names of flags that vLLM, SGLang, gflags and older scripts bring, and what to write instead.

An advice is the end of a sentence: `--NAME: ADVICE`. Names that are flags here are not in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

_NONE = "has no equivalent here"
_MEMORY = "use --max_memory_utilization"
_CHUNK = "use --max_tokens_per_chunk_for_prefill"
_RANKS = "use --tp_size, and --nnodes for the number of ranks"
_DRAFT = "use --draft_model, --num_speculative_tokens and --speculative_algorithm"
_GRAPH = "graphs are off unless --enable_graph is given"
_OFFLOAD = "use --host_blocks_factor"
_CONTEXT = f"{_NONE}: a request may use the model's whole context; --max_cache_size caps memory"
_FOLDER = f"{_NONE}: what belongs to a model is read from the folder given by --model"
_NO_HUB = f"{_NONE}: --model is a folder, and nothing is downloaded"
_NO_LORA = f"{_NONE}: adapters are not served"
_NO_QUANTIZATION = f"{_NONE}: weights have the checkpoint's type or --dtype"
_ONE_PROCESS = f"{_NONE}: the server is one process and its engine another"
_BUILT_IN = f"{_NONE}: it is always on"
_AUTOMATIC = f"{_NONE}: it is chosen for the device"
_ROUTES = f"{_NONE}: every route is served, with CORS by --allowed_origins"

# advice → the names it answers
_ANSWERS: Mapping[str, str] = {
    _MEMORY: "gpu_memory_utilization mem_fraction_static memory_ratio",
    "use --max_cache_size (bytes)": "kv_cache_memory_bytes num_gpu_blocks_override max_total_tokens num_pages",
    _RANKS: "tensor_parallel_size tp",
    "use --nnodes for the number of ranks": "pipeline_parallel_size pp_size pp num_gpus",
    "use --dp_size": "data_parallel_size dp data_parallel_size_local",
    "use --ep_size": "enable_expert_parallel ep expert_parallel_size",
    "use --master_node_addr (HOST:PORT)": "dist_init_addr master_addr master_port data_parallel_address nccl_init_addr",
    "use --device for the kind, ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES for which ones": "devices device_id",
    "use --node_rank": "data_parallel_rank",
    "use --model_id": "served_model_name alias",
    "use --model": "model_path model_tag",
    "use --dtype": "torch_dtype",
    _FOLDER: "tokenizer tokenizer_path tokenizer_mode chat_template chat_template_content_format completion_template "
    "generation_config override_generation_config hf_overrides json_model_override_args hf_config_path response_role "
    "preferred_sampling_params skip_tokenizer_init",
    _NO_HUB: "revision code_revision tokenizer_revision hf_token download_dir load_format model_loader_extra_config",
    f"{_NONE}: a checkpoint's code is never run": "trust_remote_code model_impl",
    _CONTEXT: "max_model_len context_length max_seq_len_to_capture",
    "use --max_seqs_per_batch": "max_num_seqs max_running_requests",
    "use --max_concurrent_requests": "max_queued_requests limit_concurrency max_concurrency",
    "use --max_tokens_per_batch": "max_num_batched_tokens max_prefill_tokens",
    _CHUNK: "chunked_prefill_size long_prefill_token_threshold max_prefill_length",
    "use --enable_chunked_prefill=false": "disable_chunked_prefill",
    "use --enable_prefix_cache": "enable_prefix_caching prefix_caching",
    "use --enable_prefix_cache=false": "disable_radix_cache",
    "use --xxh3_128bits_seed": "prefix_caching_hash_algo",
    "use --block_size (tokens) or --phy_page_granularity_size (bytes)": "page_size",
    "use --priority_strategy": "scheduling_policy schedule_policy enable_priority_scheduling",
    "use --enable_schedule_overlap": "async_scheduling",
    "use --enable_schedule_overlap=false": "disable_overlap_schedule",
    f"{_NONE}: a prompt is admitted when it fits": "schedule_conservativeness scheduler_delay_factor "
    "num_scheduler_steps preemption_mode max_num_partial_prefills max_long_partial_prefills",
    "use --random_seed": "seed",
    "use --config_json_file": "config",
    "use --log_level": "uvicorn_log_level log_level_http",
    "use --access_log": "log_requests enable_log_requests log_requests_level max_log_len",
    "use --access_log=off": "disable_log_requests disable_uvicorn_access_log",
    "use --log_dir": "log_path log_file crash_dump_folder",
    "use --pid_file": "pidfile",
    "use --liveness_timeout_secs": "watchdog_timeout soft_watchdog_timeout",
    "use --shutdown_timeout_secs": "timeout_graceful_shutdown graceful_shutdown_timeout",
    "use --rpc_idle_timeout_s": "timeout_keep_alive keep_alive_timeout",
    "use --allowed_origins": "cors_origins allow_origins",
    _ROUTES: "allow_credentials allowed_methods allowed_headers root_path middleware fastapi_root_path",
    "use --ssl_certfile": "ssl_cert_file ssl_ca_certs",
    "use --ssl_keyfile": "ssl_key_file",
    "use --enable_vmm_weights": "enable_sleep_mode enable_memory_saver",
    "use --enable_vmm_kvcache": "enable_kvcache_vmm enable_vmm",
    _DRAFT: "speculative_config speculative_model speculative_draft_model_path",
    "use --num_speculative_tokens": "speculative_num_draft_tokens speculative_num_steps num_lookahead_slots",
    "use --speculative_algorithm": "spec_method speculative_eagle_topk",
    "use --enable_disagg_pd": "kv_transfer_config disaggregation_mode",
    "use --kv_cache_transfer_mode": "disaggregation_transfer_backend",
    "use --enable_service_routing": "kv_events_config",
    _OFFLOAD: "swap_space cpu_offload_gb kv_offloading_size hicache_ratio hicache_size enable_hierarchical_cache",
    "use --limit_image_per_prompt": "limit_mm_per_prompt",
    "use --task": "runner is_embedding convert",
    "use --enable_graph": "compilation_config enable_torch_compile torch_compile_max_bs",
    _GRAPH: "enforce_eager disable_cuda_graph disable_custom_all_reduce",
    "use --acl_graph_decode_batch_size_limit": "cuda_graph_max_bs cuda_graph_bs cudagraph_capture_sizes",
    f"{_NONE}: tools are called when a request has some; --tool_call_parser says how the model writes them":
    "enable_auto_tool_choice tool_parser_plugin tool_server",
    "use --reasoning_parser": "enable_reasoning reasoning_config",
    _NO_LORA: "enable_lora lora_modules lora_paths max_loras max_lora_rank max_cpu_loras max_loras_per_batch",
    _NO_QUANTIZATION: "quantization q quantization_param_path torchao_config",
    _ONE_PROCESS: "distributed_executor_backend worker_cls api_server_count headless workers tokenizer_worker_num "
    "disable_frontend_multiprocessing base_gpu_id gpu_id_step load_balance_method enable_dp_attention",
    _AUTOMATIC: "attention_backend sampling_backend prefill_attention_backend decode_attention_backend enable_dbo "
    "guided_decoding_backend structured_outputs_config grammar_backend enable_p2p_check disable_sliding_window",
    _BUILT_IN: "enable_metrics enable_cache_report enable_mixed_chunk enable_prompt_tokens_details "
    "enable_server_load_tracking return_tokens_as_token_ids",
    f"{_NONE}: numbers are at /metrics": "disable_log_stats decode_log_interval show_time_cost otlp_traces_endpoint "
    "collect_detailed_traces",
    f"{_NONE}: a chunk of a stream is a step's tokens": "stream_interval",
    f"{_NONE}: the server warms up with one short request": "warmups skip_server_warmup",
    f"{_NONE}: a request may ask for 20": "max_logprobs logprobs_mode",
    f"{_NONE}: files of clients are not read": "allowed_local_media_path file_storage_path media_io_kwargs "
    "mm_processor_kwargs",
    "not supported: every XLLM_FLAG_<NAME> is read": "fromenv tryfromenv",
    "not supported: an unknown flag is an error": "undefok",
}  # fmt: skip


def _by_name() -> Iterator[tuple[str, str]]:
    for advice, names in _ANSWERS.items():
        for name in names.split():
            yield name, advice


FOREIGN: Mapping[str, str] = MappingProxyType(dict(_by_name()))
"""Name → advice."""


def advice(name: str) -> str:
    """What to write instead of a foreign name or its negated form; '' for a name that nobody brings."""
    return next(
        (FOREIGN[one] for one in (name, name.removeprefix("no_"), name.removeprefix("no")) if one in FOREIGN), ""
    )
