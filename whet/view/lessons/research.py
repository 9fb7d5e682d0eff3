"""A research report in six steps with a tool, and a counter-example that trusts the rumour."""

from __future__ import annotations

from whet.reward.judge import Grade
from whet.reward.rubric import Criterion, score_rubric
from whet.types import ToolCall
from whet.view.lessons.play import Example, Move, Played, stop, words

TASK = (
    "A forum says that the city of Lindau closes its old bridge in May. Find out if that is true, and write a short report with sources."
)


def search(query: str, answer: str) -> Move:
    """A step that calls the search tool."""
    text = f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
    return Move(text, ToolCall("search", {"query": query}), answer)


SEARCHES = (
    search("Lindau old bridge closed May", "1. forum: a friend of mine heard that the old bridge closes in May.\n2. city notice 14: works on the bridge."),
    search("city notice 14 bridge works", "Notice 14: the old bridge stays open. One lane is closed for works from 3 to 9 June."),
    search("old bridge bus line June", "Bus line 2 takes another way from 3 to 9 June."),
)
REPORT = (
    "The rumour is not right.\n\nThe forum names no source; it repeats what a friend has heard. Notice 14 of the city says that the old bridge "
    "stays open, and that one lane is closed for works from 3 to 9 June. The bus company agrees: line 2 takes another way in these days, and "
    "in May nothing changes yet.\n\nWhat to do: cross the bridge as always in May; plan some more time from 3 to 9 June, or take the new bridge."
    "\n\nSources: city notice 14; bus company, line 2. The forum is named here as the place of the rumour alone, and not as a source."
)
PLAN = Move(
    "I plan: look for the claim, find who says it first, look for a notice of the city, and check it with a second source.",
    answer="Go on.",
)
CHECK = Move("The notice and the bus company agree, and the forum has no source. I write the report.", answer="Go on.")
CRITERIA = [
    Criterion(name="right", weight=1.0, text="The report says what is true of the bridge."),
    Criterion(name="sources", weight=1.0, text="Two sources of its own agree with it."),
    Criterion(name="useful", weight=0.5, text="The reader knows what to do."),
]
WEIGHTS = ", ".join(f"{each.name} {each.weight}" for each in CRITERIA)


def judged(steps: tuple[Move, ...], grades: list[Grade], expected: tuple[float, float]) -> Played:
    """A trajectory with the reward that whet's rubric makes of a judge's grades."""
    found = score_rubric(CRITERIA, grades, "graded")
    return Played(steps, found.total, dict(found.components), f"rubric with the weights {WEIGHTS}; {found.detail}", expected)


CAREFUL = judged((PLAN, *SEARCHES, CHECK, Move(REPORT)), ["fully", "fully", "fully"], (1.2, 2.3))
RUMOUR = Move("The old bridge closes in May, as people in a forum say. Take the new bridge all month. Source: a forum.")
CREDULOUS = judged((PLAN, SEARCHES[0], RUMOUR), ["not", "not", "partly"], (1.2, 0.4))

RESEARCH = {
    "research": Example(
        {"name": "ppo", "gamma": 1.0, "lam": 0.98, "whiten": True},
        ((TASK, (CAREFUL, CREDULOUS)),),
        words={
            "title": words("A research report in six steps", "六步写成的调研报告"),
            "text": [
                words(
                    "The first trajectory has six steps and 285 trained tokens: a plan, three searches, a check, and the report. A judge's "
                    "grades, which are made up, give it 2.5 by a weighted rubric. What the tool answered lies between the steps: it is read, "
                    "and never trained.",
                    "第一条轨迹有六步、285 个训练词元：计划、三次搜索、核对、报告。评分者的等级（虚构）按加权评分表给它 2.5 分。"
                    "工具的回复夹在各步之间：只读，不训练。",
                ),
                words(
                    "The second one trusts the rumour after a single search, and gets 0.25. Where it decides to stop looking, the critic had "
                    "expected more: its tokens are pushed down.",
                    "第二条只搜了一次就相信传言，得 0.25 分。它决定不再查证的地方，价值模型原本预期更高：那些词元被压低。",
                ),
            ],
            "stops": [
                stop("lesson/0#0/0", None, "Six actions, and the arithmetic that ties them to their tokens.", "六个动作，以及把动作与词元连起来的算式。", view="steps"),
                stop("lesson/0#0/0", 189, "A token of the tool's reply: why it does not train, and how value passes over it.", "工具回复里的词元：为什么不训练，价值怎样越过它。"),
                stop("lesson/0#0/0", 178, "The last token before a tool's reply: its V′ is on the other side.", "工具回复前的最后一个词元：它的 V′ 在另一边。"),
                stop("lesson/0#0/0", 425, "The last of 285 tokens: 2.5 is paid here.", "285 个词元的最后一个：2.5 分记在这里。"),
                stop("lesson/0#0/1", 149, "The counter-example trusts the rumour.", "反例：相信了传言。"),
            ],
        },
    ),
}
