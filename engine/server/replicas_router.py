"""Ray Serve's part of the choice of a replica: it sends a request where the front has decided."""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ChosenReplicaRouter(RequestRouter):
    """The replica whose id is the call's first argument; if it is gone any other, which then says that it is not it."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen one, then the others."""
        chosen = pending_request.args[0] if pending_request is not None and pending_request.args else None
        first = [each for each in candidate_replicas if each.replica_id.unique_id == chosen]
        return [first, [each for each in candidate_replicas if each.replica_id.unique_id != chosen]]
