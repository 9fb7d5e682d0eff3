"""A Ray cluster on this machine with a job server: prints the server's address, and ends with its standard input."""

import sys

import ray


def main() -> None:
    found = ray.init(address="local", num_cpus=3, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=0, log_to_driver=False)
    print(f"http://{found.dashboard_url}", flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
