"""A Ray cluster of two nodes on this machine, one processor each: prints its address, and ends with its standard input."""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    node = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**{key: value for key, value in node.items() if key != "include_dashboard"})
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
