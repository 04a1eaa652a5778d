"""The API process over real sockets, with an engine that does what each prompt tells it."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_models import CONTEXT
from scripted_server import Server, ask, error_of, open_stream, script, serving, streamed, wait_until, write_model
from stream_grammar import check_stream

from xllm_cli.core import SamplingParams

pytestmark = pytest.mark.server
MAX_CONCURRENT = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), model, max_concurrent_requests=MAX_CONCURRENT) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1/", api_key="none", max_retries=0) as client:
        yield client


# --- answers -------------------------------------------------------------------------------------------------------

SAYINGS = ["hello", "", "漢字 and 😀", "a\n\nb", [0x90, 0x91, 5], [188, 188], "x<|im_end|>y"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("say", SAYINGS)
def test_a_stream_joins_to_the_whole_answer(http: httpx.Client, say: Any, chat: bool) -> None:
    for per_step in (1, 3):
        prompt = script(say=say, per_step=per_step)
        choice = ask(http, prompt, chat=chat).json()["choices"][0]
        stream = streamed(http, prompt, chat=chat)
        assert stream.choices[0].text == (choice["message"]["content"] if chat else choice["text"])
        assert stream.choices[0].finish == choice["finish_reason"] == "length"


@pytest.mark.parametrize("chat", [False, True])
def test_stop_strings_end_both_kinds_of_answer(http: httpx.Client, server: Server, chat: bool) -> None:
    prompt = script(say="one, two, three", endless=False)
    whole = ask(http, prompt, chat=chat, stop=["wo, t", "two, three!", "o, th"]).json()
    stream = streamed(http, prompt, chat=chat, stop=["wo, t", "two, three!", "o, th"])
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if chat else choice["text"]) == stream.choices[0].text == "one, t"
    assert choice["finish_reason"] == stream.choices[0].finish == "stop"
    assert whole["usage"]["completion_tokens"] == len("one, two, t")
    server.wait_idle()


def test_a_stop_string_aborts_an_endless_sequence(http: httpx.Client, server: Server) -> None:
    assert ask(http, script(endless=True, delay=0.001), stop="xxx").json()["choices"][0]["text"] == ""
    server.wait_idle()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_is_in_one_last_chunk_when_asked_for(http: httpx.Client, options: Any, chat: bool) -> None:
    usage = ask(http, "hello", chat=chat).json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 2
    stream = streamed(http, "hello", chat=chat, stream_options=options)
    assert stream.usage == (usage if options == {"include_usage": True} else None)


def test_continuous_usage_counts_up(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = ask(http, "hey", stream=True, stream_options=options).text
    chunks = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3, 3]


def test_prompts_of_every_shape(http: httpx.Client) -> None:
    ids = [64, 65]
    text = ask(http, ids).json()["choices"][0]["text"]
    assert len(text) == 2
    for prompt, texts in ((["ab", "c"], ["ab", "c"]), ([ids, [66]], [text, "c"]), (["d", ids], ["d", text])):
        answer = ask(http, prompt).json()
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
        assert answer["usage"]["prompt_tokens"] == 3


def test_several_choices_are_prompt_major(http: httpx.Client) -> None:
    answer = ask(http, ["ab", "c"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "c", "c"]
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 6
    stream = streamed(http, "hello", chat=True, n=3)
    assert len({choice.text for choice in stream.choices.values()}) == 1 and len(stream.choices) == 3


def test_log_probabilities_of_completions(http: httpx.Client) -> None:
    whole = ask(http, "né", logprobs=2).json()["choices"][0]["logprobs"]
    assert whole["tokens"][0] == "n" and whole["text_offset"] == [0, 1, 1]
    assert all(value < 0 for value in whole["token_logprobs"])
    assert [len(top) for top in whole["top_logprobs"]] == [1, 1, 1]  # the two likeliest share one text
    assert streamed(http, "né", logprobs=2).choices[0].logprobs == list(zip(*whole.values(), strict=True))


def test_log_probabilities_of_chat(http: httpx.Client) -> None:
    prompt = script(say="né")
    whole = ask(http, prompt, chat=True, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in whole for byte in entry["bytes"]) == "né".encode()
    assert whole[0]["top_logprobs"][0]["token"] == whole[0]["token"] == "n"
    assert streamed(http, prompt, chat=True, logprobs=True, top_logprobs=1).choices[0].logprobs == whole


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_is_prompt_and_answer_in_one_text(http: httpx.Client, logprobs: int | None, max_tokens: int) -> None:
    fields = {"echo": True, "logprobs": logprobs, "max_tokens": max_tokens, "stop": "né"}
    prompt = script(say="héy!!", per_step=2)
    answer = ask(http, prompt, **fields).json()
    choice, text = answer["choices"][0], prompt + "héy!!".encode()[:max_tokens].decode("utf-8", "replace")
    assert (choice["text"], answer["usage"]["completion_tokens"]) == (text, max_tokens)
    stream = streamed(http, prompt, **fields).choices[0]
    assert stream.text == text
    if logprobs is None:
        assert choice["logprobs"] is None and stream.logprobs == []
        return
    whole = choice["logprobs"]
    assert stream.logprobs == list(zip(*whole.values(), strict=True))
    assert len(whole["tokens"]) == len(prompt.encode()) + max_tokens
    assert whole["token_logprobs"][0] is None is whole["top_logprobs"][0]
    assert all(value <= 0 for value in whole["token_logprobs"][1:])
    assert whole["text_offset"][: len(prompt)] == list(range(len(prompt)))


def test_what_an_evaluation_harness_asks_for(http: httpx.Client) -> None:
    prompts = [[72, 105], [87, 72, 105, 33]]
    answer = ask(http, prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1).json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        numbers = choice["logprobs"]
        assert numbers["token_logprobs"][1:-1] == [-token / 100 for token in prompt[1:]]
        assert all(max(top.values()) == value for value, top in zip(*list(numbers.values())[2:], strict=True) if top)


def test_completions_default_to_sixteen_tokens_and_chat_to_no_limit(http: httpx.Client) -> None:
    prompt = script(say="y" * 50)
    assert len(ask(http, prompt, max_tokens=None).json()["choices"][0]["text"]) == 16
    assert len(ask(http, prompt, chat=True, max_tokens=None).json()["choices"][0]["message"]["content"]) == 50


def test_the_openai_client_is_content(sdk: openai.OpenAI) -> None:
    assert [card.id for card in sdk.models.list()] == ["tiny"]
    assert sdk.completions.create(model="tiny", prompt="hey").choices[0].text == "hey"
    messages: Any = [{"role": "user", "content": script(say="bonjour")}]
    assert sdk.chat.completions.create(model="tiny", messages=messages).choices[0].message.content == "bonjour"
    chunks = list(sdk.chat.completions.create(model="tiny", messages=messages, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "bonjour"


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_has_a_status_before_the_first_token_and_an_event_after(http: httpx.Client, at: int) -> None:
    prompt = script(say="hello world", at=at, error=[503, "kv_capacity_exceeded"])
    answer = ask(http, prompt, stream=True)
    whole = ask(http, prompt)
    assert (whole.status_code, whole.headers["retry-after"]) == (503, "7")
    if at == 0:
        assert (answer.status_code, error_of(answer)) == (503, error_of(whole))
    else:
        stream = check_stream(answer.text, chat=False)
        assert stream.error == error_of(whole) and stream.choices[0].text == "hello"[:at]


def test_the_openai_client_raises_in_the_middle_of_a_stream(sdk: openai.OpenAI) -> None:
    prompt = script(say="hello", at=2, error=[503, "engine_trouble"])
    with pytest.raises(openai.APIError, match="what went wrong"):
        list(sdk.completions.create(model="tiny", prompt=prompt, stream=True))


FIELDS = ["prompt", "messages", *SamplingParams.__struct_fields__, "n", "stop", "stream", "stream_options", "model"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", ""]), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans(), st.booleans())
def test_no_request_makes_a_server_error(http: httpx.Client, fields: Any, chat: bool, usable: bool) -> None:
    if usable:
        fields |= {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    answer = http.post("/v1/chat/completions" if chat else "/v1/completions", json=fields)
    assert answer.status_code in (200, 400, 404)
    assert answer.status_code == 200 or error_of(answer)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"), ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"), ("POST", "/sleep", 400, "vmm_weights_required"),
        ("POST", "/wakeup", 400, "vmm_weights_required"), ("POST", "/fork_master", 400, "vmm_weights_required"),
        ("POST", "/v1/completions", 400, "invalid_json"),
    ],
)  # fmt: skip
def test_every_error_has_openais_shape(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


def test_models_and_their_names(http: httpx.Client, model: Path) -> None:
    for name in ("tiny", "", None, str(model), f"{model}/"):
        assert ask(http, "x", model=name).json()["model"] == "tiny"
    refused = ask(http, "x", model="tinny")
    assert refused.status_code == 404 and "tiny" in error_of(refused)["message"]
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
    assert http.get("/v1/models/tiny").json()["id"] == http.get(f"/v1/models/{model}").json()["id"] == "tiny"


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompt_and_max_tokens_share_the_context(http: httpx.Client, extra: int) -> None:
    answer = ask(http, [1] * (CONTEXT - 9 + extra), max_tokens=9, stop_token_ids=[1])
    if extra <= 0:
        assert answer.status_code == 200
        return
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(CONTEXT) in error["message"] and str(CONTEXT + 1) in error["message"]


def test_an_omitted_max_tokens_is_clipped_to_the_context(http: httpx.Client) -> None:
    answer = ask(http, [1] * (CONTEXT - 3), max_tokens=None).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert ask(http, [1] * CONTEXT, max_tokens=None).status_code == 400


def test_prompts_without_tokens_or_beyond_the_vocabulary_are_refused(http: httpx.Client) -> None:
    assert error_of(ask(http, ""))["code"] == "empty_prompt"
    assert "320" in error_of(ask(http, [320]))["message"]


def test_a_huge_prompt_and_a_huge_body_are_refused_and_the_next_request_is_fine(http: httpx.Client) -> None:
    assert error_of(ask(http, "x" * 10_000_000))["code"] == "context_length_exceeded"
    too_large = http.post("/v1/completions", content=b"x" * (33 << 20))
    assert (too_large.status_code, error_of(too_large)["code"]) == (413, "body_too_large")
    chunks = (b"x" * (1 << 20) for _ in range(33))
    assert http.post("/v1/completions", content=chunks).status_code == 413
    assert ask(http, "ok").json()["choices"][0]["text"] == "ok"


def test_unknown_fields_are_reported_and_template_errors_are_the_clients(http: httpx.Client, server: Server) -> None:
    answer = ask(http, "x", temperatur=1)
    assert answer.headers["x-xllm-ignored-fields"] == "temperatur"
    server.wait_for("ignored unknown fields: temperatur")
    refused = http.post("/v1/chat/completions", json={"messages": [{"role": "cow", "content": "moo"}]})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "chat_template_error")


def test_request_ids_slashes_and_head(http: httpx.Client, server: Server) -> None:
    assert http.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert http.get("/health", headers={"x-request-id": "my own"}).headers["x-request-id"].startswith("req-")
    assert httpx.get(f"{server.url}/v1//models/").json()["data"][0]["id"] == "tiny"
    head = http.head("/health")
    assert (head.status_code, head.content) == (200, b"")


# --- operation -----------------------------------------------------------------------------------------------------


def test_health_metrics_and_memory_answer_from_the_last_step(http: httpx.Client, server: Server) -> None:
    for path in ("/health", "/readyz", "/livez", "/ping", "/version"):
        assert http.get(path).status_code == 200
    before = server.gauge("vllm:generation_tokens_total")
    ask(http, "hello")
    assert server.gauge("vllm:generation_tokens_total") == before + 5
    memory = http.get("/vmm").json()
    assert memory["mapped"] == server.gauge('xllm:vmm_bytes{kind="mapped"}') == 2 << 20
    assert memory["ranks"] and memory["headroom_limited_by"] == "arena"


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"n": 3}, {"stream": True, "n": 3}])
@pytest.mark.parametrize("mute", [False, True])
def test_a_client_that_goes_is_forgotten_by_the_engine(server: Server, fields: dict[str, Any], mute: bool) -> None:
    connection = open_stream(
        server, script(endless=True, delay=0.01, **({"at": 0, "mute": True} if mute else {})), **fields
    )
    running = fields.get("n", 1)
    wait_until(lambda: server.gauge("xllm:open_http_requests") == 1)
    assert mute or not fields.get("stream") or connection.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: mute or server.gauge("vllm:num_requests_running") == running)
    connection.close()
    server.wait_idle()


def test_a_body_that_never_arrives_takes_no_place(server: Server, http: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port)), timeout=10) for _ in range(MAX_CONCURRENT)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert ask(http, "x").status_code == 200
    for connection in slow:
        connection.close()


def test_too_many_requests_are_told_to_come_back(http: httpx.Client, server: Server) -> None:
    held = [open_stream(server, script(endless=True, delay=0.05), stream=True) for _ in range(MAX_CONCURRENT)]
    wait_until(lambda: server.gauge("xllm:open_http_requests") == MAX_CONCURRENT)
    refused = ask(http, "x")
    assert (refused.status_code, error_of(refused)["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    for connection in held:
        connection.close()
    server.wait_idle()
    assert ask(http, "x").status_code == 200


def test_a_client_that_does_not_read_stalls_nobody(http: httpx.Client, server: Server) -> None:
    before = server.gauge("vllm:generation_tokens_total")
    stalled = open_stream(server, script(endless=True, per_step=20, delay=0.01), stream=True, logprobs=20)
    wait_until(lambda: server.gauge("vllm:generation_tokens_total") > before + 1000)  # megabytes nobody reads
    for _ in range(5):
        started = time.monotonic()
        assert http.get("/health").status_code == 200
        assert ask(http, "hello").status_code == 200
        assert time.monotonic() - started < 10
    stalled.close()
    server.wait_idle()


def test_concurrent_streams_keep_their_texts_apart(http: httpx.Client) -> None:
    texts = [chr(ord("a") + i) * 30 for i in range(MAX_CONCURRENT)]
    with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
        streams = pool.map(lambda text: streamed(http, script(say=text, delay=0.001)), texts)
        assert [stream.choices[0].text for stream in streams] == texts


def test_a_second_signal_ends_the_process_at_once(server: Server) -> None:
    """The last test of the shared server."""
    stream = open_stream(server, script(endless=True, delay=0.05), stream=True)
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
    server.process.send_signal(signal.SIGINT)
    server.wait_for("stopping: 1 requests are open")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 130
    assert list(server.runtime.iterdir()) == []
    stream.close()
