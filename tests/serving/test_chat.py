"""Chat templates of the public models' shapes, rendered beside the library transformers, and templates that fail."""

# ruff: noqa: E501  (templates keep the lines that public ones have)

import pytest

from kinformer.runtime.errors import KinformerError
from tests.interop.peers import blank_tokenizer

pytest.importorskip("jinja2")
from kinformer.lab.serving.fields import MOST_CHARACTERS, ChatTemplate, FieldError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
TURNS = [
    {"role": "user", "content": "  Is a < b & c? \n"},
    {"role": "assistant", "content": "Caf\u00e9 'no' \"yes\"."},
    {"role": "user", "content": "\u65e5\u672c {{ 1 }} {% x %}"},
]
CHAT = [{"role": "system", "content": "Be brief."}, *TURNS]
CALLED = [
    CHAT[0],
    TURNS[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"z": 1, "a": "\u00e9<b>"}}}],
    },
    {"role": "tool", "name": "look", "content": '{"z": [1, 2]}'},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks things up: \u00e9 & <b>.",
            "parameters": {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}},
        },
    }
]
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate!') }}{% endif %}
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""
LLAMA_3 = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "Year: " + strftime_now("%Y") + "\\n\\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}{%- for call in message.tool_calls %}{{- call.function|tojson }}{%- endfor %}{{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{% for message in rest %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
PHI = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') %}{{'<|user|>' + '\\n' + message['content'] + '<|end|>' + '\\n' + '<|assistant|>' + '\\n'}}
{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>' + '\\n'}}{% else %}{% continue %}{% endif %}{% endfor %}"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}{%- endif %}
        {%- if loop.index0 > ns.last_query_index %}{{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}{{- '<|im_start|>user\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}
{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<\uff5cUser\uff5c>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<\uff5cAssistant\uff5c>' + content + '<\uff5cend of sentence\uff5c>'}}{%- endif %}
{%- endfor -%}{% if add_generation_prompt %}{{'<\uff5cAssistant\uff5c><think>\\n'}}{% endif %}"""
GENERATION = """{% for message in messages %}{% if message.role == 'assistant' %}
{%- generation -%}{% set inner = message.content | trim %}{{ inner }}{{ eos_token }}{%- endgeneration %}
{% else %}[{{ message.role }}] {{ message.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endif %}{% endfor %}{{ inner is defined }}"""
DATED = """{{ strftime_now('%Y') }}|{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ {'b': 1, 'a': [none, true]} | tojson(separators=(',', ':'), sort_keys=true) }}"""
DEFINED = """{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ cls_token is defined }} {{ unk_token }} {{ pad_token }}
{% if tools is not none %}You have tools.{% endif %}
{% for document in documents or [] %}{{ document.title }}{% endfor %}{{ add_generation_prompt }}"""
SHAPES = {
    name.lower(): text
    for name, text in list(globals().items())
    if isinstance(text, str) and "{" in text and name.isupper()
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    blank_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def template(folder, text, special=SPECIAL):
    (folder / "chat.jinja").write_text(text, encoding="utf-8")
    return ChatTemplate(folder / "chat.jinja", special_tokens=special)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("messages", "names"),
    [
        (CHAT, {}),
        (TURNS, {"add_generation_prompt": False}),
        (CALLED, {"tools": TOOLS}),
        (TURNS, {"documents": [{"title": "One", "text": "two"}], "enable_thinking": False}),
    ],
)
def test_renderings_are_those_of_transformers(shape, messages, names, tokenizer, tmp_path):
    names = {"add_generation_prompt": True} | names
    ours = template(tmp_path, SHAPES[shape])
    try:
        theirs = tokenizer.apply_chat_template(messages, chat_template=SHAPES[shape], tokenize=False, **names)
    except Exception as error:
        with pytest.raises(FieldError, match=str(error)[:20]):
            ours.prompt(messages, **names)
        assert shape == "llama_2"  # which knows no tools
        return
    assert ours.prompt(messages, **names) == theirs


def test_a_dozen_shapes_are_compared():
    assert len(SHAPES) >= 12


def test_a_run_that_names_no_special_tokens_adds_empty_ones(tmp_path):
    assert template(tmp_path, "{{ bos_token + 'x' + eos_token }}", None).prompt(TURNS) == "x"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('Roles must\n alternate!') }}", "Roles must alternate!"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ 'a' * 10 ** 9 }}", "more than"),
        ("{{ 10 ** (9 ** 9) }}", "more than"),
        ("{% for i in range(90000) %}{{ messages[0].content * 99 }}{% endfor %}", "more than"),
        ("{{ {1: 2}[3].x }}", "UndefinedError"),
        ("{{ messages | tojson(indent='x' ~ nothing.x) }}", "UndefinedError"),
        ("{{ 'a'.ljust(10 ** 17) }}", "MemoryError"),
        ("{{ raise_exception('') }}", "it gives no reason"),
    ],
)
def test_a_template_that_fails_is_one_sentence(text, reason, tmp_path):
    with pytest.raises(FieldError, match=reason) as caught:
        template(tmp_path, text).prompt(TURNS)
    assert caught.value.param == "messages" and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["{% for %}", "{{ x", "{% generation %}", "(" * 9 + "{{ " + "(" * 9000 + " }}"])
def test_a_file_that_is_not_a_template_is_refused(text, tmp_path):
    with pytest.raises(KinformerError, match="chat.jinja: is not a Jinja template") as caught:
        template(tmp_path, text)
    assert "\n" not in str(caught.value)
    (tmp_path / "chat.jinja").write_bytes(b"\xff{{")
    with pytest.raises(KinformerError, match="chat.jinja: is not a Jinja template .UnicodeDecodeError"):
        ChatTemplate(tmp_path / "chat.jinja")


def test_what_may_be_rendered_is_bounded(tmp_path):
    assert len(template(tmp_path, "{{ 'a' * 1000 }}").prompt(TURNS)) == 1000 < MOST_CHARACTERS
