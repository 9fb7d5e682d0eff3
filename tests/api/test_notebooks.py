"""Notebooks, run by a kernel: from rows to a trained model, an interrupt, pictures and replies below the cells."""

import os
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long

GRPO = """
import whet

rows = [{"prompt": f"What is {n} + {n}?", "label": str(2 * n)} for n in range(4)]
def score(trajectory): return len(trajectory.response) % 7 / 7 + (trajectory.task.label in trajectory.response)
def double(x: int) -> str:
    "Double a number."
    return str(2 * x)
run = whet.train("model", rows, reward=score, tools=[double], num_rollouts=2, SMALL)
"""
SIZES = 'batch={"prompts_per_rollout": 2, "samples_per_prompt": 3}, train__optim__lr=1e-2'
SMALL = f'{SIZES}, rollout={{"max_turn_tokens": 8, "max_tokens": 400}}'


@pytest.fixture
def run_cells(here, monkeypatch):
    """Function that runs cells in a kernel, in the test's folder. Returns the cells with their outputs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kernel = here / "kernels" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernel / "kernel.json").write_text(f'{{"argv": {argv}, "display_name": "python3", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(here / "kernels"))

    def run(*cells, interrupts=None):
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
        where = {"metadata": {"path": str(here)}}
        client = nbclient.NotebookClient(book, timeout=200, kernel_name="python3", allow_errors=True, resources=where)
        if interrupts is not None:
            threading.Thread(target=interrupt, args=(client, here / interrupts), daemon=True).start()
        client.execute()
        return book.cells

    return run


def interrupt(client, file):
    """Interrupt the kernel as the notebook's button does, once a file is there."""
    for _ in range(3000):
        if file.exists():
            break
        time.sleep(0.05)
    os.kill(client.km.provisioner.process.pid, 2)


def texts(cell):
    return "".join(output.get("text", "") + str(output.get("data", {})) + "".join(output.get("traceback", ())) for output in cell.outputs)


def test_grpo_with_a_reward_and_a_tool_of_the_notebook(run_cells):
    lines = GRPO.replace("SMALL", SMALL)
    cells = run_cells(lines, "run.plot()", "run.show()", "print(run.status, run.model_path.name, len(run.rows)); print(run.generate('Hi'))")
    told = [texts(cell) for cell in cells]
    assert "<progress value=" in told[0] and "2/2" in told[0] and "Traceback" not in "".join(told), told
    assert "image/png" in told[1] and "What is" in told[2] and "assistant" in told[2] and "finished model 2" in told[3]


def test_sft(run_cells):
    cells = run_cells(
        """
        import whet
        rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}] * 4
        run = whet.sft("model", rows, num_steps=3, samples_per_step=2)
        """,
        "run.plot()",
        "print(run.metrics['sft/loss'].count())",
    )
    told = [texts(cell) for cell in cells]
    assert "3/3" in told[0] and "image/png" in told[1] and told[2].startswith("3"), told


def test_an_interrupted_cell_saves_and_goes_on_when_it_runs_again(run_cells):
    wait = """
    import pathlib, time
    def pause(step, metrics):
        pathlib.Path("reached").touch()
        if step == 2 and not pathlib.Path("once").exists():
            pathlib.Path("once").touch(); time.sleep(3)
    class Slow:
        on_step = staticmethod(pause)
    """
    again = GRPO.replace("num_rollouts=2", "num_rollouts=4, callbacks=Slow()").replace("SMALL", SMALL)
    cells = run_cells(wait, again, again, "print(run.status, len(run.rows), len(list(pathlib.Path('runs').iterdir())))", interrupts="once")
    told = [texts(cell) for cell in cells]
    assert "KeyboardInterrupt" in told[1] and "the same call goes on" in told[1], told[1]
    assert "did not finish and has the same settings: it goes on" in told[2] and told[3].startswith("finished 4 1"), told
