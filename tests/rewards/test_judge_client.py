"""Questions to an OpenAI-compatible server: what is sent, how many at a time, and what every failure becomes."""

import base64
import io
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
import torch
from PIL import Image

from flowgrpo.rewards.judges.judge_client import JudgeClient, JudgeReply, JudgeServer, Question
from flowgrpo.rewards.judges.judge_images import chosen_frames, data_urls, shrunk
from flowgrpo.rewards.serving.http_client import ServerError, Unavailable, asked_pause
from tests.rewards.stub_server import FakeClock, Reply, StubServer, failed, question_of, said

KEY = "sk-3c9e1f5a7b"
Stub = Callable[..., StubServer]


@pytest.fixture
def stub() -> Iterator[Stub]:
    made: list[StubServer] = []

    def make(answer: Callable[..., Reply | None] = lambda request, number: said("fine")) -> StubServer:
        made.append(StubServer(answer))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(JudgeClient, "sleep", staticmethod(fake.sleep))
    monkeypatch.setattr(JudgeClient, "clock", staticmethod(fake))
    return fake


def client(server: StubServer, max_tokens: int = 50, **options: object) -> JudgeClient:
    ours = {name: options.pop(name) for name in ("system", "logprobs") if name in options}
    return JudgeClient("judge", {"url": server.url, "model": "m", **options}, max_tokens=max_tokens, **ours)


def ask(server: StubServer, *texts: str, **options: object) -> list[JudgeReply]:
    return client(server, **options).ask([Question(text) for text in texts])


# -- what is sent -----------------------------------------------------------------------------------------------------


def test_a_question_about_an_image_is_sent_as_documented(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = stub()
    levels = torch.arange(2 * 5 * 3).view(3, 2, 5) * 8
    asked = client(server, key_env="JUDGE_KEY", system="Be strict.", extra={"seed": 3})
    assert asked.ask([Question("How good?", (levels / 255,))]) == [JudgeReply("fine")]
    request = server.requests[0]
    assert request["path"] == "/v1/chat/completions"
    assert request["headers"]["Authorization"] == f"Bearer {KEY}"
    url = request["body"]["messages"][1]["content"][0]["image_url"]["url"]
    assert request["body"] == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "How good?"}],
            },
        ],
        "temperature": 0,
        "max_tokens": 50,
        "seed": 3,
    }
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (5, 2))
    pixels = [picture.getpixel((x, y)) for y in range(2) for x in range(5)]
    assert pixels == [tuple(levels[:, y, x].tolist()) for y in range(2) for x in range(5)]


def test_a_question_without_images_is_a_plain_text(stub: Stub):
    server = stub()
    ask(server, "2 + 2?", max_tokens=7)
    assert server.bodies == [
        {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}], "temperature": 0, "max_tokens": 7}
    ]
    assert "Authorization" not in server.requests[0]["headers"]


def test_a_base_model_is_asked_by_the_completions_api(stub: Stub):
    body = {"choices": [{"text": " 4", "finish_reason": "length"}]}
    server = stub(lambda request, number: (200, {}, json.dumps(body).encode()))
    asked = client(server, api="completions", system="Sums.")
    assert asked.ask([Question("2 + 2 =", begun="The sum is")]) == [JudgeReply(" 4", cut=True)]
    assert server.requests[0]["path"] == "/v1/completions"
    assert server.bodies == [
        {"model": "m", "prompt": "Sums.\n\n2 + 2 =\nThe sum is", "temperature": 0, "max_tokens": 50}
    ]
    with pytest.raises(ValueError, match="completions takes no images; use chat"):
        asked.ask([Question("?", (torch.zeros(3, 2, 2),))])


def test_an_answer_that_is_begun_is_continued(stub: Stub):
    server = stub()
    client(server).ask([Question("How good?", begun="The quality is")])
    body = server.bodies[0]
    assert body["messages"][-1] == {"role": "assistant", "content": "The quality is"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def test_frames_of_a_video_are_evenly_spaced_and_shrunk():
    assert [chosen_frames(count, most) for count, most in ((3, 8), (9, 3), (5, 1), (10, 4))] == [
        [0, 1, 2], [0, 4, 8], [2], [0, 3, 6, 9],
    ]  # fmt: skip
    video = (torch.arange(9.0) / 10).view(9, 1, 1, 1).expand(9, 3, 8, 16)
    urls = data_urls(video, side=4, frames=3)
    pictures = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    assert [picture.size for picture in pictures] == [(4, 2)] * 3
    assert [picture.getpixel((1, 1)) for picture in pictures] == [(0, 0, 0), (102, 102, 102), (204, 204, 204)]
    assert shrunk(video, 16) is video


# -- how many at a time -----------------------------------------------------------------------------------------------


def test_as_many_questions_as_allowed_are_under_way_and_no_more(stub: Stub):
    arrived, let_go, extra = threading.Semaphore(0), threading.Event(), []

    def answer(request: dict, number: int) -> Reply:
        arrived.release()
        let_go.wait(timeout=20)
        return said(question_of(request).upper())

    def watch() -> None:
        for _ in range(3):
            assert arrived.acquire(timeout=20)
        # A fourth would be here by now or soon.
        extra.append(arrived.acquire(timeout=0.3))
        let_go.set()

    server, watching = stub(answer), threading.Thread(target=watch)
    watching.start()
    texts = [f"q{k}" for k in range(9)]
    assert [found.text for found in ask(server, *texts, concurrency=3)] == [text.upper() for text in texts]
    watching.join()
    assert extra == [False]
    assert server.most_in_flight == 3


# -- busy, slow, dead -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again_with_pauses_that_double(stub: Stub, clock: FakeClock, status: int):
    server = stub(lambda request, number: failed(status) if number < 3 else said("at last"))
    assert ask(server, "?")[0].text == "at last"
    first, second, third = clock.pauses
    assert (second, third) == (2 * first, 4 * first)
    assert 0.75 <= first < 1.25
    assert server.bodies == [server.bodies[0]] * 4


def test_a_pause_that_the_server_asks_for_is_kept(stub: Stub, clock: FakeClock):
    server = stub(lambda request, number: failed(429, Retry_After="17") if number == 0 else said("fine"))
    assert ask(server, "?")[0].text == "fine"
    assert clock.pauses == [17.0]


def test_pauses_are_read_from_numbers_and_dates():
    soon = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=100), usegmt=True)
    assert 90 < asked_pause(soon) <= 100
    late = "Wed, 21 Oct 2015 07:28:00 GMT"
    assert [asked_pause(text) for text in (None, "", "5", "0.5", "-3", late, "soon", "nan", "inf", "1e9")] == [
        0, 0, 5, 0.5, 0, 0, 0, 0, 300, 300,
    ]  # fmt: skip


def test_patience_has_an_end(stub: Stub, clock: FakeClock):
    server = stub(lambda request, number: failed(503, {"error": "loading"}))
    with pytest.raises(Unavailable, match=r"503.*loading.*\(tried 4 times in \d+ s\)"):
        ask(server, "?", patience=10)
    assert len(clock.pauses) == 3
    assert clock.now <= 10


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_uses_up_no_patience(stub: Stub, clock: FakeClock, status: int):
    server = stub(lambda request, number: failed(status, Retry_After="5") if clock.now < 90 else said("at last"))
    assert ask(server, "?", patience=10)[0].text == "at last"
    assert clock.now >= 90


def test_a_server_that_stays_busy_is_given_up_after_the_time_of_an_answer(stub: Stub, clock: FakeClock):
    server = stub(lambda request, number: failed(429, Retry_After="20"))
    with pytest.raises(Unavailable, match=r"429.*tried 5 times.*the server is busy: .*`server.concurrency`"):
        ask(server, "?", patience=10, timeout=90)
    assert clock.pauses == [20.0] * 4


def test_a_server_that_does_not_answer_in_time_is_asked_again(stub: Stub, clock: FakeClock):
    release = threading.Event()

    def answer(request: dict, number: int) -> Reply:
        if number == 0:
            release.wait(timeout=20)
        return said("fine")

    server = stub(answer)
    assert ask(server, "?", timeout=0.2)[0].text == "fine"
    release.set()
    assert len(server.requests) == 2
    assert len(clock.pauses) == 1


def test_a_server_that_dies_in_the_middle_of_a_batch_is_waited_for(stub: Stub, clock: FakeClock):
    lock, answered = threading.Lock(), []
    dying = threading.Thread(target=lambda: server.stop())

    def answer(request: dict, number: int) -> Reply | None:
        with lock:
            if number == 3:
                dying.start()
            if number >= 3 and not clock.pauses:
                return None
            answered.append(question_of(request))
            return said(question_of(request).upper())

    server = stub(answer)

    def restart() -> None:
        with lock:
            dying.join()
            if not server.running:
                server.start()

    clock.on_sleep = restart
    texts = [f"q{k}" for k in range(8)]
    assert [found.text for found in ask(server, *texts, concurrency=2)] == [text.upper() for text in texts]
    assert sorted(answered) == texts


def test_the_repetition_of_a_call_asks_only_for_what_is_missing(stub: Stub, clock: FakeClock):
    broken = True
    server = stub(lambda request, number: failed(503) if broken and question_of(request) == "q2" else said("fine"))
    asked = client(server, patience=1, concurrency=1)
    questions = [Question(f"q{k}") for k in range(4)]
    with pytest.raises(Unavailable):
        asked.ask(questions)
    broken, before = False, [question_of(request) for request in server.requests]
    assert asked.ask(questions) == [JudgeReply("fine")] * 4
    after = [question_of(request) for request in server.requests][len(before) :]
    assert set(before[:2]) == {"q0", "q1"}
    assert "q2" in after
    assert set(after) & {"q0", "q1"} == set()


# -- refusals and nonsense --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 501])
def test_a_refusal_is_not_repeated_and_names_no_key(
    stub: Stub, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = stub(lambda request, number: failed(status, {"error": f"Incorrect API key provided: {KEY}"}))
    with pytest.raises(ServerError, match=f"answered {status}") as caught:
        ask(server, "?", key_env="JUDGE_KEY")
    assert clock.pauses == []
    assert "[hidden]" in str(caught.value)
    assert ("the key in JUDGE_KEY was sent" in str(caught.value)) == (status in (401, 403))
    assert KEY not in f"{caught.value}{caught.value.body}{caplog.text}{caught.value.__context__!r}"


def test_the_key_is_in_no_attribute_and_read_when_it_is_needed(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = stub()
    asked = client(server, key_env="JUDGE_KEY")
    asked.ask([Question("one")])
    assert KEY not in f"{vars(asked)}{vars(asked._http)}"
    assert KEY.encode() not in pickle.dumps(asked)
    monkeypatch.setenv("JUDGE_KEY", "another")
    pickle.loads(pickle.dumps(asked)).ask([Question("two")])
    assert [request["headers"]["Authorization"] for request in server.requests] == [f"Bearer {KEY}", "Bearer another"]


def test_redirects_are_not_followed(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    thief = stub()
    server = stub(lambda request, number: failed(307, Location=f"{thief.url}/chat/completions"))
    with pytest.raises(ServerError, match="answered 307"):
        ask(server, "?", key_env="JUDGE_KEY")
    assert thief.requests == []


@pytest.mark.parametrize(
    "reply",
    [
        (400, {}, json.dumps({"error": {"code": "content_policy_violation", "message": "no"}}).encode()),
        (400, {}, json.dumps({"error": {"code": "content_filter"}}).encode()),
        said(None, finish_reason="content_filter"),
        said(None, message={"content": None, "refusal": "I cannot look at this."}),
    ],
)
def test_a_sample_that_the_server_will_not_look_at_has_no_answer(stub: Stub, reply: Reply):
    found = ask(stub(lambda request, number: reply), "?")[0]
    assert found.text == ""
    assert found.refused


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>welcome</html>",
        b"[]",
        b"null",
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": {"0": 1}}',
        b"[" * 200_000,
        b"\xff\xfe\x00",
    ],
)
def test_nonsense_is_an_error_that_shows_it(stub: Stub, clock: FakeClock, body: bytes):
    with pytest.raises(ServerError, match="sent a reply that is not an answer"):
        ask(stub(lambda request, number: (200, {}, body)), "?")
    assert clock.pauses == []


def test_an_answer_without_end_is_not_read(stub: Stub):
    with pytest.raises(ServerError, match="larger than 4194304 bytes"):
        ask(stub(lambda request, number: said("x" * (5 << 20))), "?")


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (None, "server is None; give"),
        ({"url": "http://a"}, "server needs model"),
        ({"url": "http://a", "model": "m", "modle": 1}, "no field 'modle'; did you mean 'model'"),
        ({"url": "a:80", "model": "m"}, "url is 'a:80'"),
        ({"url": "http://a", "model": ""}, "server.model is ''"),
        ({"url": "http://a", "model": "m", "api": "responses"}, "server.api is 'responses'"),
        ({"url": "http://a", "model": "m", "concurrency": 0}, "server.concurrency is 0"),
        ({"url": "http://a", "model": "m", "max_tokens": True}, "server.max_tokens is True"),
        ({"url": "http://a", "model": "m", "timeout": 0}, "server.timeout is 0"),
        ({"url": "http://a", "model": "m", "extra": {"temperature": 1}}, "server.extra has 'temperature'"),
        ({"url": "http://a", "model": "m", "key_env": "SURELY_UNSET"}, "variable SURELY_UNSET is not set"),
    ],
)
def test_wrong_options_are_refused(server: object, message: str):
    with pytest.raises(ValueError, match=message):
        JudgeClient("judge", server, max_tokens=5)


def test_an_address_with_a_secret_is_refused_and_not_repeated():
    for url in (f"http://me:{KEY}@host/v1", f"http://host/v1?key={KEY}"):
        with pytest.raises(ValueError, match="leave it out") as caught:
            JudgeServer.read("judge", {"url": url, "model": "m"})
        assert KEY not in str(caught.value)


def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\nX-Admin: 1")
    with pytest.raises(ValueError, match="JUDGE_KEY holds spaces") as caught:
        JudgeClient("judge", {"url": "http://a", "model": "m", "key_env": "JUDGE_KEY"}, max_tokens=5)
    assert KEY not in str(caught.value)
