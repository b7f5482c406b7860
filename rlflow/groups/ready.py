"""Which group goes first: the groups that wait for the trainer, and the places kept for those still being played.

    expect: a group is admitted, and may get a claim -> put: it is ready -> take: it enters an update

A group whose oldest token is of version v can enter the update of version v + max_versions at the latest. The admission
budget makes sure that there are enough places for all. This queue lets a group pass only if the remaining places are
enough for every group with a claim: earliest deadline first, with reservations.

Rules: no group with a claim is ever too late, however slow it is. The trainer waits only when every place that is left
is reserved.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count

from rlflow.config import Order
from rlflow.types import ReadyGroup


class ReadyQueue:
    """Under `oldest_first` every group has a claim; under `ready_first` those whose task has been late before."""

    def __init__(self, *, order: Order, max_versions: int, groups_per_step: int) -> None:
        self._order = order
        self._max_versions = max_versions
        self._groups_per_step = groups_per_step
        self._claims: dict[int, int] = {}
        """Group -> the oldest version that its tokens can be of."""
        self._due: Counter[int] = Counter()
        """Version -> claims."""
        self._waiting: list[tuple[tuple[int, int, int], ReadyGroup]] = []
        self._arrivals = count()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def groups(self) -> list[ReadyGroup]:
        """The ready groups, in the order in which they would go."""
        return [group for _, group in sorted(self._waiting, key=lambda item: item[0])]

    def expect(self, group_id: int, version: int, *, was_late: bool) -> None:
        """A group was admitted that will hold tokens of `version` and newer."""
        if self._order is Order.oldest_first or was_late:
            self._claim(group_id, version)

    def forget(self, group_id: int) -> None:
        """A group that was expected will not come."""
        version = self._claims.pop(group_id, None)
        if version is not None:
            self._due[version] -= 1
            if not self._due[version]:
                del self._due[version]

    def put(self, group: ReadyGroup) -> None:
        has_claim = group.group_id in self._claims
        if has_claim:
            self.forget(group.group_id)
            self._claim(group.group_id, group.oldest_version)
        key = (0, group.oldest_version, group.group_id) if has_claim else (1, next(self._arrivals), group.group_id)
        heapq.heappush(self._waiting, (key, group))
        self.num_bytes += group.num_bytes

    def take(self, *, version: int, places: int) -> list[ReadyGroup]:
        """The groups that may enter the update of `version` now, at most `places`."""
        taken: list[ReadyGroup] = []
        while self._waiting and len(taken) < places:
            group = self._waiting[0][1]
            if not self._leaves_room(group.group_id, version, places - len(taken) - 1):
                break
            heapq.heappop(self._waiting)
            self._leave(group)
            taken.append(group)
        return taken

    def remove(self, condition: Callable[[ReadyGroup], bool]) -> list[ReadyGroup]:
        """Take out the groups that meet the condition, and return them."""
        removed = [group for _, group in self._waiting if condition(group)]
        if removed:
            gone = {group.group_id for group in removed}
            self._waiting = [item for item in self._waiting if item[1].group_id not in gone]
            heapq.heapify(self._waiting)
            for group in removed:
                self._leave(group)
        return removed

    def _claim(self, group_id: int, version: int) -> None:
        self._claims[group_id] = version
        self._due[version] += 1

    def _leave(self, group: ReadyGroup) -> None:
        self.forget(group.group_id)
        self.num_bytes -= group.num_bytes

    def _leaves_room(self, group_id: int, version: int, places: int) -> bool:
        """Whether every claim can still be met if this group goes, with `places` left in the update of `version`.

        Only claims older than the group's own count: for the others a place goes, and a rival with it.
        """
        own = self._claims.get(group_id)
        due = 0
        for oldest in sorted(self._due):
            if own is not None and oldest >= own:
                break
            later_updates = oldest + self._max_versions - version
            if later_updates < 0:
                continue  # too late whatever happens; it is being cancelled
            due += self._due[oldest]
            if due > places + later_updates * self._groups_per_step:
                return False
        return True
