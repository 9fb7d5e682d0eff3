"""In the place of SGLang's own: `whet serve`, which speaks the same routes, by SGLang's command line. Says which GPUs its process sees."""

import os
import sys


def main() -> None:
    words = iter(sys.argv[1:])
    named = {word: True if word == "--incremental-streaming-output" else next(words) for word in words}
    known = {"--model-path", "--host", "--port", "--dtype", "--log-level", "--incremental-streaming-output", "--tp-size"}
    assert named.keys() <= known | {"--api-key", "--admin-api-key"}, sorted(named.keys() - known)
    print(f"devices {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}, listens on {named['--host']}", flush=True)
    if "--api-key" in named:
        os.environ.update(WHET_API_KEY=str(named["--api-key"]), WHET_ADMIN_KEY=str(named["--admin-api-key"]))
    settings = [f"host={named['--host']}", f"port={named['--port']}", f"model.dtype={named['--dtype']}", "model.device=cpu"]
    os.execv(sys.executable, [sys.executable, "-m", "whet", "serve", str(named["--model-path"]), *settings])


if __name__ == "__main__":
    main()
