"""Results of MCP tools as text for a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from whet.env.tool_env import shorten

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock

MAX_CHARS = 1 << 20
"""Longest text of a result; the environment shortens it further (env.max_reply_chars)."""


def text_of(result: CallToolResult) -> str:
    """The texts of a result, one below the other, with other blocks named in words. Structured content is JSON where there is no block."""
    parts = [_block(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return shorten("\n".join(parts), MAX_CHARS)


def _block(block: ContentBlock) -> str:
    from mcp_types import AudioContent, EmbeddedResource, ImageContent, TextContent, TextResourceContents

    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        kind = "image" if isinstance(block, ImageContent) else "audio"
        return f"[{kind}, {block.mime_type}, {len(block.data) * 3 // 4} bytes, not shown]"
    if isinstance(block, EmbeddedResource):
        if isinstance(block.resource, TextResourceContents):
            return f"[resource {block.resource.uri}]\n{block.resource.text}"
        return f"[resource {block.resource.uri}, {block.resource.mime_type or 'of no type'}, not shown]"
    return f"[resource {block.uri}: {block.name}]"
