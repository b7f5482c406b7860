"""The shared-memory transport in one worker of an engine: whole parameters, seen where the trainer has written them."""

from rlflow.weights.engine.messages import Opening
from rlflow.weights.engine.receiver import Receiver
from rlflow.weights.shm.arena import map_arena


class ArenaReceiver(Receiver):
    """Reads from an arena, which says which version it holds, so that a rewritten one is noticed."""

    def _ask(self, opening: Opening) -> int:
        self._staged = opening.staged
        self._arena = map_arena(opening.staged.path, opening.staged.num_bytes)
        return len(self._staged.buckets)

    def receive(self, bucket: int) -> None:
        """Raises ValueError when the arena holds another version."""
        self._arena.check(self._staged.version)
        for name, tensor in self._arena.tensors(self._staged.slots[slice(*self._staged.buckets[bucket])]):
            self._destination.land(name, tensor)

    def commit(self) -> None:
        # First, so that what was laid out from an arena that was rewritten meanwhile is not put in place.
        self._arena.check(self._staged.version)
        super().commit()
        self._arena.check(self._staged.version)
