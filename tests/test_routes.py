"""The other routes of the server, asked by the clients they are for; one server for all of them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_models import CONTEXT
from scripted_server import Server, ask, error_of, open_stream, script, serving, wait_until, write_model

pytestmark = pytest.mark.server
CHAT = [{"role": "user", "content": "hé"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_model(tmp_path_factory.mktemp("models") / "tiny")
    with serving(tmp_path_factory.mktemp("server"), model) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


# --- tokens --------------------------------------------------------------------------------------------------------


def test_tokens_go_there_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "hé 漢", "return_token_strs": True}).json()
    assert (answer["count"], answer["max_model_len"]) == (len("hé 漢".encode()), CONTEXT)
    assert answer["token_strs"][0] == "h" and len(answer["token_strs"]) == len(answer["tokens"])
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé 漢"}
    chat = http.post("/tokenize", json={"messages": CHAT, "model": "tiny"}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": CHAT}, {"prompt": 1}, {"prompt": "x", "model": "y"}])
def test_what_cannot_be_tokenized_is_the_clients_error(http: httpx.Client, body: Any) -> None:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == (404 if "model" in body else 400) and error_of(answer)["param"]
    assert http.post("/detokenize", json={"tokens": [-1]}).status_code == 400


def test_what_is_rendered_is_what_runs(http: httpx.Client) -> None:
    prompts = ["ab", [1, 2, 3]]
    rendered = http.post("/v1/completions/render", json={"prompt": prompts, "n": 2, "max_tokens": 4}).json()
    assert [item["token_ids"] for item in rendered] == [[64, 65], [1, 2, 3]]
    assert rendered[0]["sampling_params"]["max_tokens"] == 4 and rendered[0]["prompt"] == "ab"
    chat = http.post("/v1/chat/completions/render", json={"messages": CHAT}).json()
    assert (
        chat["token_ids"]
        == chat["prompt_token_ids"]
        == http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    )
    assert ask(http, "hé", chat=True).json()["usage"]["prompt_tokens"] == len(chat["token_ids"])
    assert http.post("/v1/completions/render", json={"prompt": "x" * CONTEXT}).status_code == 400


def test_a_remote_tokenizer_learns_what_it_needs(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["eos_token_ids"]) == ("<|bos|>", "<|eos|>", [257])
    assert "im_start" in info["chat_template"] and info["model_max_length"] == CONTEXT


# --- what routers ask ----------------------------------------------------------------------------------------------


def test_models_and_settings_under_all_their_names(http: httpx.Client) -> None:
    assert http.get("/model_info").json() == http.get("/get_model_info").json()
    assert http.get("/model_info").json()["served_model_name"] == "tiny"
    for path in ("/server_info", "/get_server_info//"):
        server = http.get(path).json()
        assert (server["block_size"], server["model_id"], server["status"]) == (128, "tiny", "ready")
        assert "api_key" not in server
        assert "model" not in server, "next to model_id it is a duplicate to sglang-router"
    assert http.head("/v1/models").status_code == http.head("/metrics/").status_code == 200


def test_load_counts_what_is_open(http: httpx.Client, server: Server) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    stream = open_stream(server, script(endless=True, delay=0.05), stream=True)
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
    assert http.get("/load").json() == {"server_load": 1}
    loads = http.get("/v1/loads").json()
    assert loads["loads"][0]["num_running_reqs"] == loads["aggregate"]["total_running_reqs"] == 1
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    before = server.gauge(aborted)
    stream.close()
    server.wait_idle()
    wait_until(lambda: server.gauge(aborted) == before + 1)


def test_metrics_tell_of_a_request(http: httpx.Client, server: Server) -> None:
    stop, tokens = 'vllm:request_success_total{engine="0",finished_reason="stop"', "vllm:prompt_tokens_total"
    before = server.gauge(stop), server.gauge(tokens), server.gauge("vllm:time_to_first_token_seconds_count")
    ask(http, script(say="one, two"), stop=",")
    assert server.gauge(stop) == before[0] + 1 and server.gauge(tokens) > before[1]
    assert server.gauge("vllm:time_to_first_token_seconds_count") == before[2] + 1


# --- /v1/responses -------------------------------------------------------------------------------------------------


def test_responses_whole_and_streamed(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        asked: dict[str, Any] = {"model": "tiny", "input": script(say="bonjour"), "instructions": "be brief"}
        whole = sdk.responses.create(**asked)
        events = list(sdk.responses.create(**asked, stream=True))
    assert (whole.output_text, whole.status) == ("bonjour", "incomplete")  # the scripted engine ends with "length"
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.total_tokens == whole.usage.input_tokens + 7
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "bonjour"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.output_text == "bonjour" and events[-1].response.usage == whole.usage


def test_responses_take_items_and_end_with_stop(http: httpx.Client) -> None:
    parts = [{"type": "input_text", "text": script(say="hey", finish="stop")}]
    items = [{"role": "developer", "content": "x"}, {"type": "message", "role": "user", "content": parts}]
    answer = http.post("/v1/responses", json={"input": items, "temperature": 0}).json()
    assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("completed", "hey")


@pytest.mark.parametrize(
    "extra",
    [
        {"store": True}, {"previous_response_id": "resp_1"}, {"background": True}, {"n": 2}, {"tools": [{}]},
        {"text": {"format": {"type": "json_object"}}}, {"input": []}, {"input": [{"role": "cow", "content": ""}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, {"max_output_tokens": 0},
    ],
)  # fmt: skip
def test_responses_that_need_more_are_refused(http: httpx.Client, extra: dict[str, Any]) -> None:
    answer = http.post("/v1/responses", json={"input": "x", **extra})
    assert answer.status_code == 400 and error_of(answer)["param"]


def test_a_response_that_breaks_off_fails(http: httpx.Client) -> None:
    prompt = script(say="hello", at=2, error=[503, "engine_trouble"])
    text = http.post("/v1/responses", json={"input": prompt, "stream": True}).text
    last = json.loads(text.strip().rsplit("data: ", 1)[1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "engine_trouble" and "[DONE]" not in text


# --- /v1/messages --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_messages_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "system": [{"type": "text", "text": "be brief"}]}
    asked["messages"] = [{"role": "user", "content": [{"type": "text", "text": script(say="one, two", finish="stop")}]}]
    for stops, text, ending in (([], "one, two", ("end_turn", None)), ([", "], "one", ("stop_sequence", ", "))):
        whole = claude.messages.create(**asked, stop_sequences=stops)
        with claude.messages.stream(**asked, stop_sequences=stops) as stream:
            assert "".join(stream.text_stream) == text
            final = stream.get_final_message()
        for message in (whole, final):
            assert message.content[0].type == "text" and message.content[0].text == text
            assert (message.stop_reason, message.stop_sequence) == ending
        assert whole.usage.output_tokens == final.usage.output_tokens == len(text + (ending[1] or ""))
    counted = claude.messages.count_tokens(model="tiny", system="be brief", messages=asked["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_errors_of_messages_are_anthropics(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    user: list[Any] = [{"role": "user", "content": script(say="hello", at=2, error=[503, "trouble"])}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="other", max_tokens=5, messages=user)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        claude.messages.create(
            model="tiny", max_tokens=5, messages=user, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    with pytest.raises(anthropic.APIStatusError, match="what went wrong"):
        list(claude.messages.create(model="tiny", max_tokens=50, messages=user, stream=True))
    answer = http.post("/v1/messages", json={"messages": user})
    assert answer.status_code == 400 and answer.json()["type"] == "error" and "max_tokens" in answer.text


# --- whatever comes ------------------------------------------------------------------------------------------------

POSTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/completions/render", "/v1/chat/completions/render", "/tokenize", "/detokenize",
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "input", "instructions", "system", "tokens", "model", "max_tokens", "max_output_tokens",
    "stop", "stop_sequences", "stream", "temperature", "n", "text", "thinking", "tool_choice", "role", "content",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "format", ""]), inner)
    ),
    max_leaves=6,
)
USABLE: dict[str, Any] = {"prompt": "hi", "messages": CHAT, "input": "hi", "max_tokens": 3, "tokens": [1]}


@settings(max_examples=150)
@given(st.sampled_from(POSTS), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3), st.booleans())
def test_no_body_makes_a_server_error(http: httpx.Client, path: str, fields: Any, is_usable: bool) -> None:
    answer = http.post(path, json={**(USABLE if is_usable else {}), **fields})
    assert answer.status_code in (200, 400, 404), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"1", b'"x"', b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000,
     b'{"prompt": "x", "prompt": 1}', b'{"prompt": "\\ud800"}', b'{"temperature": 1e999, "prompt": "x"}', b"\x00"],
)  # fmt: skip
def test_no_malformed_body_makes_a_server_error(http: httpx.Client, body: bytes) -> None:
    for path in POSTS:
        answer = http.post(path, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], (path, answer.text)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"garbage\r\n\r\n", 400, "invalid_http"), (b"\x16\x03\x01\x02\x00\x01", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100, 431, "headers_too_large"),
    ],
)  # fmt: skip
def test_what_is_not_http_gets_an_error_of_our_shape(server: Server, sent: bytes, status: int, code: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(sent)
        if status == 431:
            time.sleep(0.1)
            connection.sendall(b"a" * 65_537)  # no more: what is unread would reset the connection
        head, _, body = connection.recv(4096).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["code"] == code


def test_probes_are_quick_while_long_prompts_are_read(http: httpx.Client, server: Server) -> None:
    """A megabyte takes the tokenizer a second or so; its thread must not hold the event loop."""
    prompt, times = "x" * 1_000_000, []
    with ThreadPoolExecutor(2) as pool:
        long = [pool.submit(http.post, "/tokenize", json={"prompt": prompt}) for _ in range(2)]
        for _ in range(100):
            started = time.monotonic()
            assert http.get("/health").status_code == http.get("/livez").status_code == 200
            times.append((time.monotonic() - started) / 2)
        assert {future.result().json()["count"] for future in long} == {len(prompt)}
    times.sort()
    # alone the median is 4 ms; the margin is for a machine that does other things too
    assert times[90] < 1 and times[-1] < 5, times[90:]
