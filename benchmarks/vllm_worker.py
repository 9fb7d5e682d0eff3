"""vLLM behind a pipe, run by `vllm_peer.py` in vLLM's own Python: one line of JSON in, one out, for each batch of prompts."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    folder, compiled, threads = sys.argv[1], sys.argv[2] == "compiled", int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams, __version__

    began = time.perf_counter()
    llm = LLM(
        folder, dtype="float32", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=128, enforce_eager=not compiled
    )
    ready = {"version": __version__, "start_s": round(time.perf_counter() - began, 1)}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        stops = [] if asked["eos"] is None else [asked["eos"]]
        params = [
            SamplingParams(temperature=1.0, max_tokens=asked["new_tokens"], seed=i, stop_token_ids=stops, ignore_eos=True, detokenize=False)
            for i in range(len(asked["prompts"]))
        ]
        clock, busy = time.perf_counter(), time.process_time()
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], params, use_tqdm=False)
        seconds, processor = time.perf_counter() - clock, time.process_time() - busy
        tokens = sum(len(one.outputs[0].token_ids) for one in found)
        print(json.dumps({"tokens": tokens, "seconds": seconds, "processor": processor}), file=answers, flush=True)


if __name__ == "__main__":
    main()
