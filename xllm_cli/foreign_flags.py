"""The flags of what is not served here: other kinds of models, the original's launcher and its logging library.

Declarations only, as flags.py; each section has one answer for all of its flags.
"""

from __future__ import annotations

from typing import Any, ClassVar

from xllm_cli.declare import INT32_MAX, INT64_MAX, UINT32_MAX, Meta, Section, flag, idle


def _count(default: int, help: str, low: int = 0) -> Any:
    return flag(default, help, low=low, high=INT64_MAX)


class DiTConfig(Section):
    """Diffusion models"""

    group: ClassVar[Meta] = {"status": "unsupported", "never": True, "why": "diffusion models are not served"}
    max_requests_per_batch: int = flag(1, "images made together", low=1, high=INT32_MAX)
    dit_cache_policy: str = flag("TaylorSeer", "what is reused between steps")
    dit_cache_warmup_steps: int = _count(0, "steps before anything is reused")
    dit_cache_n_derivatives: int = _count(3, "order of the extrapolation")
    dit_cache_skip_interval_steps: int = _count(3, "steps between two whole ones")
    dit_cache_residual_diff_threshold: float = flag(0.09, "change above which a step is computed", low=0)
    dit_cache_start_steps: int = _count(5, "first steps that are computed")
    dit_cache_end_steps: int = _count(5, "last steps that are computed")
    dit_cache_start_blocks: int = _count(5, "first blocks that are computed")
    dit_cache_end_blocks: int = _count(5, "last blocks that are computed")
    dit_sp_communication_overlap: bool = flag(True, "overlap computing and talking")
    dit_debug_print: bool = flag(False, "print what a step does")
    dit_generation_image_area_max: int = _count(0, "largest image in pixels; 0 is no limit")
    dit_enable_vae_tiling: bool = flag(False, "decode images in tiles")
    dit_vae_image_size: int = _count(1048576, "pixels of a tile")
    dit_sparse_attention_enabled: bool = flag(False, "leave out weak attention")
    dit_sparse_attention_sparsity: float = flag(0.5, "share that is left out", low=0, high=1)
    dit_sparse_attention_pool_size: int = _count(128, "tokens judged together")
    dit_sparse_attention_sparse_start_step: int = _count(0, "first step that leaves something out")
    dit_sparse_attention_version: str = flag("rain_fusion", "how weak attention is found")
    dit_sparse_attention_mask_refresh_steps: int = _count(1, "steps between two judgements")


class RecConfig(Section):
    """Recommendation models"""

    group: ClassVar[Meta] = {"status": "unsupported", "never": True, "why": "recommendation models are not served"}
    enable_rec_fast_sampler: bool = flag(True, "fused sampling of items")
    enable_rec_prefill_only: bool = flag(False, "rank with the prompt alone")
    enable_xattention_one_stage: bool = flag(False, "shared attention in one kernel")
    max_decode_rounds: int = flag(0, "tokens of an item", low=0, high=INT32_MAX)
    enable_constrained_decoding: bool = flag(False, "only items that exist")
    output_rec_logprobs: bool = flag(False, "report probabilities of items")
    enable_convert_tokens_to_item: bool = flag(False, "answer with items instead of tokens")
    enable_output_sku_logprobs: bool = flag(False, "report probabilities of goods")
    enable_extended_item_info: bool = flag(False, "report more of each item")
    each_conversion_threshold: int = flag(50, "items of one beam", low=0, high=INT32_MAX)
    total_conversion_threshold: int = flag(1000, "items of all beams", low=0, high=INT32_MAX)
    request_queue_size: int = flag(100000, "requests that wait", low=0, high=INT32_MAX)
    rec_worker_max_concurrency: int = flag(1, "requests a worker runs", low=1, high=UINT32_MAX)


class LauncherConfig(Section):
    """The original's launcher"""

    group: ClassVar[Meta] = {"status": "accepted", "why": "nothing is launched but this server"}
    binary_path: str = flag("", "the program to start")
    log_files: bool = idle(True, "write log files", "there are log files only with --log_dir")
    enable_auto_tuning_gflags: bool = flag(False, "choose flags by the device")


class GlogConfig(Section):
    """The original's logging library, glog"""

    group: ClassVar[Meta] = {"status": "accepted", "why": "--log_level, --log_dir and --log_format rule the log"}
    v: int = flag(0, "verbosity", low=-INT32_MAX, high=INT32_MAX)
    vmodule: str = flag("", "verbosity by file")
    minloglevel: int = flag(0, "least severity that is logged", low=0, high=INT32_MAX)
    stderrthreshold: int = flag(2, "least severity that also goes to stderr", low=0, high=INT32_MAX)
    logtostderr: bool = flag(False, "log to stderr instead of files")
    alsologtostderr: bool = flag(False, "log to stderr beside files")
    logtostdout: bool = flag(False, "log to stdout instead of files")
    colorlogtostderr: bool = flag(False, "coloured lines")
    log_prefix: bool = flag(True, "begin lines with time and place")
    logbufsecs: int = flag(30, "seconds a line may wait", low=0, high=INT32_MAX)
    logbuflevel: int = flag(0, "severity up to which lines wait", low=-1, high=INT32_MAX)
    max_log_size: int = flag(1800, "MiB of a log file", low=0, high=UINT32_MAX)
    stop_logging_if_full_disk: bool = flag(False, "stop at a full disk")
    timestamp_in_logfile_name: bool = flag(True, "time in the names of log files")
