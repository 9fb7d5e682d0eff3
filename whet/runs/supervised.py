"""`whet sft`, `whet dpo` and `whet rm`, as a function of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from whet.build.parts import build_observer, build_run_state, length_of_run
from whet.build.programs import build_supervised, program_of
from whet.build.session import open_run
from whet.checkpoint.run_state import Stateful
from whet.data.hub import resolve_model_path
from whet.data.template import Renderer, load_renderer
from whet.loop import Evaluated
from whet.model.decoder import DecoderModel
from whet.model.scalar import ScalarModel
from whet.runs.commands import finish, keep_failed_batch, warn_all
from whet.settings.supervised import StepRunConfig, chat_of, kind_of
from whet.supervised_loop import SupervisedRun, train_supervised
from whet.train.controller import LOCAL, Controller, begin_call
from whet.train.watchdog import RunStatus


def train_on_data(
    config: StepRunConfig, command: str | None = None, controller: Controller = LOCAL, notes: Sequence[str] = ()
) -> dict[str, float]:
    """Train on given data to the end of the run. Exports the model to `<run_dir>/model`; that of `whet rm` is
    for `AutoModelForSequenceClassification`.

    Args:
        config: the run's settings; their class says which command's run it is.
        command: the typed command line, which also resumes the run. None: the command alone.
        controller: broadcasts calls to the other ranks.
        notes: notes of the start, shown first.

    Returns:
        The last `eval/...` of the held-out data; empty without them.
    """
    program, name = program_of(config), f"whet {kind_of(config)}"
    assert program.rows is not None, "a run with rollouts is another function's"
    with open_run(config, command or name) as session:
        folder = resolve_model_path(config.model.path)
        renderer = load_renderer(folder, chat_of(config), trust_remote_code=config.model.trust_remote_code)
        data = program.rows.read(config, renderer)
        num_steps = length_of_run(len(data.source), program.rows.per_step(config), config.num_steps, config.num_epochs, "num_steps")
        with closing(build_observer(config, session, program.headlines)) as observer:
            with controller.broadcast(begin_call(num_steps)):
                model = program.model.load(config, folder)
                learner = build_supervised(config, folder, model, num_steps, controller)
            policy = learner.policy
            if isinstance(model, ScalarModel):
                note_padding(model, renderer)
            evaluated = Evaluated()
            others: dict[str, Stateful] = {"evaluated": evaluated}
            state = build_run_state(config, session, observer, data.source, others, learner.models, controller)
            measured = None if data.held_out is None else data.held_out(learner.measure)
            run = SupervisedRun(num_steps, data.take, learner, measured, evaluated, state, observer, session.stop, renderer.num_spelled)
            controller.report_status(lambda: RunStatus(observer.phases.present))
            facts = {"model": str(folder), **data.facts, **spelled_facts(renderer), "device": str(policy.device)}
            for note in notes:
                observer.display.note(note)
            observer.display.start(f"{name}: {session.folder}", num_steps, facts)
            warn_all(observer.display, [*session.notes, *learner.notes, *note_rate(config)])
            with keep_failed_batch(config, session, lambda _: policy), run.checkpoint.whole():
                values = train_supervised(run)
            finish(config, observer, policy, folder, session.folder)
    return values


def spelled_facts(renderer: Renderer) -> dict[str, str]:
    """Special tokens that the data spell as text; nothing if there are none."""
    num = renderer.num_spelled
    return {"special tokens": f"{num} spelled in the data's texts stay text (data.special_tokens_in_text)"} if num else {}


def note_rate(config: StepRunConfig) -> list[str]:
    """A note on a learning rate that nobody chose, where that of reinforcement learning is too low."""
    optim, kind = config.train.optim, kind_of(config)
    if kind == "dpo" or "lr" in optim.model_fields_set:
        return []
    return [f"train.optim.lr is not set, so it is {optim.lr:g}, as for reinforcement learning; whet {kind} usually takes 1e-5 or more"]


def note_padding(model: DecoderModel, renderer: Renderer) -> None:
    """Set the model's padding token so that transformers reads a batch's scores where whet does, at each last
    token: none of the tokens that end a turn may be padding.
    """
    text = model.config.get_text_config()
    pad = renderer.tokenizer.pad_token_id if text.pad_token_id is None else text.pad_token_id
    text.pad_token_id = None if pad in renderer.stop_token_ids else pad
