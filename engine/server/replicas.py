"""Several replicas as one server process: cluster, front and listening socket put together."""

from engine.server.keys import Keys
from engine.server.process import Process
from engine.server.replicas_actor import OpenReplica
from engine.server.replicas_cluster import ClusterSettings, cluster
from engine.server.replicas_front import Front
from engine.server.replicas_roster import Roster
from engine.server.settings import ServerSettings


def serve_replicas(
    open_replica: OpenReplica,
    replicas: ClusterSettings,
    settings: ServerSettings,
    keys: Keys,
    address: tuple[str, int],
) -> int:
    """Start the replicas and serve until told to stop; the exit code, as `Process` has it.

    Raises EngineError when the replicas do not start.
    """
    with cluster(open_replica, replicas) as fleet:
        front = Front(Roster(fleet), settings, keys)
        process = Process(front, front, *address)
        process.run()
        return process.exit_code
