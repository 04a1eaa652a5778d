"""Every flag once: its name, type, default, range, and the line of help that says what it trades.

The frozen sections here and in *_flags.py are the only declaration; everything else is generated from `FLAGS`.
"Unset" is None; a value that other flags imply is a property of `Config`, never written back. This module knows no
rule (rules.py), no source of values (sources.py) and nothing that runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

from xllm_cli.declare import INT32_MAX, INT64_MAX, Flag, Section, declared, flag, idle, unbuilt
from xllm_cli.foreign_flags import DiTConfig, GlogConfig, LauncherConfig, RecConfig
from xllm_cli.memory_flags import KVCacheConfig, KVCacheStoreConfig, VmmConfig
from xllm_cli.rank_flags import DisaggPDConfig, DistributedConfig, EPLBConfig, ParallelConfig
from xllm_cli.service_flags import SecurityConfig as SecurityConfig
from xllm_cli.service_flags import ServiceConfig as ServiceConfig
from xllm_cli.step_flags import (
    BeamSearchConfig,
    ExecutionConfig,
    HostConfig,
    KernelConfig,
    ProfileConfig,
    SchedulerConfig,
    SpeculativeConfig,
)

_TEXT_ONLY = "models of text are served, and requests with media are refused"


class ModelConfig(Section):
    """The checkpoint and the device it runs on"""

    model: str = flag("", "checkpoint folder (config.json, tokenizer, safetensors)", common=True)
    model_id: str = flag("", "name clients ask for; empty is the folder's name", common=True)
    device: Literal["auto", "npu", "cuda", "cpu"] = flag(
        "auto", "auto is the first usable one", supported=("auto", "npu", "cpu"), why="its operators are not there",
        common=True,
    )  # fmt: skip
    backend: Literal["", "llm", "vlm", "dit", "rec"] = flag(
        "", "kind of model; empty reads it from the checkpoint", supported=("", "llm"), why="models of text are served"
    )
    task: Literal["generate", "embed", "mm_embed"] = flag(
        "generate", "what the model is asked for", supported=("generate",), why="models generate text"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = flag(
        "auto", "auto is the checkpoint's; float32 is exact and twice the memory of bfloat16", common=True
    )
    tool_call_parser: Literal["", "auto", "none", "hermes", "qwen25", "qwen3"] = flag(
        "", "how the model writes tool calls; empty and auto ask its chat template, none refuses requests with tools"
    )
    reasoning_parser: Literal["", "auto", "none", "qwen3", "deepseek-r1"] = flag(
        "", "how the model writes reasoning; empty and auto ask its chat template, none leaves it in the text, "
        "deepseek-r1 begins with it unannounced",
    )  # fmt: skip
    use_cpp_chat_template: bool = idle(
        True, "render chat templates by a program instead of the template", "a template is rendered as it is written"
    )
    enable_qwen3_reranker: bool = unbuilt(False, "rank with a Qwen3 reranker", "models generate text")
    limit_image_per_prompt: int = idle(8, "images of one request", _TEXT_ONLY, low=0, high=INT32_MAX)
    max_encoder_cache_size: int = idle(0, "cache of encoded media", _TEXT_ONLY, low=0, high=INT64_MAX)
    mm_download_headers: str = idle("", "HTTP headers for fetching media", _TEXT_ONLY)
    use_audio_in_video: bool = idle(False, "hear the sound of videos", _TEXT_ONLY)
    enable_return_mm_full_embeddings: bool = unbuilt(False, "answer with embeddings of media", "models generate text")
    flashinfer_workspace_buffer_size: int = idle(
        134217728, "bytes of FlashInfer's workspace", "attention needs no workspace", low=0, high=INT32_MAX,
        is_bytes=True,
    )  # fmt: skip


class LoadConfig(Section):
    """How weights are read"""

    enable_manual_loader: bool = flag(
        False,
        "pack weights in pinned host memory, 128 MiB of it, and copy them to the device while the next are read; on "
        "implicitly with enable_vmm_weights. A cpu's memory is the host's: there they are packed straight into place",
        only_on=("npu",),
    )
    enable_rolling_load: bool = unbuilt(
        False, "keep some layers on the device and load the others when they are due",
        "all layers stay on the device", never=True,
    )  # fmt: skip
    rolling_load_num_cached_layers: int = idle(
        2, "layers that enable_rolling_load keeps", "it belongs to enable_rolling_load", low=0, high=INT32_MAX
    )
    rolling_load_num_rolling_slots: int | None = idle(
        None, "places for layers that come and go; unset is all there is room for",
        "it belongs to enable_rolling_load", low=0, high=INT32_MAX, unset=-1,
    )  # fmt: skip
    enable_prefetch_weight: bool = idle(
        False, "bring weights into the device's cache ahead of their use", "kernels read weights where they lie"
    )


class Config(Section):
    """All sections. It crosses processes as JSON: `model_dump_json` and `model_validate_json` are inverse."""

    service: ServiceConfig = ServiceConfig()
    security: SecurityConfig = SecurityConfig()
    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    vmm: VmmConfig = VmmConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    kv_store: KVCacheStoreConfig = KVCacheStoreConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    beam_search: BeamSearchConfig = BeamSearchConfig()
    parallel: ParallelConfig = ParallelConfig()
    eplb: EPLBConfig = EPLBConfig()
    distributed: DistributedConfig = DistributedConfig()
    disagg: DisaggPDConfig = DisaggPDConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    profile: ProfileConfig = ProfileConfig()
    execution: ExecutionConfig = ExecutionConfig()
    kernel: KernelConfig = KernelConfig()
    host: HostConfig = HostConfig()
    dit: DiTConfig = DiTConfig()
    rec: RecConfig = RecConfig()
    launcher: LauncherConfig = LauncherConfig()
    glog: GlogConfig = GlogConfig()

    @property
    def has_elastic_kv(self) -> bool:
        """KV pages are backed on demand; `vmm_elastic` without a switch changes nothing (R14)."""
        return self.vmm.enable_vmm_kvcache and self.vmm.vmm_elastic

    @property
    def has_pool(self) -> bool:
        """There is a page pool: KV, weights or both live in it."""
        return self.vmm.enable_vmm_kvcache or self.vmm.enable_vmm_weights

    @property
    def kv_ratio(self) -> float:
        """The effective `max_memory_utilization`, r of DESIGN.md §7: unset is 0 for elastic KV and 0.8 otherwise."""
        ratio = self.kv_cache.max_memory_utilization
        if ratio is None:
            return 0.0 if self.has_elastic_kv else 0.8
        return ratio

    @property
    def implied_manual_loader(self) -> bool:
        """Weights in virtual memory switch the manual loader on; KV alone does not (R1)."""
        return self.load.enable_manual_loader or self.vmm.enable_vmm_weights

    @property
    def served_model_id(self) -> str:
        """The name clients ask for."""
        return self.model.model_id or os.path.basename(os.path.abspath(self.model.model))

    def value(self, name: str) -> Any:
        """The value of a flag by its name."""
        return getattr(getattr(self, FLAGS[name].section), name)


class LaunchConfig(Section):
    """What this call does; not part of the configuration"""

    config_json_file: str = flag("", "JSON file of flags; the command line wins over it", common=True)
    flagfile: str = flag("", "file of flags, one on each line, read as if they were typed in its place")
    enable_dump_config_json: bool = flag(
        False, "write the configuration, keys left out, to dump_config_json_file and serve"
    )
    dump_config_json_file: str = flag("xllm_config.json", "where enable_dump_config_json writes")
    dry_run: bool = flag(False, "print the configuration as print_config does, and each rank's command, and exit")
    print_config: Literal["false", "true", "sources"] = flag(
        "false", "print the configuration as JSON and exit; =sources adds where each value came from", bare="true",
        common=True,
    )  # fmt: skip
    help: str = flag("", "this help; =all lists every flag, =WORD those about a word", bare="short")

    @property
    def only_prints(self) -> bool:
        """Nothing is served."""
        return self.dry_run or self.print_config != "false"


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Attribute name and class of every section of Config, in order."""
    for name, field in Config.model_fields.items():
        yield name, cast(type[Section], field.annotation)


def _declarations() -> Iterator[Flag]:
    for name, section in sections():
        yield from declared(name, section)
    yield from declared("launch", LaunchConfig)


FLAGS: Mapping[str, Flag] = MappingProxyType({one.name: one for one in _declarations()})
ALIASES: Mapping[str, str] = MappingProxyType(
    {also: one.name for one in FLAGS.values() for also in one.meta.get("also", ())}
)
