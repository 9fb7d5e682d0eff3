"""Two small lessons: one question under PPO and under GRPO, and two prompts with three replies each."""

from __future__ import annotations

from whet.view.lessons.play import Example, Move, Played, stop, words

QUESTION = "1+1等于2吗？"


def one(text: str, reward: float, expected: tuple[float, float] = (0.0, 0.0)) -> Played:
    """A reply of one turn."""
    return Played((Move(text),), reward, expected=expected)


ONE_PLUS_ONE = {
    "one-plus-one-ppo": Example(
        {"name": "ppo", "gamma": 1.0, "lam": 0.95, "whiten": False},
        ((QUESTION, (one("是的，1+1等于2。", 1.0, (0.4, 0.85)),)),),
        words={
            "title": words("1+1等于2吗？ under PPO", "“1+1等于2吗？”——PPO"),
            "text": [
                words(
                    "One reply, and a critic. The critic says before each token what reward it expects; a token's advantage is what came "
                    "better than that. So the tokens of one reply differ.",
                    "一条回复，加一个价值模型。价值模型在每个词元之前说出它预期的奖励；词元的优势就是实际比预期好了多少。所以同一条回复里各词元的优势不同。",
                ),
                words(
                    "The reward 1 is paid on the last token. δ carries it there; the sum Σ (γλ)ˡ δ carries it back to the earlier ones.",
                    "奖励 1 记在最后一个词元上。那里的 δ 直接得到它；求和 Σ (γλ)ˡ δ 再把它传回更早的词元。",
                ),
            ],
            "stops": [
                stop("lesson/0#0/0", 14, "The first token of the reply: its advantage is a sum over all later δ.", "回复的第一个词元：它的优势是之后所有 δ 的和。"),
                stop("lesson/0#0/0", 24, "The last token: the reward is paid here.", "最后一个词元：奖励记在这里。"),
                stop("lesson/0#0/0", 2, "A token of the prompt: it does not train.", "提示里的词元：不参与训练。"),
            ],
        },
    ),
    "one-plus-one-grpo": Example(
        {"name": "grpo"},
        (
            (
                QUESTION,
                (
                    one("是的，1+1等于2。", 1.0),
                    one("等于2。", 1.0),
                    one("不是，1+1等于3。", 0.0),
                    one("在十进制里，1+1等于2。", 1.0),
                    one("我不知道。", 0.0),
                ),
            ),
        ),
        words={
            "title": words("1+1等于2吗？ under GRPO", "“1+1等于2吗？”——GRPO"),
            "text": [
                words(
                    "Five replies, and no critic. A reply is compared with its siblings: advantage = (r − mean) / (std + 1e-6). All tokens "
                    "of a reply get the same number, since nothing says which of them earned the reward.",
                    "五条回复，没有价值模型。每条回复与同组的其他回复比较：优势 =（r − 均值）/（标准差 + 1e-6）。"
                    "一条回复的所有词元得到同一个数，因为无从知道奖励是哪个词元挣来的。",
                ),
                words(
                    "In the second epoch the log-probs have moved, and the clip holds back tokens that went far enough.",
                    "到第二遍时对数概率已经移动，走得够远的词元被裁剪挡住。",
                ),
            ],
            "stops": [
                stop("lesson/0#0/0", 14, "A right reply: pushed up.", "答对的回复：被推高。"),
                stop("lesson/0#0/2", 14, "A wrong reply: pushed down.", "答错的回复：被压低。"),
                stop("lesson/0#0/3", 16, "The second epoch: which branch of the min is active.", "第二遍：min 的哪一支生效。", use="last", colour="clip"),
            ],
        },
    ),
}

TWO_PROMPTS = {
    "two-prompts": Example(
        {"name": "grpo"},
        (
            ("What is 7*8?", (one("56.", 1.0), one("7*8 is 56.", 1.0), one("It is 54.", 0.0))),
            ("What is 17*23?", (one("It is 381.", 0.0), one("17*23 = 340 + 51 = 391.", 1.0), one("I guess 400.", 0.0))),
        ),
        words={
            "title": words("Two prompts, three replies each", "两个提示，各三条回复"),
            "text": [
                words(
                    "A reply is compared within its own group alone. The one right reply to the hard question stands out more, and gets a "
                    "larger advantage, than the two right ones to the easy question.",
                    "回复只在自己的组里比较。难题里唯一答对的回复更突出，优势比简单题里两条答对的回复更大。",
                ),
                words(
                    "With the reducer sample_mean every trajectory has the same weight: w = 1 / its tokens / 6. A token of a short reply "
                    "weighs more than one of a long reply.",
                    "归约方式 sample_mean 让每条轨迹权重相同：w = 1 / 它的词元数 / 6。短回复里的一个词元比长回复里的更重。",
                ),
            ],
            "stops": [
                stop("lesson/0#0/0", 12, "Right where two of three are: a small advantage, and a heavy token.", "三条里对两条：优势小，单个词元却重。"),
                stop("lesson/1#0/1", 14, "Right where one of three is: a large advantage, and light tokens.", "三条里只对一条：优势大，单个词元较轻。"),
                stop("lesson/1#0/0", 14, "One of two wrong replies: pushed down half as hard.", "两条答错的之一：压低的力度只有一半。"),
            ],
        },
    ),
}
