"""A Ray cluster of two nodes on this machine. The second one has two processors, four devices that count as GPUs, and its own address:
prints the cluster's address, and ends with its standard input."""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    node = {"object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    cluster.add_node(**node, num_cpus=2, num_gpus=4, node_ip_address="127.0.0.2")
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
