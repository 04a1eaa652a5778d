"""The flags of a step: what is scheduled, how it is drafted, run and profiled. Declarations only, as flags.py."""

from __future__ import annotations

from typing import ClassVar, Literal

from xllm_cli.declare import INT32_MAX, INT64_MAX, Meta, Section, flag, idle, unbuilt

_NPU = ("npu",)
_ONE_QUEUE = "requests are of one kind and wait in one queue, which --priority_strategy orders"
_NO_ESTIMATES = "the scheduler counts tokens and bytes and does not predict times"
_NO_PROFILER = "the engine has no profiler; /metrics has the times of its steps"


class SchedulerConfig(Section):
    """What one step computes and who waits"""

    max_tokens_per_batch: int = flag(
        10240, "tokens a step computes at most; more throughput, longer steps", low=1, high=INT32_MAX, common=True,
    )  # fmt: skip
    max_seqs_per_batch: int = flag(1024, "sequences in a step at most", low=1, high=INT32_MAX, common=True)
    enable_chunked_prefill: bool = flag(
        True, "cut long prompts so that running requests keep their pace; off finishes a prompt in one step"
    )
    max_tokens_per_chunk_for_prefill: int | None = flag(
        None, "prompt tokens a step takes; unset is the device's choice (cpu: 512)", low=1, high=INT32_MAX, unset=-1
    )
    memory_wait_seconds: float = flag(60.0, "seconds a request waits alone for memory before 503", low=0)
    priority_strategy: Literal["fcfs", "priority", "deadline"] = flag(
        "fcfs",
        "who goes first; fcfs is who came first, priority is the request's field, then who came first",
        supported=("fcfs", "priority"),
        why="the scheduler does not predict when a request ends",
    )
    enable_schedule_overlap: bool = idle(
        False, "prepare the next step during this one", "steps run one after the other"
    )
    enable_task_pipeline: bool | None = idle(
        None, "pipeline of host and device work; unset is false", "there is no task pipeline"
    )
    prefill_scheduling_memory_usage_threshold: float = idle(
        0.95, "share of the cache in use above which no prompt begins",
        "a prompt begins when all of it and one more block fit", low=0, high=1,
    )  # fmt: skip
    chunked_match_frequency: int = idle(
        2, "how often a prompt in chunks looks for cached prefixes", "it looks at every block it reaches", low=0,
        high=INT32_MAX,
    )  # fmt: skip
    use_zero_evict: bool = unbuilt(
        False, "admit only what never needs an eviction", "admission counts idle prefixes as free", never=True
    )
    max_decode_token_per_sequence: int = idle(
        256, "tokens use_zero_evict expects of each request", "it belongs to use_zero_evict", low=1, high=INT32_MAX
    )
    use_mix_scheduler: bool = idle(False, "prompts and decodes in one step", "every step may mix them")
    enable_online_preempt_offline: bool = idle(True, "online requests preempt offline ones", _ONE_QUEUE)
    aggressive_coeff: float = idle(1.0, "eagerness of latency-aware scheduling", _NO_ESTIMATES, low=0)
    starve_threshold: float = idle(1.0, "when a request counts as starved", _ONE_QUEUE, low=0)
    enable_starve_prevent: bool = idle(True, "let starved requests go first", _ONE_QUEUE)


class BeamSearchConfig(Section):
    """Beam search"""

    group: ClassVar[Meta] = {"status": "accepted", "why": "there is no beam search"}
    beam_width: int = unbuilt(
        1, "beams of a request; 1 is no beam search", "sequences are sampled, n of them if asked for", low=1,
        high=INT32_MAX,
    )  # fmt: skip
    enable_beam_search_kernel: bool = flag(False, "fused kernel of beam search")
    enable_block_copy_kernel: bool | None = flag(None, "copy blocks of beams with one kernel; unset asks the device")
    enable_topk_sorted: bool = flag(True, "sort the candidates of a beam")


class SpeculativeConfig(Section):
    """Speculative decoding"""

    group: ClassVar[Meta] = {"why": "every token is computed by the model itself so far"}
    draft_model: str = flag("", "folder of the draft; empty is a draft inside the model", status="unsupported")
    num_speculative_tokens: int = flag(
        0, "tokens drafted per step; 0 is off; more pays only while drafts are accepted", low=0, high=64,
        status="unsupported",
    )  # fmt: skip
    speculative_algorithm: Literal["MTP", "Eagle3", "Suffix", "DFlash", "DSpark"] = flag(
        "MTP", "how tokens are drafted", supported=("MTP",)
    )
    speculative_suffix_cache_max_depth: int = flag(
        64, "longest suffix remembered", status="accepted", low=1, high=INT32_MAX
    )
    speculative_suffix_max_spec_factor: float = flag(1.0, "drafted tokens per matched one", status="accepted", low=0)
    speculative_suffix_max_spec_offset: float = flag(
        0.0, "drafted tokens beside the factor", status="accepted", low=-INT32_MAX, high=INT32_MAX
    )
    speculative_suffix_min_token_prob: float = flag(
        0.1, "least estimated probability of a drafted token", status="accepted", low=0, high=1
    )
    speculative_suffix_max_cached_requests: int | None = flag(
        None, "requests remembered; unset is all", status="accepted", low=0, high=INT32_MAX, unset=-1
    )
    speculative_suffix_use_tree_spec: bool = flag(False, "draft a tree instead of a line", status="accepted")
    enable_opt_validate_probs: bool = flag(False, "leaner check of draft probabilities", status="accepted")
    enable_atb_spec_kernel: bool = flag(False, "validate drafts with ATB's kernel", status="accepted")


class ProfileConfig(Section):
    """Measuring steps, and scheduling by what was measured"""

    group: ClassVar[Meta] = {"status": "accepted", "why": _NO_ESTIMATES}
    enable_profile_step_time: bool = flag(False, "measure steps at start to predict them")
    enable_profile_token_budget: bool = flag(False, "choose the tokens of a step by measured times")
    enable_latency_aware_schedule: bool = unbuilt(False, "keep steps within latency limits", _NO_ESTIMATES)
    profile_max_prompt_length: int = flag(2048, "longest prompt measured at start", low=1, high=INT32_MAX)
    max_global_ttft_ms: int = flag(INT32_MAX, "limit of the time to the first token", low=0, high=INT32_MAX)
    max_global_tpot_ms: int = flag(INT32_MAX, "limit of the time for each further token", low=0, high=INT32_MAX)
    enable_profile_kv_blocks: bool = flag(True, "measure with the blocks of real requests")
    disable_ttft_profiling: bool = flag(False, "leave first tokens out of the measurement")
    enable_forward_interruption: bool = unbuilt(False, "break off a step that is too long", _NO_ESTIMATES)
    enable_online_profile: bool = unbuilt(False, "profile on demand over HTTP", _NO_PROFILER)
    profile_backend: str = idle("torch", "tool of the online profile", _NO_PROFILER)
    profile_dir: str = idle("", "folder of online profiles", _NO_PROFILER)


class ExecutionConfig(Section):
    """How a step runs"""

    random_seed: int | None = flag(
        None, "seed of requests that bring none; unset differs at every start", low=0, high=INT32_MAX, unset=-1
    )
    enable_graph: bool = flag(
        False, "replay captured decode steps on npu: less launching, more memory, a later start", only_on=_NPU
    )
    enable_graph_double_buffer: bool = idle(True, "two sets of a graph's inputs", "one step is in flight at a time")
    enable_graph_mode_decode_no_padding: bool = flag(
        False, "capture every batch size, so that no row is padding", only_on=_NPU
    )
    enable_prefill_piecewise_graph: bool = idle(False, "graphs for parts of a prefill", "prefills run without graphs")
    enable_graph_vmm_pool: bool = idle(True, "memory of graphs in virtual pages", "graphs share torch's pool")
    max_tokens_for_graph_mode: int = flag(
        2048, "largest step that is a graph, 0 for any", low=0, high=INT32_MAX, only_on=_NPU
    )
    acl_graph_decode_batch_size_limit: int = flag(
        16,
        "largest batch whose decode step is a graph; larger ones run without, 0 all",
        low=0,
        high=INT32_MAX,
        only_on=_NPU,
    )
    enable_shm: bool = idle(False, "send inputs to ranks through shared memory", "one rank needs no messages")
    use_contiguous_input_buffer: bool = idle(
        True, "one buffer for all inputs of a step", "inputs are made where the step runs"
    )
    input_shm_size: int = idle(1024, "MiB of shared memory for inputs", "one rank needs no messages", low=1,
        high=INT64_MAX)  # fmt: skip
    output_shm_size: int = idle(128, "MiB of shared memory for outputs", "one rank needs no messages", low=1,
        high=INT64_MAX)  # fmt: skip


class KernelConfig(Section):
    """Variants of kernels"""

    group: ClassVar[Meta] = {"status": "accepted", "why": "each device has one kernel for each operator"}
    npu_kernel_backend: str = flag("AUTO", "library of npu kernels")
    enable_customize_mla_kernel: bool = flag(False, "own kernel of latent attention")
    enable_intralayer_addnorm: bool = flag(False, "fuse addition and norm within a layer")
    enable_interlayer_addnorm: bool = flag(False, "fuse addition and norm between layers")
    enable_fused_mc2: int | None = flag(None, "fuse products with collectives; unset is the device's choice", low=0,
        high=INT32_MAX, unset=-1)  # fmt: skip
    enable_split_rmsnorm_rope: bool = flag(False, "fuse split, norm and rotation")
    enable_aclnn_matmul: bool = flag(False, "products by aclnn")
    enable_aclnn_swiglu: bool = flag(False, "activations by aclnn")
    enable_dspark_native_sas: bool = flag(False, "own sparse attention of DSpark")


class HostConfig(Section):
    """The cpu device: host memory"""

    host_memory_bytes: int = flag(
        0, "memory that counts as the device's total; 0 is the machine's or the container's", low=0, high=INT64_MAX,
        is_bytes=True, only_on=("cpu",),
    )  # fmt: skip
    host_page_mode: Literal["auto", "huge", "4k"] = flag(
        "auto",
        "huge maps faster and fails cleanly; 4k runs on every kernel; auto is huge where it works",
        only_on=("cpu",),
    )
