"""The worked examples of docs/algorithms.md, computed again with whet from the inputs that the page gives."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import torch
from pydantic import TypeAdapter

from tests.algorithms_page import Cell, Page
from whet.algo.base import StepPlan
from whet.algo.config import AlgorithmConfig
from whet.algo.dpo import dpo_loss
from whet.algo.preference_config import DpoConfig, RewardModelConfig
from whet.algo.reward_model import reward_model_loss
from whet.algo.sft import sft_loss
from whet.algo.table import build_algorithm
from whet.core.batch import TokenOutputs, TrainBatch, batch_of
from whet.core.preference import last_tokens, pair_batch
from whet.core.weights import REDUCERS
from whet.types import Origin, Pair, Sample

WHO = {"prompt": Origin.PROMPT, "model": Origin.MODEL, "tool": Origin.ENVIRONMENT}
TOOL, FIVE, PAIR, SFT = "A tool call, token by token", "A group of five", "A pair", "Two conversations"
CRITIC, FREE = "With a critic", "Without a critic"
GRPO, OTHERS = "GRPO, token by token", "The other losses, and the optimal token baseline"
LIMIT = 8
Rows = list[dict[str, Cell]]


def settings(text: str) -> dict[str, Any]:
    """What the inline code of a cell sets, as TOML."""
    return tomllib.loads("\n".join(code for code in re.findall(r"`([^`]+)`", text) if " = " in code))


def algorithm(name: str, num_steps: int = 1, **given: Any):
    return build_algorithm(TypeAdapter(AlgorithmConfig).validate_python({"name": name, **given}), StepPlan(num_steps, max_tokens=LIMIT))


def sample(who: list[Origin], mask: list[bool], trajectory: str, **more: Any) -> Sample:
    n = len(who)
    return Sample(tuple(range(n)), tuple(who), tuple(mask), (0.0,) * n, (0,) * n, "g", trajectory, **more)


def reply(num_tokens: int, trajectory: str, **more: Any) -> Sample:
    return sample([Origin.PROMPT, *[Origin.MODEL] * num_tokens], [False, *[True] * num_tokens], trajectory, **more)


def outputs(logprobs: torch.Tensor, scores: torch.Tensor | None = None) -> TokenOutputs:
    return TokenOutputs(logprobs, torch.zeros_like(logprobs), scores=scores)


def untrained(page: Page, rows: Rows, *names: str) -> None:
    """Where nothing trains, the page has a 0."""
    for row in rows:
        if row["m"].text == "0":
            for name in names:
                page.equal(row[name], 0.0, f"{name} of a token that does not train")


def tool_call(page: Page) -> None:
    """Every column of the two tables, and their arithmetic."""
    critic, free = page.table(CRITIC, "token"), page.table(FREE, "token")
    greedy, beyond = (page.number(cell) for cell in page.found(r"greedy trajectory scored ([\d.]+), and the critic expects ([\d.]+) after"))
    (reward,) = (page.number(cell) for cell in page.found(r"two of the model; the reward is (\d)\."))
    prompt = [Origin.PROMPT] * 2
    assert [row["m"].text for row in critic] == [row["m"].text for row in free]
    mask = [False, False, *(page.number(row["m"]) == 1 for row in critic)]
    for rows in (critic, free):
        page.column(rows, "token", [float(t) for t in range(2, 2 + len(rows))])
        page.column(rows, "m", [float(m) for m in mask[2:]])
    one = sample([*prompt, *(WHO[row["who"].text] for row in critic)], mask, "t", reward=reward, baseline=greedy)
    batch = batch_of([one])

    def column(rows: Rows, name: str) -> torch.Tensor:
        return torch.tensor([0.0, 0.0, *(page.number(row[name]) for row in rows)])

    batch = batch.with_(values=column(critic, "V"), scores=torch.full((len(mask),), beyond))
    batch = batch.with_(old_logprobs=column(free, "log π"), teacher_logprobs=column(free, "log π_T"))
    untrained(page, free, "log π", "log π_T")
    columns = page.table(TOOL, "column")
    assert {row["column"].text for row in columns} | {"token", "who", "m", "V", "log π", "log π_T"} == {*critic[0], *free[0]}
    for row in columns:
        name, chosen = row["column"].text, settings(row["settings"].text)
        page.see(row["settings"].start, row["settings"].start + len(row["settings"].text))
        cut = batch.with_(truncated=torch.tensor([chosen.get("bootstrap_truncated", False)]))
        found, _ = algorithm(row["algorithm"].text.strip("`"), **chosen).assign_credit(cut)
        page.column(critic if name in critic[0] else free, name, found.advantages[2:].tolist())
    (over_actions, over_all, cut), (without,) = page.arithmetic(CRITIC), page.arithmetic(FREE)
    for name, row in {"A₂": 0, "A₃": 1, "A₄": 2, "A₇": 5, "A₈": 6}.items():
        page.equal(critic[row]["gae"], over_actions[name], name)
    page.equal(critic[6]["whitened"], over_actions["whitened"], "whitened")
    page.equal(critic[2]["all"], over_all["A₄"], "A₄ over all")
    page.equal(critic[6]["cut"], cut["A₈"], "A₈ of the cut one")
    for row, column, name in ((2, "G", "G₄"), (2, "G, all", "all"), (2, "remax", "remax"), (0, "opd", "opd")):
        page.equal(free[row][column], without[name], name)


def five(page: Page) -> tuple[Rows, TrainBatch]:
    """The replies as the first table has them."""
    rows = page.table(FIVE, "reply")
    page.column(rows, "reply", [float(i + 1) for i in range(5)])
    made = [reply(int(page.number(row["tokens"])), row["reply"].text, reward=page.number(row["r"])) for row in rows]
    return rows, batch_of(made)


def group_of_five(page: Page) -> None:
    """Advantages and weights of each reply, and the arithmetic of the third."""
    rows, batch = five(page)
    last = last_tokens(batch)
    for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl", "grpo_passk", "reinforce_plus_plus_baseline"):
        found, _ = algorithm(name).assign_credit(batch)
        page.column(rows, "rf++b" if name == "reinforce_plus_plus_baseline" else name, found.advantages[last].tolist())
    for name in ("gspo", "cispo", "sapo", "gmpo"):
        same, _ = algorithm(name).assign_credit(batch)
        page.column(rows, "grpo", same.advantages[last].tolist())
    reducers = {name: REDUCERS[name](batch) for name in ("sample_mean", "token_mean")}
    reducers["constant_length"] = algorithm("dr_grpo").reducer(batch)
    page.says("`constant_length` has a limit of {} tokens", LIMIT)
    for name, weights in reducers.items():
        page.column(rows, f"w, {name}", weights[last].tolist())
    (names,) = page.arithmetic(FIVE)
    for name in ("grpo", "rloo", "opo", "gpg", "maxrl"):
        page.equal(rows[2][name], names[name], name)
    page.equal(rows[2]["dr_grpo"], 2 - names["mean"], "dr_grpo")
    for name, column in {"passk": "grpo_passk", "rf": "rf++b", "w_sample": "w, sample_mean", "w_token": "w, token_mean"}.items():
        page.equal(rows[2][column], names[name], name)
    page.equal(rows[2]["w, constant_length"], names["w_constant"], "w_constant")


def off_policy(page: Page) -> tuple[Rows, TrainBatch, torch.Tensor]:
    """The replies with the log-probs of two policies: the rows, the batch with the old ones, and the present ones. [T]"""
    _, batch = five(page)
    rows = page.table(GRPO, "reply")
    counts = [int(n) - 1 for n in batch.lengths]
    numbered = [(float(i + 1), float(t + 1)) for i, n in enumerate(counts) for t in range(n)]
    for heading in (GRPO, OTHERS):
        page.column(page.table(heading, "reply"), "reply", [i for i, _ in numbered])
        page.column(page.table(heading, "reply"), "token", [t for _, t in numbered])
    old, now = (torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, torch.tensor([page.number(r[c]) for r in rows]).log())
                for c in ("π_old", "π"))
    probs = old.exp()
    return rows, batch.with_(old_logprobs=old, squared_probs=probs**2 + (1 - probs) ** 2), now


def grpo_by_token(page: Page) -> None:
    """Ratio, term, weight and gradient of each token, with the loss, and on-policy."""
    rows, batch, now = off_policy(page)
    mask = batch.loss_mask
    grpo = algorithm("grpo", num_steps=2)
    batch, _ = grpo.assign_credit(batch)
    weights, logprobs = grpo.reducer(batch), now.clone().requires_grad_()
    terms = grpo.loss(batch, outputs(logprobs)).terms
    (weights * terms).sum().backward()
    columns = {"ρ": (now - batch.old_logprobs).exp(), "A": batch.advantages, "w": weights, "term": terms, "w·term": weights * terms}
    for name, column in {**columns, "gradient": logprobs.grad}.items():
        page.column(rows, name, column.detach()[mask].tolist())
    (loss,) = page.found(r"sum of w·term, (\S+)\. On-policy")
    third, fifth = page.found(r"where ρ = 1, the gradient is −w·A: (\S+) for reply 3's token, (\S+) for each of reply 5's")
    page.equal(loss, float((weights * terms).detach().sum()), "the loss")
    logprobs = batch.old_logprobs.clone().requires_grad_()
    (weights * grpo.loss(batch, outputs(logprobs)).terms).sum().backward()
    last = last_tokens(batch)
    page.equal(third, float(logprobs.grad[last[2]]), "reply 3's gradient")
    page.equal(fifth, float(logprobs.grad[last[4]]), "reply 5's gradient")
    low, high = page.found(r"have left \[1 − ([\d.]+), 1 \+ ([\d.]+)\]")
    page.equal(low, grpo.config.clip_low, "clip_low")
    page.equal(high, grpo.config.clip_high, "clip_high")
    (names,) = page.arithmetic(GRPO)
    for name in ("ρ", "A", "term", "w·term"):
        page.equal(rows[5][name], names[name], name)
    page.equal(rows[7]["gradient"], -float(rows[7]["w"]) * float(rows[7]["A"]), "on-policy")


def other_losses(page: Page) -> None:
    """The same tokens by the other losses, and the optimal token baseline."""
    _, batch, now = off_policy(page)
    rows, mask = page.table(OTHERS, "reply"), batch.loss_mask
    for name in ("gspo", "cispo", "sapo", "gmpo", "gpg"):
        made = algorithm(name, num_steps=2)
        credited, _ = made.assign_credit(batch)
        page.column(rows, name, made.loss(credited, outputs(now)).terms[mask].tolist())
    credited, _ = algorithm("otb").assign_credit(batch)
    page.column(rows, "otb", credited.advantages[mask].tolist())
    energy = torch.where(mask, 1 - 2 * batch.old_logprobs.exp() + batch.squared_probs, 0.0)
    pieces = torch.split(energy, batch.lengths.tolist())
    page.column(rows, "W", torch.cat([piece.cumsum(0) for piece in pieces])[mask].tolist())
    (names,) = page.arithmetic(OTHERS)
    for name in ("gspo", "cispo", "sapo", "gmpo", "gpg", "W", "otb"):
        page.equal(rows[4][name], names[name], name)
    first, second = page.found(r"whose ratios are ([\d.]+) and ([\d.]+),")
    ratios = (now - batch.old_logprobs).exp()[mask].tolist()
    page.equal(first, ratios[3], "the first ratio")
    page.equal(second, ratios[4], "the second ratio")


def preference_pair(page: Page) -> None:
    """The terms of a pair by several settings, and their gradients."""
    rows, losses = page.table(PAIR, "reply"), page.table(PAIR, "command")
    lengths = [sum(row["reply"].text == name for row in rows) for name in ("chosen", "rejected")]
    page.column(rows, "token", [float(t + 1) for n in lengths for t in range(n)])
    scores = [page.number(cell) for cell in page.found(r"scores the replies ([\d.]+) and ([\d.]+)\.")]
    for row in losses:
        margin = page.number(row["margin"])
        batch = pair_batch([Pair(reply(lengths[0], "c"), reply(lengths[1], "r"), margin)])

        def column(name: str, batch: TrainBatch = batch) -> torch.Tensor:
            return torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, torch.tensor([page.number(r[name]) for r in rows]))

        batch = batch.with_(ref_logprobs=column("log π_ref"))
        chosen = settings(row["settings"].text)
        page.see(row["settings"].start, row["settings"].start + len(row["settings"].text))
        by = torch.zeros((), requires_grad=True)
        ends, trained = last_tokens(batch), batch.loss_mask & (batch.sample_of_token == 0)
        if row["command"].text == "`rm`":
            made = reward_model_loss(RewardModelConfig.model_validate(chosen))
            score = torch.zeros(batch.num_tokens).index_copy(0, ends, torch.tensor(scores)).index_add(0, ends[:1], by[None])
            terms = made(batch, outputs(column("log π"), score)).terms
        else:
            config = DpoConfig.model_validate(chosen)
            if config.loss == "ipo":
                page.equal(row["margin"], 0.0, "ipo has no margin")
            share = 1.0 if config.means else 1.0 / int(trained.sum())
            terms = dpo_loss(config)(batch, outputs(column("log π") + trained * by * share)).terms
        page.equal(row["term"], float(terms.detach().sum()), f"{row['command'].text} {chosen}")
        terms.sum().backward()
        page.equal(row["gradient"], float(by.grad), f"gradient of {row['command'].text} {chosen}")
    (names,) = page.arithmetic(PAIR)
    for row, name in zip(losses, ("dpo", "smoothed", "ahead", "ipo", "rpo", "rm", "margin", "centered"), strict=True):
        page.equal(row["term"], names[name], name)


def conversations(page: Page) -> None:
    """What supervised fine-tuning makes of two conversations."""
    rows = page.table(SFT, "conversation")
    made: list[Sample] = []
    for name in dict.fromkeys(row["conversation"].text for row in rows):
        mine = [row for row in rows if row["conversation"].text == name]
        page.column(mine, "conversation", [len(made) + 1.0] * len(mine))
        page.column(mine, "token", [t + 1.0 for t in range(len(mine))])
        made.append(sample([WHO[r["who"].text] for r in mine], [page.number(r["m"]) == 1 for r in mine], name))
    batch = batch_of(made)
    page.column(rows, "m", batch.loss_mask.float().tolist())
    untrained(page, rows, "log π")
    terms = sft_loss(batch, outputs(torch.tensor([page.number(row["log π"]) for row in rows]))).terms
    page.column(rows, "term", terms.tolist())
    (names,) = page.arithmetic(SFT)
    for name in ("token_mean", "sample_mean"):
        weights = REDUCERS[name](batch)
        page.column(rows, f"w, {name}", weights.tolist())
        assert abs(names[name] - float((weights * terms).sum())) < 1e-6, name


WORKED = (tool_call, group_of_five, grpo_by_token, other_losses, preference_pair, conversations)
