"""What the Python API takes, and how it refuses the rest: in one line, and a bad prompt of several alone."""

from __future__ import annotations

import numpy as np
import pytest
from test_llm import Letters, ids_of, make
from toy_runner import greedy, idle, reference, sampled

import ms_spec
from ms_spec import cli, job, llm
from ms_spec.errors import RequestError
from ms_spec.models.chat_template import NoTemplate, check_messages
from ms_spec.sampling_params import SamplingParams

GOOD = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("text", ["\ud800abc", "abc\udfff", b"caf\xe9".decode("utf-8", "surrogateescape")])
def test_text_that_is_no_unicode_fails_alone(text):
    engine = make()
    place = next(i for i, letter in enumerate(text) if ord(letter) > 0xD000)
    with pytest.raises(RequestError, match=f"not valid Unicode: character {place} is the lone surrogate U.D") as caught:
        engine.generate(text, greedy(4))
    assert "\n" not in str(caught.value)
    outputs = engine.generate(["fine", text, "good"], greedy(4))
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].prompt == text
    idle(engine._engine)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, True], r"prompt_token_ids\[1\] = True: must be a token id"),
        ([1, 2.0], r"prompt_token_ids\[1\] = 2.0"),
        ([1.5], r"prompt_token_ids\[0\] = 1.5"),
        ({"prompt_token_ids": [1, "2"]}, r"prompt_token_ids\[1\] = '2'"),
        ({"prompt_token_ids": [[1]]}, r"prompt_token_ids\[0\] = \[1\]"),
        ({"prompt_token_ids": "12"}, "must be a list of token ids, not str"),
        ({"prompt_token_ids": 5}, "must be a list of token ids, not int"),
        ({"prompt_token_ids": []}, "empty"),
        (np.array([True, False]), r"prompt_token_ids\[0\] = True"),
        ([1, -1], r"prompt_token_ids\[1\] = -1: not in the vocabulary"),
        ([1, 2, 10**30], r"prompt_token_ids\[2\] = 10{30}: not in the vocabulary"),
        ({"promt": "x"}, "prompt dict field 'promt' is unknown; did you mean 'prompt'"),
        ({"prompt": "x", "prompt_tokens_ids": [1]}, "did you mean 'prompt_token_ids'"),
        ({"prompt": 5}, "prompt = 5: must be a text"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "prompt = 5: must be a text"),
        ({}, "a prompt dict needs"),
    ],
)
def test_wrong_prompts(ids, words):
    engine = make()
    with pytest.raises(RequestError, match=words) as caught:
        engine.generate(ids, greedy(4))
    assert "\n" not in str(caught.value)
    good, bad = engine.generate(["fine", ids], greedy(4))
    assert good.error is None and bad.error == str(caught.value)
    idle(engine._engine)


def test_integers_of_any_kind():
    engine = make()
    wanted = [reference([1, 2, 3], greedy(8))]
    one = [np.int64(1), np.int32(2), np.uint8(3)]
    for prompt in (one, tuple(one), [one], {"prompt_token_ids": one}, [1, np.int64(2), 3], np.array([[1, 2, 3]])):
        assert ids_of(engine.generate(prompt, greedy(8))) == wanted
    output = engine.generate(one, greedy(8))[0]
    assert all(type(token) is int for token in output.prompt_token_ids)


def test_a_bad_conversation_fails_alone():
    engine = make()
    wanted = ids_of(engine.chat(GOOD, greedy(6)))
    wrong = [
        (5, "conversation 1: messages: must be a list of objects with role and content, not int"),
        ([], "conversation 1: messages: is empty"),
        ([*GOOD, {"role": "user"}], "conversation 1: messages[1] has no content"),
        ([{"role": "user", "content": "\ud800"}], "conversation 1: the conversation is not valid Unicode"),
    ]
    for conversation, words in wrong:
        good, bad = engine.chat([GOOD, conversation], greedy(6))
        assert ids_of([good]) == wanted
        assert bad.error.startswith(words) and bad.outputs[0].finish_reason == "error"
    with pytest.raises(RequestError, match=r"^messages\[0\] = 'hi': expected an object"):
        engine.chat(["hi"], greedy(6))
    idle(engine._engine)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (5, " = 5: expected an object with role and content"),
        ({"content": "x"}, " has no role"),
        ({"role": 1, "content": "x"}, ".role = 1: must be a text"),
        ({"role": "user", "content": None}, ".content = None: must be a text"),
        ({"role": "user", "content": 5}, ".content = 5: must be a text"),
        ({"role": "user", "content": ["x"]}, ".content[0] = 'x': expected {'type': 'text'"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            ".content[1].type = 'image_url': not supported; allowed: 'text'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text = None"),
    ],
)
def test_messages_name_what_is_wrong(message, words):
    with pytest.raises(ValueError) as caught:
        check_messages([*GOOD, message])
    assert str(caught.value).startswith("messages[1]" + words)


def test_messages_that_are_right():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert check_messages((*GOOD, call)) == [*GOOD, call]


class Templates(Letters):
    def render_chat(self, messages, template="default", **options):
        if template == "none":
            raise NoTemplate("there is none")
        return f"{template} {sorted(options.items())}"


def test_chat_options_reach_the_template():
    engine = make()
    engine._parts.tokenizer = Templates()
    one = engine.chat(GOOD, greedy(2), chat_template="own", tools=[1], chat_template_kwargs={"think": False})[0]
    assert one.prompt == "own [('add_generation_prompt', True), ('think', False), ('tools', [1])]"
    with pytest.raises(ValueError, match="there is none"):
        engine.chat([GOOD, GOOD], greedy(2), chat_template="none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chat_template_kwargs": 3}, "chat_template_kwargs = 3: must be a dict"),
        ({"chat_template_kwargs": {"messages": 3}}, "chat_template_kwargs.messages: give it as chat's own argument"),
        ({"chat_template_kwargs": {"template": "x"}}, "own argument chat_template"),
        ({"template": "x"}, "own argument chat_template"),
        ({"chat_template_kwargs": {3: 1}}, "chat_template_kwargs has the name 3: must be a text"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt = 'no': must be True or False"),
    ],
)
def test_wrong_chat_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        make().chat(GOOD, greedy(2), **options)


class Deaf(Letters):
    def encode(self, text, add_special_tokens=True):
        return []


def test_a_text_without_tokens_is_said_to_be_one():
    engine = make()
    engine._parts.tokenizer = Deaf()
    for ask in (lambda: engine.generate("\N{SNOWMAN}", greedy(2)), lambda: engine.chat(GOOD, greedy(2))):
        with pytest.raises(RequestError, match="the tokenizer makes no token of it"):
            ask()


def test_parameters_are_checked_when_they_are_used():
    engine = make()
    for name, value in (("temperature", -5), ("max_tokens", 0), ("top_p", 2), ("stop", [""]), ("n", 10**9)):
        params = greedy(4)
        setattr(params, name, value)
        with pytest.raises(ValueError, match=f"^{name}"):
            engine.generate([1, 2], params)
        with pytest.raises(ValueError, match=rf"^sampling_params\[1\]: {name}"):
            engine.generate([[1, 2]] * 2, [greedy(4), params])
    params = greedy(20)
    params.stop = "zz"
    assert engine.generate([1, 2], params)[0].error is None
    # What changes later does not concern a request that runs.
    params = greedy(20)
    results = engine.stream([1, 2], params)
    next(results)
    params.max_tokens = 1
    assert [output for _, output in results][-1].outputs[0].token_ids == reference([1, 2], greedy(20))
    for number in (greedy(4, min_tokens=4), sampled(1, None, min_tokens=10**12), sampled(1, top_k=10**30)):
        assert engine.generate([1, 2], number)[0].error is None


def test_checks_come_before_the_model(monkeypatch):
    monkeypatch.setattr(llm, "LLM", lambda *_, **__: pytest.fail("loads"))
    bad = SamplingParams()
    bad.temperature = -5
    for prompts, params, words in (
        ("", None, "empty"),
        ([[]], None, "empty"),
        (None, None, "prompts must be"),
        ({"x": 1}, None, "prompt dict"),
        ("\ud800", None, "Unicode"),
        ([1, True], None, "token id"),
        (["a", "b"], [SamplingParams()], "1 entries for 2 prompts"),
        ("a", {"n": 1}, "must be SamplingParams"),
        ("a", [None], r"sampling_params\[0\] is a NoneType"),
        ("a", bad, "temperature = -5"),
    ):
        with pytest.raises(ValueError, match=words):
            ms_spec.generate(prompts, "nowhere", params)
    with pytest.raises(ValueError, match="speculative_config"):
        ms_spec.generate("a", "nowhere", speculative_config="ngram")


def test_wrong_calls_fail_at_the_call():
    engine = make()
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match="prompts must be a text"):
            call(None)
        with pytest.raises(ValueError, match="must be SamplingParams"):
            call([], "x")
        with pytest.raises(ValueError, match="1 entries for 0"):
            call([], [greedy()])
    late = engine.stream([1, 2], greedy(4))
    engine.close()
    for call in (engine.generate, engine.stream, engine.chat):
        with pytest.raises(RuntimeError, match="closed"):
            call([[]])
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([])
    with pytest.raises(RuntimeError, match="closed"):
        next(late)


def test_a_budget_without_room_for_drafts_is_told(caplog):
    spec = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    make(max_num_batched_tokens=2, max_num_seqs=2, **spec)
    assert "max_num_batched_tokens = 2" in caplog.text and "max_num_seqs = 2" in caplog.text and "use 10" in caplog.text
    caplog.clear()
    make(max_num_batched_tokens=2, max_num_seqs=2)
    make(max_num_batched_tokens=4, max_num_seqs=2, **spec)
    assert not caplog.text


def test_a_chat_prompt_of_the_command_line_fails_alone(monkeypatch, capsys):
    def render_chat(self, messages, add_generation_prompt=True):
        if messages[0]["content"] == "b":
            raise ValueError("messages: the chat template refuses them: b")
        return messages[0]["content"]

    monkeypatch.setattr(Letters, "render_chat", render_chat)
    monkeypatch.setattr(job, "make_llm", lambda arguments: make())
    code = cli.run_app(["generate", "--chat", "--json", "-p", "a", "-p", "b", "--max-tokens", "4"])
    out, err = capsys.readouterr()
    assert code == 2 and '"prompt": "b"' in out.splitlines()[1]
    assert err.count("\n") == 1 and "prompt 2: messages: the chat template refuses them" in err
