"""A server in a thread, and the clients that people have: OpenAI's, and sockets that do not behave."""

import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

import kinformer
from kinformer.lab.runs.options import ServeOptions
from kinformer.lab.serving import answers, fields
from kinformer.runtime.errors import KinformerError
from tests.comparison.browser import Browser

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    (place / "text.txt").write_text("It was the best of times, it was the worst of times. " * 80)
    options = {"recipe": "tiny", "steps": 4, "batch_size": 2, "length": 32, "threads": 1, "device": "cpu"}
    kinformer.train("linear-transformer", data=place / "text.txt", out=place / "run", quiet=True, **options)
    (place / "chat.jinja").write_text(TEMPLATE)
    return place / "run"


def built(folder, **options):
    from kinformer.lab.serving.server import Server

    return Server(folder, ServeOptions(**{"port": 0, "quiet": True, "threads": 1, "device": "cpu"} | options))


@contextmanager
def serving(folder, **options):
    server = built(folder, **options)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, max_streams=4, max_waiting=8, chat_template=str(folder.parent / "chat.jinja")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def get(server, path):
    with urlopen(f"{server.url}{path}", timeout=20) as answer:
        return answer.read().decode()


def post(server, data, path="/v1/completions", kind="application/json"):
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    request = Request(f"{server.url}{path}", data, {"content-type": kind})
    try:
        with urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def continued(folder, prompt, new, seed, **options):
    return "".join(kinformer.stream(folder, prompt, max_new_tokens=new, seed=seed, threads=1, **options))


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_completions_are_those_of_generate(client, folder):
    assert [model.id for model in client.models.list()] == ["run"]
    settings = [("It was ", 12, seed, {"temperature": 0.5 + seed / 4}) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(
            lambda item: client.completions.create(
                model="run", prompt=item[0], max_tokens=item[1], seed=item[2], **item[3]
            ),
            settings,
        )
        texts = [answer.choices[0].text for answer in answers]
    assert texts == [continued(folder, prompt, new, seed, **options) for prompt, new, seed, options in settings]


def test_a_stream_adds_up_to_the_answer(client):
    settings = {"model": "run", "prompt": ["It was ", "the best"], "n": 2, "max_tokens": 9, "seed": 3}
    whole = client.completions.create(**settings)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 4
    assert whole.usage.completion_tokens == 36 and whole.usage.prompt_tokens == 15
    texts, usage = [""] * 4, None
    for part in client.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and usage == whole.usage


def test_echo_scores_the_prompt_of_every_copy(client):
    answer = client.completions.create(
        model="run", prompt="It was", max_tokens=3, n=2, echo=True, logprobs=2, temperature=0, seed=0
    )
    for choice in answer.choices:
        scores = choice.logprobs
        assert choice.text.startswith("It was") and len(scores.tokens) == len(scores.token_logprobs) == 9
        assert scores.token_logprobs[0] is None and max(scores.token_logprobs[1:]) < 0
        assert scores.text_offset[:6] == list(range(6)) and len(scores.top_logprobs[-1]) == 2


def test_a_token_that_ends_a_text_ends_it(folder):
    text = continued(folder, "It was ", 40, 1, temperature=0.9)
    end = next(letter for letter in text[8:] if ord(letter) < 128)
    settings = {"model": "run", "prompt": "It was ", "max_tokens": 40, "seed": 1, "temperature": 0.9}
    with serving(folder, set={"input.eos_token": ord(end)}) as server:
        _, answer = post(server, settings | {"return_token_ids": True})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(end)], "stop")
    assert choice["token_ids"] and ord(end) not in choice["token_ids"]


def test_a_stop_string_ends_the_text_before_it(client, folder):
    text = continued(folder, "It was ", 40, 1, temperature=0.9)
    stop = text[10:12]
    answer = client.completions.create(
        model="run", prompt="It was ", max_tokens=40, seed=1, temperature=0.9, stop=[stop]
    )
    assert answer.choices[0].text == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"


def test_a_chat_follows_the_template(client, folder):
    messages = [{"role": "user", "content": "the best?"}]
    answer = client.chat.completions.create(model="run", messages=messages, max_tokens=8, seed=2, temperature=0.7)
    assert answer.choices[0].message.content == continued(folder, "user: the best?\nassistant: ", 8, 2, temperature=0.7)
    pieces = client.chat.completions.create(
        model="run", messages=messages, max_tokens=8, seed=2, temperature=0.7, stream=True
    )
    parts = [piece.choices[0].delta.content or "" for piece in pieces]
    assert "".join(parts) == answer.choices[0].message.content


def test_health_metrics_and_the_page(server, client):
    client.completions.create(model="run", prompt="a", max_tokens=2)
    health = json.loads(get(server, "/health"))
    assert health["status"] == "ok" and health["model"] == "run"
    metrics = get(server, "/metrics")
    assert "# TYPE kinformer_new_tokens_total counter" in metrics and "kinformer_streams_limit 4" in metrics
    page = get(server, "/")
    assert "<title>" in page and "http" not in page.split("<body>")[1]


def test_the_page_continues_a_prompt_in_a_browser(server, folder):
    browser = Browser()
    try:
        browser.open(server.url)
        text = "document.getElementById('text').textContent"
        until(lambda: browser.js("document.getElementById('name').textContent") == "run")
        browser.js("""
            for (const [id, value] of Object.entries({prompt: "It was ", tokens: 12, temperature: 0.8, seed: 3}))
                document.getElementById(id).value = value;
            window.seen = new Set();
            new MutationObserver(() => seen.add(document.getElementById("text").textContent.length))
                .observe(document.getElementById("text"), {childList: true, characterData: true, subtree: true});
            document.getElementById("go").click();
        """)
        until(lambda: browser.js("!document.getElementById('go').disabled && seen.size > 1"))
        assert browser.js(text) == "It was " + continued(folder, "It was ", 12, 3, temperature=0.8)
        assert browser.js("seen.size") > 3  # it came piece by piece
        facts = "document.getElementById('facts').textContent"
        until(lambda: ", 0 streams" in browser.js(facts))
        for width in (390, 1366):
            browser.size(width)
            assert browser.js("document.documentElement.scrollWidth") <= width
        browser.js("document.getElementById('tokens').value = 100000; document.getElementById('go').click()")
        until(lambda: server.engine.rows == 1)
        until(lambda: re.match(r"[1-9][\d,]* bytes of state, 1 streams", browser.js(facts)))
        browser.js("document.getElementById('stop').click()")
        until(lambda: server.engine.rows == 0)
        until(lambda: re.match(r"0 bytes of state \([\d,]+ at most\), 0 streams", browser.js(facts)))
        assert browser.errors == []
    finally:
        browser.close()


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{", 400, "is no JSON"),
        (b"\xff\xfe", 400, "not UTF-8"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b"[]", 400, "no object"),
        ({"model": "run", "prompt": [[1]] * 200_000}, 400, "the body has 400,004 values, names and lists"),
        ({"model": "run", "prompt": [1] * 200_000}, 400, "the body has 200,004 values"),
        ({"model": "run", "prompt": "a", "logit_bias": {str(n): 1 for n in range(100_000)}}, 400, "the body has 200,0"),
        ({"prompt": "a"}, 400, "names no model"),
        ({"model": "gpt-9", "prompt": "a"}, 404, "model is 'gpt-9', but this server has 'run' alone"),
        ({"model": "run"}, 400, "prompt must be"),
        ({"model": "run", "prompt": ""}, 400, ""),
        ({"model": "run", "prompt": [999]}, 400, "999"),
        ({"model": "run", "prompt": "a", "temperatur": 1}, 400, "temperature"),
        ({"model": "run", "prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"model": "run", "prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"model": "run", "prompt": "a", "n": 0}, 400, "n is 0"),
        ({"model": "run", "prompt": "a", "n": 100}, 400, "n is 100, but this server continues at most 4 sequences"),
        ({"model": "run", "prompt": "a", "n": 10**12, "echo": True}, 400, "n is 1,000,000,000,000, but this server"),
        ({"model": "run", "prompt": ["a"] * 100_000}, 400, "prompt holds 100,000 texts, but this server accepts"),
        ({"model": "run", "prompt": "a" * 4000, "n": 4, "echo": True, "logprobs": 20}, 400, "337,344 values"),
        ({"model": "run", "prompt": "a", "max_tokens": 10**9}, 400, "from 0 to 1048576"),
        ({"model": "run", "prompt": "a", "max_tokens": 5.0}, 400, "max_tokens is 5.0 but must be a whole number"),
        ({"model": "run", "prompt": "a", "temperature": 10**400}, 400, "but must be a number below 1e308"),
        ({"model": "run", "prompt": "a", "top_p": 10**400}, 400, "but must be a number below 1e308"),
        ({"model": "run", "prompt": "a", "seed": 10**400}, 400, "seed is 100"),
        ({"model": "run", "prompt": "a", "seed": -1}, 400, "seed is -1 but must be a whole number"),
        ({"model": "run", "prompt": "a", "top_k": 10**400, "n": "a" * 10**6}, 400, "n is 'aaa"),
        ({"model": "run", "prompt": "a", "x" * 10**6: 1}, 400, "valid names are"),
        ({"model": "x" * 10**6, "prompt": "a"}, 404, "model is 'xxx"),
        (
            {"model": "run", "prompt": "a", "presence_penalty": 3},
            400,
            "presence_penalty is 3 but must be a number from",
        ),
        ({"model": "run", "prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty is 0"),
        (
            {"model": "run", "prompt": "a", "logit_bias": {"a": 1}},
            400,
            "logit_bias holds 'a': 1, but must give ids",
        ),
        (
            {"model": "run", "prompt": "a", "logit_bias": {"999": 1}},
            400,
            "logit_bias names token 999, but tokens end at",
        ),
        ({"model": "run", "prompt": "a", "logit_bias": {"9": True}}, 400, "logit_bias holds '9': True"),
        ({"model": "run", "prompt": "a", "stop_token_ids": ["a"]}, 400, "stop_token_ids must be a list of at most 64"),
        ({"model": "run", "prompt": "a", "min_p": 1.5}, 400, "min_p is 1.5"),
        ({"model": "run", "prompt": "a", "stop": ""}, 400, "stop"),
        ({"model": "run", "prompt": "a", "top_p": 7}, 400, "top_p"),
        ({"model": "run", "prompt": "a", "seed": "x"}, 400, "seed"),
    ],
)
def test_a_mistake_is_a_sentence_in_the_form_of_openai(server, data, status, message):
    code, answer = post(server, data)
    error = answer["error"]
    assert code == status and message in error["message"] and error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"] and "--" not in error["message"] and len(error["message"]) < 400


def test_a_field_that_is_unknown_is_named_by_param(server):
    assert post(server, {"model": "run", "prompt": "a", "temperatur": 1})[1]["error"]["param"] == "temperatur"


def test_cuts_of_the_vocabulary_are_those_of_generate(client, folder):
    def text(**options):
        options = {"model": "run", "prompt": "It was ", "max_tokens": 12, "seed": 3, "temperature": 1.0} | options
        return client.completions.create(**options).choices[0].text

    assert text(extra_body={"min_p": 0.2}) == continued(folder, "It was ", 12, 3, temperature=1.0, min_p=0.2)
    assert text(extra_body={"min_p": 0.2}) != text()
    assert text() == text(extra_body={"top_k": -1}) == text(extra_body={"top_k": 0, "min_p": 0})


def test_penalties_and_biases_change_the_drawn_tokens(client, folder):
    def drawn(prompt="It was the", new=24, **extra):
        answer = client.completions.create(
            model="run", prompt=prompt, max_tokens=new, temperature=0, extra_body={"return_token_ids": True, **extra}
        )
        return answer.choices[0].model_extra["token_ids"], answer.choices[0].text

    plain, text = drawn()
    assert len(set(plain)) < len(plain)
    _, penalised = drawn(repetition_penalty=1.7)
    assert penalised == continued(folder, "It was the", 24, 0, temperature=0, repetition_penalty=1.7) != text
    assert drawn(presence_penalty=0.0, frequency_penalty=0)[0] == plain
    # A bias of 100 wins every draw; the penalty of 2 for each of its earlier occurrences does not change that.
    assert drawn(new=5, logit_bias={"65": 100}, frequency_penalty=2.0)[0] == [65] * 5
    # It grows with their number, until the second token wins; a presence penalty does not grow.
    two = {"65": 100, "66": 95}
    assert 66 in drawn(new=6, logit_bias=two, frequency_penalty=2.0)[0]
    assert drawn(new=6, logit_bias=two, presence_penalty=2.0)[0] == [65] * 6
    banned, _ = drawn(logit_bias={str(plain[0]): -100})
    assert plain[0] not in banned
    # A small bias for every letter is an order, so each presence penalty moves on to the next token.
    steps, _ = drawn(new=4, logit_bias={"65": 100, "66": 99, "67": 98, "68": 97}, presence_penalty=2.0)
    assert steps[:2] == [65, 66] and len(set(steps[:2])) == 2


def test_tokens_that_stop_end_the_text_before_them(client):
    answer = client.completions.create(
        model="run", prompt="It was ", max_tokens=40, seed=1, extra_body={"return_token_ids": True}
    )
    tokens = answer.choices[0].model_extra["token_ids"]
    cut = client.completions.create(
        model="run", prompt="It was ", max_tokens=40, seed=1,
        extra_body={"return_token_ids": True, "stop_token_ids": [tokens[20]], "ignore_eos": True},
    ).choices[0]  # fmt: skip
    assert cut.model_extra["token_ids"] == tokens[: tokens.index(tokens[20])] and cut.finish_reason == "stop"


TOOL_TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}\
{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }} {% endfor %}\
{{ message.content }} {% endfor %}"""


def test_tools_are_rendered_by_the_template(client, folder):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Berlin"}'}}
    messages = [
        {"role": "user", "content": "It"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "was"},
    ]
    with pytest.raises(openai.BadRequestError, match="template does not read tools"):
        client.chat.completions.create(model="run", messages=messages, tools=[tool])
    path = folder.parent / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    with serving(folder, chat_template=str(path)) as server:
        ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked = {"model": "run", "messages": messages, "max_tokens": 8, "seed": 0, "temperature": 0.7, "tools": [tool]}
        answer = ours.chat.completions.create(**asked).choices[0].message
        assert answer.content == continued(folder, "weather It Berlin  was ", 8, 0, temperature=0.7)
        assert answer.tool_calls is None
        answer = ours.chat.completions.create(**asked, tool_choice="none").choices[0].message
        assert answer.content == continued(folder, "It Berlin  was ", 8, 0, temperature=0.7)
        call["function"]["arguments"] = "{"
        with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls are not JSON"):
            ours.chat.completions.create(**asked)


def test_embeddings_are_those_of_embed(client, server, folder):
    texts = ["It was the best", "of times"]
    wanted = kinformer.embed(folder, texts, threads=1, device="cpu")
    answer = client.embeddings.create(model="run", input=texts)  # OpenAI's client requests base64 and decodes it
    assert [item.index for item in answer.data] == [0, 1] and answer.usage.prompt_tokens == 23
    for item, vector in zip(answer.data, wanted, strict=True):
        assert item.embedding == pytest.approx(vector.tolist(), abs=1e-6)
    ids = list(b"of times")
    plain = client.embeddings.create(model="run", input=ids, encoding_format="float").data[0].embedding
    assert plain == pytest.approx(wanted[1].tolist(), abs=1e-6)
    for data, message in [
        ({"input": ""}, "input 0 has 0 tokens, but must have 1 to 32"),
        ({"input": ["a", "b" * 33]}, "input 1 has 33 tokens"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": [999]}, "999"),
        ({"input": "a", "encoding_format": "x"}, "encoding_format is 'x' but must be one of float, base64"),
        ({"input": ["a"] * 3000}, "input holds 3,000 texts"),
    ]:
        code, problem = post(server, {"model": "run"} | data, "/v1/embeddings")
        assert code == 400 and message in problem["error"]["message"]


def test_a_server_with_a_key_answers_those_who_send_it(folder, monkeypatch, caplog):
    def status(server, path, key=None):
        head = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            with urlopen(Request(f"{server.url}{path}", headers=head), timeout=20) as answer:
                return answer.status
        except HTTPError as error:
            assert error.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer KEY" in json.loads(error.read())["error"]["message"]
            return error.code

    monkeypatch.setenv("KINFORMER_API_KEY", "from-the-environment")
    with serving(folder, api_key="s3cret") as server:
        assert [status(server, path) for path in ("/health", "/", "/v1/models", "/metrics")] == [200, 200, 401, 401]
        assert status(server, "/v1/models", "wrong") == status(server, "/v1/models", "from-the-environment") == 401
        with pytest.raises(openai.AuthenticationError, match="does not send this server's key"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0).models.list()
        ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0)
        assert [model.id for model in ours.models.list()] == ["run"]
    with serving(folder) as server:
        assert status(server, "/v1/models") == 401 and status(server, "/v1/models", "from-the-environment") == 200
    monkeypatch.delenv("KINFORMER_API_KEY")
    caplog.set_level("INFO", logger="kinformer")
    built(folder, host="0.0.0.0", quiet=False).socket.close()
    assert "KINFORMER_API_KEY" in caplog.text


def test_the_state_is_bounded_by_the_memory(folder):
    from kinformer.lab.serving.server import half_of_memory

    server = built(folder)
    server.socket.close()
    assert 1 << 28 < server.engine.limits.max_state_bytes == half_of_memory(torch.device("cpu"))
    server = built(folder, max_state_bytes=10_000)
    server.socket.close()
    assert server.engine.limits.max_state_bytes == 10_000


@pytest.mark.parametrize("signs", ['"[{', '\\",:', "\\\\[", '\\\\"{'])
def test_brackets_of_a_text_are_not_counted(signs):
    text = signs * 100_000
    assert fields.parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_a_stream_that_is_not_read_ends_its_connection(folder, monkeypatch):
    from kinformer.lab.serving.server import Connection

    monkeypatch.setattr(Connection, "unread_seconds", 0.2)
    data = json.dumps({"model": "run", "prompt": "a", "max_tokens": 1 << 20, "logprobs": 20, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with serving(folder) as server, socket.socket() as client:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.socket.getsockname())
        client.sendall(f"{head}content-length: {len(data)}\r\n\r\n{data}".encode())
        until(lambda: server.engine.counts["cancelled"] == 1)
        until(lambda: not server._http.server_state.connections)


def test_large_answers_let_other_threads_run(server, monkeypatch):
    kinds, write = [], answers.encoded_by_parts

    def noting(data):
        kinds.append(data["object"])
        return write(data)

    monkeypatch.setattr(answers, "encoded_by_parts", noting)
    text = {"model": "run", "prompt": "a" * 300, "max_tokens": 1}
    assert post(server, text)[0] == post(server, {"model": "run", "input": "abc"}, "/v1/embeddings")[0] == 200
    assert kinds == ["text_completion", "list"]
    data = json.dumps(text | {"echo": True, "logprobs": 1, "stream": True}).encode()
    with urlopen(
        Request(f"{server.url}/v1/completions", data, {"content-type": "application/json"}), timeout=20
    ) as got:
        assert got.read().endswith(b"[DONE]\n\n")
    assert kinds[2:] == ["text_completion"]


def test_parts_of_an_answer_do_not_wait_for_each_other(server):
    with socket.create_connection(server.socket.getsockname(), timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert client.recv(4096)
        (connection,) = [
            item.transport.get_extra_info("socket")
            for item in server._http.server_state.connections
            if item.transport.get_extra_info("peername") == client.getsockname()
        ]
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_head_that_does_not_come_ends_its_connection(folder, monkeypatch):
    from kinformer.lab.serving.server import Connection

    monkeypatch.setattr(Connection, "head_seconds", 0.2)
    with serving(folder) as server:
        for begun in (b"", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"):
            with socket.create_connection(server.socket.getsockname(), timeout=20) as client:
                client.sendall(begun)
                answer = b""
                while begun and not answer.endswith(b"}"):
                    answer += client.recv(4096)
                client.sendall(b"GET /health HTTP/1.1\r\nhos")
                assert client.recv(4096) == b""


def test_a_body_that_does_not_come_ends_its_request(folder, monkeypatch):
    monkeypatch.setattr("kinformer.lab.serving.server.BODY_SECONDS", 0.2)
    with serving(folder) as server, socket.create_connection(server.socket.getsockname(), timeout=20) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: 100\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


def test_other_paths_methods_and_types(server):
    assert post(server, {}, "/v2/completions")[0] == 404
    assert post(server, {}, "/v1/models")[0] == 405
    assert post(server, b"a=1", kind="application/x-www-form-urlencoded")[0] == 415


def test_a_client_that_leaves_ends_its_stream(server, client):
    stream = client.completions.create(model="run", prompt="It was ", max_tokens=1_000_000, stream=True)
    next(iter(stream))
    until(lambda: server.engine.rows == 1)
    stream.close()
    until(lambda: server.engine.rows == 0)
    assert json.loads(get(server, "/health"))["streams"] == 0


def test_beyond_the_bound_a_request_is_refused(folder):
    with serving(folder, max_streams=1, max_waiting=0) as server:
        busy = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = busy.completions.create(model="run", prompt="It was ", max_tokens=1_000_000, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            busy.completions.create(model="run", prompt="It was ", max_tokens=2)
        with pytest.raises(openai.BadRequestError, match="chat template"):
            busy.chat.completions.create(model="run", messages=[{"role": "user", "content": "a"}])
        stream.close()
        until(lambda: server.engine.rows == 0)
        assert busy.completions.create(model="run", prompt="It was ", max_tokens=2).choices


def test_a_server_that_closes_tells_its_streams(folder):
    with serving(folder) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="run", prompt="It was ", max_tokens=1_000_000, stream=True)
        next(iter(stream))
        threading.Timer(0.2, server.close).start()
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass


@contextmanager
def handling(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def served(server, visit):
    """Serve in this thread, which signals interrupt, until the server ends; what ``visit`` in another returns."""
    with ThreadPoolExecutor(1) as pool:
        visited = pool.submit(visit)
        visited.add_done_callback(lambda _: server.close())
        server.run()
        return visited.result(20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_and_tells_its_streams(folder, number):
    """The signal then reaches its handler from before, as if there had been no server."""
    server, heard = built(folder), []

    def visit():
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="run", prompt="It was ", max_tokens=1_000_000, stream=True)
        next(iter(stream))
        os.kill(os.getpid(), number)
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass

    with handling(number, lambda number, _: heard.append(number)):
        served(server, visit)
        assert heard == [number]


def test_under_nohup_a_server_stays(folder):
    server = built(folder)

    def visit():
        until(lambda: server._http.started)
        os.kill(os.getpid(), signal.SIGHUP)
        return signal.getsignal(signal.SIGHUP), json.loads(get(server, "/health"))["status"]

    with handling(signal.SIGHUP, signal.SIG_IGN):
        assert served(server, visit) == (signal.SIG_IGN, "ok")


def test_without_descriptors_the_log_gets_a_line_a_second():
    from kinformer.lab.serving.server import sparing

    class Loop:
        now, others = 5.0, 0

        def time(self):
            return self.now

        def default_exception_handler(self, context):
            self.others += 1

    said, loop = [], Loop()
    handler = sparing(said.append)
    for _ in range(3):
        for _ in range(2048):
            handler(loop, {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "")})
        loop.now += 1
    handler(loop, {"message": "other", "exception": OSError(errno.EPERM, "")})
    assert len(said) == 3 and "descriptors" in said[0] and loop.others == 1


def test_requests_without_a_seed_have_the_servers(folder):
    with serving(folder, seed=7) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        request = {"model": "run", "prompt": "It was ", "max_tokens": 12}
        texts = [client.completions.create(**request, **more).choices[0].text for more in ({}, {}, {"seed": 7})]
        assert texts[0] == texts[1] == texts[2]
        assert client.completions.create(**request, seed=8).choices[0].text != texts[0]


def test_where_it_listens_is_printed_as_json(cli, folder, monkeypatch):
    monkeypatch.setattr("kinformer.lab.serving.server.Server.run", lambda self: self.socket.close())
    code, out, _ = cli("serve", folder, "--port", "0", "--json")
    printed = json.loads(out)
    assert code == 0 and printed["model"] == "run" and printed["url"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "at most 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
        (["--chat-stop", "User"], "lacks a chat template; give a --chat-template too"),
        (["--max-streams", "0"], "max-streams"),
    ],
)
def test_mistakes_on_the_command_line(cli, folder, arguments, message):
    code, out, err = cli("serve", folder, *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("package", ["starlette.applications", "uvicorn", "anyio.to_thread"])
def test_without_its_packages_it_is_one_sentence(cli, folder, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "kinformer.lab.serving.server", raising=False)
    code, out, err = cli("serve", folder)
    assert (code, out) == (2, "") and "pip install 'kinformer[serve]'" in err and err.count("\n") == 1


def test_a_run_that_continues_no_text_is_refused(tmp_path):
    options = {"task": "recall", "recipe": "tiny", "length": 24, "batch_size": 4, "steps": 1, "pairs": "2"}
    kinformer.train("gpt", out=tmp_path / "run", threads=1, device="cpu", symbols=30, quiet=True, **options)
    with pytest.raises(KinformerError, match="only next-token continues texts"):
        kinformer.serve(tmp_path / "run", port=0)
