"""A step of RLHF with four models (policy, reference, reward model, critic) on a poem with five characters a line."""

from __future__ import annotations

from whet.view.lessons.play import Example, Move, Played, stop, words

LINES = "床前明月光，\n疑是地上霜。\n举头望明月，\n低头思故乡。"
OTHER = "山上有月亮，\n我在想家乡。\n月亮真的亮，\n想家好心慌啊。"


def scored(poem: str, score: float, end: float) -> Played:
    """A poem with the reward model's score, and the critic's last estimate."""
    return Played((Move(poem),), score, {"reward_model": score}, "the reward model's score", (0.9, end))


POEM = {
    "poem": Example(
        {"name": "ppo", "gamma": 1.0, "lam": 0.95, "whiten": True, "kl_reward": {"coef": 0.1}},
        (
            (
                "写一首思乡的五言诗。",
                (scored(LINES, 1.8, 1.6), scored(OTHER, -0.4, 0.1)),
            ),
        ),
        reference=True,
        words={
            "title": words("RLHF with four models: a poem", "四个模型的 RLHF：一首五言诗"),
            "text": [
                words(
                    "Policy, reference, reward model and critic meet in one formula. The reward model scores the whole poem, and its score is "
                    "paid on the last token. On every token −β (log π − log π_ref) is added: what it costs to leave the reference. The critic "
                    "says what it expects before each token.",
                    "策略、参考模型、奖励模型和价值模型在一个公式里相遇。奖励模型给整首诗打分，分数记在最后一个词元上；每个词元再加上"
                    " −β (log π − log π_ref)，这是离开参考模型的代价；价值模型在每个词元之前说出它的预期。",
                ),
                words(
                    "The second poem breaks the form in its last line, and the reward model does not like it.",
                    "第二首最后一句破了格律，奖励模型不喜欢。",
                ),
            ],
            "stops": [
                stop("lesson/0#0/0", 16, "The first character: r is the KL's part alone.", "第一个字：r 只有 KL 部分。"),
                stop("lesson/0#0/0", 43, "The last token: the reward model's score and the KL's part.", "最后一个词元：奖励模型的分数加上 KL 部分。"),
                stop("lesson/0#0/0", 24, "Coloured by log π − log π_ref: where the policy left the reference.", "按 log π − log π_ref 着色：策略在哪里离开了参考模型。", colour="kl"),
                stop("lesson/0#0/1", 41, "The line that breaks the form.", "破了格律的那一句。"),
            ],
        },
    ),
}
