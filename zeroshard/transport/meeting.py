"""The ranks of a launcher, through its store only: who came, and where each one stands.

Works where no process group does, and for some ranks where others are missing.
"""

import json
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..errors import CommunicationError

__all__ = ["Meeting"]

POLL_S = 0.05


class Meeting:
    """Notes that the ranks leave for each other. Each thread needs one of its own.

    Args:
        patience_s: how long to try to reach the store.
        purpose: of the meeting; notes of another one are not seen.

    Attributes:
        rank: of this process.
        world_size: how many there should be.

    Raises:
        CommunicationError: nobody answers at the launcher's address.
    """

    def __init__(self, patience_s: float, purpose: str = "doctor") -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun has a store; with other launchers the first rank has to make one.
        has_one = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                address,
                port,
                is_master=self.rank == 0 and not has_one,
                timeout=timedelta(seconds=patience_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank} reaches nobody at MASTER_ADDR={address}, MASTER_PORT={port} "
                f"within {patience_s:g} s ({str(error).splitlines()[0]}): rank 0 does not "
                "run there, or a firewall lies between"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"zeroshard-{purpose}/{attempt}", store)

    def tell(self, what: str, item: Any) -> None:
        """Leave a note of this rank (JSON), in the place of an earlier one."""
        self.store.set(f"{what}/{self.rank}", json.dumps(item))

    def told(self, what: str, ranks: Iterable[int]) -> dict[int, Any]:
        """The notes that are there, by rank."""
        try:
            there = [rank for rank in ranks if self.store.check([f"{what}/{rank}"])]
            return {rank: json.loads(self.store.get(f"{what}/{rank}")) for rank in there}
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank} lost the connection to the launcher's store: rank 0, or the "
                "launcher, has ended"
            ) from error

    def hear(self, what: str, ranks: Iterable[int], patience_s: float) -> dict[int, Any]:
        """The notes of `ranks` once all of them are there, or those that are by then."""
        wanted = list(ranks)
        deadline = time.monotonic() + patience_s
        found = self.told(what, wanted)
        while len(found) < len(wanted) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            found.update(self.told(what, [rank for rank in wanted if rank not in found]))
        return found
