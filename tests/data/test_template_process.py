"""Chat templates of others: whatever one does, it is bounded and told, and the next rendering is as ever."""

import os
import signal
import threading
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from whet.data.template_process import TEMPLATES, TemplateFailed, TemplateProcess
from whet.types import Message

MESSAGES = [{"role": "user", "content": "hä \u2063 <|x|>\ud83d"}, {"role": "assistant", "content": "b" * 100_000}]
PLAIN = (
    "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ tools | tojson }}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def process():
    made = TemplateProcess(cpu_limit_s=0.5)
    yield made
    made.close()


def render(process, template, messages=MESSAGES, tools=None, generate=True, **options):
    return process.render(template, messages, tools, generate=generate, options=options)


def test_it_renders_what_transformers_renders(process):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": [1.5, None, True]}}}]
    for generate in (True, False):
        given = {"tools": tools, "chat_template": PLAIN, "add_generation_prompt": generate, "bos_token": "<s>"}
        (expected,), _ = render_jinja_template([MESSAGES], **given)
        assert render(process, PLAIN, tools=tools, generate=generate, bos_token="<s>") == expected


BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a doubled text": "{% set n = namespace(a='x') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "a large number": "{% set x = 10 ** (10 ** 8) %}{{ x % 7 }}",
    "a wide format": "{{ '%9999999999d' % 1 }}",
    "a wide field": "{{ '{:>9999999999}'.format(1) }}",
    "a padded text": "{{ 'a'.ljust(10**11) }}",
    "a nest of lists": "{% set n = namespace(a=['x']) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
    "a comparison": "{% set n = namespace(a=1, b=1) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
    "{% endfor %}{{ n.a == n.b }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "filler": "{{ lipsum(n=10**9) }}",
    "batches": "{{ [1] | batch(10**10, 0) | list }}",
    "brackets": "{{" + "(" * 100_000,
    "only for long conversations": "{% if messages | length > 1 %}{{ 'a' * 10**10 }}{% endif %}",
}


LIMITS = r"took over 0.5 s of the processor's time|needs over 1024 MiB of memory|calls itself too deeply"


@pytest.mark.parametrize("kind", BOMBS)
def test_a_template_that_takes_too_much_is_an_error(process, kind):
    begin = time.monotonic()
    with pytest.raises(TemplateFailed, match=LIMITS):
        render(process, BOMBS[kind])
    assert time.monotonic() - begin < 60
    assert render(process, "{{ messages | length }}") == "2"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content.nothing.more }}", "UndefinedError"),
        ("{% nonsense %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError|UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_what_a_template_raises_is_told(process, template, words):
    with pytest.raises(TemplateFailed, match=words):
        render(process, template)


def test_a_process_that_dies_is_replaced(process):
    assert render(process, "{{ 1 }}") == "1"
    os.kill(process._child.pid, signal.SIGKILL)
    with pytest.raises(TemplateFailed, match="its process died"):
        render(process, "{{ 1 }}")
    assert render(process, "{{ 1 }}") == "1"


def test_threads_get_their_own_answers(process):
    found = {}

    def ask(number):
        texts = [f"{number} {i}" * 999 for i in range(20)]
        found[number] = [render(process, "{{ messages[0].content }}", [{"role": "user", "content": text}]) for text in texts]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [f"{number} {i}" * 999 for i in range(20)] for number in range(8)}


def test_a_renderers_template_is_bounded(tokenizer_of, monkeypatch):
    renderer = tokenizer_of(PLAIN)
    assert renderer.render([Message("user", "u")], (), generate=False).endswith("user: u\nnull")
    renderer = tokenizer_of(BOMBS["only for long conversations"])
    with pytest.raises(ValueError, match=r"cannot render the roles \['user', 'user'\]: it needs over 1024 MiB of memory"):
        renderer.render([Message("user", "u")] * 2, (), generate=False)


@pytest.fixture
def tokenizer_of():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from whet.data.template import Renderer

    def make(template):
        made = Tokenizer(models.WordLevel({"<s>": 0, "u": 1}, unk_token="<s>"))
        return Renderer(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<s>", bos_token="<s>", chat_template=template))

    return make


def test_a_forked_process_has_its_own(process):
    assert render(process, "{{ 1 }}") == "1"
    child = os.fork()
    if not child:
        os._exit(0 if process._child is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render(process, "{{ 2 }}") == "2" and TEMPLATES is not process
