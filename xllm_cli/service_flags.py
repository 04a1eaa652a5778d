"""The flags of the HTTP server: where it listens, how it lives, and whom it lets in. Declarations only, as flags.py."""

from __future__ import annotations

from typing import Literal

from xllm_cli.declare import INT32_MAX, INT64_MAX, Section, flag, idle

_ONE_LOOP = "one event loop takes requests and sends answers"
_NO_CHANNELS = "the engine is spoken to through local sockets, which need no reconnecting"


class ServiceConfig(Section):
    """Where the server listens and how many requests it takes at once"""

    host: str = flag("", "address to listen on; empty is all interfaces, 127.0.0.1 this machine only", common=True)
    port: int = flag(8010, "TCP port; 0 takes a free one and prints it", low=0, high=65535, common=True,
        also=("start_port",))  # fmt: skip
    max_concurrent_requests: int = flag(
        200, "requests in flight before 429; more wait longer, fewer are refused sooner; 0 is no limit", low=0,
        high=INT32_MAX, common=True,
    )  # fmt: skip
    max_body_bytes: int = flag(
        32 << 20, "longest request body before 413; a larger one costs memory for each request", low=1,
        high=INT64_MAX, is_bytes=True,
    )  # fmt: skip
    strict_requests: bool = flag(
        False, "refuse unknown request fields with 400; off serves them with a header that names what was ignored"
    )
    shutdown_drain_secs: float = flag(
        0.0, "seconds a stop still takes new requests while readiness says 503, for load balancers to notice", low=0
    )
    shutdown_timeout_secs: float = flag(
        30.0, "seconds a stop waits for running requests; longer loses fewer, shorter restarts sooner", low=0
    )
    liveness_timeout_secs: float = flag(
        120.0, "seconds of an engine's silence before /livez says 503; it must exceed the longest step", low=1
    )
    pid_file: str = flag("", "file for the server's process id, written once it listens and removed at the end")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least level that is logged", common=True)
    log_dir: str = flag(
        "", "folder for node_RANK.log, which takes everything the server would say on stderr; lines are appended"
    )
    log_format: Literal["text", "json"] = flag("text", "form of a log line; json is one object a line, for collectors")
    access_log: Literal["requests", "all", "off"] = flag(
        "requests", "one line for each HTTP request; requests leaves out probes and metrics"
    )
    rpc_idle_timeout_s: int | None = flag(
        None, "seconds an idle connection is kept; unset is 75, longer than load balancers' 60", low=1, high=INT32_MAX,
        unset=-1,
    )  # fmt: skip
    num_request_handling_threads: int = flag(
        4, "threads that tokenize long prompts; more than processors is of no use", low=1, high=1024
    )
    num_threads: int = idle(8, "threads of the RPC server", _ONE_LOOP, low=1, high=INT32_MAX)
    num_response_handling_threads: int = idle(4, "threads that send answers", _ONE_LOOP, low=1, high=INT32_MAX)
    rpc_channel_timeout_ms: int | None = idle(
        None, "limit of a call between processes", _NO_CHANNELS, low=0, high=INT32_MAX, unset=-1
    )
    max_reconnect_count: int = idle(40, "tries to reach a lost process", _NO_CHANNELS, low=0, high=INT32_MAX)
    health_check_interval_ms: int = idle(
        3000, "time between two looks at the ranks", "the engine reports with every step and its end is seen at once",
        low=1, high=INT32_MAX,
    )  # fmt: skip


class SecurityConfig(Section):
    """Whom the server lets in"""

    api_key: str = flag(
        "", "keys of which a request must bring one, separated by commas or by giving the flag again; other users may "
        "see a command line, so prefer api_key_file or the environment's XLLM_API_KEY",
        is_secret=True, is_list=True, common=True,
    )  # fmt: skip
    api_key_file: str = flag("", "file of API keys, one on each line; # begins a comment", common=True)
    public_metrics: bool = flag(False, "answer /metrics without an API key, for scrapers that cannot send one")
    allowed_origins: str = flag(
        "", "origins whose pages may call the API from a browser, separated by commas; * is all, empty none",
        is_list=True,
    )  # fmt: skip
    ssl_certfile: str = flag("", "certificate chain (PEM); with it the server speaks only TLS")
    ssl_keyfile: str = flag("", "private key of ssl_certfile (PEM); empty is the one in ssl_certfile")
