"""The page at `/`, in a browser: what it sends, what it shows, that it needs no other site."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from chromium import Chromium, browsing, find_chromium
from servers import Server, serving
from waiting import LIMIT, wait_until

from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.server.app import PAGE

SOURCE = PAGE.read_text(encoding="utf-8")
KEY = "a key"
CHAT = "/v1/chat/completions"
SHIFT = 8  # as the protocol numbers it
LAST = "document.querySelector('#messages > li:last-child {}')"
LONG = '{"ignore_eos": true}'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if (binary := find_chromium()) is None:
        pytest.skip("there is no Chromium")
    with browsing(binary, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the model that adds. It needs a key."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, EMBEDDED_MODEL, "--served-model-name", "adder", "--api-key", KEY) as server:
        yield server


@pytest.fixture
def page(browser: Chromium, server: Server) -> Iterator[Chromium]:
    """The page of the server, ready to chat; nothing goes wrong there unless a test expects it."""
    open_page(browser, server.url)
    give_key(browser, KEY)
    browser.wait_for("document.querySelector('#state').textContent === 'ready'")
    browser.events.clear()
    yield browser
    assert browser.errors == []


def open_page(browser: Chromium, url: str) -> None:
    """Open it as a new tab does: without settings."""
    browser.look()
    browser.open(f"{url}/version")
    browser.evaluate("sessionStorage.clear()")
    browser.open(f"{url}/")


def give_key(browser: Chromium, key: str) -> None:
    browser.wait_for("!document.querySelector('#key-label').hidden")
    browser.write("#key", key)
    browser.press("Enter")


def send(browser: Chromium, text: str) -> None:
    browser.write("#input", text)
    browser.press("Enter")


def wait_for_end(browser: Chromium) -> None:
    browser.wait_for(f"{LAST.format('.notes')}?.hidden === false")


def last(browser: Chromium, part: str) -> str:
    """The text of a part of the last answer."""
    return str(browser.evaluate(f"{LAST.format(part)}.textContent"))


def gauge(browser: Chromium, name: str) -> str:
    return str(browser.evaluate(f"document.querySelector('#gauge-{name} span').textContent"))


def test_the_page_loads_nothing_from_other_sites() -> None:
    found = set(re.findall(r"\w+://[^\s'\"]+", SOURCE))
    assert found <= {"http://www.w3.org/2000/svg"}, "the name of a format, not an address"
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=(?![\"']data:)", SOURCE)
    assert "default-src 'none'" in SOURCE


def test_addresses_of_the_page_are_relative() -> None:
    """A proxy may serve it below a path."""
    assert len(re.findall(r"\b(?:fetch|call)\(\"(?!/)", SOURCE)) == 3
    assert not re.search(r"\b(?:fetch|call)\(\"/", SOURCE)


def test_the_elements_of_the_page_are_closed() -> None:
    void = {"meta", "link", "input"}
    open_tags: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in void:
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag, self.getpos()

    Parser().feed(SOURCE)
    assert open_tags == []


def test_an_answer_streams_into_the_page(page: Chromium) -> None:
    page.write("#temperature", "0")
    send(page, "12+34=")
    wait_for_end(page)
    assert last(page, ".content") == "46"
    assert "3 tokens" in last(page, ".notes")
    assert page.evaluate("document.activeElement.id") == "input"


def test_a_conversation_has_several_turns(page: Chromium) -> None:
    page.write("#temperature", "0")
    page.write("#system", "Add.")
    page.write("#seed", "7")
    for problem in ("12+34=", "250+250="):
        send(page, problem)
        wait_for_end(page)
    first, second = page.bodies(CHAT)
    answers = page.evaluate("[...document.querySelectorAll('.content')].map(e => e.textContent)")
    assert first == {
        "model": "adder", "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "seed": 7,
        "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "12+34="}],
    }  # fmt: skip
    assert second["messages"][2:] == [
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "250+250="},
    ]
    assert len(answers) == 2
    page.click("#new")
    assert page.evaluate("document.querySelector('#messages').children.length") == 0
    send(page, "1+1=")
    wait_for_end(page)
    assert len(page.bodies(CHAT)[2]["messages"]) == 2


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_an_answer_and_its_request(page: Chromium, server: Server, how: str) -> None:
    page.write("#extra", LONG)
    page.evaluate(
        "window.lengths = new Set(); new MutationObserver(() => lengths.add("
        "document.querySelector('.content')?.textContent.length))"
        ".observe(document.querySelector('#messages'), {childList: true, subtree: true})"
    )
    send(page, "12+34=")
    page.wait_for(f"{LAST.format('.content')}?.textContent.length > 100")
    page.wait_for("lengths.size > 3")  # it has come in pieces
    assert not page.evaluate("document.querySelector('#stop').hidden")
    if how == "button":
        page.click("#stop")
    else:
        page.press("Escape")
    wait_for_end(page)
    assert "stopped" in last(page, ".notes")
    text = last(page, ".content")
    assert len(text) > 100
    wait_until("the request goes on", lambda: is_at_rest(server))
    assert last(page, ".content") == text
    assert page.evaluate("document.querySelector('#stop').hidden")
    page.write("#extra", "")
    send(page, "1+1=")
    wait_for_end(page)
    assert page.bodies(CHAT)[1]["messages"][1] == {"role": "assistant", "content": text}


def is_at_rest(server: Server) -> bool:
    text = httpx.get(f"{server.url}/metrics", timeout=LIMIT).text
    return re.search(r"^vllm:num_requests_running\S* 0.0$", text, re.MULTILINE) is not None


def test_gauges_move(page: Chromium) -> None:
    page.wait_for("document.querySelector('#gauge-running span').textContent === '0'")
    assert gauge(page, "waiting") == "0"
    page.write("#extra", LONG)
    send(page, "12+34=")
    page.wait_for("document.querySelector('#gauge-running span').textContent === '1'")
    page.wait_for("Number(document.querySelector('#gauge-speed span').textContent) > 0")
    page.wait_for("Number(document.querySelector('#gauge-usage span').textContent) > 0")
    page.press("Escape")
    wait_for_end(page)
    page.wait_for("document.querySelector('#gauge-running span').textContent === '0'")
    page.wait_for("Number(document.querySelector('#gauge-first span').textContent) > 0")
    page.evaluate("document.querySelector('#extra').value = ''")
    send(page, "1+1=")  # its prompt begins as the last one
    page.wait_for("Number(document.querySelector('#gauge-hits span').textContent) > 0")
    assert (
        page.evaluate("document.querySelector('#gauge-speed .curve').getAttribute('d').length") > 9
    )


def test_a_key_is_asked_for(browser: Chromium, server: Server) -> None:
    open_page(browser, server.url)
    browser.wait_for("document.querySelector('#state').textContent === 'API key needed'")
    assert browser.evaluate("document.activeElement.id") == "key"
    give_key(browser, "another key")
    browser.wait_for("document.querySelector('#state').textContent === 'wrong API key'")
    assert "does not know this key" in browser.evaluate(
        "document.querySelector('#key-note').textContent"
    )
    assert browser.evaluate("document.activeElement.id") == "key", "for another one"
    give_key(browser, KEY)
    browser.wait_for("document.querySelector('#model').textContent === 'adder'")
    browser.open(f"{server.url}/")
    browser.wait_for("document.querySelector('#model').textContent === 'adder'")


def test_a_key_that_becomes_wrong_is_asked_for_again(page: Chromium) -> None:
    """Also in the middle of a chat; the message can be sent again with the right one."""
    page.evaluate("document.querySelector('#key').value = 'no'")
    send(page, "12+34=")
    wait_for_end(page)
    assert "this key is wrong" in last(page, ".error")
    page.wait_for("samples.length > 1")
    page.evaluate("readMetrics()")
    assert page.evaluate("document.querySelector('#state').textContent") == "wrong API key"
    give_key(page, KEY)
    page.wait_for("document.querySelector('#state').textContent === 'ready'")
    assert page.evaluate("document.querySelector('#key-note').textContent") == ""
    page.click("#messages > li:last-child .again")
    page.wait_for("messages.length === 2")
    page.events = [e for e in page.events if e["method"] != "Log.entryAdded"]  # the status 401


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("#temperature", "-1", r"Error 400: temperature must be .*-1"),
        ("#temperature", "hot", "temperature must be a number, got hot."),
        ("#seed", "9007199254740993", r"seed must be below 2\^53"),
        ("#extra", "{", "The other fields are not valid JSON: "),
        ("#extra", "[1]", "The other fields must be a JSON object"),
        ("#extra", '{"n": 2}', "The other fields may not have n"),
        ("#extra", '{"top_q": 2}', "Error 400: .*top_q"),
    ],
)
def test_errors_are_shown_and_another_try_is_possible(
    page: Chromium, field: str, value: str, message: str
) -> None:
    page.write("#max_tokens", "4")
    page.write(field, value)
    send(page, "12+34=")
    wait_for_end(page)
    assert re.match(message, last(page, ".error"))
    assert page.evaluate(f"{LAST.format('.error')}.getAttribute('role')") == "alert"
    page.write(field, "")
    page.click("#messages > li:last-child .again")
    page.wait_for(f"{LAST.format('.error')}.hidden && {LAST.format('.notes')}.hidden === false")
    assert len(page.bodies(CHAT)[-1]["messages"]) == 1
    page.events = [e for e in page.events if e["method"] != "Log.entryAdded"]  # the status 400


def test_a_server_that_ends_is_noticed(browser: Chromium, scripted: "Scripted") -> None:
    open_page(browser, scripted.url)
    browser.wait_for("document.querySelector('#state').textContent === 'ready'")
    scripted.end()
    browser.wait_for("document.querySelector('#state').textContent === 'no answer'")
    send(browser, "Hi")
    wait_for_end(browser)
    assert last(browser, ".error").startswith("The server does not answer")


@pytest.mark.parametrize("width", [400, 700, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_its_text_is_readable(page: Chromium, width: int, scheme: str) -> None:
    page.look(width, 700, scheme)
    send(page, "12+34=" + "9" * 300)
    wait_for_end(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.checkVisibility() &&"
        f" e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    overflows = "(e => e.scrollWidth > e.clientWidth)(document.querySelector('#scroll'))"
    assert not page.evaluate(overflows), "a long word is broken"
    for text, back in (
        ("text", "back"),
        ("quiet", "back"),
        ("bad", "bad-back"),
        ("quiet", "panel"),
    ):
        assert contrast(page, text, back) >= 4.5, (text, back)
    assert contrast(page, "on-accent", "accent") >= 4.5


def contrast(page: Chromium, text: str, back: str) -> float:
    """The ratio of two colours' luminance, as WCAG defines it."""

    def luminance(name: str) -> float:
        style = f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')"
        code = page.evaluate(style).strip()
        parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(text), luminance(back)))
    return (high + 0.05) / (low + 0.05)


def test_all_controls_have_names(page: Chromium) -> None:
    send(page, "12+34=")
    wait_for_end(page)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = {"button", "textbox", "log", "region", "DisclosureTriangle"}
    found = [
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in controls
    ]
    assert [name for role, name in found if not name and role != "log"] == []
    assert {"Message", "temperature", "API key", "Send", "New chat", "Try again", "Take back"} <= {
        name for _, name in found
    }


def test_the_page_is_usable_by_keyboard(page: Chromium) -> None:
    """Every control is reached by Tab, and Shift+Enter starts a line."""
    reached = []
    page.evaluate("document.querySelector('#new').focus()")
    for _ in range(14):
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.press("Tab")
    assert set(reached) >= {
        "new", "SUMMARY", "key", "system", "temperature", "top_p", "max_tokens", "seed", "extra",
        "scroll", "input", "send",
    }  # fmt: skip
    page.write("#input", "a")
    page.press("Enter", SHIFT)
    assert page.evaluate("document.querySelector('#input').value") == "a\n"


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


class Scripted:
    """A server with the page, whose answers are events of a script."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.models: list[dict[str, Any]] = [{"id": "scripted", "max_model_len": 99}]
        self.go_on = threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                models = json.dumps({"data": scripted.models})
                answers = {"/": SOURCE, "/v1/models": models}
                self._answer(answers.get(self.path, ""), "text/html")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.end_headers()
                for event in scripted.script:
                    if event is None:
                        scripted.go_on.wait(LIMIT)
                        continue
                    data = event if isinstance(event, str) else json.dumps(event)
                    self.wfile.write(f"data: {data}\n\n".encode())
                    self.wfile.flush()

            def _answer(self, body: str, kind: str) -> None:
                self.send_response(200)
                self.send_header("content-type", kind)
                self.end_headers()
                self.wfile.write(body.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.go_on.set()
    server.end()


@pytest.fixture
def answered(browser: Chromium, scripted: Scripted) -> Callable[..., None]:
    """Opens the page, and sends a message that a script answers."""

    def answer(*script: Any) -> None:
        scripted.script = list(script)
        open_page(browser, scripted.url)
        browser.wait_for("document.querySelector('#state').textContent === 'ready'")
        send(browser, "Hi")

    return answer


def test_reasoning_stands_apart_and_closes(
    browser: Chromium, scripted: Scripted, answered: Callable[..., None]
) -> None:
    answered(
        chunk({"role": "assistant", "content": "", "reasoning_content": "Let me "}),
        chunk({"reasoning_content": "think."}), None,
        chunk({"content": "Yes."}), chunk({}, "stop"), "[DONE]",
    )  # fmt: skip
    browser.wait_for(f"{LAST.format('.reasoning')}?.open")
    assert last(browser, ".reasoning .text").startswith("Let me")
    scripted.go_on.set()
    wait_for_end(browser)
    assert last(browser, ".content") == "Yes."
    assert not browser.evaluate(f"{LAST.format('.reasoning')}.open")
    browser.click("#messages .reasoning summary")
    assert browser.evaluate(f"{LAST.format('.reasoning')}.open")
    scripted.script = ["[DONE]"]
    send(browser, "And?")
    browser.wait_for("document.querySelectorAll('.assistant').length === 2 && !running")
    assert browser.bodies(CHAT)[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_tool_calls_are_shown_and_get_results(
    browser: Chromium, scripted: Scripted, answered: Callable[..., None]
) -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        head = {"id": f"call-{index}", "type": "function"} if "name" in function else {}
        return chunk({"tool_calls": [{"index": index, **head, "function": function}]})

    answered(
        call(0, name="weather", arguments=""), call(0, arguments='{"city": '),
        call(0, arguments='"Rome"}'), call(1, name="time", arguments="{}"),
        chunk({}, "tool_calls"), "[DONE]",
    )  # fmt: skip
    wait_for_end(browser)
    shown = browser.evaluate("[...document.querySelectorAll('.call')].map(e => e.textContent)")
    assert browser.evaluate(f"{LAST.format('.copy')}.hidden"), "there is no text"
    assert shown == ['Calls weather{\n  "city": "Rome"\n}', "Calls time{}"]
    placeholder = "document.querySelector('#input').getAttribute('aria-label')"
    assert browser.evaluate(placeholder) == "Result of weather"
    send(browser, "sunny")
    assert browser.evaluate(placeholder) == "Result of time"
    assert len(browser.bodies(CHAT)) == 1, "the second result is missing"
    scripted.script = [chunk({"content": "Go out."}, "stop"), "[DONE]"]
    send(browser, "noon")
    wait_for_end(browser)
    assert last(browser, ".content") == "Go out."
    assert browser.evaluate(placeholder) == "Message"
    calls = [
        {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": text}}
        for index, (name, text) in enumerate([("weather", '{"city": "Rome"}'), ("time", "{}")])
    ]
    assert browser.bodies(CHAT)[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call-0", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call-1", "content": "noon"},
    ]


@pytest.mark.parametrize("content", ["", "I ask."])
@pytest.mark.parametrize("ending", ["length", "Stop"])
def test_a_call_that_is_cut_off_is_not_sent_back(
    browser: Chromium, scripted: Scripted, answered: Callable[..., None], content: str, ending: str
) -> None:
    """Its arguments are no JSON, so that every further request would be refused."""
    function = {"name": "weather", "arguments": '{"city": "Ro'}
    call = {"index": 0, "id": "call-0", "type": "function", "function": function}
    begun = [chunk({"content": content}), chunk({"tool_calls": [call]})]
    answered(*begun, *([None] if ending == "Stop" else [chunk({}, "length"), "[DONE]"]))
    browser.wait_for(f"{LAST.format('.call pre')}?.textContent.length > 5")
    if ending == "Stop":
        browser.click("#stop")
    wait_for_end(browser)
    assert browser.evaluate("document.querySelector('#input').placeholder") == "Message"
    scripted.go_on.set()
    scripted.script = [chunk({"content": "Go out."}, "stop"), "[DONE]"]
    send(browser, "And?")
    browser.wait_for("document.querySelectorAll('.assistant').length === 2 && !running")
    sent = browser.bodies(CHAT)[1]["messages"]
    assert sent[1:] == [
        {"role": "assistant", "content": content}, {"role": "user", "content": "And?"}
    ]  # fmt: skip


def test_code_is_set_apart_and_markup_stays_text(
    browser: Chromium, answered: Callable[..., None]
) -> None:
    text = "Run `ls`:\n```sh\nls -l\n```\n**Now** <img src=x onerror='window.hurt = 1'>"
    answered(chunk({"content": text}, "stop"), "[DONE]")
    wait_for_end(browser)
    assert last(browser, "pre") == "ls -l"
    assert last(browser, ".content code") == "ls"
    assert last(browser, ".content strong") == "Now"
    assert browser.evaluate("document.querySelector('#messages img')") is None
    assert "<img src=x" in last(browser, ".content")
    assert browser.evaluate("window.hurt") is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            [chunk({"content": "a"}), {"error": {"message": "the engine has ended"}}],
            "Error: the eng",
        ),
        ([chunk({"content": "a"})], "The stream has ended before the answer."),
    ],
)
def test_an_answer_that_breaks_off_stays_with_its_error(
    browser: Chromium, answered: Callable[..., None], script: list[Any], message: str
) -> None:
    answered(*script)
    wait_for_end(browser)
    assert last(browser, ".content") == "a"
    assert last(browser, ".error").startswith(message)


def test_events_are_read_wherever_the_stream_is_cut(browser: Chromium, scripted: Scripted) -> None:
    open_page(browser, scripted.url)
    stream = 'data: {"a":1}\r\n\r\n: a comment\ndata:two\r\ndata: lines\n\ndata: é\r\revent: x\n\n'
    expected = ['{"a":1}', "two\nlines", "é"]
    found = browser.evaluate(
        f"(() => {{ const text = {json.dumps(stream)}, found = [];"
        " for (let i = 0; i <= text.length; i++) for (let j = i; j <= text.length; j++) {"
        " const read = eventReader();"
        " found.push([text.slice(0, i), text.slice(i, j), text.slice(j)].flatMap(read)); }"
        " return [...new Set(found.map((one) => JSON.stringify(one)))]; })()"
    )
    assert [json.loads(one) for one in found] == [expected]


def test_metrics_become_readings(browser: Chromium, scripted: Scripted) -> None:
    """Rates of the last interval, means and shares of the whole time."""
    open_page(browser, scripted.url)
    names = (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "generation_tokens_total", "prefix_cache_hits_total", "prefix_cache_queries_total",
        "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count",
    )  # fmt: skip
    at = {
        0: (0, 0, 0, 100, 50, 100, 1.0, 2), 1: (3, 1, 0.25, 150, 50, 100, 1.0, 2),
        3: (2, 0, 0.5, 350, 80, 140, 1.6, 5),
    }  # fmt: skip

    def readings(*times: int) -> Any:
        samples = [
            {
                "time": time,
                "text": "# HELP vllm:x y\n"
                + "".join(
                    f'vllm:{name}{{model_name="a}} b"}} {value}\n'
                    for name, value in zip(names, at[time], strict=True)
                ),
            }
            for time in times
        ]
        return browser.evaluate(
            f"readings({json.dumps(samples)}.map(s => ({{...s, values: parseMetrics(s.text)}})))"
        )

    assert readings(0) == dict(running=0, waiting=0, speed=None, usage=0, hits=None, first=None)
    found = readings(0, 1, 3)
    assert found.pop("first") == pytest.approx(200)
    assert found == dict(running=2, waiting=0, speed=100, usage=50, hits=75)
    assert readings(3, 0)["speed"] is None, "times that do not grow"
    several = 'a_total{r="x"} 1.0\na_total{r="y"} 2e1\nb NaN\nc +Inf\n\n# EOF\nd 5 1234\n'
    assert browser.evaluate(f"parseMetrics({several!r})") == {"a_total": 21, "d": 5}


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (None, "ms", ["\u2013", ""]), (0, "%", ["0", "%"]), (3.14159, "%", ["3.1", "%"]),
        (43.6, "ms", ["44", "ms"]), (1234, "ms", ["1.23", "s"]), (28766.4, "", ["28,766", ""]),
    ],
)  # fmt: skip
def test_numbers_are_short(
    browser: Chromium, scripted: Scripted, value: float | None, unit: str, shown: list[str]
) -> None:
    open_page(browser, scripted.url)
    assert browser.evaluate(f"shown({json.dumps(value)}, {unit!r})") == shown


def test_a_curve_keeps_its_place(browser: Chromium, scripted: Scripted) -> None:
    """The newest value is at the right, and the largest at the top."""
    open_page(browser, scripted.url)
    assert browser.evaluate("sparkline([null, 0, 5, 10], 4)") == [
        "M57,20L58,10L59,0", "M57,20L58,10L59,0L59,20L57,20Z",
    ]  # fmt: skip
    assert browser.evaluate("sparkline([0, 1], 4)[0]") == "M58,20L59,15"
    assert browser.evaluate("sparkline([null, 3], 4)") == ["", ""]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a\nb\n\nc", [["text", "a\nb"], ["text", "c"]]),
        ("a:\n\n```\nx\n\n y\n```\n\nb", [["text", "a:"], ["code", "x\n\n y"], ["text", "b"]]),
        ("```py\nx = `y`\n", [["code", "x = `y`\n"]]),
        ("```\nx\n```\n~~~\n```\n~~~", [["code", "x"], ["code", "```"]]),
        ("# A #\n#b\n###### c", [["heading", 1, "A"], ["text", "#b"], ["heading", 6, "c"]]),
        ("> a\n> > b\nc", [["quote", [["text", "a"], ["quote", [["text", "b"]]]]], ["text", "c"]]),
        ("- a\n- b\n\n***", [["list", None, [[["text", "a"]], [["text", "b"]]]], ["rule"]]),
        (
            "3. a\n   - b\n     c\n   - d\n4. e\nf",
            [["list", 3, [
                [["text", "a"], ["list", None, [[["text", "b\nc"]], [["text", "d"]]]]],
                [["text", "e\nf"]],
            ]]],
        ),
        ("1. a\n\n   p\n\n2. b\n\nc", [
            ["list", 1, [[["text", "a"], ["text", "p"]], [["text", "b"]]]], ["text", "c"],
        ]),
        ("- a\n  ```\n  x\n    y\n  ```\n- b", [
            ["list", None, [[["text", "a"], ["code", "x\n  y"]], [["text", "b"]]]],
        ]),
        ("a\n1. b", [["text", "a"], ["list", 1, [[["text", "b"]]]]]),
        (
            "|a|b\\|c|\n|:-:|--:|\n|1|2|3|\n|4|\nd",
            [["table", ["center", "right"], [["a", "b|c"], ["1", "2"], ["4"]]], ["text", "d"]],
        ),
        ("a | b\n- | -\n", [["table", ["left", "left"], [["a", "b"]]]]),
        ("a | b\n---", [["text", "a | b"], ["rule"]]),
        ("-\n1.\n", [["list", None, [[]]], ["list", 1, [[]]]]),
    ],
)  # fmt: skip
def test_text_has_blocks(
    browser: Chromium, scripted: Scripted, text: str, expected: list[Any]
) -> None:
    open_page(browser, scripted.url)
    assert browser.evaluate(f"blocks({json.dumps(text)})") == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("2*3 ** 4, 2*3*4 and a_b_c", ["2*3 ** 4, 2*3*4 and a_b_c"]),
        ("**a *b*** _c_", [["strong", ["a ", ["em", ["b"]]]], " ", ["em", ["c"]]]),
        ("`a*b*` and `` `c` ``", [["code", ["a*b*"]], " and ", ["code", ["`c`"]]]),
        (r"\*a\* \`b\`", ["*a* `b`"]),
        ("[t](https://a.b/c_(d)?e=1 \"f\").", [["a", ["t"], "https://a.b/c_(d)?e=1"], "."]),
        ("[**t**](mailto:a@b.c)", [["a", [["strong", ["t"]]], "mailto:a@b.c"]]),
        ("![t](https://a.b/c.png)", [["a", ["t"], "https://a.b/c.png"]]),
        ("see https://a.b/c_d.", ["see ", ["a", ["https://a.b/c_d"], "https://a.b/c_d"], "."]),
        ("[t](javascript:alert(1))", ["[t](javascript:alert(1))"]),
        ("[t](JaVaScRiPt:x) [t](data:text/html,x)", ["[t](JaVaScRiPt:x) [t](data:text/html,x)"]),
        ("[t](/relative)", ["[t](/relative)"]),
    ],
)  # fmt: skip
def test_lines_have_parts(
    browser: Chromium, scripted: Scripted, text: str, parts: list[Any]
) -> None:
    open_page(browser, scripted.url)
    assert browser.evaluate(f"inline({json.dumps(text)})") == parts


def test_a_long_text_of_marks_takes_no_long_time(browser: Chromium, scripted: Scripted) -> None:
    """An answer is parsed again while it grows; a pattern must not try every pair of marks."""
    open_page(browser, scripted.url)
    for text in ("*", "**a ", "`", "[", "[](", "> ", "- ", "|", "_a", "1. "):
        took = browser.evaluate(
            f"(() => {{ const text = {text!r}.repeat(3000), start = performance.now();"
            " const all = (one) => one.forEach(part => Array.isArray(part) ? all(part)"
            " : typeof part === 'string' && inline(part)); all(blocks(text));"
            " return performance.now() - start; })()"
        )
        assert took < 1000, text


def test_markdown_becomes_elements_and_no_other_markup(
    browser: Chromium, answered: Callable[..., None]
) -> None:
    text = (
        "# T\n\n1. a\n   - b\n\n| x | y |\n|--|--:|\n| <b>1</b> | `2` |\n\n> q\n\n---\n"
        '[good](https://a.example/?q="><img src=x onerror=window.hurt=1>)'
        " [g](https://a.example/x) [bad](javascript:window.hurt=1)"
        " <script>window.hurt = 1</script> <a href='javascript:window.hurt=1'>l</a>"
    )
    answered(*(chunk({"content": text[i : i + 7]}) for i in range(0, len(text), 7)),
             chunk({}, "stop"), "[DONE]")  # fmt: skip
    wait_for_end(browser)
    assert last(browser, "h3") == "T" and last(browser, "ol ul li") == "b"
    assert last(browser, "td") == "<b>1</b>" and last(browser, "td code") == "2"
    assert last(browser, "blockquote") == "q"
    assert browser.evaluate(f"{LAST.format('td:last-child')}.style.textAlign") == "right"
    links = browser.evaluate(
        "[...document.querySelectorAll('#messages a')].map(e => [e.href, e.rel])"
    )
    assert links and all(link[0].startswith("https://a.example/") for link in links)
    assert all("noopener" in link[1] for link in links)
    names = browser.evaluate("[...document.querySelectorAll('.content *')].map(e => e.localName)")
    assert not {"script", "img", "b", "iframe"} & set(names)
    assert browser.evaluate("window.hurt") is None


def test_a_block_that_is_whole_stays_while_the_answer_grows(
    browser: Chromium, scripted: Scripted, answered: Callable[..., None]
) -> None:
    """What a reader has selected there stays selected."""
    answered(
        chunk({"content": "One.\n\nTwo"}), None, chunk({"content": " more."}, "stop"), "[DONE]"
    )
    browser.wait_for(f"{LAST.format('p:last-child')}?.textContent === 'Two'")
    browser.evaluate(f"window.first = {LAST.format('p')}")
    scripted.go_on.set()
    wait_for_end(browser)
    assert last(browser, "p:last-child") == "Two more."
    assert browser.evaluate(f"window.first === {LAST.format('p')}")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((11, 0, 1000, 3000, True), [5, ""]),
        ((11, 0, 3000, 3001, False), [11000 / 3001, " with the prompt"]),
        ((1, 0, 1000, 1000, True), None), ((5, 0, 1000, 1001, True), None),
    ],
)  # fmt: skip
def test_the_speed_of_calls_counts_all_time(
    browser: Chromium, scripted: Scripted, args: tuple[Any, ...], expected: Any
) -> None:
    """Their tokens come in one event, so that the time since it says nothing."""
    open_page(browser, scripted.url)
    assert browser.evaluate(f"speed(...{json.dumps(args)})") == expected


def test_a_model_or_an_adapter_can_be_chosen(browser: Chromium, scripted: Scripted) -> None:
    scripted.models = [
        {"id": "base", "max_model_len": 9},
        {"id": "sql", "parent": "base", "max_model_len": 9},
    ]
    scripted.script = [chunk({"content": "a"}, "stop"), "[DONE]"]
    open_page(browser, scripted.url)
    browser.wait_for("!document.querySelector('#model').disabled")
    send(browser, "Hi")
    browser.wait_for("messages.length === 2 && !running")
    browser.evaluate(
        "document.querySelector('#model').value = 'sql';"
        "document.querySelector('#model').dispatchEvent(new Event('change'))"
    )
    send(browser, "Hi")
    browser.wait_for("messages.length === 4 && !running")
    assert [body["model"] for body in browser.bodies(CHAT)] == ["base", "sql"]
    browser.open(f"{scripted.url}/")
    browser.wait_for("document.querySelector('#model').value === 'sql'")
    scripted.models.pop()
    browser.evaluate("document.querySelector('#model').focus()")
    browser.wait_for("document.querySelector('#model').value === 'base' && model === 'base'")


@pytest.mark.parametrize("width", [390, 1200])
def test_what_can_be_done_stands_in_line_with_the_message(
    browser: Chromium, scripted: Scripted, answered: Callable[..., None], width: int
) -> None:
    """Also without notes before it; and the header has room for the longest state."""
    scripted.models = [{"id": "a/model-with-a-very-long-name" * 2, "max_model_len": 9}] * 2
    answered({"error": {"message": "full"}})
    wait_for_end(browser)
    browser.look(width)
    left = "document.querySelector('#messages > li:last-child {}').getBoundingClientRect().left"
    assert browser.evaluate(left.format(".again")) == browser.evaluate(left.format(".error"))
    browser.evaluate("showKeyField(true)")
    assert browser.evaluate("document.querySelector('#new').getBoundingClientRect().right") < width
    assert browser.evaluate(
        "(e => e.scrollWidth <= e.clientWidth)(document.querySelector('#state'))"
    )
    assert browser.evaluate("document.querySelector('#model').getBoundingClientRect().width") > 60


@pytest.mark.parametrize("ending", ["error", "Stop"])
def test_a_message_without_an_answer_can_be_taken_back_or_sent_again(
    browser: Chromium, scripted: Scripted, answered: Callable[..., None], ending: str
) -> None:
    answered(None if ending == "Stop" else {"error": {"message": "full"}})
    if ending == "Stop":
        browser.wait_for("running !== null")
        assert browser.evaluate(
            "(async () => { document.querySelector('#stop').click();"
            " await new Promise(done => setTimeout(done, 50));"
            f" return {LAST.format('.notes')}.textContent; }})()"
        ).startswith("stopped"), "although the server sends nothing"
    wait_for_end(browser)
    scripted.go_on.set()
    browser.click("#messages > li:last-child .back")
    assert browser.evaluate("[messages.length, document.querySelector('#messages').children.length]"
                            ) == [0, 0]  # fmt: skip
    assert browser.evaluate("document.querySelector('#input').value") == "Hi"
    browser.press("Enter")
    wait_for_end(browser)
    scripted.script = [chunk({"content": "Yes."}, "stop"), "[DONE]"]
    browser.click("#messages > li:last-child .again")
    browser.wait_for("messages.length === 2")
    assert [len(body["messages"]) for body in browser.bodies(CHAT)] == [1, 1, 1]
    browser.click("#messages > li:last-child .back")
    assert browser.evaluate("messages.length") == 0


def test_a_phones_keyboard_sends_too(browser: Chromium, answered: Callable[..., None]) -> None:
    """It names no key while it composes a word; it only says that it breaks the line."""
    answered(chunk({"content": "a"}, "stop"), "[DONE]")
    wait_for_end(browser)
    browser.write("#input", "Hello")
    sends = (
        "document.querySelector('#input').dispatchEvent(new InputEvent('beforeinput',"
        " {inputType: '%s', cancelable: true, bubbles: true}))"
    )
    assert browser.evaluate(sends % "insertText")
    assert not browser.evaluate(sends % "insertLineBreak"), "the line is not broken"
    browser.wait_for("messages.length === 4")
    assert browser.bodies(CHAT)[1]["messages"][2] == {"role": "user", "content": "Hello"}
    assert browser.evaluate("document.querySelector('#input').enterKeyHint") == "send"
