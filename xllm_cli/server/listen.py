"""The listening socket and its certificate: checked before anything slow, with errors that say what is wrong."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl

import psutil  # type: ignore[import-untyped]

from xllm_cli.errors import BindError, ConfigError
from xllm_cli.flags import SecurityConfig

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; an empty host is all interfaces, port 0 picks a free one. BindError when it cannot be.

    It listens at once: two sockets with SO_REUSEADDR may share an address until one of them does.
    """
    where = f"{host or '0.0.0.0'}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise BindError(f"cannot listen on {where}: {error.strerror}; check --host") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise BindError(f"cannot listen on {where}: it is in use{_holder(port)}; choose another --port") from error
        raise BindError(f"cannot listen on {where}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def is_beyond_loopback(listener: socket.socket) -> bool:
    """Whether other machines can connect."""
    return not ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def urls(listener: socket.socket, certificate: str = "") -> list[str]:
    """Where clients on this machine and, if possible, on others reach the server."""
    scheme = "https" if certificate else "http"
    host, port = listener.getsockname()[:2]
    if not ipaddress.ip_address(host).is_unspecified:
        return [f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"]
    return [f"{scheme}://127.0.0.1:{port}", f"{scheme}://{socket.gethostname()}:{port}"]


def check_certificate(security: SecurityConfig) -> None:
    """ConfigError when the certificate and its key cannot be used; nothing without them."""
    if not security.ssl_certfile:
        if security.ssl_keyfile:
            raise ConfigError("--ssl_keyfile needs --ssl_certfile, the certificate chain (PEM)")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            security.ssl_certfile, security.ssl_keyfile or None, password=_no_password
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"--ssl_certfile={security.ssl_certfile} --ssl_keyfile={security.ssl_keyfile}: {error}"
        ) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; a server cannot be asked for its password")


def _holder(port: int) -> str:
    """Who listens on the port, as far as this user may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            return f" by process {connection.pid}"
    return ""
