"""The reward `remote`: equal to the local reward to the last bit, whatever happens to the server in between."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flowgrpo.rewards import RewardBatch, RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.remote import Remote
from flowgrpo.rewards.serving.http_client import HttpClient, Reply
from flowgrpo.rewards.serving.wire import WireLimits
from tests.rewards.served import Served
from tests.rewards.stub_server import FakeClock

COLUMNS = {"taste": [1.0, None, 0.5, 2.0, -1.0], "extra": ["a", "b", None, [1, {"c": 2.5}], True], "hint": [1] * 5}
GROUPS = [3, 9, 3, 9, 3]
PROMPTS = ["a", "b{", "ü\n", "\ud800", ""]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(Remote, "sleep", staticmethod(fake.sleep))
    monkeypatch.setattr(Remote, "clock", staticmethod(fake))
    return fake


@pytest.fixture
def serve(plugins: str, clock: FakeClock) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(name: str, options: dict | None = None, **more: Any) -> Served:
        made.append(Served(f"{plugins}:{name}" if name[0] != "=" else name[1:], options, **more))
        return made[-1]

    yield make
    for server in made:
        if server.thread.is_alive():
            server.close()


def images(count: int = 5, *shape: int) -> torch.Tensor:
    return torch.rand(count, *(shape or (3, 6, 5)), generator=torch.Generator().manual_seed(count))


def remote(url: str, **options: Any) -> RewardSet:
    return RewardSet([RewardSpec("remote", options={"url": url, **options})], sleep=lambda seconds: None)


def same(one: RewardBatch, other: RewardBatch) -> bool:
    return (
        one.names == other.names
        and one.values.numpy().tobytes() == other.values.numpy().tobytes()
        and repr(one.sub_scores) == repr(other.sub_scores)
        and one.notes == other.notes
    )


# -- equal to the local one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "samples"),
    [
        ("level", {}, images()),
        ("level", {"gain": 0.3}, images()),
        ("rich", {}, images()),
        ("Apart", {}, images()),
        ("Ranked", {}, images()),
        ("Small", {"offset": 0.1}, images()),
        ("motion", {}, images(5, 4, 3, 6, 5)),
        ("longest", {}, ["x" * k for k in range(5)]),
        ("keyed", {}, ["x" * k for k in range(5)]),
        ("=jpeg_compressibility", {}, images()),
        ("=digit_share", {}, ["1a", "", "22", "é3", "\ud800"]),
        ("=win_rate", {"judge": "jpeg_incompressibility"}, images()),
    ],
)
def test_results_are_those_of_the_local_reward_to_the_last_bit(serve, plugins, name, options, samples):
    server = serve(name, options)
    columns = {**COLUMNS, "wanted": ["q", 12, None, 2, 3], "noise_key": [7, 8, 9, 7, 8], "completion_ids": [[1]] * 5}
    spec = RewardSpec(name[1:] if name[0] == "=" else f"{plugins}:{name}", options=options)
    local, away = RewardSet([spec]), remote(server.url)
    expected = local.score(samples, PROMPTS, columns, GROUPS)
    assert same(away.score(samples, PROMPTS, columns, GROUPS), expected)
    mine, theirs = local.rewards[0].function, server.reward.function
    # The served reward was called with the same batches as the local one.
    assert getattr(theirs, "calls", None) == getattr(mine, "calls", None)


def test_it_is_called_as_the_served_reward_would_be(serve):
    away = remote(serve("rich").url)
    with pytest.raises(ValueError, match="takes `taste`, which the prompts do not have"):
        away.score(images(), PROMPTS)
    with pytest.raises(ValueError, match="scores `images`, but the samples here are completions"):
        away.score(["a"], ["p"], {"taste": [1]})
    with pytest.raises(ValueError, match="compares whole groups"):
        remote(serve("Apart").url).score(images(), PROMPTS)


def test_only_the_columns_that_the_reward_looks_at_are_sent(serve):
    away = remote(serve("rich").url)
    odd = {"taste": [1.0] * 5, "picture": [object()] * 5}
    assert away.score(images(), PROMPTS, odd).values.shape == (5, 1)
    with pytest.raises(RewardError, match=r"column 'taste' has a tuple in row 1 .* cannot be sent"):
        away.score(images(), PROMPTS, {"taste": [1.0, (1, 2), 1.0, 1.0, 1.0]})


@pytest.mark.parametrize("encoding", ["uint8", "png"])
def test_smaller_encodings_round_to_256_levels(serve, encoding):
    server = serve("level")
    exact = (images() * 255).round() / 255
    local = exact.flatten(1).mean(1)
    assert torch.equal(remote(server.url, encoding=encoding).score(images(), PROMPTS).values[:, 0], local)
    assert not torch.equal(remote(server.url).score(images(), PROMPTS).values[:, 0], local)


@pytest.mark.parametrize("name", ["Small", "Ranked", "rich"])
def test_a_call_that_is_too_large_goes_in_parts_and_groups_stay_whole(serve, plugins, name):
    each = 3 * 6 * 5 * 4
    limits = WireLimits(most_bytes=4 * each + 1000) if name != "rich" else WireLimits(most_samples=2)
    server = serve(name, limits=limits)
    local = RewardSet([RewardSpec(f"{plugins}:{name}")])
    samples, groups = images(), [3, 9, 3, 9, 3]
    got = remote(server.url, **({"batch_size": 5} if name == "Small" else {}))
    found = got.score(samples, PROMPTS, COLUMNS, groups)
    if name == "Ranked":
        assert [groups for groups, _ in server.reward.function.calls] == [[3, 3, 3], [9, 9]]
        assert found.values[:, 0].tolist() == [3.0, 2.0, 4.0, 3.0, 5.0]
    elif name == "rich":
        # The first of every call has no peak.
        assert [row != row for row in found.sub_scores["rich"]["peak"]] == [True, False, True, False, True]
        assert found.notes["rich"] == local.score(samples, PROMPTS, COLUMNS).notes["rich"]
    else:
        assert same(found, local.score(samples, PROMPTS, COLUMNS))


def test_a_long_text_is_as_large_as_in_the_request(serve, plugins):
    """A text of letters takes a byte for each, and others take up to twelve."""
    server = serve("longest", limits=WireLimits(most_bytes=20_000))
    away = remote(server.url)
    texts = ["a" * 15_000, "b", "é" * 2_500, "🟥" * 1_200]
    found = away.score(texts, ["p"] * 4, {"wanted": [""] * 4})
    assert found.values[:, 0].tolist() == [float(len(text)) for text in texts]
    # A call that was tried again would say so at the end.
    with pytest.raises(RewardError, match=r"a sample of \d+ bytes is more than .* with a larger --max-mb\.$"):
        away.score(["é" * 4_000], ["p"], {"wanted": [""]})


def test_a_group_that_cannot_be_sent_whole_is_refused_with_advice(serve):
    server = serve("Ranked", limits=WireLimits(most_bytes=1000))
    with pytest.raises(RewardError, match=r"a group of .* bytes is more than .* --max-mb"):
        remote(server.url).score(images(), PROMPTS, {"hint": [1] * 5}, GROUPS)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_of_the_served_reward_is_a_failure_here(serve, tmp_path):
    server = serve("fails")
    spec = RewardSpec("remote", options={"url": server.url})
    away = RewardSet([spec], quarantine=tmp_path / "failed", sleep=lambda seconds: None)
    with pytest.raises(RewardError, match="'fails' failed on prompt 'b': ZeroDivisionError: no edges"):
        away.score(images(2), ["a", "b"])
    assert len(list((tmp_path / "failed").rglob("*.png"))) == 2
    assert len(server.reports) == 4
    assert away.score(images(1), ["a"]).values.isfinite().all()


def test_a_row_that_the_served_reward_got_wrong_is_named(serve):
    server = serve("worded", limits=WireLimits(most_samples=2))
    with pytest.raises(RewardError, match="'good'") as caught:
        remote(server.url).score(images(4), ["a", "a", "a", "b"])
    assert caught.value.index == 3
    assert len(server.reports) == 1


def test_a_server_that_is_killed_in_the_middle_and_started_again_loses_nothing(serve, plugins, clock):
    first = serve("Small")
    away, began = remote(first.url, patience=100), threading.Event()
    inner, calls = first.reward.function, []

    def dies(images: torch.Tensor, prompts: list[str]) -> Any:
        calls.append(len(images))
        if len(calls) == 2:
            began.set()
            hung_up.wait(timeout=20)
        return inner(images=images, prompts=prompts)

    first.reward.function = dies
    hung_up = threading.Event()

    def murder() -> None:
        began.wait(timeout=20)
        first.server.socket.close()
        first.server.hang_up()
        hung_up.set()
        first.close()

    killer = threading.Thread(target=murder)
    killer.start()

    def restart() -> None:
        killer.join()
        if len(clock.pauses) == 3:
            serve("Small", port=first.port)

    clock.on_sleep = restart
    batch = away.score(images(), PROMPTS)
    expected = RewardSet([RewardSpec(f"{plugins}:Small")]).score(images(), PROMPTS)
    assert same(batch, expected)
    assert clock.pauses == [1.0, 2.0, 4.0]


def test_what_the_server_refuses_for_good_is_sent_once(serve, monkeypatch):
    server = serve("level", limits=WireLimits(most_side=16))
    away = remote(server.url)
    sent: list[str] = []
    request = HttpClient.request

    def counted(self: HttpClient, method: str, path: str, *more: Any) -> Reply:
        sent.append(path)
        return request(self, method, path, *more)

    monkeypatch.setattr(HttpClient, "request", counted)
    with pytest.raises(RewardError, match="17") as caught:
        away.score(images(1, 3, 17, 4), ["a"])
    assert sent == ["/score"]
    assert "The call was tried" not in str(caught.value)


def test_a_server_that_comes_back_with_another_reward_is_refused_at_once(serve, clock):
    first = serve("Small")
    away = remote(first.url)
    first.close()
    for name, options in (("Small", {"offset": 0.5}), ("level", {})):
        second = serve(name, options, port=first.port)
        with pytest.raises(RewardError, match="serves another reward than at the start"):
            away.score(images(), PROMPTS)
        assert second.service.metrics.text({}).count("failures_total 0") == 1
        second.close()
    assert clock.pauses == []


def test_a_full_server_is_waited_for_as_it_asks(serve, clock):
    server = serve("level", waiting=0)
    away = remote(server.url)
    place = server.service.admit()
    place.__enter__()
    clock.on_sleep = lambda: place.__exit__(None, None, None)
    assert away.score(images(), PROMPTS).values.shape == (5, 1)
    assert clock.pauses == [1.0]


def test_patience_has_an_end(serve, clock):
    server = serve("level")
    away = remote(server.url, patience=20)
    server.close()
    with pytest.raises(
        RewardError, match=r"Connection refused \(tried \d+ times in \d+ s\).*The call was tried 4 times"
    ):
        away.score(images(), PROMPTS)
    assert clock.now <= 4 * 20


def test_a_busy_server_uses_up_no_patience(serve, clock):
    server = serve("level", waiting=0)
    away = remote(server.url, patience=20)
    place = server.service.admit()
    place.__enter__()
    clock.on_sleep = lambda: place.__exit__(None, None, None) if clock.now > 400 else None
    assert away.score(images(), PROMPTS).values.shape == (5, 1)
    assert 400 < clock.now < 440


def test_a_server_that_stays_busy_is_given_up_after_the_time_of_a_request(serve, clock):
    server = serve("level", waiting=0)
    away = remote(server.url, patience=20, timeout=90)
    with (
        server.service.admit(),
        pytest.raises(
            RewardError, match=r"503.*tried \d+ times.*the server is busy: list more servers in `url`.*--wait"
        ),
    ):
        away.score(images(), PROMPTS)
    assert 4 * 60 < clock.now <= 4 * 90


# -- construction -----------------------------------------------------------------------------------------------------


def test_no_server_is_a_mistake_that_can_be_mended(clock):
    with pytest.raises(ValueError, match="start `flowgrpo rewards serve NAME` there"):
        Remote("http://127.0.0.1:9", patience=3)


def test_the_name_of_the_reward_can_be_asked_for(serve):
    server = serve("Small")
    assert remote(server.url, reward="smallest").names == ("smallest",)
    with pytest.raises(ValueError, match="serves the reward 'smallest', and not 'ocr'"):
        remote(server.url, reward="ocr")


def test_the_token_is_sent_and_asked_for(serve, monkeypatch):
    server = serve("level", token="s3cret-token")
    monkeypatch.setenv("REWARD_TOKEN", "s3cret-token")
    away = remote(server.url, token_env="REWARD_TOKEN")
    assert away.score(images(), PROMPTS).values.shape == (5, 1)
    with pytest.raises(ValueError, match=r"answered 401.*no key was sent: name .* as token_env"):
        remote(server.url)
    monkeypatch.setenv("REWARD_TOKEN", "wrong")
    with pytest.raises(ValueError, match=r"not the token of this server.*the key in REWARD_TOKEN was sent") as caught:
        remote(server.url, token_env="REWARD_TOKEN")
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (b"", "another program answers there; give the address that `flowgrpo rewards serve` printed"),
        (b"<html>", "another program answers there"),
        (b"[]", "another program answers there"),
        (b"{}", "another program answers there"),
        (b'{"version": 2}', "version 2"),
        (b'{"version": 1, "declaration": {}, "limits": {}}', "does not declare a reward"),
        (b'{"version": 1, "declaration": null, "limits": {}}', "does not declare a reward"),
        (b"[" * 100_000, "not a usable server of a reward: another program answers there"),
    ],
)
def test_what_is_no_server_of_a_reward_is_refused(monkeypatch, told, message):
    monkeypatch.setattr(HttpClient, "request", lambda self, *words: Reply(200, told))
    with pytest.raises(ValueError, match=message):
        Remote("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": "jpeg"}, "encoding is 'jpeg'"),
        ({"timeout": 0}, "remote: timeout is 0; give a number above 0"),
        ({"patience": float("inf")}, "remote: patience is inf"),
        ({"token_env": "SURELY_UNSET"}, "SURELY_UNSET is not set"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Remote("http://127.0.0.1:9", **options)


def test_a_hostile_reply_is_an_error_and_never_a_score(serve, monkeypatch):
    away = remote(serve("level").url)
    for body in (b"", b"[]", b"{}", b'{"values": [1], "sub_scores": [], "notes": []}', b"[" * 100_000):
        monkeypatch.setattr(HttpClient, "request", lambda self, *words, body=body: Reply(200, body))
        with pytest.raises(RewardError, match="ValueError"):
            away.score(images(1), ["a"])
    for values in ("[1, 2]", '["x"]', "5", "[1e999]", "[[1]]"):
        body = f'{{"values": {values}, "sub_scores": {{}}, "notes": []}}'.encode()
        monkeypatch.setattr(HttpClient, "request", lambda self, *words, body=body: Reply(200, body))
        with pytest.raises(RewardError, match="InvalidScores"):
            away.score(images(1), ["a"])


# -- several addresses -------------------------------------------------------------------------------------------------


def counting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The path and the address of every request, in order."""
    asked: list[tuple[str, str]] = []
    request = HttpClient.request

    def noted(self: HttpClient, method: str, path: str, *rest: Any) -> Reply:
        asked.append((path, self.url))
        return request(self, method, path, *rest)

    monkeypatch.setattr(HttpClient, "request", noted)
    return asked


def test_requests_go_to_several_servers_in_turn(serve, monkeypatch):
    one, two = serve("level"), serve("level")
    expected = remote(one.url).score(images(), PROMPTS)
    asked = counting(monkeypatch)
    away = remote([one.url, two.url])
    for _ in range(4):
        assert same(away.score(images(), PROMPTS), expected)
    urls = [one.url, two.url]
    assert asked == [("/info", url) for url in urls] + [("/score", url) for url in urls * 2]


def test_a_server_that_is_away_is_passed_over_at_once_and_used_again(serve, clock, monkeypatch):
    one, two = serve("level"), serve("level")
    expected = remote(one.url).score(images(), PROMPTS)
    away = remote([one.url, two.url])
    one.kill()
    for _ in range(3):
        assert same(away.score(images(), PROMPTS), expected)
    assert clock.now == 0.0
    back = serve("level", port=one.port)
    asked = counting(monkeypatch)
    for _ in range(2):
        assert same(away.score(images(), PROMPTS), expected)
    assert {url for _, url in asked} == {back.url, two.url}


def test_if_every_server_is_away_each_reason_is_said(serve, clock):
    one, two = serve("level"), serve("level")
    away = remote([one.url, two.url], patience=5.0)
    one.kill()
    two.kill()
    with pytest.raises(RewardError, match=r"; http.* times in ") as failed:
        away.score(images(), PROMPTS)
    assert all(f"{server.url}: " in str(failed.value) for server in (one, two))
    assert clock.now > 0


def test_one_busy_server_among_servers_that_are_away_uses_up_no_patience(serve, clock):
    one, two = serve("level"), serve("level", waiting=0)
    away = remote([one.url, two.url], patience=20)
    one.kill()
    place = two.service.admit()
    place.__enter__()
    clock.on_sleep = lambda: place.__exit__(None, None, None) if clock.now > 100 else None
    assert away.score(images(), PROMPTS).values.shape == (5, 1)
    assert clock.now > 100


def test_servers_of_different_rewards_are_refused(serve):
    one, two, other = serve("level"), serve("level", {"gain": 2.0}), serve("Small")
    for second in (two, other):
        with pytest.raises(ValueError, match=rf"{one.url} serves 'level', and {second.url} serves .* at every address"):
            remote([one.url, second.url])
    with pytest.raises(ValueError, match="more than once; give each address once"):
        remote([one.url, f"{one.url}/"])
    with pytest.raises(ValueError, match="empty list"):
        remote([])
