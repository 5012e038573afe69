"""install.sh, run for real into homes of its own: what it puts there, leaves alone, and takes away again."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SHIPPED = "LICENSE README.md install.sh pyproject.toml config examples scripts sparkguard sysctl systemd".split()
LAUNCHERS = ("run-model.sh", "vllm-serve.sh", "vllm_env.sh", "vllm_mem_budget.sh")
PYTHON = getattr(sys, "_base_executable", sys.executable)  # the one below the virtual environment that runs the tests


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an install without network takes."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder), f"{REPOSITORY}[runners]", "hatchling"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Place:
    """A copy of the checkout that a test may change, and an empty home whose path has a blank in it."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.wheels = wheels
        self.checkout = folder / "checkout"
        self.home = folder / "a home"
        self.home.mkdir()
        self.checkout.mkdir()
        for name in SHIPPED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, self.checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.checkout / name)

    def run(self, *arguments: str, path: str = "/usr/bin:/bin", python: str = PYTHON) -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(self.home), "PATH": path, "PYTHON": python}
        command = [str(self.checkout / "install.sh"), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    def install(self, *arguments: str, path: str = "/usr/bin:/bin", python: str = PYTHON) -> subprocess.CompletedProcess[str]:
        """Without network."""
        return self.run("--wheels", str(self.wheels), *arguments, path=path, python=python)


@pytest.fixture
def place(tmp_path: Path, wheels: Path) -> Place:
    return Place(tmp_path, wheels)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Place:
    """A fresh install, for tests that only look."""
    place = Place(tmp_path_factory.mktemp("installed"), wheels)
    done = place.install()
    assert done.returncode == 0, done.stderr
    assert "nothing was started" in done.stdout
    return place


MINE = "VLLM_MODEL=mine\nVLLM_PORT=8001\n"


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Place:
    """An install into a home with a program of the same name; then an edit and a spec of one's own; then a newer version."""
    place = Place(tmp_path_factory.mktemp("updated"), wheels)
    program(place.home / ".local/bin", "run-model.sh", "mine\n")
    first = place.install()
    assert first.returncode == 0, first.stderr
    assert "run-model.sh.old" in first.stdout

    models = place.home / ".config/spark/models"
    (models / "embeddings.env").write_text(MINE)
    (models / "own.env").write_text("VLLM_MODEL=own\n")
    kept = place.install()
    assert f"kept {models}/embeddings.env" in kept.stdout
    assert not (models / "embeddings.env.new").exists()

    for name in ("config/models/embeddings.env", "config/models/longcontext.env", "sparkguard/__init__.py"):
        path = place.checkout / name
        path.write_text(path.read_text() + "\n# a newer version\nNEWER = 1\n")
    (place.checkout / "systemd/user/vllm-vision-agent.service").unlink()
    second = place.install()
    assert second.returncode == 0, second.stderr
    return place


def tree(folder: Path) -> dict[str, str]:
    """Every path below a folder with what is there: the file's checksum, the link's target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[str(path.relative_to(folder))] = "folder"
        else:
            stamp = path.stat().st_mtime_ns
            found[str(path.relative_to(folder))] = (
                f"{hashlib.sha256(path.read_bytes()).hexdigest()} {stamp} {path.stat().st_mode:o}"
            )
    return found


def program(folder: Path, name: str, text: str) -> str:
    """Puts a program on PATH; returns the PATH."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_a_dry_run_says_everything_and_does_nothing(place: Place) -> None:
    """Each launcher, unit and configuration file is named, and the home stays empty."""
    done = place.install("--dry-run")
    assert done.returncode == 0, done.stderr
    units = ("vllm-model@.service", "spark-runners.service", "inference.slice")
    for name in (*LAUNCHERS, *units, "spark.conf", "runners.toml", "embeddings.env", "venv"):
        assert name in done.stdout
    for name in ("sparkguard", "spark-runner"):
        assert f"would link {place.home}/.local/bin/{name}\n" in done.stdout
    assert f"without systemd-python, of which {place.wheels} has no wheel" in done.stdout
    assert "apt-get" not in done.stdout
    assert all(not line.startswith(("write", "make", "link")) for line in done.stdout.splitlines())
    assert tree(place.home) == {}


def test_a_second_run_changes_nothing(installed: Place) -> None:
    """The same tree to the nanosecond, and it says so."""
    before = tree(installed.home)
    again = installed.install()
    assert again.returncode == 0, again.stderr
    assert any(line.startswith("unchanged: ") for line in again.stdout.splitlines())
    assert tree(installed.home) == before


def test_the_launchers_name_the_interpreter_absolutely(installed: Place) -> None:
    """Neither the checkout nor the caller's PATH matters any more; what works in a checkout only is not installed."""
    programs = installed.home / ".local/bin"
    assert {path.name for path in programs.iterdir()} >= {*LAUNCHERS, "sparkguard", "spark-runner"}
    python = str(installed.home / ".local/share/sparkguard/venv/bin/python").replace(" ", "\\ ")
    for name in LAUNCHERS:
        text = (programs / name).read_text()
        assert f"={python}\n" in text and "@PYTHON@" not in text
        assert os.access(programs / name, os.X_OK)
    assert not (programs / "quickstart.sh").exists() and not (programs / "test.sh").exists()
    link = programs / "sparkguard"
    assert link.is_symlink() and os.access(link, os.X_OK)
    assert str(installed.checkout) not in "".join(path.read_text() for path in programs.iterdir())


def run_installed(place: Place, *command: str) -> subprocess.CompletedProcess[str]:
    path = f"{place.home}/.local/bin:/usr/bin:/bin"
    env = {"HOME": str(place.home), "PATH": path, "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    return subprocess.run([*command], env=env, cwd="/", capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("launcher", ["vllm_mem_budget.sh", "vllm-serve.sh"])
def test_a_fresh_install_refuses_and_names_the_line_to_edit(launcher: str, installed: Place) -> None:
    """No spec names a model yet: 78, and the file."""
    done = run_installed(installed, launcher, "embeddings")
    assert done.returncode == 78
    assert str(installed.home / ".config/spark/models/embeddings.env") in done.stderr
    assert "VLLM_MODEL=" in done.stderr


def test_the_runners_lack_nothing_but_an_engine(installed: Place) -> None:
    """What the supervisor imports is there; without a llama-server its check is 127 and says so."""
    done = run_installed(installed, "sparkguard", "serve", "--check")
    assert done.returncode == 127
    assert "there is no llama-server" in done.stderr
    assert "is not installed" not in done.stderr


def test_vllm_env_exports_when_sourced_and_prints_when_run(installed: Place) -> None:
    """The caller's functions, options and variables stay as they were."""
    printed = run_installed(installed, "vllm_env.sh")
    assert printed.returncode == 0, printed.stderr
    cpus = printed.stdout.removeprefix("cpus=").partition(" ")[0]
    assert printed.stdout.endswith(" share=0.80\n") and cpus[0].isdigit()
    script = (
        'main() { :; }; . vllm_env.sh; env | grep -E "^(MAX_JOBS|SPARK_CPUS)=" | sort; echo $-; declare -F; compgen -v _spark'
    )
    sourced = run_installed(installed, "bash", "-c", script)
    options = run_installed(installed, "bash", "-c", "echo $-").stdout
    assert sourced.stdout == f"MAX_JOBS=1\nSPARK_CPUS={cpus}\n{options}declare -f main\n"
    assert sourced.stderr == ""


def test_vllm_env_sourced_fails_without_ending_the_shell(installed: Place) -> None:
    """A bad setting is a status, and the message is the program's."""
    done = run_installed(installed, "bash", "-c", "VLLM_CPU_SHARE=7; export VLLM_CPU_SHARE; . vllm_env.sh; echo $?; declare -F")
    assert done.stdout == "78\n"
    assert "VLLM_CPU_SHARE" in done.stderr


def test_a_launcher_in_a_checkout_without_a_venv_says_what_to_run(place: Place) -> None:
    """127, and the two ways to get one."""
    done = run_installed(place, str(place.checkout / "scripts/vllm_mem_budget.sh"), "embeddings")
    assert done.returncode == 127
    assert "scripts/quickstart.sh" in done.stderr and "./install.sh" in done.stderr


def test_a_launcher_in_a_checkout_takes_the_venv_beside_it(place: Place) -> None:
    """.venv/bin/python of the checkout, from whatever folder it is called."""
    program(place.checkout / ".venv/bin", "python", '#!/bin/sh\necho "python $*"\n')
    done = run_installed(place, "bash", "-c", f"cd {place.checkout}/scripts && bash vllm-serve.sh embeddings 'a b'")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("python -I -c ") and done.stdout.endswith(" embeddings a b\n")


def test_the_units_and_the_configuration_are_the_repositorys(installed: Place) -> None:
    """Byte for byte, and all of them."""
    folders = {"systemd/user": ".config/systemd/user", "config": ".config/spark", "config/models": ".config/spark/models"}
    for source, target in folders.items():
        for path in (installed.checkout / source).iterdir():
            if path.is_file():
                assert (installed.home / target / path.name).read_bytes() == path.read_bytes()


def test_an_edited_file_is_never_overwritten(updated: Place) -> None:
    """The new version is put beside it; what nobody edited is brought up to date."""
    models = updated.home / ".config/spark/models"
    assert (models / "embeddings.env").read_text() == MINE
    assert (models / "embeddings.env.new").read_text() == (updated.checkout / "config/models/embeddings.env").read_text()
    assert "# a newer version" in (models / "longcontext.env").read_text()
    assert not (models / "longcontext.env.new").exists()


def test_a_changed_package_is_installed_anew(updated: Place) -> None:
    """The venv follows the checkout though the version is the same, and the build leaves nothing in the checkout."""
    python = str(updated.home / ".local/share/sparkguard/venv/bin/python")
    assert run_installed(updated, python, "-I", "-c", "import sparkguard; print(sparkguard.NEWER)").stdout == "1\n"
    assert sorted(path.name for path in updated.checkout.iterdir()) == sorted(SHIPPED)


def test_a_unit_that_is_shipped_no_more_goes(updated: Place) -> None:
    """An update removes what an earlier version put there; a spec of one's own is not its business."""
    assert not (updated.home / ".config/systemd/user/vllm-vision-agent.service").exists()
    assert (updated.home / ".config/systemd/user/vllm-longcontext.service").exists()
    assert (updated.home / ".config/spark/models/own.env").read_text() == "VLLM_MODEL=own\n"


def test_somebody_elses_program_of_the_same_name_is_only_moved(updated: Place) -> None:
    """A script of one's own in ~/.local/bin is not lost."""
    programs = updated.home / ".local/bin"
    assert (programs / "run-model.sh.old").read_text() == "mine\n"
    assert "sparkguard.run_model" in (programs / "run-model.sh").read_text()


def test_after_an_update_too_a_second_run_changes_nothing(updated: Place) -> None:
    """An edited file and its new version are left in peace."""
    before = tree(updated.home)
    assert updated.install().returncode == 0
    assert tree(updated.home) == before


def test_uninstall_leaves_only_what_you_edited(place: Place) -> None:
    """An enabled unit's link goes with the unit; what was there before stays, and so does a configuration that was edited."""
    other = place.home / ".config/other"
    other.parent.mkdir()
    other.write_text("mine\n")
    assert place.install().returncode == 0
    units = place.home / ".config/systemd/user"
    (units / "default.target.wants").mkdir()
    (units / "default.target.wants/vllm-embeddings.service").symlink_to(units / "vllm-embeddings.service")
    conf = place.home / ".config/spark/spark.conf"
    conf.write_text(conf.read_text() + "# mine\n")
    log = place.home / ".local/state/sparkguard/logs/m.log"
    log.parent.mkdir(parents=True)
    log.write_text("info: srv: model loaded\n")

    whole = tree(place.home)
    dry = place.run("--uninstall", "--dry-run")
    assert dry.returncode == 0 and "would remove" in dry.stdout
    assert tree(place.home) == whole

    done = place.run("--uninstall")
    assert done.returncode == 0, done.stderr
    assert f"kept {conf}" in done.stdout
    left = {".config", ".config/other", ".config/spark", ".config/spark/spark.conf", ".local", ".local/state"}
    assert tree(place.home).keys() == left
    assert place.run("--uninstall").stdout == "unchanged: nothing is installed\n"


def test_what_stands_in_the_way_is_kept(place: Place) -> None:
    """A folder with a launcher's name is moved, not filled; a link of one's own to a disk that is not there now stays a link."""
    folder = place.home / ".local/bin/vllm-serve.sh"
    folder.mkdir(parents=True)
    (folder / "mine").write_text("mine\n")
    conf = place.home / ".config/spark/spark.conf"
    conf.parent.mkdir(parents=True)
    conf.symlink_to("/nowhere/spark.conf")
    done = place.install()
    assert (done.returncode, done.stderr) == (0, "")
    assert "sparkguard.launch" in folder.read_text()
    assert (folder.with_name("vllm-serve.sh.old") / "mine").read_text() == "mine\n"
    assert conf.readlink() == Path("/nowhere/spark.conf")
    assert "VLLM_MEM_BUDGET" in conf.with_name("spark.conf.new").read_text()


@pytest.mark.parametrize(
    ("home", "complaint"),
    [
        ("", "HOME is no folder: ''"),
        ("a home", "HOME is no folder: 'a home'"),
        ("{}/none", "no folder"),
        ("{}/a\nb", "line break"),
    ],
)
def test_a_home_that_is_none(place: Place, home: str, complaint: str) -> None:
    """Nothing is put anywhere for a home that is no full path, is not there, or would break the manifest's lines."""
    (place.home / "a\nb").mkdir()
    env = {"HOME": home.format(place.home), "PATH": "/usr/bin:/bin", "PYTHON": PYTHON}
    before = tree(place.home)
    done = subprocess.run(
        [str(place.checkout / "install.sh")], env=env, cwd=place.home.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert complaint in done.stderr
    assert tree(place.home) == before


def test_a_failed_install_says_how_and_can_be_taken_away(place: Place, tmp_path: Path) -> None:
    """Without network and without wheels: the remedy is named, and uninstall removes the half that is there."""
    empty = tmp_path / "empty"
    empty.mkdir()
    failed = place.run("--wheels", str(empty))
    assert failed.returncode == 1
    assert "pip wheel --wheel-dir" in failed.stderr
    assert not (place.home / ".config").exists()
    assert place.run("--uninstall").returncode == 0
    assert tree(place.home) == {}


def test_it_hints_at_a_path_without_local_bin(place: Place) -> None:
    """And is silent when ~/.local/bin is on PATH."""
    assert "not on your PATH" in place.install("--dry-run").stdout
    assert "not on your PATH" not in place.install("--dry-run", path=f"{place.home}/.local/bin:/usr/bin:/bin").stdout


def test_on_macos_there_are_programs_and_no_units(place: Place, tmp_path: Path) -> None:
    """It is said once."""
    path = program(tmp_path / "mac", "uname", "#!/bin/sh\necho Darwin\n")
    done = place.install("--dry-run", path=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("macOS") == 1
    assert "vllm-serve.sh" in done.stdout and "spark.conf" in done.stdout
    assert ".config/systemd" not in done.stdout and ".slice" not in done.stdout


def test_an_old_python_is_refused_by_name(place: Place, tmp_path: Path) -> None:
    """One that answers the version check with no."""
    path = program(tmp_path / "old", "python3", "#!/bin/sh\nexit 1\n")
    done = place.install(path=path, python="python3")
    assert done.returncode == 1
    assert "3.10" in done.stderr and "PYTHON=" in done.stderr
    assert tree(place.home) == {}


def test_a_python_without_venv_gets_the_one_apt_line(place: Place, tmp_path: Path) -> None:
    """Debian keeps ensurepip in a package of its own."""
    text = f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; esac\nexec {PYTHON} "$@"\n'
    path = program(tmp_path / "bare", "python3", text)
    program(tmp_path / "bare", "apt-get", "#!/bin/sh\nexit 1\n")
    done = place.install(path=path, python="python3")
    assert done.returncode == 1
    assert "sudo apt-get install -y python3-venv" in done.stderr
    assert tree(place.home) == {}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--frobnicate"], "unknown argument"),
        (["--wheels"], "takes a folder"),
        (["--wheels", "/nonexistent"], "no folder /nonexistent"),
    ],
    ids=["unknown", "no folder named", "no such folder"],
)
def test_bad_arguments_are_a_usage_error(arguments: list[str], complaint: str, place: Place) -> None:
    """Status 2, before anything is done."""
    done = place.run(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert tree(place.home) == {}


def test_help_goes_to_stdout(place: Place) -> None:
    """It names every option."""
    done = place.run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--dry-run", "--wheels", "--engine", "--uninstall", "--sysctl", "PYTHON="):
        assert option in done.stdout


def as_root(checkout: Path, tmp_path: Path, *arguments: str, before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs install.sh as root in a mount namespace whose /etc/sysctl.d is empty, and says what was in it afterwards.

    sysctl is a stand-in that prints what it was called with: the real one would change this machine's kernel.
    """
    path = program(tmp_path / "root", "sysctl", '#!/bin/sh\necho "loaded: $*"\n')
    script = (
        f'mount -t tmpfs none /etc/sysctl.d && {{ {before or ":"}; }} && "$@"; status=$?; '
        'cd /etc/sysctl.d; for file in *; do [ ! -e "$file" ] || echo "left: $file"; done; exit $status'
    )
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    return subprocess.run(
        [*unshare, "bash", "-c", script, "bash", str(checkout / "install.sh"), *arguments],
        env={"HOME": str(tmp_path), "PATH": path, "PYTHON": PYTHON, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_sysctl_writes_its_one_file_and_loads_it(place: Place, tmp_path: Path) -> None:
    """Nothing is installed besides: --sysctl is the root step and only that."""
    done = as_root(place.checkout, tmp_path, "--sysctl", SUDO_USER="somebody")
    assert done.returncode == 0, done.stderr
    path = "/etc/sysctl.d/99-spark.conf"
    assert done.stdout.splitlines() == [
        f"write {path}",
        f"load it: sysctl -p {path}",
        f"loaded: -p {path}",
        "left: 99-spark.conf",
    ]
    assert not (tmp_path / ".local").exists() and not (tmp_path / ".config").exists()


def test_sysctl_keeps_an_edited_file(place: Place, tmp_path: Path) -> None:
    """The numbers that somebody chose stay, and are loaded."""
    done = as_root(place.checkout, tmp_path, "--sysctl", before="echo 'net.core.rmem_max = 1' > /etc/sysctl.d/99-spark.conf")
    assert done.returncode == 0, done.stderr
    assert "kept /etc/sysctl.d/99-spark.conf" in done.stdout
    assert "loaded: -p" in done.stdout


def test_sysctl_can_be_taken_back(place: Place, tmp_path: Path) -> None:
    """Only an unedited file is removed."""
    copy = f"cp {place.checkout}/sysctl/99-spark.conf /etc/sysctl.d/"
    assert "left:" not in as_root(place.checkout, tmp_path, "--sysctl", "--uninstall", before=copy).stdout
    edited = f"{copy}; echo '# mine' >> /etc/sysctl.d/99-spark.conf"
    assert "left: 99-spark.conf" in as_root(place.checkout, tmp_path, "--sysctl", "--uninstall", before=edited).stdout


def test_a_dry_run_of_sysctl_writes_and_loads_nothing(place: Place, tmp_path: Path) -> None:
    """It prints both actions."""
    done = as_root(place.checkout, tmp_path, "--sysctl", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == ["would", "would"]


def test_sudo_without_sysctl_is_refused(place: Place, tmp_path: Path) -> None:
    """It would install for root, which nobody means."""
    done = as_root(place.checkout, tmp_path, SUDO_USER="somebody")
    assert done.returncode == 2
    assert "somebody" in done.stderr and "--sysctl" in done.stderr
    assert not (tmp_path / ".local").exists()
