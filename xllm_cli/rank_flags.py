"""The flags of several devices, hosts and instances. Declarations only, as flags.py."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from xllm_cli.declare import INT32_MAX, INT64_MAX, Meta, Section, flag, idle, unbuilt

_ONE_RANK = "one rank serves a model so far"
_ALONE = "one rank has nobody to share with"
_NO_SERVICE = "no routing service is told of this server"
_NO_DISAGG = "prefill and decode are not separated"


def _ways(help: str) -> Any:
    """A number of ways to cut a model, of which one is built."""
    return unbuilt(1, help, _ONE_RANK, low=1, high=1024)


class ParallelConfig(Section):
    """How a model is cut over devices"""

    tp_size: int = _ways("devices that share each layer")
    dp_size: int = _ways("replicas that share the requests")
    ep_size: int = _ways("devices that share the experts")
    cp_size: int = _ways("devices that share a context")
    kv_split_size: int = _ways("devices that share one sequence's cache")
    sp_size: int = _ways("devices that share a sequence (diffusion)")
    cfg_size: int = _ways("devices that share guidance (diffusion)")
    vae_size: int = _ways("devices that share the decoder of images (diffusion)")
    communication_backend: Literal["hccl", "lccl", "nccl", "gloo"] = idle(
        "hccl", "library of collective operations", _ALONE
    )
    enable_mm_encoder_dp: bool = idle(False, "replicate the encoder of images", _ALONE)
    enable_multi_stream_parallel: bool = idle(False, "overlap computing and talking", _ALONE)
    micro_batch_num: int = idle(1, "parts of a step that overlap", _ALONE, low=1, high=INT32_MAX)
    enable_dp_balance: bool = idle(False, "balance tokens over replicas", _ALONE)


class EPLBConfig(Section):
    """Balancing experts over devices"""

    group: ClassVar[Meta] = {"status": "accepted", "why": "one rank holds all experts"}
    enable_eplb: bool = flag(False, "move experts to where there is room")
    redundant_experts_num: int = flag(1, "copies of busy experts on each device", low=0, high=INT32_MAX)
    eplb_update_interval: int = flag(1000, "steps between two moves", low=1, high=INT64_MAX)
    expert_parallel_degree: int = flag(0, "how experts are spread", low=0, high=INT32_MAX)
    rank_tablefile: str = flag("", "file that says which rank is where")


class DistributedConfig(Section):
    """Ranks on several hosts, and the routing service"""

    nnodes: int = unbuilt(1, "number of ranks", _ONE_RANK, low=1, high=4096)
    node_rank: int | None = unbuilt(
        None, "run exactly this rank; unset starts all", _ONE_RANK, low=0, high=4095, supported=(None, 0)
    )
    machine_rank: int = unbuilt(0, "which of several hosts this is", _ONE_RANK, low=0, high=4095)
    master_node_addr: str = idle("127.0.0.1:19888", "HOST:PORT where ranks meet", "one rank needs no meeting point")
    xtensor_master_node_addr: str = idle(
        "127.0.0.1:19889", "HOST:PORT where page allocators meet", "one rank needs no meeting point"
    )
    enable_service_routing: bool = idle(False, "report load and KV events to the routing service", _NO_SERVICE)
    etcd_addr: str = idle("", "HOST:PORT of the routing service's etcd", _NO_SERVICE)
    etcd_namespace: str = idle("", "prefix of keys in etcd", _NO_SERVICE)
    etcd_ttl: int = idle(3, "seconds a key in etcd lives", _NO_SERVICE, low=1, high=INT32_MAX)
    heart_beat_interval: float = idle(0.5, "seconds between two reports", _NO_SERVICE, low=0)


class DisaggPDConfig(Section):
    """Prefill and decode on separate instances"""

    group: ClassVar[Meta] = {"status": "accepted", "why": _NO_DISAGG}
    enable_disagg_pd: bool = unbuilt(False, "separate prefill from decode", "one instance does both so far")
    enable_pd_ooc: bool = unbuilt(False, "mix online and offline load over both", "one instance does both so far")
    instance_role: Literal["DEFAULT", "PREFILL", "DECODE", "MIX"] = unbuilt(
        "DEFAULT", "what this instance does", "one instance does both so far"
    )
    disagg_pd_port: int = flag(7777, "port where the instances meet", low=0, high=65535)
    kv_cache_transfer_mode: Literal["PUSH", "PULL"] = flag("PUSH", "who moves the KV")
    transfer_listen_port: int = flag(26000, "port where KV arrives", low=0, high=65535)
    kv_push_dst_rotate: bool = flag(False, "take turns among receivers")
