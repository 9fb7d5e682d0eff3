"""`whet sft`, `whet dpo` and `whet rm`: what they do, as a function of a configuration."""

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
from whet.runs.commands import batches_kept, finish, warn_all
from whet.settings.supervised import StepRunConfig, chat_of, kind_of
from whet.supervised_loop import SupervisedRun, train_supervised
from whet.train.alarm import Situation
from whet.train.lead import ALONE, Lead, begin


def train_on_data(config: StepRunConfig, command: str | None = None, lead: Lead = ALONE, notes: Sequence[str] = ()) -> dict[str, float]:
    """A run that learns from data as they are, to its end, and the model exported to `<run_dir>/model`: of `whet rm`, for
    `AutoModelForSequenceClassification`.

    Args:
        config: the run's settings; their class says which command's run it is.
        command: what was typed; the same goes on with a run that was stopped. None: the command alone.
        lead: tells the other processes of the job what all of them do.
        notes: what the person who starts the run should know already.

    Returns:
        `eval/...` of what is held out, at the end; nothing if nothing is.
    """
    program, name = program_of(config), f"whet {kind_of(config)}"
    assert program.rows is not None, "a run with rollouts is another function's"
    with open_run(config, command or name) as opened:
        folder = resolve_model_path(config.model.path)
        renderer = load_renderer(folder, chat_of(config), trust_remote_code=config.model.trust_remote_code)
        data = program.rows.read(config, renderer)
        num_steps = length_of_run(len(data.source), program.rows.per_step(config), config.num_steps, config.num_epochs, "num_steps")
        with closing(build_observer(config, opened, program.headlines)) as observer:
            with lead.tell(begin(num_steps)):
                backend, learner = build_supervised(config, folder, num_steps, lead)
            if isinstance(backend.model, ScalarModel):
                note_padding(backend.model, renderer)
            evaluated = Evaluated()
            others: dict[str, Stateful] = {"evaluated": evaluated}
            state = build_run_state(config, opened, learner.policy, observer, data.source, others, learner, lead)
            measured = None if data.held_out is None else data.held_out(learner.measure)
            run = SupervisedRun(num_steps, data.take, learner, measured, evaluated, state, observer, opened.stop, renderer.num_spelled)
            lead.describe(lambda: Situation(observer.phases.present))
            facts = {"model": str(folder), **data.facts, **spelled_facts(renderer), "device": str(backend.model.device)}
            for note in notes:
                observer.display.note(note)
            observer.display.start(f"{name}: {opened.folder}", num_steps, facts)
            warn_all(observer.display, [*opened.notes, *learner.notes])
            with batches_kept(config, opened, lambda _: learner.policy), run.checkpoint.whole():
                values = train_supervised(run)
            finish(config, observer, backend, folder, opened.folder, lead)
    return values


def spelled_facts(renderer: Renderer) -> dict[str, str]:
    """Special tokens that the data spell, where there are any."""
    num = renderer.num_spelled
    return {"special tokens": f"{num} spelled in the data's texts stay text (data.special_tokens_in_text)"} if num else {}


def note_padding(model: DecoderModel, renderer: Renderer) -> None:
    """Have transformers read a batch's scores where whet does, at each last token: it goes by the config's padding, in which no
    turn may end."""
    text = model.config.get_text_config()
    pad = renderer.tokenizer.pad_token_id if text.pad_token_id is None else text.pad_token_id
    text.pad_token_id = None if pad in renderer.stop_token_ids else pad
