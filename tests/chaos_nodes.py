"""Ray nodes that outlast the lives of a run, in a process of their own: a head, and two with sandboxes, one of them to be lost."""

import os
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

END, AGAIN = "end", "again"
START_S = 240.0  # for a node
SANDBOXES, NODES = "sandbox", 2  # what nodes with sandboxes offer, and how many of them there are


def serve(asked: Connection, asking: Connection, environment: Mapping[str, str], slots: int) -> None:
    """The target of a forked process: tells address and raylet, and again after `AGAIN`, until `END`, or until nobody asks."""
    asking.close()  # the parent's end, which came along
    os.setsid()
    os.environ.update(environment)
    tempfile.tempdir = None  # the parent may have asked for it
    from ray.cluster_utils import Cluster

    _be_patient()
    small: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 * 2**20}  # Any: Ray's node arguments
    apart = {**small, "num_cpus": 1, "resources": {SANDBOXES: slots}}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **small})
    try:
        *_, node = [cluster.add_node(**apart) for _ in range(NODES)]
        asked.send((cluster.address, _raylet(node)))
        while asked.recv() == AGAIN:
            cluster.remove_node(node, allow_graceful=False)
            node = cluster.add_node(**apart)
            asked.send((cluster.address, _raylet(node)))
    except EOFError:
        pass
    finally:
        cluster.shutdown()
    os._exit(0)  # what the parent had open is the parent's to close


def _be_patient() -> None:
    """Ray gives up on a node that is not there in 30 s, which a busy machine may need for one more."""
    from ray._private import services

    asked = services.get_node

    def patient(*arguments: Any) -> Any:  # Any: Ray's own
        deadline = time.monotonic() + START_S
        while True:
            try:
                return asked(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)  # nothing tells when it is there

    services.get_node = patient


def _raylet(node: Any) -> int:  # Any: Ray's node
    return node.all_processes["raylet"][0].process.pid
