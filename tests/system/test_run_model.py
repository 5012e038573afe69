"""run-model.sh under a real user manager: the switch on a port, and the way back when it does not work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess

    from system.installed import Installed

RUN_MODEL = "/home/spark/.local/bin/run-model.sh"
LONGCONTEXT, VISION = "vllm-longcontext", "vllm-vision-agent"


@pytest.fixture
def two_models(installed: Installed) -> Installed:
    """Specs for the two on port 8000, and longcontext serving."""
    installed.spec("longcontext", "0.70", 8000)
    installed.spec("vision-agent", "0.65", 8000)
    installed.systemctl("start", LONGCONTEXT)
    installed.until_it_serves(8000)
    return installed


def run_model(place: Installed, name: str, **env: str) -> subprocess.CompletedProcess[str]:
    return place.exec([RUN_MODEL, name], env=env, timeout=90)


def states(place: Installed) -> tuple[str, str]:
    return place.state(LONGCONTEXT)["ActiveState"], place.state(VISION)["ActiveState"]


@pytest.mark.parametrize("name", ["vllm-vision-agent", "vllm-vision-agent.service", "vision-agent"])
def test_it_switches_and_waits_until_the_model_answers(two_models: Installed, name: str) -> None:
    """Unit or spec, by any name: the other one is stopped, and the end is an answer on the port."""
    done = run_model(two_models, name)
    assert done.returncode == 0, done.stderr
    assert "stopping vllm-longcontext.service" in done.stderr
    assert "vllm-vision-agent.service answers on port 8000" in done.stderr
    assert states(two_models) == ("inactive", "active")


def test_one_that_runs_already_is_left_alone(two_models: Installed) -> None:
    """It says so, and nothing is restarted."""
    pid = two_models.state(LONGCONTEXT)["MainPID"]
    done = run_model(two_models, "longcontext")
    assert done.returncode == 0, done.stderr
    assert "runs already, and answers on port 8000" in done.stderr
    assert two_models.state(LONGCONTEXT)["MainPID"] == pid


def test_a_refusal_changes_nothing(two_models: Installed) -> None:
    """The guard is asked before Conflicts= could stop the holder: too large even without it, and the holder serves on."""
    two_models.spec("embeddings", "0.10", 8001)
    two_models.systemctl("start", "vllm-embeddings")
    two_models.until_it_serves(8001)
    two_models.spec("vision-agent", "0.75", 8000)
    pid = two_models.state(LONGCONTEXT)["MainPID"]
    done = run_model(two_models, VISION)
    assert done.returncode == 75
    assert "FATAL: vision-agent wants --gpu-memory-utilization 0.75" in done.stderr
    assert "to 0.85, over the 0.80 budget" in done.stderr  # 0.10 + 0.75: the holder's 0.70 is not in it
    assert "nothing was changed" in done.stderr
    assert two_models.state(LONGCONTEXT)["MainPID"] == pid
    assert states(two_models) == ("active", "inactive")


def test_a_drop_in_of_the_unit_counts_in_the_question(two_models: Installed) -> None:
    """The share that is asked about is the unit's, not this shell's: a drop-in beyond the budget is refused beforehand."""
    two_models.drop_in(VISION, "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.90\n")
    done = run_model(two_models, VISION, VLLM_GPU_MEM_UTIL="0.10")
    assert done.returncode == 78
    assert "0.90" in done.stderr
    assert states(two_models) == ("active", "inactive")


def test_a_server_that_dies_is_replaced_by_the_former_one(two_models: Installed) -> None:
    """Its last lines are shown, its restarts are ended, and the model that served before serves again."""
    two_models.spec("vision-agent", "0.65", 8000, STAND_IN_EXIT="1")
    done = run_model(two_models, VISION)
    assert done.returncode == 69
    assert "vllm-vision-agent.service failed" in done.stderr
    assert "its last lines" in done.stderr
    assert "vllm-longcontext.service was started again" in done.stderr
    two_models.until_it_serves(8000)
    assert states(two_models)[0] == "active"
    assert states(two_models)[1] in ("inactive", "failed")


def test_a_load_without_end_is_given_up(two_models: Installed) -> None:
    """After RUN_MODEL_TIMEOUT seconds, and the former model comes back."""
    two_models.spec("vision-agent", "0.65", 8000, STAND_IN_LOADS="1")
    two_models.drop_in(VISION, "[Service]\nTimeoutStopSec=1\n")
    done = run_model(two_models, VISION, RUN_MODEL_TIMEOUT="2")
    assert done.returncode == 69
    assert "(RUN_MODEL_TIMEOUT)" in done.stderr
    two_models.until_it_serves(8000)
    assert states(two_models)[0] == "active"


def test_ctrl_c_stops_waiting_and_nothing_else(two_models: Installed) -> None:
    """130; the new model goes on loading, and the way back is said."""
    two_models.spec("vision-agent", "0.65", 8000, STAND_IN_LOADS="1")
    two_models.drop_in(VISION, "[Service]\nTimeoutStopSec=1\n")
    script = f"""
    {RUN_MODEL} {VISION} 2>said & pid=$!
    exec 9<> <(:)
    until grep -q 'does not answer yet' said; do read -t 0.05 -u 9; done
    kill -INT $pid; wait $pid; echo $?; cat said
    """
    # A background job of a script ignores SIGINT unless job control is on.
    done = two_models.exec("cd; set -m\n" + script, timeout=60)
    status, *said = done.stdout.splitlines()
    assert status == "130"
    assert "vllm-vision-agent.service goes on loading" in "\n".join(said)
    assert "systemctl --user start vllm-longcontext.service" in said[-1]
    assert states(two_models) == ("inactive", "active")


def test_a_model_without_a_unit_of_its_own_runs_by_the_template(two_models: Installed) -> None:
    """A spec is enough, and the holder of its port is found by the port, without Conflicts=."""
    two_models.spec("my-model", "0.30", 8000)
    done = run_model(two_models, "my-model")
    assert done.returncode == 0, done.stderr
    assert "stopping vllm-longcontext.service" in done.stderr
    assert two_models.state("vllm-model@my-model")["ActiveState"] == "active"
    assert two_models.state(LONGCONTEXT)["ActiveState"] == "inactive"


def test_switching_to_and_fro_meets_no_start_limit(two_models: Installed) -> None:
    """Three switches to a unit whose StartLimitBurst= is 2: a start by hand is no restart loop."""
    two_models.drop_in(VISION, "[Unit]\nStartLimitBurst=2\n")
    for _ in range(3):
        assert run_model(two_models, VISION).returncode == 0
        assert run_model(two_models, LONGCONTEXT).returncode == 0


def test_a_server_started_by_hand_is_nobody_we_stop(installed: Installed) -> None:
    """The port's holder is no unit: refused, with the command that ends it."""
    installed.spec("byhand", "0.10", 8000)
    installed.spec("longcontext", "0.40", 8000)
    installed.exec("cd; setsid -f .local/bin/vllm-serve.sh byhand </dev/null >/dev/null 2>&1", check=True)
    installed.until_it_serves(8000)
    done = run_model(installed, LONGCONTEXT)
    assert done.returncode == 75
    assert "which no unit of yours runs" in done.stderr and "kill " in done.stderr
    assert states(installed) == ("inactive", "inactive")


def test_a_name_without_a_spec_is_refused(installed: Installed) -> None:
    """78, and the file that is missing."""
    done = run_model(installed, "nosuchmodel")
    assert done.returncode == 78
    assert "/home/spark/.config/spark/models/nosuchmodel.env" in done.stderr
