"""What a server says of itself to Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from .service import VerifierService


class ServiceMetrics:
    """Counters and gauges of one server.

    Attributes:
        lost: Requests that were released because their client was silent.
    """

    def __init__(self, service: VerifierService) -> None:
        self._registry = CollectorRegistry()
        self._messages = Counter(
            "blockcompact_messages",
            "Messages answered.",
            ["path", "status"],
            registry=self._registry,
        )
        self.lost = Counter(
            "blockcompact_lost_clients", "Requests released in silence.", registry=self._registry
        )
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "requests": ("Open requests.", lambda: service.num_requests),
            "leases": ("Operations whose sources are held.", lambda: service.num_leases),
            "shared_bytes": ("Shared memory in use.", lambda: service.allowance.used_bytes),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"blockcompact_{name}", text, registry=self._registry).set_function(read)

    def count_message(self, path: str, status: int) -> None:
        """Counts a message that was answered."""
        self._messages.labels(path, str(status)).inc()

    def as_text(self) -> bytes:
        """Returns everything in Prometheus' text format."""
        return generate_latest(self._registry)
