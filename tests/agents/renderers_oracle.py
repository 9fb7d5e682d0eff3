"""Answers from the package renderers, in an environment of its own: one JSON line for each on standard input."""

from __future__ import annotations

import json
import sys
from importlib import import_module

MODULES = {
    "Qwen3Renderer": "qwen3",
    "Qwen35Renderer": "qwen35",
    "Llama3Renderer": "llama_3",
    "DeepSeekV3Renderer": "deepseek_v3",
    "DeepSeekV4Renderer": "deepseek_v4",
    "GLM45Renderer": "glm45",
    "GLM5Renderer": "glm5",
    "KimiK2Renderer": "kimi_k2",
}


def main() -> None:
    """Read questions until there are no more."""
    from renderers.configs import DeepSeekV4RendererConfig
    from transformers import PreTrainedTokenizerFast

    renderers: dict[str, object] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked["renderer"]
        if name not in renderers:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(asked["folder"])
            config = DeepSeekV4RendererConfig(enable_thinking=True) if name == "DeepSeekV4Renderer" else None
            renderers[name] = getattr(import_module(f"renderers.{MODULES[name]}"), name)(tokenizer, config)
        renderer = renderers[name]
        parsed = renderer.parse_response(asked["reply"], tools=asked["tools"], prompt_ids=asked["prompt"])
        calls = [[call.name, call.arguments] for call in parsed.tool_calls if call.status.value == "ok"]
        bridged = renderer.bridge_to_next_turn(asked["prompt"], asked["reply"], asked["messages"], tools=asked["tools"])
        ids = None if bridged is None else list(bridged.token_ids)
        print(json.dumps({"calls": calls, "thinking": parsed.reasoning_content, "next": ids}), flush=True)


if __name__ == "__main__":
    main()
