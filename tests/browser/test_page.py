"""The page as a person meets it: every state, told live, at every width, by keyboard and in both schemes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser.fake_supervisor import MB, FakeSupervisor, cpu, gpu, model, runner
from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from browser.conftest import Open

REFUSAL = "32b needs 23552 MB. cuda:0: 19456 MB can be had, 4096 MB are missing. The largest context that fits: 2048 tokens."
BOTH = pytest.mark.parametrize("scheme", ["light", "dark"])


def populate(supervisor: FakeSupervisor) -> None:
    """Something in every state."""
    supervisor.show(
        model("busy", "ready", aliases=["chat"], pinned=True),
        model("ready", "ready"),
        model("starting", "starting"),
        model("folder/backoff", "backoff"),
        model("32b", fits=False, reason="23552 MB are needed, 19456 MB can be had", queue=2),
        model("broken", "failed", error="bad file: it ends inside its header", needs=None, context=None, fits=None),
        model("warned", warning="This engine build has no CUDA: it would run on the CPU."),
        runners=(
            runner("busy", running=1, queue=3),
            runner("ready", memory_bytes=5901 * MB, requests=12, tokens=4210),
            runner("starting", "starting", memory_bytes=None, progress=0.42, requests=0, tokens=0, queue=1),
            runner(
                "folder/backoff", "backoff", device="cpu", pid=None, memory_bytes=None, restarts=3, last_error="killed by SIGSEGV"
            ),
            runner("draining", "draining", device="cpu"),
        ),
        devices=(gpu(), cpu(), gpu(id="cuda:1", pool="cuda:1", usable=False, reason="no code for compute capability 6.1")),
    )
    supervisor.log = [
        "info: srv init: listening",
        "debug: slot: id 0",
        "warning: memory: 1204 MB left",
        "error: ggml: out of memory",
        "no line of ours",
    ]


def texts(page: Page, name: str) -> dict[str, str]:
    """The cells of a runner's row by their column."""
    cells = page.locator("tbody").filter(has=page.get_by_role("link", name=name, exact=True)).locator("tr").first.locator("td")
    return {cell.get_attribute("data-label") or "Model": " ".join(cell.inner_text().split()) for cell in cells.all()}


def assert_accessible(page: Page) -> None:
    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]})
    assert found.violations_count == 0, found.generate_report()


VIEWS = ["runners", "models", "devices", "models/busy", "models/32b", "models/broken", "models/warned", "models/starting"]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_and_nothing_is_cut(page: Open, supervisor: FakeSupervisor, view: str, width: int, scheme: str) -> None:
    """Every view passes axe-core, wide and light as narrow and dark, and none scrolls sideways."""
    populate(supervisor)
    shown = page(view, width=width, scheme=scheme)
    assert_accessible(shown)
    assert shown.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@BOTH
def test_axe_finds_nothing_in_dialogs(page: Open, supervisor: FakeSupervisor, scheme: str) -> None:
    """The log and the question before a kill pass axe-core."""
    populate(supervisor)
    shown = page(scheme=scheme, width=360)
    shown.get_by_role("button", name="Log of ready").click()
    shown.get_by_text("out of memory").wait_for()
    assert_accessible(shown)
    shown.keyboard.press("Escape")
    shown.get_by_role("button", name="Kill the runner of ready").click()
    assert_accessible(shown)


def test_a_row_tells_its_runner(page: Open, supervisor: FakeSupervisor) -> None:
    """A row has state, device, memory measured beside estimated, requests, tokens and what waits."""
    populate(supervisor)
    shown = texts(page(), "busy")
    assert shown.pop("Model").startswith("busy up ")
    assert shown == {
        "State": "Busy",
        "Device": "cuda:0",
        "Memory": "5,688 MB est. 5,758 MB",
        "Requests": "1,284",
        "Tokens": "902.1K",
        "Waiting": "3",
        "Actions": "Log Unload Kill",
    }


def test_loading_shows_how_far(page: Open, supervisor: FakeSupervisor) -> None:
    """A runner that loads has a progress bar with its share, and no measured memory."""
    populate(supervisor)
    shown = page()
    bar = shown.get_by_role("progressbar", name="Loading starting")
    assert bar.evaluate("bar => bar.value") == pytest.approx(0.42)
    assert "loading, 42 %" in texts(shown, "starting")["Model"]
    assert texts(shown, "starting")["Memory"] == "estimated 5,758 MB"


def test_a_backing_off_runner_says_why(page: Open, supervisor: FakeSupervisor) -> None:
    """The last words of a runner that died stand under its row, and there is no process to kill."""
    populate(supervisor)
    shown = page()
    expect(shown.get_by_text("killed by SIGSEGV")).to_be_visible()
    expect(shown.get_by_role("button", name="Kill the runner of folder/backoff")).to_be_hidden()


def test_requests_without_a_runner_are_shown(page: Open, supervisor: FakeSupervisor) -> None:
    """A model that requests wait for, and that has no runner, is listed as waiting."""
    populate(supervisor)
    waiting = page().get_by_role("region", name="Waiting")
    expect(waiting).to_contain_text("32b")
    expect(waiting).to_contain_text("2 requests")


def test_no_model_says_where_to_put_one(page: Open, supervisor: FakeSupervisor) -> None:
    """Without any model both views say where a GGUF file goes."""
    supervisor.show()
    shown = page()
    expect(shown.get_by_text("No model was found")).to_be_visible()
    shown.get_by_role("link", name="Models").click()
    expect(shown.get_by_text("Put a GGUF file into the folder that MODELS_DIR names")).to_be_visible()


def test_no_runner_says_how_to_start_one(page: Open, supervisor: FakeSupervisor) -> None:
    """With models and no runner the page shows a request that would load one."""
    supervisor.show(model("tiny"))
    expect(page().get_by_label("An example request")).to_contain_text('"model": "tiny"')


def test_changes_show_without_a_reload(page: Open, supervisor: FakeSupervisor) -> None:
    """Events move a runner through its states, change its queue, and take its row away."""
    supervisor.show(model("tiny", "starting"), runners=(runner("tiny", "starting", memory_bytes=None, progress=0.1),))
    shown = page()
    expect(shown.get_by_text("loading, 10 %")).to_be_visible()
    supervisor.tell_runner(runner("tiny", progress=None))
    expect(shown.locator("td.state")).to_have_text("Ready")
    supervisor.tell_queue("tiny", 7)
    expect(shown.locator("td[data-label=Waiting]")).to_have_text("7")
    supervisor.tell_gone("tiny")
    expect(shown.get_by_text("No model is loaded")).to_be_visible()


def test_a_removed_model_goes(page: Open, supervisor: FakeSupervisor) -> None:
    """A model whose file went leaves the list, and its page says so."""
    supervisor.show(model("tiny"))
    shown = page("models/tiny")
    expect(shown.get_by_role("heading", name="tiny")).to_be_visible()
    supervisor.tell_model(model("tiny", "removed"))
    expect(shown.get_by_text("There is no such model")).to_be_visible()


def test_a_list_that_is_not_whole_says_so(page: Open, supervisor: FakeSupervisor) -> None:
    """Who misses a model there is told that not all of the folder was looked at, at once and when it changes."""
    supervisor.warning = "MODELS_DIR has more than 100000 files; the others were not looked at"
    supervisor.show(model("tiny"))
    shown = page("models")
    warning = shown.locator("section > .message.warning")
    expect(warning).to_have_text(supervisor.warning)
    assert_accessible(shown)
    supervisor.tell_library(None)
    expect(warning).to_be_hidden()
    supervisor.warning = "MODELS_DIR is too deep"
    supervisor.tell_nothing_useful()
    expect(warning).to_have_text("MODELS_DIR is too deep")


def test_lost_events_make_the_lists_be_read(page: Open, supervisor: FakeSupervisor) -> None:
    """After an event that tells of no one model, the page shows what the lists say now."""
    supervisor.show(model("tiny"))
    shown = page("models")
    supervisor.models["late"] = model("late")
    supervisor.tell_nothing_useful()
    expect(shown.get_by_role("link", name="late", exact=True)).to_be_visible()


def test_live_updates_move_nothing(page: Open, supervisor: FakeSupervisor) -> None:
    """New numbers and states leave every row, column and button where it was, and focus where it is."""
    supervisor.show(model("a", "ready"), model("b", "ready"), runners=(runner("a", requests=9, tokens=9, queue=0), runner("b")))
    shown = page()
    places = "[...document.querySelectorAll('th, tr, td, button')].map((n) => JSON.stringify(n.getBoundingClientRect()))"
    stop = shown.get_by_role("button", name="Unload b")
    stop.focus()
    before = shown.evaluate(places)
    supervisor.tell_runner(runner("a", requests=1_000_000, tokens=123_456_789, queue=42, running=1, memory_bytes=9000 * MB))
    expect(shown.locator("td[data-label=Tokens]").first).to_have_text("123.5M")
    assert shown.evaluate(places) == before
    expect(stop).to_be_focused()


def test_a_lost_connection_is_told_and_mended(page: Open, supervisor: FakeSupervisor) -> None:
    """Without the supervisor the page says since when it is not connected, keeps what it knew, and comes back by itself."""
    populate(supervisor)
    shown = page()
    supervisor.down()
    expect(shown.get_by_text(re.compile(r"Not connected since \d\d:\d\d:\d\d"))).to_be_visible()
    expect(shown.get_by_role("link", name="busy", exact=True)).to_be_visible()
    assert_accessible(shown)
    supervisor.show(model("after"))
    supervisor.up()
    shown.locator("#lost button").dispatch_event("click")  # a click would want it visible, and the page may be back by now
    expect(shown.locator("#connection")).to_have_text("Live")
    expect(shown.get_by_text("Not connected since")).to_be_hidden()
    expect(shown.get_by_text("No model is loaded")).to_be_visible()


def test_a_silent_connection_is_made_anew(page: Open, supervisor: FakeSupervisor) -> None:
    """A stream that has said nothing for 25 s is held to be broken, although nobody has ended it."""
    supervisor.show(model("tiny"))
    shown = page("models")
    shown.clock.install()
    supervisor.tell_model(model("heard"))  # the time runs from here
    expect(shown.get_by_role("link", name="heard", exact=True)).to_be_visible()
    supervisor.show(model("after"))
    shown.clock.fast_forward(25_000)
    expect(shown.get_by_role("link", name="after", exact=True)).to_be_visible()


def test_a_key_is_asked_for_and_kept_for_the_tab(page: Open, supervisor: FakeSupervisor) -> None:
    """A 401 asks for the key; a wrong one is refused in place; a right one opens the page, also after a reload."""
    populate(supervisor)
    supervisor.key = "right"
    shown = page(wait="Locked")
    field = shown.get_by_label("API key")
    expect(field).to_be_focused()
    assert_accessible(shown)
    field.fill("wrong")
    shown.keyboard.press("Enter")
    expect(shown.get_by_text("That key was not accepted.")).to_be_visible()
    field.fill("right")
    shown.keyboard.press("Enter")
    expect(shown.get_by_role("link", name="busy", exact=True)).to_be_visible()
    shown.reload()
    expect(shown.get_by_role("link", name="busy", exact=True)).to_be_visible()
    assert shown.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]


def test_unload_asks_for_it(page: Open, supervisor: FakeSupervisor) -> None:
    """Unload on a row asks the supervisor to unload that model; a slash in an id stays inside its segment."""
    populate(supervisor)
    page().get_by_role("button", name="Unload folder/backoff").click()
    supervisor.wait_for("POST", "/api/models/folder%2Fbackoff/unload")


def test_a_model_is_loaded_where_the_runners_are(page: Open, supervisor: FakeSupervisor) -> None:
    """Any that is not loaded, chosen by its name; a refusal is announced there."""
    supervisor.show(model("busy", "ready"), model("tiny"), model("folder/32b", fits=False), runners=(runner("busy"),))
    shown = page()
    choice = shown.get_by_role("combobox", name="Model to load")
    assert choice.get_by_role("option").all_inner_texts() == ["folder/32b", "tiny"]
    choice.select_option("tiny")
    shown.get_by_role("button", name="Load", exact=True).click()
    supervisor.wait_for("POST", "/api/models/tiny/load")
    supervisor.answer("POST", "/api/models/folder%2F32b/load", 503, REFUSAL)
    choice.select_option("folder/32b")
    shown.get_by_role("button", name="Load", exact=True).click()
    expect(shown.get_by_role("alert")).to_have_text(REFUSAL)
    supervisor.show(model("busy", "ready"), runners=(runner("busy"),))
    supervisor.tell_nothing_useful()
    expect(choice).to_be_hidden()


def test_kill_asks_first(page: Open, supervisor: FakeSupervisor) -> None:
    """Kill does nothing until it is confirmed, and returns focus when it is not."""
    populate(supervisor)
    shown = page()
    kill = shown.get_by_role("button", name="Kill the runner of ready")
    kill.focus()
    shown.keyboard.press("Enter")
    expect(shown.get_by_role("dialog")).to_contain_text("the same as a crash")
    expect(shown.get_by_role("button", name="Cancel")).to_be_focused()
    shown.keyboard.press("Escape")
    expect(kill).to_be_focused()
    assert supervisor.asked == []
    shown.keyboard.press("Enter")
    shown.get_by_role("button", name="Kill the process").click()
    supervisor.wait_for("POST", "/api/runners/ready/kill")


def test_a_refused_load_shows_the_arithmetic(page: Open, supervisor: FakeSupervisor) -> None:
    """What the supervisor answers to a load stands on the model's page, and is announced."""
    populate(supervisor)
    shown = page("models/32b")
    supervisor.answer("POST", "/api/models/32b/load", 503, REFUSAL)
    shown.get_by_role("button", name="Load").click()
    expect(shown.get_by_role("alert")).to_have_text(REFUSAL)
    shown.get_by_role("link", name="Models", exact=True).last.click()
    expect(shown.get_by_text(REFUSAL)).to_be_visible()


def test_needs_are_told_in_parts(page: Open, supervisor: FakeSupervisor) -> None:
    """Under Needs stand the total, the context and each part that is not zero."""
    populate(supervisor)
    needs = page("models/busy").get_by_role("region", name="Needs")
    expect(needs).to_contain_text("5,758 MB")
    expect(needs).to_contain_text("for 8192 tokens of context")
    assert needs.get_by_role("listitem").all_inner_texts() == [
        "weights\n4,300 MB",
        "KV cache\n1,152 MB",
        "work buffers\n304 MB",
        "output\n2 MB",
    ]


def test_only_changed_settings_are_sent(page: Open, supervisor: FakeSupervisor) -> None:
    """Save sends what was changed, each in its type, and an emptied number as the default."""
    populate(supervisor)
    shown = page("models/ready")
    shown.get_by_label("Context", exact=True).fill("")
    shown.get_by_label("Requests at a time").fill("4")
    shown.get_by_label("KV cache type").select_option("q8_0")
    shown.get_by_label("Unloaded when idle").uncheck()
    shown.get_by_label("Engine arguments").fill("--mlock\n--numa\n\n")
    shown.get_by_label("Projector").fill("none")
    shown.get_by_label("Aliases").fill("small\nfast one")
    shown.get_by_label("File", exact=True).fill("other/file.gguf")
    shown.get_by_role("button", name="Save").click()
    expect(shown.get_by_text("Saved. It holds from the next load on.")).to_be_visible()
    assert supervisor.wait_for("PATCH", "/api/models/ready") == {
        "context": None,
        "parallel": 4,
        "kv_type": "q8_0",
        "unload_when_idle": False,
        "args": ["--mlock", "--numa"],
        "projector": False,
        "aliases": ["small", "fast one"],
        "file": "other/file.gguf",
    }


def test_a_bad_setting_is_told_at_its_field(page: Open, supervisor: FakeSupervisor) -> None:
    """What is no number is refused without asking; what the supervisor refuses stands at the field that it names."""
    populate(supervisor)
    shown = page("models/ready")
    field = shown.get_by_label("Context", exact=True)
    field.fill("many")
    shown.get_by_role("button", name="Save").click()
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description(re.compile("whole number"))
    assert supervisor.asked == []
    supervisor.answer("PATCH", "/api/models/ready", 400, "runners.toml: context of model 'ready' is 5000000000", "context")
    field.fill("5000000000")
    shown.get_by_role("button", name="Save").click()
    expect(field).to_have_accessible_description(re.compile("is 5000000000"))
    expect(field).to_have_value("5000000000")
    assert_accessible(shown)


def test_a_new_name_holds_at_once(page: Open, supervisor: FakeSupervisor) -> None:
    """No load is needed for it, and where nothing else was changed none is spoken of."""
    populate(supervisor)
    shown = page("models/ready")
    shown.get_by_label("Aliases").fill("small")
    shown.get_by_role("button", name="Save").click()
    expect(shown.get_by_text("Saved.", exact=True)).to_be_visible()


def test_typing_survives_live_updates(page: Open, supervisor: FakeSupervisor) -> None:
    """An event about the model leaves what is being typed, and changes the fields that were not touched."""
    populate(supervisor)
    shown = page("models/ready")
    shown.get_by_label("Context", exact=True).fill("123")
    changed = model("ready", "ready")
    changed["settings"].update(context=999, threads=3)
    supervisor.tell_model(changed)
    expect(shown.get_by_label("CPU threads")).to_have_value("3")
    expect(shown.get_by_label("Context", exact=True)).to_have_value("123")
    shown.get_by_role("button", name="Undo changes").click()
    expect(shown.get_by_label("Context", exact=True)).to_have_value("999")


def test_the_log_is_followed_and_paused(page: Open, supervisor: FakeSupervisor) -> None:
    """A row opens its log; new lines come by themselves, wait while it is paused, and Escape closes it."""
    populate(supervisor)
    shown = page()
    shown.locator("td.memory").nth(2).click()
    lines = shown.get_by_role("region", name=re.compile("Log lines of"))
    expect(lines).to_contain_text("out of memory")
    assert lines.locator(".level").all_inner_texts() == ["info", "debug", "warning", "error"]
    supervisor.write("info: server: a new line")
    expect(lines).to_contain_text("a new line")
    pause = shown.get_by_role("button", name="Pause")
    pause.click()
    supervisor.write("info: server: while paused")
    expect(shown.get_by_text("1 more line since the pause.")).to_be_visible()
    expect(lines).not_to_contain_text("while paused")
    pause.click()
    expect(lines).to_contain_text("while paused")
    shown.keyboard.press("Escape")
    expect(shown.get_by_role("dialog")).to_have_count(0)


def test_a_flooded_log_stays_small(page: Open, supervisor: FakeSupervisor) -> None:
    """However many lines come, the page keeps the last two thousand, and says how many it dropped."""
    populate(supervisor)
    shown = page()
    shown.get_by_role("button", name="Log of ready").click()
    shown.get_by_text("no line of ours").wait_for()
    supervisor.write(*(f"info: flood: line {number}" for number in range(6000)))
    expect(shown.get_by_text("line 5999", exact=True)).to_be_visible()
    assert shown.locator(".entry").count() == 2000
    expect(shown.get_by_text("4,005 older ones are not shown")).to_be_visible()


def test_reading_back_stops_the_scrolling(page: Open, supervisor: FakeSupervisor) -> None:
    """Who scrolls up stays there while lines come, and gets back to the newest by a button."""
    populate(supervisor)
    supervisor.log = [f"info: server: line {number}" for number in range(300)]
    shown = page()
    shown.get_by_role("button", name="Log of ready").click()
    lines = shown.get_by_role("region", name="Log lines of ready")
    expect(shown.get_by_text("line 299", exact=True)).to_be_in_viewport()
    shown.keyboard.press("Home")
    newest = shown.get_by_role("button", name="Newest lines")
    expect(newest).to_be_visible()
    supervisor.write("info: server: the end")
    expect(lines).to_contain_text("the end")
    expect(shown.get_by_text("line 0", exact=True)).to_be_in_viewport()
    newest.click()
    expect(shown.get_by_text("the end", exact=True)).to_be_in_viewport()


def test_a_failed_model_has_its_log(page: Open, supervisor: FakeSupervisor) -> None:
    """The model's page opens the log of what was tried, where no runner is left."""
    populate(supervisor)
    supervisor.runners["broken"] = runner("broken", "failed")
    shown = page("models/broken")
    shown.get_by_role("button", name="Log").click()
    expect(shown.get_by_role("dialog")).to_contain_text("Failed")
    expect(shown.get_by_text("out of memory")).to_be_visible()


def test_devices_of_one_pool_share_their_memory(page: Open, supervisor: FakeSupervisor) -> None:
    """On unified memory a runner of the GPU counts in the CPU's bar as well, and both say that they share."""
    shared = {"total_bytes": 128 << 30, "available_bytes": 100 << 30, "pool": "ram"}
    supervisor.show(model("tiny", "ready"), runners=(runner("tiny"),), devices=(gpu(**shared), cpu(**shared)))
    shown = page("devices")
    for device, other in (("cuda:0", "cpu"), ("cpu", "cuda:0")):
        card = shown.get_by_role("article").filter(has=shown.get_by_role("heading", name=device, exact=True))
        expect(card).to_contain_text(f"shared with {other}")
        expect(card.get_by_role("list")).to_contain_text("tiny")


def test_the_log_of_a_runner_never_started_says_so(page: Open, supervisor: FakeSupervisor) -> None:
    """Where the supervisor has no log, the drawer says so and asks no more."""
    populate(supervisor)
    shown = page()
    del supervisor.runners["ready"]
    shown.get_by_role("button", name="Log of ready").click()
    expect(shown.get_by_text("There is no log")).to_be_visible()


def test_the_keyboard_reaches_everything(page: Open, supervisor: FakeSupervisor) -> None:
    """Tab goes from the skip link through the views to a row's controls in reading order, each with a visible ring."""
    supervisor.show(model("tiny", "ready"), runners=(runner("tiny"),))
    shown = page()
    names = []
    for _ in range(12):
        shown.keyboard.press("Tab")
        names.append(shown.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent"))
        assert shown.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert names == [
        "Skip to the content", "Spark", "Runners", "Models", "Devices", "Colours: as the system", "cuda:0", "cpu",
        "tiny", "Log of tiny", "Unload tiny", "Kill the runner of tiny",
    ]  # fmt: skip


def test_a_view_is_announced_by_its_heading(page: Open, supervisor: FakeSupervisor) -> None:
    """After a move focus is on the new view's heading, and the window's title names it."""
    populate(supervisor)
    shown = page()
    shown.get_by_role("link", name="Devices").click()
    expect(shown.get_by_role("heading", name="Devices", level=1)).to_be_focused()
    expect(shown).to_have_title("Devices – Spark")
    shown.get_by_role("link", name="Skip to the content").focus()
    shown.keyboard.press("Enter")
    expect(shown.get_by_role("main")).to_be_focused()


def test_focus_survives_the_end_of_its_row(page: Open, supervisor: FakeSupervisor) -> None:
    """When the row of the focused button goes, focus moves to the next row."""
    supervisor.show(model("a", "ready"), model("b", "ready"), runners=(runner("a"), runner("b")))
    shown = page()
    shown.get_by_role("button", name="Unload a").focus()
    supervisor.tell_gone("a")
    expect(shown.get_by_role("link", name="b", exact=True)).to_be_focused()


def test_the_theme_is_kept(page: Open, supervisor: FakeSupervisor) -> None:
    """The toggle goes from the system's scheme to light and dark, and a reload keeps it."""
    supervisor.show(model("tiny"))
    shown = page()
    paper = "getComputedStyle(document.body).backgroundColor"
    light = shown.evaluate(paper)
    toggle = shown.locator("#theme")
    toggle.click()
    expect(toggle).to_have_text("Light")
    toggle.click()
    expect(toggle).to_have_text("Dark")
    assert shown.evaluate(paper) != light
    shown.reload()
    expect(toggle).to_have_text("Dark")
    assert shown.evaluate(paper) != light


def test_an_unusable_device_says_why(page: Open, supervisor: FakeSupervisor) -> None:
    """A device that runners cannot use is shown with the reason, and each device with its memory in parts."""
    populate(supervisor)
    shown = page("devices")
    expect(shown.get_by_text("no code for compute capability 6.1")).to_be_visible()
    expect(shown.get_by_role("img").first).to_have_accessible_name(
        "11.0 of 32.0 GB in use: busy 5,688 MB, ready 5,901 MB, everything else 0 MB, free 21,504 MB"
    )


def test_five_hundred_models_can_be_filtered(page: Open, supervisor: FakeSupervisor) -> None:
    """A large library is listed whole, and found by a part of a name or an alias."""
    supervisor.show(*(model(f"model-{number:03}", aliases=["needle"] if number == 321 else []) for number in range(500)))
    shown = page("models")
    expect(shown.locator("tbody")).to_have_count(500)
    shown.get_by_label("Filter by name").fill("need")
    expect(shown.locator("tbody")).to_have_count(1)
    expect(shown.get_by_role("link", name="model-321")).to_be_visible()


def test_names_are_text(page: Open, supervisor: FakeSupervisor) -> None:
    """A file's name, a log line or an error that looks like markup is shown as it is."""
    hostile = "<img src=x onerror=alert(1)>&amp;\"'"
    supervisor.show(model(hostile, "ready", error=hostile), runners=(runner(hostile, "backoff", last_error=hostile),))
    supervisor.log = [f"error: ggml: {hostile}"]
    shown = page()
    expect(shown.get_by_role("link", name=hostile)).to_be_visible()
    shown.get_by_role("button", name=f"Log of {hostile}").click()
    expect(shown.locator(".entry .words")).to_have_text(hostile)
    shown.keyboard.press("Escape")
    shown.get_by_role("link", name=hostile).click()
    expect(shown.get_by_role("heading", level=1)).to_have_text(hostile)
    assert shown.locator("img").count() == 0
