"""The dashboard as a person meets it: every state, every control, by keyboard, narrow and wide, light and dark."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import dashboard as world
from browser.conftest import WAIT_MILLISECONDS
from browser.dashboard import Served
from playwright.sync_api import APIResponse, Browser, Page, Route, expect

Open = Callable[..., Page]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Open]:
    """Opens a tab of the dashboard by the address that it prints; a fault in the page fails the test."""
    faults: list[str] = []
    contexts = []

    def open_page(view: str = "overview", width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        context = browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light",
            viewport={"width": width, "height": height},
            reduced_motion="reduce",
        )
        contexts.append(context)
        shown = context.new_page()
        shown.set_default_timeout(WAIT_MILLISECONDS)
        shown.on("pageerror", lambda error: faults.append(str(error)))
        shown.on(
            "console",
            lambda said: faults.append(said.text) if said.type == "error" and "Failed to load" not in said.text else None,
        )
        shown.goto(served.entry)
        shown.goto(f"{served.origin}/#/{view}")
        shown.locator("#connection").get_by_text("Live", exact=True).wait_for()
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def busy_cluster(served: Served) -> None:
    """A model on both Sparks, with a minute and a half of samples, and saved runs."""
    served.script.write("status", world.serving())
    served.script.write("watch", *(world.sample(step) for step in range(46)))
    served.script.write(
        "bench-list", {"schema_version": 1, "runs": [world.run("r2"), world.run("r1", "prefill", status="cancelled")]}
    )
    served.script.write("bench-show", world.whole_run("r2"))
    served.script.write("bench-compare", world.comparison())


def assert_accessible(page: Page) -> None:
    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]})
    assert found.violations_count == 0, found.generate_report()


def assert_nothing_is_cut(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
@pytest.mark.parametrize("view", ["overview", "models", "benchmarks"])
def test_axe_finds_nothing_and_nothing_is_cut(page: Open, served: Served, view: str, width: int, scheme: str) -> None:
    """Every tab passes axe-core with a model served, wide and light as narrow and dark, and none scrolls sideways."""
    busy_cluster(served)
    shown = page(view, width=width, scheme=scheme)
    if view == "overview":
        shown.locator(".allocation .js-plotly-plot .main-svg").first.wait_for()
    assert_accessible(shown)
    assert_nothing_is_cut(shown)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_the_questions(page: Open, served: Served, scheme: str) -> None:
    """The sheet for the sudo password passes axe-core."""
    busy_cluster(served)
    shown = page(scheme=scheme, width=360)
    shown.get_by_role("button", name="Restart Sparks …").click()
    shown.get_by_label("sudo password of the Sparks").wait_for()
    assert_accessible(shown)


def test_a_model_on_two_sparks_is_one_card(page: Open, served: Served) -> None:
    """A distributed model has one endpoint and one card, with both Sparks and the engine's figures."""
    busy_cluster(served)
    shown = page()
    card = shown.locator(".allocation")
    expect(card).to_have_count(1)
    expect(card.locator(".topology li")).to_have_text(["headRunning", "workerRunning"])
    expect(card).to_contain_text("380 ms median, 760 ms p95")
    expect(card).to_contain_text("2 running, 0 waiting")


def test_unknown_is_a_dash_and_never_a_zero(page: Open, served: Served) -> None:
    """What GB10 does not tell, and what a node that cannot be reached has not told, is no number and never green."""
    gpu = {
        "name": "NVIDIA GB10",
        "utilization_percent": None,
        "temperature_c": None,
        "power_w": None,
        "clock_mhz": None,
        "throttle": [],
    }
    lost = {"node": "worker", "host": "spark-worker", "state": "unknown", "age_s": 31.0, "error": "spark-worker: timed out"}
    served.script.write("watch", world.sample(nodes=[world.node_sample(world.HEAD, gpu=gpu), lost], allocations=[]))
    shown = page()
    head = shown.locator(".spark").filter(has_text="spark-head")
    expect(head.locator("dd").first).to_have_text("–")
    worker = shown.locator(".spark").filter(has_text="spark-worker")
    expect(worker.locator(".chip")).to_have_text("Unknown")
    expect(worker).to_contain_text("timed out")
    expect(worker.locator(".meter").first).to_be_hidden()


def test_a_dead_rank_is_not_ready(page: Open, served: Served) -> None:
    """A rank that is gone shows at its Spark, and the model is dead whatever its head answers."""
    busy_cluster(served)
    ranks = [
        {"node": "head", "rank": 0, "state": "running", "container": "a"},
        {"node": "worker", "rank": 1, "state": "gone", "container": "b"},
    ]
    served.script.write(
        "watch", world.sample(allocations=[world.allocation(state="dead", error="rank 1 on worker exited with 137", ranks=ranks)])
    )
    shown = page()
    expect(shown.locator(".allocation header .chip")).to_have_text("Dead")
    expect(shown.locator(".allocation")).to_contain_text("rank 1 on worker exited with 137")
    expect(shown.get_by_role("button", name="Use in Hermes (this machine)")).to_be_hidden()


def test_start_runs_the_verb_and_stays_busy_through_its_cleanup(page: Open, served: Served) -> None:
    """Start is `spark-serve up`; every control waits until the child has ended, cleanup and all."""
    served.script.write("up", {"event": "preflight", "words": "checking both Sparks"})
    served.script.hold("up")
    served.script.hold("up", "cleanup")
    shown = page("models")
    card = shown.locator(".model").filter(has_text="DeepSeek-V4-Flash")
    card.get_by_role("button", name="Start").click()
    busy = shown.locator("#busy")
    expect(busy).to_contain_text("Starting ds4 · checking both Sparks")
    expect(shown.locator(".model").filter(has_text="Qwen").get_by_role("button", name="Start")).to_have_attribute(
        "aria-disabled", "true"
    )
    busy.get_by_role("button", name="Cancel").click()
    expect(busy).to_contain_text("interrupted, cleaning up")
    served.script.release("up", "cleanup")
    expect(busy).to_be_hidden()
    expect(shown.locator("#activity")).to_contain_text("up ended with status 130")
    assert [call["argv"] for call in served.script.calls("up")] == [["up", "--json", "ds4"]]


def test_a_start_that_replaces_a_model_asks_first(page: Open, served: Served) -> None:
    """The question names what will be stopped, and Cancel starts nothing."""
    busy_cluster(served)
    shown = page("models")
    card = shown.locator(".model").filter(has_text="Qwen")
    card.get_by_role("combobox").select_option("worker")
    card.get_by_role("checkbox").uncheck()
    card.get_by_role("button", name="Start").click()
    dialog = shown.get_by_role("dialog")
    expect(dialog).to_contain_text("DeepSeek-V4-Flash will be drained and stopped first.")
    dialog.get_by_role("button", name="Cancel").click()
    assert served.script.calls("up") == []
    card.get_by_role("button", name="Start").click()
    dialog.get_by_role("button", name="Drain and start").click()
    expect(shown.locator("#activity")).to_contain_text("up is done")
    assert [call["argv"] for call in served.script.calls("up")] == [["up", "--json", "--node=worker", "--no-hermes", "qwen"]]


def test_the_password_goes_to_stdin_once_and_nowhere_else(page: Open, served: Served) -> None:
    """The sheet's password is the child's standard input; no argument, no answer and no line of the page has it."""
    shown = page()
    shown.get_by_role("button", name="Restart Sparks …").click()
    shown.get_by_label("sudo password of the Sparks").fill("correct horse")
    shown.get_by_role("button", name="Restart", exact=True).click()
    expect(shown.locator("#activity")).to_contain_text("reboot is done")
    [call] = served.script.calls("reboot")
    assert call["argv"] == ["reboot", "--json", "--sudo-password-stdin"]
    assert call["secret"] == "correct horse\n"
    assert "correct horse" not in shown.content()
    assert "correct horse" not in shown.evaluate("fetch('/api/state').then((answer) => answer.text())")


def test_cancelling_jobs_is_asked_and_named(page: Open, served: Served) -> None:
    """Cancel jobs & stop names the renders that will be lost; Stop alone sends no --cancel-jobs."""
    worker = {"node": "head", "worker": "w1", "state": "ready", "accepting": True, "busy": True, "jobs": ["job-17"]}
    served.script.write("watch", world.sample(allocations=[], yue=[worker]))
    shown = page()
    shown.get_by_role("button", name="Cancel jobs & stop …").click()
    expect(shown.get_by_role("dialog")).to_contain_text("job-17")
    shown.get_by_role("button", name="Cancel jobs & stop", exact=True).click()
    expect(shown.locator("#activity")).to_contain_text("stop is done")
    shown.locator(".card").filter(has_text="YuE song workers").get_by_role("button", name="Stop", exact=True).click()
    expect(shown.locator("#activity .entry").filter(has_text="stop is done")).to_have_count(2)
    assert [call["argv"] for call in served.script.calls("stop")] == [["stop", "--json", "--cancel-jobs"], ["stop", "--json"]]


@pytest.mark.parametrize(("view", "path", "name"), [("overview", "/api/actions", "Stop"), ("benchmarks", "/api/bench", "Run")])
def test_an_answer_that_comes_late_makes_nothing_busy(page: Open, served: Served, view: str, path: str, name: str) -> None:
    """What has ended before the page reads that it began is not at work: nothing would ever tell that it ended."""
    busy_cluster(served)
    shown = page(view)
    held: list[tuple[Route, APIResponse]] = []

    def hold(route: Route) -> None:
        if route.request.method == "POST":
            held.append((route, route.fetch()))
        else:
            route.fallback()

    shown.route(f"**{path}", hold)
    button = shown.get_by_role("button", name=name, exact=True)
    button.click()
    served.wait_for(lambda: bool(held or shown.evaluate("0")))  # it is within a call that a route is asked
    ((route, answer),) = held
    assert answer.json()["running"] is not None
    served.wait_for(lambda: [json.loads(ask(served, "/api/state")[1])[one] for one in ("running", "bench")] == [None, None])
    with shown.expect_response(f"**{path}"):
        route.fulfill(response=answer)
    shown.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    expect(button).to_be_enabled()
    expect(shown.locator("#busy")).to_be_hidden()


@pytest.mark.parametrize(("button", "target"), [("Use in Hermes (this machine)", "mac"), ("Use in Hermes (Spark)", "spark")])
def test_use_in_hermes(page: Open, served: Served, button: str, target: str) -> None:
    """Each of the two buttons retargets its own machine's client."""
    busy_cluster(served)
    shown = page()
    shown.get_by_role("button", name=button).click()
    expect(shown.locator("#activity")).to_contain_text("use is done")
    assert [call["argv"] for call in served.script.calls("use")] == [
        ["use", "--json", "--node=both", f"--hermes-target={target}"]
    ]


def test_a_refusal_is_told_in_the_activity(page: Open, served: Served) -> None:
    """What spark-serve says on stderr, and its status, are in the activity log."""
    served.script.fail("up", "spark-serve: another transition runs: laptop-2, pid 41, up glm53\n")
    shown = page("models")
    shown.locator(".model").filter(has_text="GLM").get_by_role("button", name="Start").click()
    expect(shown.locator("#activity")).to_contain_text("laptop-2, pid 41, up glm53")
    expect(shown.locator("#activity")).to_contain_text("up ended with status 75")


def test_a_benchmark_is_run_shown_and_compared(page: Open, served: Served) -> None:
    """The form's values are the flags; a saved run shows its levels; two chosen ones show their ratio and their differences."""
    busy_cluster(served)
    served.script.write("bench-run", {"event": "bench_request", "done": 1, "total": 3, "text": "request 1 of 3"})
    served.script.hold("bench-run")
    shown = page("benchmarks")
    shown.get_by_label("Requests").fill("3")
    shown.get_by_label("Concurrency").fill("1,4")
    shown.get_by_role("button", name="Run", exact=True).click()
    expect(shown.locator("form [role=status]")).to_contain_text("request 1 of 3")
    served.script.release("bench-run")
    expect(shown.locator("form progress")).to_be_hidden()
    [call] = [call for call in served.script.calls("bench") if call["argv"][1] == "run"]
    assert call["argv"] == [
        "bench",
        "run",
        "--json",
        "--node=both",
        "--kind=decode",
        "--requests=3",
        "--concurrency=1,4",
        "--max-tokens=256",
        "--prompt-tokens=512",
        "--reasoning=default",
    ]
    shown.get_by_role("button", name="28 Nov 2026").first.click()
    expect(shown.get_by_role("region", name="Figures of the run")).to_contain_text("44.1, p95 48.1")
    for pick in shown.get_by_role("checkbox").all():
        pick.check()
    comparison = shown.locator(".card").filter(has=shown.get_by_role("heading", name="Comparison"))
    expect(comparison).to_contain_text("These runs differ in image (sha256:1, sha256:2).")
    expect(comparison).to_contain_text("1.00")


def test_sampling_ends_with_the_last_viewer(page: Open, served: Served) -> None:
    """watch runs while a page is open, once for two pages, and not after the last."""
    served.script.write("watch", world.sample())
    first, second = page(), page()
    expect(first.locator(".spark .meter").first).to_be_visible()
    expect(second.locator(".spark .meter").first).to_be_visible()
    [call] = served.script.calls("watch")
    assert (Path("/proc") / str(call["pid"])).exists()
    first.context.close()
    second.context.close()
    served.wait_for(lambda: not (Path("/proc") / str(call["pid"])).exists())
    assert len(served.script.calls("watch")) == 1


def test_old_samples_are_said_to_be_old(page: Open, served: Served) -> None:
    """When samples stop coming, nothing stays green: the chips say stale, and the page says how old its figures are."""
    busy_cluster(served)
    shown = page()
    expect(shown.locator(".allocation header .chip")).to_have_text("Ready")
    shown.clock.install()
    shown.clock.fast_forward(20_000)
    shown.evaluate("dispatchEvent(new Event('online'))")
    expect(shown.locator(".allocation header .chip")).to_have_text("Stale")
    expect(shown.get_by_text("The newest figures are")).to_be_visible()


def ask(served: Served, path: str, method: str = "GET", body: object = None, **headers: str) -> tuple[int, str]:
    """A request with the page's cookie, unless `Cookie` says otherwise."""
    port = served.origin.rpartition(":")[2]
    sent = {"Cookie": f"spark-serve-{port}={served.token}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{served.origin}{path}", data, {key: value for key, value in sent.items() if value}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


STOP = {"verb": "stop"}
REFUSED = {
    "a name that points here": (421, {"Host": "evil.example:80", "Content_Type": "application/json"}),
    "a page of another site": (403, {"Origin": "http://evil.example", "Content_Type": "application/json"}),
    "a cross-site fetch": (403, {"Sec_Fetch_Site": "cross-site", "Content_Type": "application/json"}),
    "a form": (415, {"Content_Type": "application/x-www-form-urlencoded"}),
    "no key": (401, {"Cookie": "", "Content_Type": "application/json"}),
    "a key of no letters": (401, {"Cookie": "spark-serve-{port}=\xff\xfe", "Content_Type": "application/json"}),
    "a wrong key": (401, {"Cookie": "spark-serve=x", "Content_Type": "application/json"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_who_may_not_ask(served: Served, name: str) -> None:
    """A foreign Host, a foreign page, a form and whoever lacks the key are refused, and nothing is run."""
    status, headers = REFUSED[name]
    port = served.origin.rpartition(":")[2]
    assert ask(served, "/api/actions", "POST", STOP, **{key: it.format(port=port) for key, it in headers.items()})[0] == status
    assert served.script.calls("stop") == []


BAD = {
    "no verb": {"verb": "logs"},
    "no object": ["stop"],
    "a flag in a value": {"verb": "up", "model": "--print-cmd"},
    "a flag of another verb": {"verb": "stop", "no_hermes": True},
    "no model": {"verb": "up"},
    "a password for a start": {"verb": "up", "model": "ds4", "password": "x"},
    "half a character": {"verb": "up", "model": "\ud800"},
    "a NUL in a name": {"verb": "up", "model": "small\0x"},
    "two lines of a password": {"verb": "reboot", "password": "x\ny"},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_action(served: Served, name: str) -> None:
    """A request that is no verb with its own arguments is 400, and nothing is run."""
    assert ask(served, "/api/actions", "POST", BAD[name], Content_Type="application/json")[0] == 400
    assert served.script.calls() == []


def test_two_verbs_do_not_run_at_once(served: Served) -> None:
    """The second is 409 until the first has ended."""
    served.script.hold("stop")
    assert ask(served, "/api/actions", "POST", STOP, Content_Type="application/json")[0] == 202
    status, text = ask(served, "/api/actions", "POST", STOP, Content_Type="application/json")
    assert (status, "stop is running" in text) == (409, True)


def test_an_old_address_is_told_so(served: Served) -> None:
    """A token of an earlier run opens nothing."""
    assert ask(served, "/enter?token=old", Cookie="")[0] == 401


def test_the_first_paint_waits_for_no_charts(page: Open, served: Served) -> None:
    """What is needed for the first paint is under 200 kB; plotly's megabytes come after it, and from here."""
    busy_cluster(served)
    shown = page()
    shown.locator(".js-plotly-plot .main-svg").first.wait_for()
    entries = shown.evaluate(
        "performance.getEntriesByType('resource').map((one) => [one.name, one.startTime, one.encodedBodySize])"
    )
    paint = shown.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    charts = [entry for entry in entries if entry[0] == f"{served.origin}/charts.js"]
    assert len(charts) == 1
    assert charts[0][1] > paint
    assert sum(size for name, start, size in entries if start < charts[0][1] and "/api/" not in name) < 200_000
    assert all(name.startswith(served.origin) for name, *_ in entries)


def test_a_module_that_is_lost_on_its_way_is_fetched_again(browser: Browser, served: Served) -> None:
    """The machine's network changes while the page loads, the browser drops a module, and the page comes up all the same."""
    dropped: list[str] = []

    def lose_once(route: Route) -> None:
        if dropped:
            route.continue_()
        else:
            dropped.append(route.request.url)
            route.abort("internetdisconnected")

    context = browser.new_context()
    context.route("**/page/store.js", lose_once)
    shown = context.new_page()
    shown.goto(served.entry)
    expect(shown.locator("#connection")).to_have_text("Live")
    assert len(dropped) == 1
    context.close()
