// 页面的中文。每一条以英文原文为键；术语与 docs/glossary.md 一致。

export const CHINESE = {
  __proto__: null,
  // 视图与导航
  "Runs": "运行", "Groups": "组", "Trajectory": "轨迹", "Compare": "对比", "Lessons": "示例课", "views": "视图", "view": "显示方式",
  "Skip to content": "跳到正文", "light or dark": "浅色或深色", "keys": "快捷键", "Keys": "快捷键", "close": "关闭", "run": "运行",
  "Reading …": "读取中……", "This cannot be shown:": "无法显示：", "Choose one under Groups.": "请先在“组”里选一条轨迹。",
  "whet view has ended: start it again, and open the address that it prints": "whet view 已结束：请重新启动，并打开它打印的地址",
  "the views, from left to right": "从左到右切换视图", "the token before, after, above, below": "前、后、上、下一个词元",
  "the first and the last token": "第一个与最后一个词元", "the next colour of tokens": "换一种着色", "tokens or steps": "按词元或按动作看",
  "search": "搜索", "English or Chinese": "英文或中文", "this list": "本列表",

  // 运行
  "filter metrics": "筛选指标", "smoothing": "平滑", "drag to zoom, double click for all": "拖动放大，双击还原", "at a glance": "概览", "step": "步",
  "show {0}": "显示 {0}", "finished": "已完成", "stopped": "已停止", "failed": "失败", "evaluation": "评测", "running or killed": "运行中，或被终止",
  "{0}: {1} first, {2} last, between {3} and {4}, steps {5} to {6}": "{0}：最初 {1}，最后 {2}，在 {3} 与 {4} 之间，第 {5} 至 {6} 步",
  "rollouts recorded: {0}": "已记录 {0} 轮采样", "no records": "没有记录", "No metric has this in its name.": "没有名称包含它的指标。",
  "No metrics yet. The first line comes with the first step.": "还没有指标。第一步结束后才有第一行。",
  "These runs have no metrics. Their records are under Groups.": "这些运行没有指标。它们的记录在“组”里。",
  "Where the time went": "时间花在哪里", "seconds of each step": "每步所用秒数", "inside the phases": "各阶段之内",
  "The trainer waited for rollouts {0} % of the time.": "训练器有 {0} % 的时间在等采样。",
  "In that time the engine computed {0} %; the rest it waited for tools, rewards and the trainer.": "这段时间里推理引擎有 {0} % 在计算，其余在等工具、奖励和训练器。",
  "what trajectories waited for": "轨迹在等什么", "mean seconds of a trajectory": "每条轨迹平均秒数", "{0} trajectories": "{0} 条轨迹",
  "Trajectories wait side by side, so these seconds do not add up to those of a step.": "轨迹是并行等待的，所以这些秒数加起来不等于一步的时间。",
  "engine: decoding": "引擎：解码", "engine: prefill": "引擎：预填充", "engine: queue": "引擎：排队", "engine: the rest": "引擎：其余", "tools and environment": "工具与环境",
  "parts of the reward": "奖励的组成", "{0} more parts": "另外 {0} 个分项", "{0} more have charts of their own": "另外 {0} 个有各自的图", "{0} others": "其余 {0} 项", "label": "标签",
  "Errors": "错误", "The first of each kind and place, with its traceback.": "每种错误、每个出错位置的第一次，附调用栈。",
  "rollout": "采样轮", "annotate": "标注", "update": "更新", "publish": "发布权重", "record": "写记录", "evaluate": "评测", "save": "保存", "other": "其他",
  "checkpoint": "检查点", "critic": "价值模型", "wait": "等待",

  // 组
  "all rollouts": "所有采样轮", "the rollout before": "上一轮", "the next rollout": "下一轮", "order": "排序", "filter": "筛选",
  "newest": "最新", "best": "最好", "worst": "最差", "largest spread": "差别最大", "longest": "最长", "changed most": "变化最大",
  "all groups": "所有组", "mixed rewards": "有好有坏", "zero variance": "零方差", "with errors": "有错误", "dropped": "被丢弃",
  "search all texts": "搜索全部文本", "search on in older rollouts": "继续搜索更早的轮次",
  "{0} found in all rollouts": "所有轮次中共找到 {0} 条", "{0} found down to rollout {1}": "截至第 {1} 轮，找到 {0} 条",
  "{0} of {1} groups, {2} trajectories": "{1} 组中的 {0} 组，共 {2} 条轨迹", "The first 200 are shown.": "只显示前 200 组。",
  "the records of this rollout are gone, its index is left": "这一轮的记录已删除，只剩索引",
  "No group of this rollout is like this.": "这一轮没有这样的组。", "No row of data of this run was played twice, so no change is known.": "这次运行没有一条数据采样过两次，所以还不知道变化。",
  "No row of data of this rollout was played before, so no change is known.": "这一轮没有一条数据以前采样过，所以还不知道变化。",
  "No group of this run is like this.": "这次运行没有这样的组。",
  "Nothing is recorded yet. The first rollout's records come when it is trained on.": "还没有记录。第一轮采样训练之后才会写入。",
  "mean {0}, std {1}": "均值 {0}，标准差 {1}", "changed by {0}": "变化 {0}", "greedy": "贪心轨迹", "no text": "没有文本",
  "its last message": "最后一条消息", "groups {0} to {1} of {2}": "第 {0} 至 {1} 组，共 {2} 组", "reading: the newest {0} of {1} rollouts": "读取中：最新的 {0} 轮，共 {1} 轮", "The files of {0} runs cannot be read: {1}": "有 {0} 个运行的文件无法读取：{1}", "The files of {0} rollouts cannot be read: {1}": "有 {0} 轮的文件无法读取：{1}", "back": "上一页", "on": "下一页",
  "task": "任务", "trajectories": "轨迹数", "mean": "均值", "std": "标准差", "change": "变化", "text": "文本",

  // 结局
  "outcome": "结局", "completed": "完成", "truncated": "被截断", "aborted": "中止", "env_error": "环境出错", "reward_error": "奖励出错", "timeout": "超时",
  "refused": "被拒绝", "length": "达到长度上限", "abort": "中止",

  // 轨迹
  "reward": "奖励", "group": "组", "tokens": "词元", "turns": "对话轮次", "mean |Â|": "平均 |Â|", "algorithm": "算法", "stopped by": "终止原因",
  "Conversation": "对话", "Tokens": "词元", "prompt": "提示", "model": "模型", "environment": "环境", "unknown": "未知", "thinking": "思考",
  "tool calls": "工具调用", "tool call": "工具调用", "reply": "回复", "reply of": "工具回复：", "the environment's reply": "环境的回复",
  "its tokens": "查看词元", "{0} tokens": "{0} 个词元", "{0} more letters": "还有 {0} 个字符",
  "{0} tokens; their texts need the run's tokenizer": "{0} 个词元；需要这次运行的分词器才能显示文本",
  "The history was rewritten here: a new sample begins.": "历史在此被改写：从这里开始是新的训练样本。",
  "Its tokens were not recorded (observe.records.trajectories).": "没有记录它的词元（observe.records.trajectories）。",
  "Choose a token, with a click or with the arrow keys.": "点击或用方向键选一个词元。",
  "colour": "着色", "sample": "样本", "sample {0}": "样本 {0}", "steps": "动作", "Its group": "所在的组", "Export": "导出",
  "Exported by whet from the run {0}.": "由 whet 从运行 {0} 导出。",

  // 着色
  "advantage Â": "优势 Â", "share of the loss": "占损失的份额", "TD error δ": "TD 误差 δ", "value V": "价值 V", "return G": "回报 G",
  "ratio ρ, first use": "概率比 ρ（首次使用）", "ratio ρ, last use": "概率比 ρ（末次使用）", "clip": "裁剪", "log-prob, sampled": "采样对数概率",
  "log π − log π_ref": "log π − log π_ref", "trainer − engine": "训练器 − 引擎", "entropy": "熵", "rank": "排名", "policy version": "策略版本",
  "trains": "参与训练", "no colour": "不着色", "yes": "是", "no": "否",
  "none": "未裁剪", "high": "高于上界", "low": "低于下界", "dual": "双重裁剪", "covariance": "协方差限制", "sequence": "整条序列被丢弃",
  "rejected": "异策略校正拒绝", "too_old": "过旧", "unusable": "不可用", "masked": "被掩码", "skipped": "未计算", "left out": "未参与",

  // 词元
  "place": "位置", "id": "编号", "written by": "由谁写出", "sampled with": "采样时",
  "proof of its weights": "权重的验证", "arrival compared": "已比对到达的权重", "memory compared": "已比对内存中的权重", "{0}% of memory compared": "已比对内存中 {0}% 的权重",
  "probe within {0} nats": "探针误差不超过 {0} nats", "no proof": "未经验证", "the token before": "上一个词元", "the next token": "下一个词元",
  "Sample {0} of this trajectory: its history was rewritten.": "这条轨迹的样本 {0}：历史被改写过。",
  "Why it does not train": "为什么它不参与训练",
  "The environment wrote this token: no policy sampled it, so there is no probability of it to push. It has no ratio, no advantage and no share of the loss.":
    "这个词元由环境写出，不是策略采样的，因此没有可以推动的概率。它没有概率比，没有优势，也不占损失。",
  "This token is part of the prompt. It is read, and never trained.": "这个词元属于提示：只供阅读，从不训练。",
  "With credit_over = all it is a time step: it has a TD error of its own, below.": "在 credit_over = all 时它是一个时间步，有自己的 TD 误差，见下。",
  "It is no time step: value, return and advantage pass over it, undiscounted. Time goes from the last action before it to the next one after it.":
    "它不是时间步：价值、回报和优势不打折扣地越过它。时间从它之前的最后一个动作直接走到它之后的下一个动作。",
  "no action before": "之前没有动作", "nothing follows: V′ = 0": "之后没有动作：V′ = 0",
  "So V′ in the TD error of token {0} is the value of token {1}: {2}.": "因此词元 {0} 的 TD 误差里，V′ 就是词元 {1} 的价值：{2}。",
  "Its group was dropped ({0}), so nothing of it trains.": "它所在的组被丢弃（{0}），所以整组都不训练。",
  "This is the greedy trajectory that its group is compared with. It is never trained on.": "这是供本组比较的贪心轨迹，从不训练。",
  "Off-policy correction rejected it.": "异策略校正拒绝了它。", "A policy over the staleness bound sampled it.": "采样它的策略超过了陈旧度上限。",
  "Its sample teaches nothing: the trajectory failed, or has no valid sibling to be compared with.": "它的样本没有可学的：轨迹失败了，或没有有效的同组轨迹可比。",
  "The loss mask left it out.": "损失掩码把它排除在外。", "The model sampled it, and no optimizer step used it.": "它由模型采样，但没有优化步用到它。",
  "Credit": "信用分配", "quantity": "量", "formula": "公式", "recorded": "记录值", "recomputed": "重算值",
  "equal within 1e-5": "两者相差不超过 1e-5", "they differ": "两者不一致",
  "KL's part of the reward": "奖励中的 KL 部分", "A before whitening": "白化前的 A", "return": "回报", "token": "词元", "part": "分项",
  "V′ is the critic's estimate after the last token: the trajectory was cut.": "轨迹被截断，V′ 取价值模型在最后一个词元之后的估计。",
  "Nothing follows, so V′ = 0.": "之后没有时间步，所以 V′ = 0。", "V′ is the value of token {0}, the next time step.": "V′ 是下一个时间步（词元 {0}）的价值。",
  "The trajectory's reward is paid on this token, its last action.": "整条轨迹的奖励记在这个词元上，它是最后一个动作。",
  "The trajectory's reward is paid on its last action; here r holds only rewards of this token.": "整条轨迹的奖励记在最后一个动作上；这里的 r 只含这个词元自己的奖励。",
  "Whitened over the {0} trained tokens of the rollout: mean {1}, variance {2}.": "在这一轮的 {0} 个训练词元上白化：均值 {1}，方差 {2}。",
  "It is whitened over the rollout, whose {0} tokens are too many to be computed again here.": "它在整轮上白化，而这一轮有 {0} 个词元，太多，不在这里重算。",
  "It is whitened over the rollout, which is not at hand here.": "它在整轮上白化，而这里没有整轮的数据。",
  "β follows a target of the KL, so it is another one in each rollout. From this token's own numbers it was {0}; the run's metric reward_kl/coef has it.":
    "β 随 KL 目标调整，每轮不同。按这个词元自己的数推算，它是 {0}；运行指标 reward_kl/coef 里有它。",
  "r + γG′ within the turn": "r + γG′（只在本轮对话内）", "Each turn is credited by itself: only the last one sees the trajectory's reward.": "每轮对话单独分配：只有最后一轮看得到整条轨迹的奖励。",
  "From the return G a baseline of this step of the group is subtracted. It weighs the siblings by squared probabilities over the whole vocabulary, which are not recorded, so it is not computed again: by the recorded advantage it was {0}.":
    "从回报 G 里减去本组在这一步的基线。基线按整个词表上的概率平方给同组轨迹加权，而这些平方没有记录，所以不在这里重算：按记录的优势推算，它是 {0}。",
  "Its factor α counts trajectories of the whole rollout, which are not all at hand here.": "系数 α 要数整轮的轨迹，而这里没有全部数据。",
  "G − r of the greedy reply": "G − 贪心回复的 r", "G − baseline of the step": "G − 这一步的基线",
  "The credit of {0} is not computed again on this page; its recorded numbers stand below.": "本页不重算 {0} 的信用分配，下面是记录值。", "this algorithm": "这个算法",
  "The score of the greedy trajectory is subtracted from the return.": "从回报中减去贪心轨迹的得分。",
  "Every token of this reply has the same advantage: the group compares whole replies, and nothing says which token earned the reward. PPO's critic would: it has a value before each token.":
    "这条回复的每个词元优势都相同：组内比较的是整条回复，无从知道奖励是哪个词元挣来的。PPO 的价值模型可以区分，因为它在每个词元之前都有一个估计。",
  "{0} later tokens": "之后的 {0} 个词元", "mean of the group": "组均值", "std of the group": "组标准差", "sibling": "同组轨迹", "score r": "得分 r",
  "The group has one valid trajectory: there is nothing to compare with, so it does not train.": "组里只有一条有效轨迹：没有可比的，所以不训练。",
  "(r − mean) / (std + 1e-6)": "(r − 均值) / (标准差 + 1e-6)", "r − mean": "r − 均值", "r − mean of the others": "r − 其余轨迹的均值", "(r − mean) / mean": "(r − 均值) / 均值",
  "α (r − mean)": "α (r − 均值)",
  "Loss": "损失", "optimizer step": "优化步", "first epoch": "第一遍", "last epoch": "最后一遍",
  "The optimizer's log-probs of this token were not recorded.": "没有记录优化器对这个词元算出的对数概率。",
  "No pass computed it: all advantages of its sample are 0, so it has no gradient. Its weight stands in the denominator, and its share of the loss is 0.":
    "没有前向计算用到它：它所在样本的优势全为 0，没有梯度。它的权重仍在分母里，占损失的份额为 0。",
  "The loss {0} is your own: its recorded numbers stand below.": "损失 {0} 是你自己写的，下面是记录值。",
  "exp(mean over the reply of log π − log π_old)": "exp(整条回复上 log π − log π_old 的均值)",
  "clip code": "裁剪代码", "policy term": "策略项", "correction": "校正", "entropy bonus": "熵奖励", "KL to the reference": "与参考模型的 KL",
  "weight w": "权重 w", "1 / denominator of the step": "1 / 这一步的分母", "w = 1 / {0}: {1}.": "w = 1 / {0}：{1}。",
  "w = 1 / {0}. The rollout's steps share its samples, so the denominator is recorded, not counted again.": "w = 1 / {0}。这一轮的样本分给了几个优化步，所以分母取记录值，不在这里重数。",
  "w = 1 / {0}. The whole rollout is not at hand here, so the denominator is recorded, not counted again.": "w = 1 / {0}。这里没有整轮的数据，所以分母取记录值，不在这里重数。",
  "its group's trained tokens × the groups of the step": "本组的训练词元数 × 这一步的组数", "this sample's trained tokens × the samples of the step": "这个样本的训练词元数 × 这一步的样本数",
  "the samples of the step": "这一步的样本数", "a number of the settings": "设置里的一个数",
  "the trained tokens of the step": "这一步的训练词元数", "this trajectory's trained tokens × the valid trajectories of the step": "这条轨迹的训练词元数 × 这一步的有效轨迹数",
  "the valid trajectories of the step": "这一步的有效轨迹数", "the token limit × the valid trajectories of the step": "词元上限 × 这一步的有效轨迹数", "the denominator of the step": "这一步的分母",
  "ratio {0}, bounds {1} to {2}": "概率比 {0}，界限 {1} 至 {2}", "active": "生效", "−c A, the dual clip": "−c A，双重裁剪", "0, held back by its covariance": "0，因协方差被压住",
  "The weight ρ is within its bounds.": "权重 ρ 在界限之内。", "The clip holds the weight, not the gradient: the token still learns.": "裁剪限制的是权重而不是梯度：这个词元仍在学习。",
  "A soft gate closes as ρ leaves 1.": "ρ 离开 1 时，一道软门逐渐关上。",
  "Its advantage is 0: the policy loss does not move its probability.": "它的优势为 0：策略损失不推动它的概率。",
  "The clip is active: the policy loss does not move its probability any further.": "裁剪生效：策略损失不再继续推动它的概率。",
  "Pushed up: a step along the gradient raises log π by {0} for each unit of the learning rate (w · dterm/dlog π).": "推高：沿梯度走一步，每单位学习率使 log π 上升 {0}（w · 策略项对 log π 的导数）。",
  "Pushed down: a step along the gradient lowers log π by {0} for each unit of the learning rate (w · dterm/dlog π).": "压低：沿梯度走一步，每单位学习率使 log π 下降 {0}（w · 策略项对 log π 的导数）。",
  "By the other estimator": "换一种估计会怎样",
  "GRPO compares siblings, and this prompt was played once: its advantage would be 0.": "GRPO 要比较同组轨迹，而这个提示只采样了一次：优势会是 0。",
  "GRPO would give this token, and every other one of the reply, ({0} − {1}) / ({2} + 1e-6) = {3}.": "GRPO 会给这个词元、也给这条回复的每个词元 ({0} − {1}) / ({2} + 1e-6) = {3}。",
  "PPO with γ = λ = 1 would give it the return that is still to come less a critic's value before it: {0} − V. This run has no critic, so V is not known; a critic that had learned only the group's mean would give {1}.":
    "在 γ = λ = 1 的 PPO 下，它得到的是之后的回报减去价值模型在它之前的估计：{0} − V。这次运行没有价值模型，V 未知；若价值模型只学到组均值，结果会是 {1}。",
  "Everything that is recorded of it": "它的全部记录",

  // 动作
  "action": "动作", "One row is one action: all that the model sampled before the environment answered.": "每行是一个动作：环境回应之前模型采样的全部内容。",
  "Its log π is the sum of its tokens', so its ratio is the product of theirs: ρ = exp(Σ (log π − log π_old)). Its share of the loss is the sum of theirs, too.":
    "它的 log π 是其词元之和，所以它的比值是各词元比值之积：ρ = exp(Σ (log π − log π_old))。它占损失的份额也是各词元之和。",
  "As one step of n tokens its TD error is R + γⁿV′ − V: its rewards, and the value of the next action's first token less that of its own. It is the discounted sum of its tokens' δ; both stand below it.":
    "把一个动作的 n 个词元看作一步，TD 误差是 R + γⁿV′ − V：它的奖励，加上下一个动作第一个词元的价值，减去它自己第一个词元的价值。它等于各词元 δ 的折扣和；两个数都写在动作下面。",
  "The model took no step in this sample.": "模型在这个样本里没有动作。",

  // 对比
  "compare with": "与之对比", "choose one …": "选一条……", "Choose the other trajectory above.": "请在上面选另一条轨迹。",
  "Other trajectories of the same prompt in these runs: {0}.": "这些运行中，同一提示还有 {0} 条轨迹。",
  "This prompt was played once. Name a second run on the command line, or wait for its next epoch.": "这个提示只采样了一次。可在命令行再给一个运行，或等到它的下一个训练轮。",
  "Replies": "回复", "only in the first": "只在第一条里", "only in the second": "只在第二条里", "The replies are too long to be compared word by word.": "回复太长，不逐词比较。",
  "Drift of log-probs": "对数概率的漂移", "mean {0}, largest {1} nats over {2} tokens": "{2} 个词元上平均 {0}，最大 {1} nats",
  "used once, so there is no later log-prob": "只用过一次，没有之后的对数概率",
  "The replies share {0} tokens from their beginning; there the two policies are compared below.": "两条回复开头有 {0} 个词元相同；下面在这些词元上比较两个策略。",
  "The replies part at their first token, so no token has two comparable log-probs. The curves below are each one's own.": "两条回复从第一个词元起就不同，没有可比的词元。下面是各自的曲线。",
  "the first, from sampling to its last use: {0}": "第一条，从采样到末次使用：{0}", "the second, from sampling to its last use: {0}": "第二条，从采样到末次使用：{0}",
  "the first": "第一条", "the second": "第二条", "sampled log-prob (nats) by place of the token": "采样对数概率（nats），按词元位置",
  "Open a trajectory, and choose Compare there, to see it beside another one of its prompt. Here: the trained tokens on which trainer and engine differ most.":
    "打开一条轨迹并点“对比”，可以与同一提示的另一条并排看。这里列出训练器与引擎差别最大的训练词元。",
  "engine": "引擎", "trainer": "训练器", "trajectory": "轨迹", "{0} trained tokens, in nats": "{0} 个训练词元，单位 nats",
  "Trainer and engine agree on every token.": "训练器与引擎在每个词元上都一致。", "The trainer's log-probs were not recorded in this rollout.": "这一轮没有记录训练器的对数概率。",

  // 示例课
  "All its trajectories": "它的全部轨迹",
  "Conversations, log-probs, the critic's values and the rewards (or a judge's grades) are made up; every other number was computed by whet's own rubric, credit, loss and records when this page was started.":
    "对话、对数概率、价值模型的估计和奖励（或评分者的等级）是虚构的；其余每个数都由 whet 自己的评分表、信用分配、损失和记录代码在启动本页时算出。",
};
