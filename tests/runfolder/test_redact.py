import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config import dump_toml
from whet.runfolder.messages import own_message, without_quotes
from whet.runfolder.redact import SECRET, Redactor, is_secret_name


def redactor(variables=None, homes=("/home/alice",), users=("alice",)) -> Redactor:
    return Redactor(variables or {}, homes, users)


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "apiKey", "APIKey", "api-key", "OPENAI_API_KEY", "apikey", "access_key", "AWS_ACCESS_KEY_ID"),
        *("AWS_SECRET_ACCESS_KEY", "basic_auth"),
        *("token", "hf_token", "HF_TOKEN", "hfToken", "HFToken", "auth_token", "access_token", "access_tokens", "hub_token", "oauth_token"),
        *("password", "smtpPassword", "passwd", "db_pwd", "passphrase", "secret", "client_secret", "secrets", "credential", "credentials"),
        *("authorization", "Authorization", "Proxy-Authorization", "cookie", "set-cookie", "private_key", "auth", "--api-key"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert is_secret_name(name, variable=True)


@pytest.mark.parametrize(
    "name",
    [
        *("max_tokens", "max_turn_tokens", "stop_token_ids", "label_key", "prompt_key", "key", "tokens_per_second", "tokenizer", "tokens"),
        *("num_tokens", "pad_token", "eos_token", "per_token", "token_mean", "tokens_key", "author", "authors", "passing", "pass_reward"),
        *("TOKENIZERS_PARALLELISM", "keyword", "secretary", "cache_tokens", "max_tokens_per_device", "", "_", "cookbook", "metadata_keys"),
    ],
)
def test_names_of_no_secrets(name):
    assert not is_secret_name(name)


def test_variables_have_more_secrets_and_the_working_folder_is_none():
    for name in ("STRIPE_KEY", "SMTP_PASS", "GITLAB_PAT", "SENTRY_DSN", "MYSQL_PWD"):
        assert is_secret_name(name, variable=True)
    for name in ("PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "GIT_AUTHOR_NAME", "PATH", "LS_COLORS"):
        assert not is_secret_name(name, variable=True)


@pytest.mark.parametrize(
    "value",
    [
        *("sk-abcdefgh12345678", "sk-proj-A1b2C3-E5f6_G7", "sk_live_abcdefgh1234", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz", "hf_a1b2c3d4"),
        *("ghp_abcdefghijklmnop1234", "gho_abcdefgh12", "github_pat_11ABCDEFG_abcdefgh", "glpat-abcdefgh-1234", "AKIAIOSFODNN7EXAMPLE"),
        *("ASIAIOSFODNN7EXAMPLE", "xoxb-123456789012-abcdef", "AIzaSyA1234567890abcdefghijklmnopqrstu", "npm_abcdefghijklmnopqrst1234"),
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabcdef==\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk",
    ],
)
@pytest.mark.parametrize("around", ["{}", "see {}, then", "x={}", '{{"a": "{}"}}', "({})", "curl {}"])
def test_what_looks_like_a_secret_goes_wherever_it_is(value, around):
    for clean in (redactor().text(around.format(value)), redactor().code(around.format(value)), redactor().tree([around.format(value)])[0]):
        assert value not in clean and SECRET in clean
        assert not any(part in clean for part in value.split("\n") if len(part) > 6)


@pytest.mark.parametrize(
    "text",
    [
        *("task-force-alpha-one", "risk-adjusted-return", "hf_overrides", "use sk-learn", "the_gh_page", "Tom has 3 apples"),
        *("max_tokens = 512, stop_token_ids=[1, 2], label_key='answer'", "tokens_per_second/rollout: 1234.5", "https://example.org/a?b=c"),
        *("sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "12:30:01 step 3/10  reward 0.41", "a::token x"),
    ],
)
def test_what_is_no_secret_stays(text):
    assert redactor().text(text) == text
    assert redactor().code(text) == text
    assert redactor().tree({"x": [text]}) == {"x": [text]}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("api_key=abc", "api_key=<secret>"),
        ("api_key = 'a b', x = 'c d'", "api_key = \"<secret>\", x = 'c d'"),
        ('{"password": "a \\"b\\" c", "n": 3}', '{"password": "<secret>", "n": 3}'),
        ("hf_token: abc; ok", "hf_token: <secret>; ok"),
        ("reward.options.api_key=abc", "reward.options.api_key=<secret>"),
        ('options={api_key="a b", n=3}', 'options={api_key="<secret>", n=3}'),
        ("auth.user=abc", "auth.user=<secret>"),
        ("secrets=['a', 'b'] x", "secrets=<secret> x"),
        ("run --api-key abc --n 3", "run --api-key <secret> --n 3"),
        ("Authorization: Basic abc def", "Authorization: <secret>"),
        ("Cookie: a=b; c=d\nnext", "Cookie: <secret>\nnext"),
        ("with Bearer abcdef, then", "with Bearer <secret>, then"),
        ("https://bob:pa:ss@host/x", "https://<secret>@host/x"),
        ("postgres://bob:p@ss@host:5432/db", "postgres://<secret>@host:5432/db"),
        ('a = "{\\"token\\": \\"abc\\"}"', 'a = "{\\"token\\": "<secret>"}"'),
        ("a=b=c&password=d", "a=b=c&password=<secret>"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/<secret>"),
    ],
)
def test_named_secrets_in_text(text, clean):
    assert redactor().text(text) == clean
    assert redactor().text(clean) == clean


def test_code_keeps_names_and_loses_what_is_written_out():
    clean = redactor().code
    assert clean("token = tokens[0]") == "token = tokens[0]"
    assert clean('client = Client(api_key="abc def", n=3)') == 'client = Client(api_key="<secret>", n=3)'
    assert clean("password = f'abc'") == 'password = "<secret>"'
    assert clean('api_key = os.environ["X"]') == 'api_key = os.environ["X"]'


def test_text_with_many_equals_signs_takes_no_recursion():
    text = "a=" * 20000 + "password=abc"
    assert redactor().text(text) == "a=" * 20000 + "password=<secret>"


def test_values_of_secret_variables_go_wherever_they_are():
    clean = redactor({"SOME_API_KEY": 'sword"fish\né', "MY_TOKEN": "ab3d", "PLAIN": "visible", "X_SECRET": "abc", "Y_SECRET": "true"})
    assert clean.text("a sword x") == "a sword x"
    assert clean.text('see sword"fish\né.') == f"see {SECRET}."
    assert clean.shapes(json.dumps({"x": 'sword"fish\né'})) == json.dumps({"x": SECRET})
    assert clean.text(repr('sword"fish\né')) == f"'{SECRET}'"
    assert clean.text("ab3d ab3de (ab3d) xab3d") == f"{SECRET} ab3de ({SECRET}) xab3d"
    assert clean.text("visible abc true") == "visible abc true"
    assert clean.tree({"x": ["ab3d", {"ab3d": "visible"}]}) == {"x": [SECRET, {SECRET: "visible"}]}


def test_a_secret_of_several_lines_goes_line_by_line():
    clean = redactor({"CA_KEY": "first line of it\n  second line of it\nx"})
    assert clean.text("    second line of it") == f"    {SECRET}"


def test_secrets_of_settings_and_commands_are_found_elsewhere():
    clean = redactor()
    auth = {"user": "Bob-77", "mode": "basic", "on": True, "pin": 73912}
    clean.learn_tree({"reward": {"options": {"auth": auth, "label_key": "answer"}}})
    clean.learn_command("whet train a.toml 'env.options={password=\"open sesame\", n=1}' reward.options.token='x9 y8' n=3")
    text = "Bob-77 basic True 73912 answer, 'open sesame', x9 y8, n=3"
    assert clean.text(text) == f"{SECRET} basic True {SECRET} answer, '{SECRET}', {SECRET}, n=3"
    assert clean.tree({"pid": 73912, "n": 7391}) == {"pid": SECRET, "n": 7391}


def test_commands():
    clean = redactor()
    assert clean.command("whet train a.toml n=1 'reward.options.api_key=a b'") == "whet train a.toml n=1 'reward.options.api_key=<secret>'"
    assert clean.command("whet x --token abc --password=def --keys") == "whet x --token '<secret>' '--password=<secret>' --keys"
    assert clean.command("whet x --token --keys /home/alice/x") == "whet x --token --keys '~/x'"
    assert "a b" not in clean.command("whet train 'reward.options={api_key=\"a b\"}'")
    assert "abc" not in clean.command("unclosed ' api_key=abc")


def test_folders_and_names():
    clean = redactor()
    assert clean.text("/home/alice/runs/x /home/alice") == "~/runs/x ~"
    assert clean.text("/home/alice2/x /mnt/home/alice/y") == "/home/alice2/x /mnt/home/<user>/y"
    assert clean.text("/scratch/alice/runs, alice said, /x/alices") == "/scratch/<user>/runs, alice said, /x/alices"
    assert redactor(homes=("C:\\Users\\Al",), users=()).shapes(json.dumps("C:\\Users\\Al\\x")) == json.dumps("~\\x")


def test_this_process(monkeypatch, tmp_path):
    home = tmp_path / "somebody-31"
    home.mkdir()
    for name, value in {"HOME": str(home), "LOGNAME": "somebody-32", "THEIR_API_KEY": "k-4711-x"}.items():
        monkeypatch.setenv(name, value)
    clean = Redactor.of_process()
    assert clean.text(f"{home}/a /data/somebody-32/b k-4711-x") == f"~/a /data/<user>/b {SECRET}"


KEYS = st.sampled_from(["api_key", "hf_token", "password", "max_tokens", "label_key", "name", "options"])
VALUES = st.recursive(
    st.text(max_size=20) | st.integers(0, 10**6) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def paths(tree, path=()):
    if isinstance(tree, dict | list):
        yield path, type(tree)
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from paths(value, (*path, key))
    else:
        yield path, None


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_settings_keep_their_structure(tree):
    clean = redactor().tree(tree)
    assert list(paths(clean)) == list(paths(tree))
    assert json.loads(json.dumps(clean)) == clean
    assert tomllib.loads(dump_toml(clean)) == clean


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_nothing_under_a_secret_key_stays(tree):
    def leaves(node, secret=False):
        if isinstance(node, dict):
            for key, value in node.items():
                yield from leaves(value, secret or key in ("api_key", "hf_token", "password"))
        elif isinstance(node, list):
            for value in node:
                yield from leaves(value, secret)
        elif secret:
            yield node

    assert all(leaf == SECRET or isinstance(leaf, bool) for leaf in leaves(redactor().tree(tree)))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("reward 'math' has no option 'speed'", "reward 'math' has no option 'speed'"),
        ("the label 'Tom has 3' is odd", "the label <9 characters> is odd"),
        ("row {'prompt': \"it's Tom's\", 'n': 3}", "row {'prompt': <10 characters>, 'n': 3}"),
        ("the run's folder and the runs' model", "the run's folder and the runs' model"),
        (f"key '{'a' * 40}' and '{'a' * 41}'", f"key '{'a' * 40}' and <41 characters>"),
        ("'a\\'b c' 'd'", "<6 characters> 'd'"),
        ("a\\nb 'a\\nb'", "a\\nb <4 characters>"),
        ("'数学'", "<2 characters>"),
        ('value = "Tom has 3 apples and...', "value = <23 characters>"),
        ("'one\ntwo' three", "<7 characters> three"),
        ("the label 'it's Tom's' is odd", "the label <10 characters> is odd"),
        ("it is '' and \"\"", "it is '' and \"\""),
    ],
)
def test_quotes_that_are_text_go(text, clean):
    assert without_quotes(text) == clean


@given(st.text(), st.sampled_from(["'", '"', "repr"]))
def test_no_quoted_text_with_white_space_gets_through(text, mark):
    quoted = repr(text) if mark == "repr" else json.dumps(text)
    if any(char.isspace() for char in text.strip()):
        shown = without_quotes(f"row {quoted} is odd")
        assert shown.startswith("row <") and shown.endswith(" characters> is odd")


def test_a_failed_rollouts_message_loses_the_failures():
    from whet.rollout.report import RolloutFailed, require_valid
    from whet.types import Failure, Group, Outcome, Task, Trajectory

    task = Task("t", "what has Tom?")
    failure = Failure("BadThing", "Tom has\n3 apples", "env.step", "Traceback (most recent call last):\nBadThing: Tom has\n3 apples\n")
    with pytest.raises(RolloutFailed) as caught:
        require_valid([Group(task, (Trajectory("t/0", task, (), Outcome.ENV_ERROR, error=failure),))], "rollout 3")
    assert "Tom has" in str(caught.value)
    num_more = str(caught.value).count("\n")
    assert own_message(str(caught.value)) == f"rollout 3: all 1 trajectories failed <{num_more} lines left out>"
