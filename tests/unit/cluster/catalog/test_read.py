"""The catalog: where it is found, what it may say, and how all that is wrong with it is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.cluster.catalog import fields
from sparkguard.cluster.catalog import read as catalog
from sparkguard.errors import CONFIG, USAGE, SparkguardError

REPOSITORY = Path(__file__).parents[4]
CLUSTER = """\
[cluster]
head = "one"
worker = "me@two"
master_addr = "10.0.0.1"
worker_addr = "10.0.0.2"
lan_url = "http://10.1.0.1:8000"
worker_lan_url = "http://10.1.0.2:8000"
hf_cache_host = "/home/me/.cache/huggingface"
"""
MODEL = """\
[models.small]
image = "vllm/vllm-openai:v0.30.0"
hf_id = "Qwen/Qwen3-8B"
"""


def parsed(*parts: str) -> catalog.Catalog:
    return catalog.parse("".join((CLUSTER, *parts)), "models.toml")


def faults(text: str) -> list[str]:
    with pytest.raises(SparkguardError) as caught:
        catalog.parse(text, "models.toml")
    assert caught.value.status == CONFIG
    return [line.strip() for line in caught.value.message.splitlines()[1:]]


def faults_of(*parts: str) -> list[str]:
    return faults("".join((CLUSTER, *parts)))


def test_a_named_catalog_wins_over_all(tmp_path: Path) -> None:
    """--config wins over SPARK_SERVE_CONFIG, that over ./models.toml, and that over the home's."""
    home, here = tmp_path / "home", tmp_path / "here"
    (home / ".config" / "spark").mkdir(parents=True)
    here.mkdir()
    env = {"HOME": str(home)}
    in_home, in_here = home / ".config" / "spark" / "models.toml", here / "models.toml"
    in_home.touch()
    assert catalog.find(None, env, here) == in_home
    in_here.touch()
    assert catalog.find(None, env, here) == in_here
    assert catalog.find(None, {**env, "SPARK_SERVE_CONFIG": "/x.toml"}, here) == Path("/x.toml")
    assert catalog.find("/y.toml", {**env, "SPARK_SERVE_CONFIG": "/x.toml"}, here) == Path("/y.toml")


def test_no_catalog_says_where_it_was_looked_for(tmp_path: Path) -> None:
    """Without any catalog the error names both usual places and what to copy."""
    with pytest.raises(SparkguardError, match=r"models\.toml nor .*spark/models\.toml") as caught:
        catalog.find(None, {"HOME": str(tmp_path)}, tmp_path)
    assert caught.value.status == CONFIG
    assert "models.example.toml" in (caught.value.hint or "")


def test_two_sparks_are_head_and_worker() -> None:
    """The specification's keys make two nodes, with their caches, addresses and YuE's default URLs."""
    found = parsed()
    assert [(node.name, node.ssh, node.lan_url, node.fabric_addr) for node in found.nodes] == [
        ("head", "one", "http://10.1.0.1:8000", "10.0.0.1"),
        ("worker", "me@two", "http://10.1.0.2:8000", "10.0.0.2"),
    ]
    assert [node.yue_url for node in found.nodes] == ["http://10.1.0.1:8011", "http://two:8011"]
    assert found.cache("worker") == "/home/me/.cache/huggingface"
    assert (found.master_addr, found.master_port, found.port, found.executor) == ("10.0.0.1", 29501, 8000, "mp")


def test_more_than_two_nodes_have_names() -> None:
    """[[cluster.nodes]] takes any number; the first is the head, and --node takes roles and names."""
    nodes = "".join(
        f'[[cluster.nodes]]\nname = "n{i}"\nssh = "h{i}"\nlan_url = "http://10.1.0.{i}:8000"\nfabric_addr = "10.0.0.{i}"\n'
        for i in (1, 2, 3)
    )
    found = catalog.parse(f'[cluster]\nhf_cache_host = "/c"\n{nodes}{MODEL}', "models.toml")
    assert found.head.name == "n1" and found.master_addr == "10.0.0.1"
    model = found.model("small")
    assert [node.name for node in found.select("n3", model)] == ["n3"]
    assert [node.name for node in found.select("worker", model)] == ["n2"]
    assert [node.name for node in found.select("all", None)] == ["n1", "n2", "n3"]
    assert [node.name for node in found.select("n3,head,n1", None)] == ["n1", "n3"]


def test_all_faults_are_told_at_once() -> None:
    """Every fault of a catalog stands in one error, each with its table and key."""
    lines = faults_of(
        'port = "8000"\nkeep_container = []\n[models.a]\nwrapper = "vlm"\nimag = "x"\nhf_id = "no-owner"\n'
        '[models.b]\nimage = "-x"\nhf_id = "a/b"\nmax_model_len = 0\n[yeu]\n'
    )
    assert lines == [
        "[cluster] port: wants a whole number, has '8000'",
        "[models.a] wrapper: 'vlm' is none of vllm, dsv4, nim, tensorfold, sglang, llamacpp; did you mean vllm?",
        "[models.a] image: is missing, and there is no build table either",
        "[models.a] hf_id: 'no-owner' is no OWNER/NAME",
        "[models.a] imag: is unknown; did you mean image?",
        "[models.b] image: '-x' is no image reference and no sha256 id",
        "[models.b] max_model_len: 0 is not between 1 and 2147483648",
        "[cluster] keep_container: is unknown; did you mean keep_containers?",
        "yeu: is unknown; did you mean yue?",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('head = "-oProxyCommand=x"', "[cluster] head: '-oProxyCommand=x' begins with a dash: ssh would read it as an option"),
        ('head = "a b"', "[cluster] head: 'a b' is no host or alias that ssh takes"),
        ('head = "a;reboot"', "[cluster] head: 'a;reboot' is no host or alias that ssh takes"),
        ('lan_url = "ftp://x:8000"', "[cluster] lan_url: 'ftp://x:8000' is no http:// URL with a host"),
        ('lan_url = "http://u:p@x:8000"', "[cluster] lan_url: has a user or a password in it: credentials never"),
        ('lan_url = "http://x:99999"', "[cluster] lan_url: 'http://x:99999' is no URL: Port out of range 0-65535"),
        ('lan_url = "http://x:8001"', "[cluster] lan_url: http://x:8001 is not at port 8000, where models serve (port = 8000)"),
        ('lan_url = "http://10.1.0.2:8000"', "[cluster] nodes: two have the lan_url http://10.1.0.2:8000"),
        ('master_addr = "head.local"', "[cluster] master_addr: 'head.local' is no IP address"),
        ('master_addr = "127.0.0.1"', "[cluster] master_addr: 127.0.0.1 cannot be reached from the other nodes"),
        ('hf_cache_host = "~/x"', "[cluster] hf_cache_host: '~/x' is no absolute path"),
        ('hf_cache_host = "/a/../b"', "[cluster] hf_cache_host: 'a/../b' has a .. in it"),
        ('worker = "one"', "[cluster] nodes: two have the ssh host one"),
    ],
)  # fmt: skip
def test_a_bad_cluster_is_refused(text: str, fault: str) -> None:
    """Hosts that ssh could take for options, URLs with more than an origin, and unreachable addresses are refused."""
    key = text.partition(" ")[0]
    lines = [text if line.startswith(key + " ") else line for line in CLUSTER.splitlines()]
    found = faults("\n".join(lines))
    assert any(line.startswith(fault) for line in found), found


@pytest.mark.parametrize(
    "options",
    [
        ["-o", "ProxyCommand=touch /tmp/x"], ["-oProxyCommand touch /tmp/x"], ["-o", "proxycommand = x"], ["-F", "/tmp/config"],
        ["-o", "LocalCommand=x"], ["-o", "PermitLocalCommand=yes"], ["-o", "KnownHostsCommand=x"], ["-o", "Include=/tmp/x"],
        ["-o", "PKCS11Provider=/tmp/x.so"], ["-o", "ControlPath=/tmp/x"], ["-o"], ["host"], ["-i", "-x"], ["-o", "BatchMode=no"],
    ],
)  # fmt: skip
def test_an_ssh_option_that_runs_something_is_refused(options: list[str]) -> None:
    """What makes ssh start a program, read another configuration, or ask questions does not come from a catalog."""
    assert fields.ssh_options(tuple(options))


def test_harmless_ssh_options_are_taken() -> None:
    """The specification's own options pass."""
    assert not fields.ssh_options(("-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-p", "2222", "-4", "-J", "jump"))


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ('[models.small.env]\nHF_TOKEN = "abc"', "[models.small.env] HF_TOKEN: is a credential: set HF_TOKEN in this shell's"),
        ('[models.small.env]\nX = "hf_abcdefghijklmnopqrstuvwxyz"', "[models.small.env] X: holds what looks like a credential"),
        ('[models.small.vllm]\nargs = ["--api-key", "abc"]', "[models.small.vllm] args: --api-key is a credential"),
        ('[models.small.vllm]\nargs = ["--api-key=abc"]', "[models.small.vllm] args: --api-key is a credential"),
        ('[cluster.nccl]\nMY_PASSWORD = "abc"', "[cluster.nccl] MY_PASSWORD: is a credential"),
    ],
)
def test_a_credential_is_refused(part: str, fault: str) -> None:
    """A catalog holds no keys, tokens or passwords, and the refusal does not repeat them."""
    lines = faults_of(MODEL, part)
    assert any(line.startswith(fault) for line in lines), lines
    assert not any("abcdefghijkl" in line for line in lines)


UTILIZATION = 'gpu_memory_utilization = 0.5\n[models.small.vllm]\nargs = ["--gpu-memory-utilization", '
BUILD = f'[models.small.build]\nbase = "x@sha256:{"0" * 64}"\nserve = ["vllm"]\n[[models.small.build.files]]\n'


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("port = 8001\n", None),
        (
            '[models.small.vllm]\nargs = ["--port", "9000"]',
            "[models.small.vllm] args: --port is 9000, and [cluster] port is 8000",
        ),
        (
            'max_model_len = 10\n[models.small.vllm]\nargs = ["--max_model_len=20"]',
            "[models.small.vllm] args: --max-model-len is 20, and max_model_len is 10",
        ),
        (UTILIZATION + '"0.50"]', None),
        (UTILIZATION + '"0.6"]', "[models.small.vllm] args: --gpu-memory-utilization is 0.6, and gpu_memory_utilization is 0.5"),
        ('[models.small.vllm]\nargs = ["--nnodes", "2"]', "[models.small.vllm] args: --nnodes is set by spark-serve, for each"),
        ('docker_extra = ["--privileged"]', "[models.small] docker_extra: --privileged is said by privileged = true"),
        ('docker_extra = ["busybox"]', "[models.small] docker_extra: begins with 'busybox', which docker would take for the"),
        ('docker_extra = ["-v", "/run/docker.sock:/s"]', "[models.small] docker_extra: hands the docker daemon to the container"),
        ('aliases = ["yue"]', "[models.small] aliases: 'yue' already means YuE"),
        ("[models.small.nim]\nmanager_port = 1", "[models.small] nim: is for wrapper = 'nim', and this model's is 'vllm'"),
        (
            '[models.other]\nimage = "x"\nhf_id = "a/b"\naliases = ["SMALL"]',
            "[models.other] aliases: 'SMALL' already means small",
        ),
        (
            '[[models.small.mounts]]\ncontainer = "/x"\nsource = "/a,readonly=false"',
            "[models.small.mounts[1]] source: 'a,readonly=false' has a comma, a colon or a quote in it",
        ),
        (
            '[[models.small.checkpoints]]\nrepo = "a/b"\nrevision = "main"\nfolder = "x"',
            "[models.small.checkpoints[1]] revision: 'main' is no commit of 40 hexadecimal digits: a branch moves",
        ),
        (
            '[models.small.build]\nbase = "x:latest"\nserve = ["vllm"]',
            "[models.small.build] base: 'x:latest' is not pinned by @sha256:...",
        ),
        (
            BUILD + 'url = "http://x/y"\nsha256 = "1"\npath = "/z"',
            "[models.small.build.files[1]] url: 'http://x/y' is no https:// URL",
        ),
    ],
)
def test_an_entry_is_checked_against_itself(part: str, fault: str | None) -> None:
    """What an entry says twice it says alike, and what spark-serve decides is not said at all."""
    if fault is None:
        text = CLUSTER.replace("8000", "8001") + part + MODEL if part.startswith("port") else CLUSTER + MODEL + part
        assert catalog.parse(text, "models.toml").models
    else:
        lines = faults_of(MODEL, part)
        assert any(line.startswith(fault) for line in lines), lines


def test_the_example_is_whole_but_for_what_is_open() -> None:
    """The example catalog has no fault but its placeholders, and each of those is named with what belongs there."""
    path = REPOSITORY / "models.example.toml"
    assert [model.name for model in catalog.load(path, example=True).models] == [
        "ds4", "ds41-exl3", "qwen38-dual", "glm53", "glm53-exl3", "glm53-tensorfold", "mimo26",
    ]  # fmt: skip
    lines = faults(path.read_text())
    assert [line.partition(":")[0] for line in lines] == [
        f"[cluster] {key}"
        for key in ("head", "worker", "master_addr", "worker_addr", "lan_url", "worker_lan_url", "hf_cache_host")
    ]
    assert all("is still the example's" in line and "; write " in line for line in lines)


def test_the_example_serves_once_it_is_filled_in() -> None:
    """With the open values written, and nothing else changed, the example catalog is accepted."""
    text = (REPOSITORY / "models.example.toml").read_text()
    for old, new in (("spark-head.example", "a"), ("spark-worker.example", "b"), ("198.51.100.", "10.9.0."), ("YOU", "me")):
        text = text.replace(old, new)
    assert len(catalog.parse(text.replace("192.0.2.", "10.8.0."), "models.toml").models) == 7


def test_the_single_node_template_serves_when_it_is_taken() -> None:
    """The commented entry of the example is an entry that works."""
    text = (REPOSITORY / "models.example.toml").read_text()
    entry = text[text.index("#[models.small]") :]
    lines = [line[1:] for line in entry[: entry.index("\n\n")].splitlines()]
    model = parsed("\n".join(lines)).model("qwen8")
    assert (model.name, model.nodes_needed, model.share, model.secrets) == ("small", 1, "0.4", ("HF_TOKEN",))


def test_a_model_is_found_by_name_alias_and_case() -> None:
    """A name that is nearly one is answered with that one."""
    found = parsed(MODEL, 'aliases = ["tiny"]\n')
    assert found.model("Small").name == found.model("TINY").name == "small"
    assert found.model("yue").wrapper == "yue"
    with pytest.raises(SparkguardError, match="no model 'smal'; did you mean small") as caught:
        found.model("smal")
    assert caught.value.status == USAGE


@pytest.mark.parametrize(
    ("model", "node", "message"),
    [
        ("small", "both", "small runs on one node"),
        ("large", "worker", "large runs on 2 nodes together"),
        ("large", "worker,worker", "large runs on 2 nodes together"),
        ("small", "head,worker", "small runs on one node"),
        ("small", "head,", "no node '' in models.toml"),
        ("huge", None, "huge needs 3 nodes, and models.toml has 2"),
        ("small", "wroker", "no node 'wroker' in models.toml; did you mean worker"),
    ],
)
def test_nodes_that_do_not_suit_the_model_are_refused(model: str, node: str | None, message: str) -> None:
    """A model of one node is not started on two, nor one of two nodes on one; one that is too large is no fault of the file."""
    entry = '[models.{}]\nimage = "x"\nhf_id = "a/b"\nnnodes = {}\n'
    found = parsed(MODEL, entry.format("large", 2), entry.format("huge", 3))
    with pytest.raises(SparkguardError, match=message) as caught:
        found.select(node, found.model(model))
    assert caught.value.status == (CONFIG if model == "huge" else USAGE)


def test_one_spark_is_a_cluster() -> None:
    """Without a worker the example's entries stay, and those of one Spark run."""
    lines = [line for line in CLUSTER.splitlines() if not line.startswith(("worker", "master"))]
    found = catalog.parse("\n".join(lines) + "\n" + MODEL + '[models.large]\nimage = "x"\nhf_id = "a/b"\nnnodes = 2\n', "m")
    assert [node.name for node in found.select(None, found.model("small"))] == ["head"]
    with pytest.raises(SparkguardError, match="needs 2 nodes"):
        found.select(None, found.model("large"))


def test_no_toml_is_told_with_its_place() -> None:
    """A file that is no TOML is refused with the line."""
    with pytest.raises(SparkguardError, match=r"is no TOML: .*line 2"):
        catalog.parse("[cluster]\nhead = \n", "models.toml")


@given(st.text(max_size=40))
def test_no_host_is_an_option_or_a_shell_word(text: str) -> None:
    """Whatever passes as a host begins with no dash and holds nothing that a shell or ssh would read otherwise."""
    if fields.host(text) is None:
        assert not text.startswith("-")
        assert not set(text) & set(" \t\n\"'`$;&|<>(){}*?!#~\\")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["cluster", "models", "yue", "clients", "x"]), _VALUES), st.data())
def test_hostile_documents_end_in_faults(document: dict[str, object], data: st.DataObject) -> None:
    """Values of any type in any place end in a list of faults, never in a traceback."""
    keys = [
        "head",
        "worker",
        "lan_url",
        "nccl",
        "nodes",
        "ssh_opts",
        "port",
        "hf_cache_host",
        "env",
        "build",
        "checkpoints",
        "vllm",
    ]
    for section in ("cluster", "models"):
        inner = data.draw(st.dictionaries(st.sampled_from(keys), _VALUES, max_size=4))
        document[section] = {"m": inner} if section == "models" else inner
    found = catalog.Faults()
    catalog._catalog(document, "x", found)
    assert found.lines
