"""In the place of SGLang's own: `whet serve`, which speaks the same routes, by SGLang's command line. Says which GPUs its process sees.

On several nodes the first one waits for all others at the address where they meet, and they last as long as it does.
"""

import os
import socket
import sys
import time

MEET_S = 60.0


def main() -> None:
    words = iter(sys.argv[1:])
    named = {word: True if word == "--incremental-streaming-output" else next(words) for word in words}
    known = {"--model-path", "--host", "--port", "--dtype", "--log-level", "--incremental-streaming-output", "--tp-size"}
    known |= {"--api-key", "--admin-api-key", "--nnodes", "--node-rank", "--dist-init-addr"}
    assert named.keys() <= known, sorted(named.keys() - known)
    print(f"devices {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}, listens on {named['--host']}", flush=True)
    if "--nnodes" in named:
        meet(int(named["--nnodes"]), int(named["--node-rank"]), str(named["--dist-init-addr"]))
    if "--api-key" in named:
        os.environ.update(WHET_API_KEY=str(named["--api-key"]), WHET_ADMIN_KEY=str(named["--admin-api-key"]))
    settings = [f"host={named['--host']}", f"port={named['--port']}", f"model.dtype={named['--dtype']}", "model.device=cpu"]
    os.execv(sys.executable, [sys.executable, "-m", "whet", "serve", str(named["--model-path"]), *settings])


def meet(nodes: int, rank: int, address: str) -> None:
    """Wait for all others; a node but the first never returns."""
    host, _, port = address.rpartition(":")
    print(f"node {rank} of {nodes} at {os.environ['SGLANG_HOST_IP']} meets at {host}", flush=True)
    if rank == 0:
        listener = socket.create_server((host, int(port)))
        listener.settimeout(MEET_S)
        for _ in range(nodes - 1):
            os.set_inheritable(listener.accept()[0].detach(), True)
        return
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            head = socket.create_connection((host, int(port)))
            break
        except OSError:
            assert time.monotonic() < deadline, "the first node does not come"
            time.sleep(0.1)
    head.settimeout(None)
    head.recv(1)
    sys.exit("the first node is gone")


if __name__ == "__main__":
    main()
