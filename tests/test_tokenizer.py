"""Tokenizers against transformers, sentencepiece and themselves."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import gguf
import numpy as np
import pytest
import sentencepiece
from tiny import CORPUS, copy_of, new_folder, tiny_model
from tiny_gguf import tiny_gguf
from transformers import AutoTokenizer

from ms_spec.models.sources import resolve
from ms_spec.models.tokenizer import open_tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "12345 don't DON'T it's",
    "你好。世界 😀👩‍👩‍👧 naïve é",
    "a\n\n b\r\n\tc   \n",
    "<bos>in text<eos> <|user|>x",
    "<s>x</s> y<unk>",
    "x" * 200,
    CORPUS,
]
chance = random.Random(0)
TEXTS += ["".join(chance.choice("ab 1é\n'<>sS你🙂.,▁") for _ in range(chance.randrange(40))) for _ in range(100)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "cache"))


def equal(ours, theirs):
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special), (text, special)
        ids = theirs.encode(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == expected
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)


def changed(folder, **fields):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.update(fields)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True},
        {"tokenizer_class": "LlamaTokenizer", "bos_token": None, "eos_token": None},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {"additional_special_tokens": ["<|user|>", "<new>"]},
        {"bos_token": {"content": "<bos>", "__type": "AddedToken", "special": True}},
        {"added_tokens_decoder": {"600": {"content": "<|extra|>", "special": True, "normalized": False}}},
    ],
)
def test_directories_equal_autotokenizer(fields):
    folder = changed(copy_of(tiny_model("llama")), **fields)
    equal(open_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder)))


@pytest.mark.parametrize("name", ["TokenizersBackend", "NoSuchTokenizer", None])
def test_unknown_tokenizer_classes(name):
    original = tiny_model("llama")
    folder = changed(copy_of(original), tokenizer_class=name)
    equal(open_tokenizer(folder), AutoTokenizer.from_pretrained(str(original)))
    (folder / "tokenizer_config.json").unlink()
    assert open_tokenizer(folder).encode("Hello") == open_tokenizer(original).encode("Hello")


@pytest.fixture(scope="module")
def spm():
    """A directory with a sentencepiece tokenizer.model as Llama 2 has it."""
    folder = new_folder()
    (folder / "corpus.txt").write_text(CORPUS + "\n" + " ".join(TEXTS[:4]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_sentencepiece_is_converted_once(spm, tmp_path):
    ours = open_tokenizer(spm)
    equal(ours, AutoTokenizer.from_pretrained(str(spm)))
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 1
    code = (
        "import sys; from ms_spec.models.tokenizer import open_tokenizer; t = open_tokenizer(sys.argv[1]); "
        "print(t.encode('Hello world'), 'transformers' in sys.modules, 'mindspore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(spm)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{ours.encode('Hello world')} False False"


def test_sentencepiece_with_an_unknown_class(spm):
    folder = changed(copy_of(spm), tokenizer_class="TokenizersBackend")
    assert open_tokenizer(folder).encode("Hello world") == open_tokenizer(spm).encode("Hello world")


def spm_gguf(spm):
    model = sentencepiece.SentencePieceProcessor(model_file=str(spm / "tokenizer.model"))
    path = new_folder() / "spm.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    size = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(size)
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i) for i in range(size)])
    writer.add_token_scores([model.get_score(i) for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_gguf_sentencepiece_equals_sentencepiece(spm):
    path, model = spm_gguf(spm)
    for ours in (open_tokenizer(path), open_tokenizer(path)):  # built, then from the cache
        for text in TEXTS:
            if "<" in text or text == "":
                continue  # sentencepiece itself does not know special tokens in text
            assert ours.encode(text) == [1, *model.encode(text)], text
            assert ours.decode(ours.encode(text), True) == model.decode(model.encode(text))


def test_gguf_byte_level_equals_transformers():
    model = tiny_model("qwen2")
    tokenizer = json.loads((model / "tokenizer.json").read_text())["model"]
    folder = copy_of(model)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tokenizer["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in tokenizer["merges"]))
    extra = [f"<|{n}|>" for n in ("user", "assistant")]
    changed(folder, tokenizer_class="Qwen2Tokenizer", unk_token="<pad>", additional_special_tokens=extra)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    equal(open_tokenizer(tiny_gguf(model, "qwen2", pre="qwen2")), theirs)
    equal(open_tokenizer(folder), theirs)
    equal(open_tokenizer(tiny_gguf(model, "llama", pre="gpt-2")), AutoTokenizer.from_pretrained(str(model)))


def test_gguf_word_patterns():
    from tokenizers import Regex, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    theirs = TikTokenConverter(vocab_file=None).pattern
    split = pre_tokenizers.Split(Regex(theirs), "isolated")
    whole = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = open_tokenizer(tiny_gguf(tiny_model("llama"), "llama", pre="llama-bpe"))
    for text in TEXTS:
        assert ours.backend.pre_tokenizer.pre_tokenize_str(text) == whole.pre_tokenize_str(text)
    assert ours.encode("x")[0] == 1
    digits = open_tokenizer(tiny_gguf(tiny_model("llama"), "llama", pre="smollm"))
    pieces = digits.backend.pre_tokenizer.pre_tokenize_str("it's 123")
    assert [p for p, _ in pieces] == ["it", "'s", "Ġ", "1", "2", "3"]


def test_unknown_gguf_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre: 'strange' is not supported; supported: gpt-2"):
        open_tokenizer(tiny_gguf(tiny_model("llama"), "llama", pre="strange"))


def streams(tokenizer, ids, skip, step=1):
    decoder = tokenizer.stream_decoder(skip)
    pieces = [decoder.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    pieces.append(decoder.finish())
    assert "".join(pieces) == tokenizer.decode(ids, skip)
    return pieces


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "gguf sentencepiece"])
def test_streams_join_to_the_whole(kind, spm):
    path = {"byte level": tiny_model("llama"), "sentencepiece": spm}.get(kind) or spm_gguf(spm)[0]
    tokenizer = open_tokenizer(path)
    for text in TEXTS:
        for skip in (True, False):
            pieces = streams(tokenizer, tokenizer.encode(text), skip, step=1 + len(text) % 3)
            if "\ufffd" not in text:
                assert not any("\ufffd" in p for p in pieces)
    numbers = random.Random(1)
    byte_tokens = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i).startswith("<0x")] or range(3, 260)
    for _ in range(300):
        ids = [numbers.randrange(tokenizer.vocab_size + 5) for _ in range(numbers.randrange(30))]
        streams(tokenizer, ids, True)
        streams(tokenizer, ids, False, step=3)
        streams(tokenizer, [numbers.choice(byte_tokens) for _ in ids], True)


def test_streaming_is_prompt_and_linear(spm):
    tokenizer = open_tokenizer(tiny_model("llama"))
    ids = tokenizer.encode("plain words one after the other")
    pieces = streams(tokenizer, ids, True)
    assert all(pieces[:-1]) and pieces[-1] == ""
    pieces = streams(open_tokenizer(spm), open_tokenizer(spm).encode("plain words one after the other", False), True)
    assert all(pieces[1:-1]) and pieces[-1] == ""


def test_special_tokens_and_vocabulary():
    tokenizer = open_tokenizer(tiny_model("llama"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert (
        tokenizer.token_text(2) == "<eos>" and tokenizer.token_text(10**6) == "" and tokenizer.special_ids >= {0, 1, 2}
    )
    assert tokenizer.token_id("<eos>") == 2
    assert tokenizer.decode([2, 10**6, 5], True) == tokenizer.decode([5]) == tokenizer.decode(5)
    assert tokenizer.decode([2, 5]) == "<eos>" + tokenizer.decode([5])


@pytest.fixture(scope="module")
def smollm2():
    """Found before a test gets a cache of its own."""
    return resolve("smollm2-135m").path


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_calls_of_vllm_scripts_equal_transformers(name, smollm2):
    ours = open_tokenizer(tiny_model("llama") if name == "tiny" else smollm2)
    theirs = AutoTokenizer.from_pretrained(str(tiny_model("llama"))) if name == "tiny" else ours.as_transformers()
    talk = [{"role": "user", "content": "Hi, 你好"}, {"role": "assistant", "content": "Yes."}]
    for several in (talk, [talk, talk[:1]]):
        for prompt in (True, False):
            for options in ({"tokenize": False}, {}, {"return_dict": True}, {"padding": False, "truncation": False}):
                expected = theirs.apply_chat_template(several, add_generation_prompt=prompt, **options)
                got = ours.apply_chat_template(several, add_generation_prompt=prompt, **options)
                # Zeros beside them, token_type_ids, have no use in these models.
                assert got == ({name: expected[name] for name in got} if options.get("return_dict") else expected)
    own = "{{ messages[0].content }} {{ x }}"
    wanted = theirs.apply_chat_template(talk, chat_template=own, tokenize=False, x="y")
    assert ours.apply_chat_template(talk, chat_template=own, tokenize=False, x="y") == wanted
    for text in ("Hello <eos>", ["a", "Hello world"]):
        for special in (True, False):
            got, expected = ours(text, add_special_tokens=special), theirs(text, add_special_tokens=special)
            assert got.input_ids == got["input_ids"] == expected.input_ids
            assert got.attention_mask == expected.attention_mask
    ids = [*theirs.encode("Hello world"), theirs.eos_token_id]
    for skip in ({}, {"skip_special_tokens": True}):
        assert ours.decode(ids, **skip) == theirs.decode(ids, clean_up_tokenization_spaces=False, **skip)
        wanted = theirs.batch_decode([ids, ids[:1]], clean_up_tokenization_spaces=False, **skip)
        assert ours.batch_decode([ids, ids[:1]], **skip) == wanted
    assert ours.decode(np.array(ids)) == ours.decode(ids) and ours.decode(np.int64(5)) == ours.decode([5])
    assert (len(ours), ours.eos_token, ours.bos_token, ours.pad_token) == (
        len(theirs),
        theirs.eos_token,
        theirs.bos_token,
        theirs.pad_token,
    )


def test_what_only_transformers_can_do_is_refused():
    ours = open_tokenizer(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"padding = True: not supported.*as_transformers\(\)"):
        ours("a", padding=True)
    for name in ("return_tensors", "continue_final_message", "truncation"):
        with pytest.raises(ValueError, match=f"{name} = .*: not supported"):
            ours.apply_chat_template([{"role": "user", "content": "Hi"}], **{name: "pt"})
    assert not hasattr(ours("a"), "nothing")


def test_text_that_is_no_unicode():
    tokenizer = open_tokenizer(tiny_model("llama"))
    for call in (tokenizer.encode, tokenizer, lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(
            ValueError, match=r"not valid Unicode: character \d+ is the lone surrogate U.DC80; remove it"
        ):
            call("ab\udc80")
    assert tokenizer.encode("ab") and tokenizer.encode("\U0001f600")


def test_as_transformers():
    folder = tiny_model("llama")
    ours, theirs = open_tokenizer(folder).as_transformers(), AutoTokenizer.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.encode("Hello <eos>") == theirs.encode("Hello <eos>") and ours.eos_token_id == theirs.eos_token_id
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


TEMPLATES = [
    "{% for m in messages %}\n  {% if m.role == 'system' %}\n{% continue %}{% endif %}\n[{{ m.role }}] x\n{% endfor %}",
    "{{ bos_token }}{{ messages | tojson }}{{ '<a> & b' | tojson }}{{ messages[0] | tojson(indent=2) }}{{ eos_token }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%Y') }}{{ tools is none }}",
    "{%- if add_generation_prompt -%} go {%- endif -%}{{ extra }}{{ messages[-1]['content'] | trim }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% break %}{% endfor %}{{ ns.n }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_equal_transformers(template):
    folder = copy_of(tiny_model("llama"))
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "system", "content": "é <b>"}, {"role": "user", "content": " Hi & bye "}]
    theirs = AutoTokenizer.from_pretrained(str(folder))
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, extra="x")
        assert open_tokenizer(folder).render_chat(messages, add_generation_prompt=prompt, extra="x") == expected


def test_chat_templates_where_they_come_from():
    messages = [{"role": "user", "content": "Hi"}]
    model = tiny_model("llama")
    tokenizer = open_tokenizer(model)
    assert tokenizer.render_chat(messages) == "<|user|>Hi<eos><|assistant|>"
    assert tokenizer.encode_chat(messages)[0] == tokenizer.token_id("<|user|>")
    assert open_tokenizer(tiny_gguf(model, "llama")).render_chat(messages) == tokenizer.render_chat(messages)
    several = [{"name": "default", "template": "D"}, {"name": "other", "template": "O{{ messages[0].content }}"}]
    several = open_tokenizer(changed(copy_of(model), chat_template=several))
    assert several.render_chat(messages) == "D" and several.render_chat(messages, template="other") == "OHi"
    assert several.render_chat(messages, template="own {{ messages[0].role }}") == "own user"


def test_chat_faults_are_one_line():
    model = tiny_model("llama")
    messages = [{"role": "user", "content": "Hi"}]

    def refused(match, messages=messages, template=None, tokenizer=None):
        with pytest.raises(ValueError, match=match) as error:
            (tokenizer or open_tokenizer(model)).render_chat(messages, template=template)
        assert "\n" not in str(error.value)

    none = open_tokenizer(changed(copy_of(model), chat_template=None))
    refused("has none .a base model.*; write the prompt out", tokenizer=none)
    refused("only user", template="{{ raise_exception('only user') }}")
    refused("line 1", template="{% if %}")
    refused("chat_template = 3: must be Jinja text", template=3)
    refused("expected an object with role", messages=["Hi"])
    refused("is empty", messages=[])
    refused("", template="{{ messages.append(1) }}")
    refused("", template="{{ ''.__class__.__mro__ }}")


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a usable tokenizer"):
        open_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="neither a directory nor"):
        open_tokenizer(tmp_path / "nothing")
