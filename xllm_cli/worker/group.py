"""The ranks of one model, seen as one: a plan goes to all, one result comes back.

With one rank the plan is a function call and its vote is its own.
"""

from __future__ import annotations

from typing import Protocol

from xllm_cli.core import Observation, StepPlan, StepResult
from xllm_cli.worker.graphs import GraphOptions
from xllm_cli.worker.memory import MemoryObserver
from xllm_cli.worker.sharing import Loaded, WeightsShare
from xllm_cli.worker.worker import Worker


class Group(Protocol):
    """Ranks that execute a plan in lockstep."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan on every rank; `mapped` only if every rank mapped."""
        ...

    def break_off(self, plan: StepPlan) -> StepResult:
        """What became of the pages of a plan whose execute() raised: as if its vote was lost."""
        ...

    def observe(self) -> Observation:
        """The tightest rank's memory, now."""
        ...

    def relieve(self) -> int:
        """Pages are short outside a step: bytes that an allocator cached, and that no step needs, went back."""
        ...

    @property
    def weights(self) -> WeightsShare | None:
        """The model's parameters on every rank, where they can sleep; None where they are ordinary tensors."""
        ...

    def exchange(self, loaded: Loaded) -> None:
        """Compute with these weights from now on; the ones before are the caller's to let go. No step is under way.
        MemoryShortage or DeviceError: nothing has changed."""
        ...

    def close(self) -> bool:
        """End the ranks; False if one leaked."""
        ...


class LocalGroup:
    """One rank, in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def execute(self, plan: StepPlan) -> StepResult:
        """See Group."""
        return self._worker.execute(plan)

    def break_off(self, plan: StepPlan) -> StepResult:
        """See Group."""
        return self._worker.break_off(plan)

    def capture(self, options: GraphOptions) -> None:
        """See Worker."""
        self._worker.capture(options)

    def observe(self) -> Observation:
        """See Group."""
        return self._worker.observe()

    def relieve(self) -> int:
        """See Group."""
        return self._worker.relieve()

    @property
    def observer(self) -> MemoryObserver:
        """Who watches the memory of this process."""
        return self._worker.observer

    @property
    def weights(self) -> WeightsShare | None:
        """See Group."""
        return self._worker.weights

    def exchange(self, loaded: Loaded) -> None:
        """See Group."""
        self._worker.exchange(loaded)

    def close(self) -> bool:
        """See Group."""
        return self._worker.close()
