"""A server of files that speaks the Model Context Protocol with the standard library alone: python files_server.py FOLDER.

Its tools have the names and arguments of @modelcontextprotocol/server-filesystem.
"""

import json
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1]).resolve()
TEXT = {"type": "string"}
EDITS = {"type": "array", "items": {"type": "object", "properties": {"oldText": TEXT, "newText": TEXT}, "required": ["oldText", "newText"]}}
ARGUMENTS = {
    "list_directory": {"path": TEXT},
    "read_text_file": {"path": TEXT},
    "write_file": {"path": TEXT, "content": TEXT},
    "edit_file": {"path": TEXT, "edits": EDITS},
    "delete_all": {},
}
TOOLS = [
    {"name": name, "description": f"{name}.", "inputSchema": {"type": "object", "properties": fields, "required": list(fields)}}
    for name, fields in ARGUMENTS.items()
]


def call(name, arguments):
    path = (FOLDER / arguments["path"]).resolve()
    if not path.is_relative_to(FOLDER):
        raise ValueError("Access denied")
    if name == "list_directory":
        return "\n".join(f"[{'DIR' if each.is_dir() else 'FILE'}] {each.name}" for each in sorted(path.iterdir()))
    if name == "write_file":
        path.write_text(arguments["content"])
    if name == "edit_file":
        text = path.read_text()
        for edit in arguments["edits"]:
            assert edit["oldText"] in text
            text = text.replace(edit["oldText"], edit["newText"], 1)
        path.write_text(text)
    return path.read_text()


def result(method, parameters):
    if method == "initialize":
        asked = parameters["protocolVersion"]
        return {"protocolVersion": asked, "capabilities": {"tools": {}}, "serverInfo": {"name": "files", "version": "1"}}
    if method == "tools/list":
        return {"tools": TOOLS}
    try:
        return {"content": [{"type": "text", "text": call(parameters["name"], parameters["arguments"])}]}
    except (OSError, ValueError, AssertionError) as error:
        return {"content": [{"type": "text", "text": str(error) or "it is not there"}], "isError": True}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] in ("initialize", "tools/list", "tools/call"):
        answer = {"result": result(asked["method"], asked.get("params", {}))}
    else:
        answer = {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
