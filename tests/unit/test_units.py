"""The units in systemd/user and the drop-ins among the examples, read by systemd's own parser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
UNITS = REPOSITORY / "systemd" / "user"
# unit -> the name it gives to the launchers
SERVICES = {
    "vllm-embeddings.service": "embeddings",
    "vllm-longcontext.service": "longcontext",
    "vllm-vision-agent.service": "vision-agent",
    "vllm-model@.service": '"%i"',
}
DROP_INS = {
    "vims-server-memcap.conf": "vims-server.service",
    "retune-longcontext.conf": "vllm-longcontext.service",
    "budget-test.conf": "vllm-model@mymodel.service",
}

pytestmark = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


def settings_of(unit: Path) -> dict[str, dict[str, list[str]]]:
    """{section: {key: values}}, without the comments."""
    sections: dict[str, dict[str, list[str]]] = {}
    keys: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            keys = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            keys.setdefault(key, []).append(value)
    return sections


def verify(home: Path, *units: str) -> subprocess.CompletedProcess[str]:
    """Under a home with the launchers in it: a program that is missing is an error too."""
    folder = home / ".config" / "systemd" / "user"
    shutil.copytree(UNITS, folder, dirs_exist_ok=True)
    programs = home / ".local" / "bin"
    programs.mkdir(parents=True)
    for script in (REPOSITORY / "scripts").glob("*.sh"):
        shutil.copy(script, programs)
    return subprocess.run(
        ["systemd-analyze", "verify", "--user", *units],
        env={"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("unit", [*SERVICES, "inference.slice"])
def test_systemd_has_no_complaint(unit: str, home: Path) -> None:
    """systemd-analyze exits 0 on unknown keys, so that only an empty stderr is a clean bill."""
    done = verify(home, unit.replace("@", "@some-model"))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_complains_about_an_unknown_key(home: Path) -> None:
    """The check above can fail: a misspelt key is reported."""
    drop_in = home / ".config/systemd/user/vllm-embeddings.service.d/typo.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nRestartSek=1\n")
    assert "RestartSek" in verify(home, "vllm-embeddings.service").stderr


def test_the_two_on_one_port_start_in_one_transaction_without_a_cycle(home: Path) -> None:
    """Conflicts= with After= on one side only is no ordering cycle."""
    done = verify(home, "vllm-longcontext.service", "vllm-vision-agent.service")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", SERVICES)
def test_a_service_is_guarded_launched_and_released_under_its_name(unit: str) -> None:
    """The guard says no before anything is loaded, and the reservation is given back whatever happens."""
    name = SERVICES[unit]
    service = settings_of(UNITS / unit)["Service"]
    assert service["ExecStartPre"] == [f"%h/.local/bin/vllm_mem_budget.sh {name}"]
    assert service["ExecStart"] == [f"%h/.local/bin/vllm-serve.sh {name}"]
    assert service["ExecStopPost"] == [f"%h/.local/bin/vllm-serve.sh --release {name}"]


EXPECTED = {
    "Type": "exec",
    "Slice": "inference.slice",
    "TimeoutStartSec": "infinity",
    "NotifyAccess": "exec",
    "Restart": "on-abnormal",
    "RestartForceExitStatus": "0 1 125 134 137 139",
    "RestartSec": "10",
    "SuccessExitStatus": "130 143",
    "KillMode": "mixed",
    "TimeoutStopSec": "30",
    "OOMScoreAdjust": "500",
    "OOMPolicy": "kill",
}


@pytest.mark.parametrize("unit", SERVICES)
def test_all_services_live_and_die_by_the_same_rules(unit: str) -> None:
    """Besides their programs the four [Service] sections are equal, and hold nothing else: no EnvironmentFile= above all."""
    service = settings_of(UNITS / unit)["Service"]
    rules = {key: values for key, values in service.items() if not key.startswith("Exec")}
    assert rules == {key: [value] for key, value in EXPECTED.items()}


@pytest.mark.parametrize("unit", SERVICES)
def test_the_four_files_explain_themselves_in_the_same_words(unit: str) -> None:
    """A comment that is mended in one unit is mended in all."""
    text = (UNITS / unit).read_text()
    body = text[text.index("[Service]") :].partition("\n[Install]")[0].rstrip()
    template = (UNITS / "vllm-model@.service").read_text()
    expected = template[template.index("[Service]") :].partition("\n[Install]")[0].rstrip()
    assert body == expected.replace('"%i"', SERVICES[unit])


@pytest.mark.parametrize("unit", SERVICES)
def test_a_load_of_a_quarter_of_an_hour_still_meets_the_start_limit(unit: str) -> None:
    """The limit ends a restart loop only if that many starts, each with its load and its RestartSec=, fit the interval."""
    sections = settings_of(UNITS / unit)
    assert sections["Unit"]["StartLimitIntervalSec"] == ["2h"]
    starts = int(sections["Unit"]["StartLimitBurst"][0])
    pause = int(sections["Service"]["RestartSec"][0])
    assert starts * (15 * 60 + pause) < 2 * 60 * 60


def test_only_embeddings_and_models_of_the_users_own_can_be_enabled() -> None:
    """The two on port 8000 are started by hand, since only one of them can run."""
    wanted = {unit: settings_of(UNITS / unit).get("Install", {}).get("WantedBy") for unit in SERVICES}
    assert wanted == {
        "vllm-embeddings.service": ["default.target"],
        "vllm-longcontext.service": None,
        "vllm-vision-agent.service": None,
        "vllm-model@.service": ["default.target"],
    }


def test_longcontext_and_vision_agent_exclude_each_other() -> None:
    """Both say so, for who reads one of them; the order stands on one side."""
    longcontext, vision = (settings_of(UNITS / f"vllm-{name}.service")["Unit"] for name in ("longcontext", "vision-agent"))
    assert longcontext["Conflicts"] == ["vllm-vision-agent.service"]
    assert vision["Conflicts"] == ["vllm-longcontext.service"]
    assert (longcontext.get("After"), vision.get("After")) == (["vllm-vision-agent.service"], None)


def test_no_unit_knows_somebodys_home() -> None:
    """Paths begin with a specifier."""
    for unit in UNITS.iterdir():
        values = [value for keys in settings_of(unit).values() for values in keys.values() for value in values]
        assert not [value for value in values if value.startswith("/") or re.search(r"/(home|root|Users)/", value)], unit


@pytest.mark.parametrize("example", DROP_INS)
def test_an_example_is_a_drop_in_that_systemd_takes(example: str, home: Path) -> None:
    """Copied where its comment says, it draws no complaint, and systemd has read it."""
    unit = DROP_INS[example]
    folder = home / ".config" / "systemd" / "user"
    drop_in = folder / f"{unit}.d" / example
    assert str(drop_in.parent.relative_to(home)) in (REPOSITORY / "examples" / example).read_text()
    drop_in.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / "examples" / example, drop_in)
    if unit == "vims-server.service":
        (folder / unit).write_text("[Service]\nExecStart=/bin/true\n")
    done = verify(home, unit)
    assert (done.returncode, done.stderr) == (0, "")
    drop_in.write_text(drop_in.read_text() + "NoSuchKey=1\n")
    shutil.rmtree(home / ".local")
    assert "NoSuchKey" in verify(home, unit).stderr


def test_every_example_drop_in_is_checked() -> None:
    """A new .conf among the examples joins the table above."""
    assert {path.name for path in (REPOSITORY / "examples").glob("*.conf")} == DROP_INS.keys()


def test_the_cap_bounds_memory_and_swap_in_percent_and_says_what_it_cannot() -> None:
    """The caps follow the machine's size; CUDA memory on unified memory is outside of them."""
    path = REPOSITORY / "examples" / "vims-server-memcap.conf"
    service = settings_of(path)["Service"]
    assert service == {"MemoryHigh": ["25%"], "MemoryMax": ["30%"], "MemorySwapMax": ["0"], "OOMPolicy": ["continue"]}
    assert "CUDA memory is not charged to the cgroup" in path.read_text()
