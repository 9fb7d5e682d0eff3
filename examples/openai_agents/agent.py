"""The desk of a shop, written with OpenAI's agents. It knows nothing of whet, and nothing of it was changed for a training.

    echo "Where does order 4821 go?" | OPENAI_API_KEY=... python examples/openai_agents/agent.py ORDERS.json

The door answers what it knows and hands questions about orders to the clerk, who looks them up.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled

ORDERS = json.loads(Path(sys.argv[1]).read_text())


@function_tool
def look_up(number: int) -> str:
    """Looks an order up: its goods, its city and its state.

    Args:
        number: the number of the order.
    """
    order = ORDERS.get(str(number))
    return f"there is no order {number}" if order is None else json.dumps(order)


clerk = Agent(name="Clerk", instructions="You answer questions about an order in a few words. Look the order up first.", tools=[look_up])
door = Agent(
    name="Door",
    instructions="You answer customers in a few words. The shop is open from 9 to 17 and closed on Mondays. "
    "Questions about an order are the clerk's: hand them over.",
    handoffs=[clerk],
)


async def main() -> None:
    set_tracing_disabled(True)
    result = await Runner.run(door, sys.stdin.read(), max_turns=6)
    print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
