"""Clients: how many requests and samples of each client are being answered."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from nanovllm.server.errors import APIError
from nanovllm.server.limits import Limits


@dataclass(slots=True)
class Counts:
    """What a client has now."""

    requests: int = 0
    samples: int = 0


class Clients:
    """The counts of clients that have requests; the others are not kept.

    A client is an API key, or where none is needed, an address.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.counts: dict[Any, Counts] = {}

    @contextmanager
    def request(self, client: Any) -> Iterator["ClientRequest"]:
        """Count a request, and the samples that it adds, during the block."""
        counts, most = self.counts.get(client, Counts()), self._limits.max_client_requests
        if most is not None and counts.requests >= most:
            raise APIError(
                429, f"this client has {counts.requests} requests, and at most {most} may be"
                " answered at a time (max_client_requests); try again later", "client_full",
            )  # fmt: skip
        self.counts[client] = counts
        counts.requests += 1
        request = ClientRequest(counts, self._limits.max_client_samples)
        try:
            yield request
        finally:
            counts.requests -= 1
            counts.samples -= request.num_samples
            if not counts.requests:
                del self.counts[client]


class ClientRequest:
    """A request that is being answered; `num_samples` of its client's samples are its own."""

    def __init__(self, counts: Counts, most: int | None) -> None:
        self._counts, self._most = counts, most
        self.num_samples = 0

    def add_samples(self, number: int) -> None:
        """Count samples until the request has been answered; raise if they are too many."""
        most, others = self._most, self._counts.samples
        if most is not None and number > most:
            raise APIError(
                400,
                f"samples or inputs must be at most {most} (max_client_samples), got {number}",
            )
        if most is not None and others + number > most:
            raise APIError(
                429, f"this client has {others} samples, and at most {most} may run or wait"
                " (max_client_samples); try again later", "client_full",
            )  # fmt: skip
        self._counts.samples += number
        self.num_samples += number


def address_of(scope: Mapping[str, Any]) -> str:
    """The address of a request's client; of IPv6 the network, as a client may have all of it."""
    address: str = (scope.get("client") or ("",))[0]
    try:
        found = ip_address(address)
    except ValueError:  # a client of a Unix socket
        return address
    if not isinstance(found, IPv6Address):
        return address
    return f"{int(found) >> 64:x}::/64" if found.ipv4_mapped is None else str(found.ipv4_mapped)
