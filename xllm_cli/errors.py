"""Every exception the product raises on purpose.

    XllmError
    ├── ConfigError      flags, file or environment are wrong; the message is complete    exit 2
    ├── ModelError       the checkpoint is missing, broken or of an unknown architecture  exit 1
    ├── DeviceError      the device or its driver cannot be used                          exit 1
    ├── BindError        the address cannot be bound                                      exit 3
    ├── MemoryShortage   the model or the smallest cache does not fit                     exit 4
    ├── EngineDead       the engine process ended; open requests get an error event       exit 1
    └── RequestError     one request is refused or failed; carries its HTTP status and code

    VmmError (in xllm_cli.vmm.driver, raised by native code)
    └── VmmShortage      out of pages or of address-space entries: a miss, never a failure

An expected shortage inside the engine is a return value, not an exception; VmmShortage stops at the pool.
"""

from __future__ import annotations


class XllmError(Exception):
    """Base of all; `exit_code` is what the process ends with when the error is fatal."""

    exit_code = 1


class ConfigError(XllmError):
    """A flag, the JSON file, the environment or a rule of SPEC.md is broken."""

    exit_code = 2


class ModelError(XllmError):
    """The checkpoint cannot be served: missing file, unknown architecture, wrong shape."""


class DeviceError(XllmError):
    """No usable device or driver; the message says what to install or to run."""


class BindError(XllmError):
    """The listening address is taken or not ours."""

    exit_code = 3


class MemoryShortage(XllmError):
    """The model, or a cache of even one block, does not fit; the message shows the arithmetic."""

    exit_code = 4


class EngineDead(XllmError):
    """The engine process ended while requests were open."""


class RequestError(XllmError):
    """One request is refused or failed; others go on.

    `status` is the HTTP status, `code` the machine-readable reason (OpenAI's `error.code`), `param` the offending
    field if there is one, `retry_after` seconds when waiting helps.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after
