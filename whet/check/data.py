"""Checks of data: every row is read as the run reads it, and the first are shown as the model sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from whet.check.context import TRAINING, CheckContext
from whet.check.faults import SHOWN_ROWS, columns_text, fault_notes, masked_lines, rotary_faults, row_faults, visible
from whet.check.findings import Note, fail, need, ok, warn
from whet.check.own_source import check_source
from whet.check.pairs import check_pairs
from whet.data.files import paths_text
from whet.data.rows import task_from
from whet.data.source import SourceConfig, TaskSource
from whet.data.supervised import Conversation, conversation_from, read_conversations, supervised_source
from whet.data.template import Renderer
from whet.evaluate.config import EvaluationSetConfig
from whet.plan.text import several
from whet.rollout.sampling import RolloutConfig
from whet.settings.rl import check_best, evaluation_rows, training_rows
from whet.settings.supervised import SupervisedRunConfig, held_out_rows
from whet.types import JSON, Message, Task

MEASURED_ROWS = 20_000
"""Maximum number of prompts that are rendered to know their lengths. Of more, prompts at even distances are
taken.
"""
Tools = Sequence[Mapping[str, JSON]]


def check_data(context: CheckContext) -> Iterator[Note]:
    """Check the training rows."""
    rows = context.program.rows
    yield from _tasks(context) if rows is None else ROWS[rows.name](context, context.config)


def _tasks(context: CheckContext) -> Iterator[Note]:
    """Check the prompts of a run with rollouts."""
    if context.rl.data.source is not None:
        yield from check_source(context)
        if context.source is not None and context.renderer is not None and TRAINING in context.tools:
            rollout = context.fitted(context.rl.rollout)
            yield from _prompts(context.rows[TRAINING], context.renderer, context.tools[TRAINING], rollout, context.vocab_size, odd=warn)
        return
    rows = training_rows(context.rl)
    renderer, tools = context.renderer, context.tools.get(TRAINING)
    length = None if renderer is None or tools is None else _length(renderer, tools)
    try:
        source = TaskSource(rows if length else rows.model_copy(update={"max_prompt_tokens": None}), length=length)
    except ValueError as error:
        yield from fault_notes(row_faults(rows.path, lambda row: task_from(row, rows, "row")) or [str(error)])
        return
    yield ok(_counted(source, rows))
    context.rows[TRAINING] = source.tasks
    if length or rows.max_prompt_tokens is None:
        context.source = source
    renderer, tools = need(renderer, "the tokenizer"), need(tools, "the environment's tools")
    yield from _prompts(source.tasks, renderer, tools, context.fitted(context.rl.rollout), context.vocab_size)


def _length(renderer: Renderer, tools: Tools) -> Callable[[Task], int]:
    def length(task: Task) -> int:
        try:
            return len(renderer.prompt(task, tools))
        except ValueError as error:
            raise ValueError(f"{task.origin}: {error}") from error

    return length


def check_evaluation(context: CheckContext) -> Iterator[Note]:
    """Check the rows of every evaluation set, and that one of them measures `checkpoint.best`."""
    config = context.rl
    try:
        check_best(config)
    except ValueError as error:
        yield fail(str(error))
    if not config.evaluate.sets:
        yield warn("there is no evaluation set: nothing will show whether the model gets better (evaluate.sets.NAME.path=FILE)")
    for name, chosen in config.evaluate.sets.items():
        for note in _evaluation_set(context, name, chosen):
            yield Note(note.status, f"{name}: {note.text}", note.lines)


def _evaluation_set(context: CheckContext, name: str, chosen: EvaluationSetConfig) -> Iterator[Note]:
    rows = evaluation_rows(context.rl, chosen)
    try:
        source = TaskSource(rows, name=name)
    except ValueError as error:
        yield from fault_notes(row_faults(rows.path, lambda row: task_from(row, rows, "row")) or [str(error)])
        return
    tasks = context.rows[name] = source.tasks[: chosen.limit]
    yield ok(f"{_counted(source, rows)}; {len(tasks)} of them are played, {several(chosen.samples_per_prompt, 'time')} each")
    if context.renderer is None or name not in context.tools:
        yield Note("skip", f"not rendered: needs {'the tokenizer' if context.renderer is None else 'its environment'}")
        return
    rollout = context.fitted(chosen.rollout.over(context.rl.rollout))
    yield from _prompts(tasks, context.renderer, context.tools[name], rollout, context.vocab_size)


def _counted(source: TaskSource, rows: SourceConfig) -> str:
    limit = rows.max_prompt_tokens
    dropped = "" if limit is None else f", {source.num_dropped} dropped as longer than max_prompt_tokens = {limit}"
    if rows.long_prompts not in ("drop", "error"):
        dropped = f", {source.num_cut} cut to max_prompt_tokens = {limit}"
    return f"{len(source)} rows of {paths_text(rows.path)}, columns {columns_text(rows.path)}{dropped}"


def _prompts(
    tasks: Sequence[Task],
    renderer: Renderer,
    tools: Tools,
    rollout: RolloutConfig,
    vocab_size: int | None,
    odd: Callable[[str], Note] = fail,
) -> Iterator[Note]:
    """Render prompts as the run does, and check their lengths, the room for replies, their token ids, and their roles.

    `odd` makes the note about a role that nobody knows: the run refuses rows with one, but not what a source of the user's gives.
    """
    step = -(-len(tasks) // MEASURED_ROWS)
    lengths: list[int] = []
    highest = -1
    faults: list[str] = []
    for task in tasks[::step]:
        try:
            tokens = renderer.prompt(task, tools)
        except ValueError as error:
            faults.append(f"{task.origin}: {error}")
            continue
        lengths.append(len(tokens))
        highest = max(highest, *tokens)
    if faults:
        yield from fault_notes(faults)
        return
    if vocab_size is not None and highest >= vocab_size:
        yield fail(f"prompts have token ids up to {highest}, but the model knows 0 to {vocab_size - 1}: its tokenizer is another")
    yield _room(lengths, rollout, f"{len(lengths)} prompts at even distances" if step > 1 else "prompts")
    answered = [task.origin for task in tasks if not isinstance(task.prompt, str) and task.prompt[-1].role == "assistant"]
    if answered:
        yield warn(
            f"{len(answered)} of {len(tasks)} prompts end with a message of the assistant's ({answered[0]}), and the model begins another "
            "after it: if it is the answer, the model reads it before it replies; leave it out of the prompt"
        )
    yield from _odd_roles(renderer, ((task.origin, task.prompt) for task in tasks if not isinstance(task.prompt, str)), odd)
    for task in tasks[:SHOWN_ROWS]:
        tokens = renderer.prompt(task, tools)
        label = "no label" if task.label is None else f"label {task.label!r}"
        lines = [f"prompt  {visible(renderer.decode(tokens))}", "model   begins here"]
        yield ok(f"{task.origin}: {len(tokens)} tokens, {label}", lines)


def _room(lengths: Sequence[int], rollout: RolloutConfig, what: str) -> Note:
    """Compare the lengths of prompts with `rollout.max_tokens`."""
    without = sum(length >= rollout.max_tokens for length in lengths)
    text = f"{what} have {min(lengths)} to {max(lengths)} tokens; rollout.max_tokens = {rollout.max_tokens}"
    if not without:
        return ok(f"{text} leaves {rollout.max_tokens - max(lengths)} or more for replies")
    advice = "raise it, or drop long prompts with data.max_prompt_tokens"
    note = fail if without == len(lengths) else warn
    return note(f"{text} leaves no room to reply to {without} of {len(lengths)}: {advice}")


def _conversations(context: CheckContext, config: SupervisedRunConfig) -> Iterator[Note]:
    """Check the conversations of supervised training, and show which of their tokens train."""
    rows = config.data
    try:
        conversations = read_conversations(rows)
    except ValueError as error:
        yield from fault_notes(row_faults(rows.path, lambda row: conversation_from(row, rows)) or [str(error)])
        return
    yield ok(f"{len(conversations)} rows of {paths_text(rows.path)}, columns {columns_text(rows.path)}")
    renderer = need(context.renderer, "the tokenizer")
    try:
        source = context.source = supervised_source(rows, renderer, run_seed=config.seed)
    except ValueError as error:
        yield from fault_notes(_rendering_faults(conversations, renderer) or [str(error)])
        return
    lengths: list[int] = []
    trained, highest = 0, -1
    for tokens, mask in source.rows():
        lengths.append(len(tokens))
        trained += sum(mask)
        highest = max(highest, *tokens)
    context.longest = (max(lengths),)
    dropped = "" if rows.max_tokens is None else f", {source.num_dropped} dropped as longer than data.max_tokens = {rows.max_tokens}"
    share = f"{trained} of {sum(lengths)} tokens train ({trained / sum(lengths):.0%})"
    yield ok(f"{len(source)} conversations have {min(lengths)} to {max(lengths)} tokens{dropped}; {share}")
    yield from _odd_roles(renderer, ((conversation.origin, conversation.messages) for conversation in conversations), warn)
    yield from rotary_faults(context, lengths)
    if context.vocab_size is not None and highest >= context.vocab_size:
        yield fail(f"token ids go up to {highest}, but the model knows 0 to {context.vocab_size - 1}: its tokenizer is another")
    for number, (tokens, mask) in enumerate(islice(source.rows(), SHOWN_ROWS), start=1):
        yield ok(f"conversation {number}: {len(tokens)} tokens, {sum(mask)} train", masked_lines(tokens, mask, renderer))
    yield from _held_out(config, renderer)


def _held_out(config: SupervisedRunConfig, renderer: Renderer) -> Iterator[Note]:
    """Check that the held-out conversations can be read and rendered."""
    rows = held_out_rows(config.data, config.evaluate)
    if rows is None:
        return
    try:
        source = supervised_source(rows, renderer, run_seed=config.seed, name="held_out")
    except ValueError as error:
        yield fail(f"held out: {error}")
        return
    yield ok(f"held out: {len(source)} conversations of {paths_text(rows.path)}")


def _odd_roles(renderer: Renderer, rows: Iterable[tuple[str, Sequence[Message]]], note: Callable[[str], Note]) -> Iterator[Note]:
    """Note the first row with an unknown role: the template writes it unchanged."""
    odd = next((f"{origin}: {text}" for origin, messages in rows if (text := renderer.odd_role(messages))), None)
    if odd is not None:
        yield note(odd)


ROWS: dict[str, Callable[[CheckContext, Any], Iterator[Note]]] = {"conversations": _conversations, "pairs": check_pairs}
"""Checks by the name of the rows in `whet.build.programs`."""


def _rendering_faults(conversations: Sequence[Conversation], renderer: Renderer) -> list[str]:
    faults: list[str] = []
    for conversation in conversations:
        try:
            renderer.supervised(conversation.messages, conversation.tools, conversation.first_trained)
        except ValueError as fault:
            faults.append(f"{conversation.origin}: {fault}")
    return faults
