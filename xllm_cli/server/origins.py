"""The origins whose pages may call the API from a browser (CORS). Knows no framework."""

from __future__ import annotations

import re

from xllm_cli.errors import ConfigError
from xllm_cli.flags import SecurityConfig

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")


def allowed_origins(security: SecurityConfig) -> list[str]:
    """The origins of --allowed_origins, as browsers spell them. ConfigError for one that no browser would send."""
    origins = [origin.strip().rstrip("/") for origin in security.allowed_origins.split(",") if origin.strip()]
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"--allowed_origins: {origin!r} is no origin; write scheme://host[:port], or *")
    return origins
