"""Which command lines are servers, and what each says of itself."""

from __future__ import annotations

import shlex

import pytest

from sparkguard.core.share import parse_share
from sparkguard.probe import engines
from sparkguard.probe.engines import Found

CONFIG = "mem_fraction_static: 0.6\nport: 31000\n"


def no_file(path: str) -> str | None:
    return None


def recognise(line: str, text: str | None = None) -> Found | None:
    return engines.recognise(shlex.split(line), lambda path: text)


@pytest.mark.parametrize(
    "line, share, port",
    [
        ("vllm serve m --gpu-memory-utilization 0.4", "0.4", 8000),
        ("/opt/v/bin/vllm serve m --gpu-mem=0.4 --port 8001", "0.4", 8001),
        ("python3 /opt/v/bin/vllm serve m --gp 0.4", "0.4", 8000),
        ("./venv/bin/python3.12 -u -X dev ./venv/bin/vllm serve m --gp 0.4", "0.4", 8000),
        ("python -m vllm.entrypoints.openai.api_server --model m --gp 0.4", "0.4", 8000),
        ("python -mvllm.entrypoints.openai.api_server --model m --gp 0.4", "0.4", 8000),
        ("python -Im vllm.entrypoints.api_server --model m --gp 0.4", "0.4", 8000),
        ("python -O -W ignore -m vllm.entrypoints.cli.main serve m --gp 0.4", "0.4", 8000),
        ("python -Wignore --check-hash-based-pycs always -m vllm serve m --gp 0.4", "0.4", 8000),
        ("python /src/vllm/vllm/entrypoints/openai/api_server.py --model m --gp 0.4", "0.4", 8000),
        ("python -m vllm.entrypoints.launchers.api_server.entry --model m --gp 0.4", "0.4", 8000),
        ("python -m dynamo.vllm --model m --gpu-memory-utilization 0.4", "0.4", 8000),
        ("vllm serve m", None, 8000),
        ("vllm serve m --gpu_memory_utilization 0.4 --headless", "0.4", None),
        ("vllm run-batch -i a -o b --model m --gp 0.4", "0.4", None),
        ("vllm bench latency --model m --gp 0.4", "0.4", None),
        ("vllm bench throughput --model m --gp 0.4", "0.4", None),
        ("vllm bench startup --model m", None, None),
        ("vllm bench mm-processor --model m --gp 0.4", "0.4", None),
        ("vllm bench sweep serve --serve-cmd 'vllm serve m --gp 0.4' --bench-cmd 'vllm bench serve'", "0.4", 8000),
        ("vllm snapshot create m --snapshot-dir d --gp 0.4", "0.4", 8000),
        ("pypy3 /v/bin/vllm serve m --gp 0.4", "0.4", 8000),
    ],
)
def test_vllm(line: str, share: str | None, port: int | None) -> None:
    """Every form in which vLLM is started declares its share."""
    found = recognise(line)
    assert found is not None and found.declared is not None
    assert found.engine == "vllm"
    assert (found.declared.share, found.port) == (parse_share(share) if share else None, port)


@pytest.mark.parametrize(
    "line",
    [
        "vllm",
        "vllm --help",
        "vllm --version",
        "vllm -v serve",
        "vllm serve --help",
        "vllm serve m --help=Frontend",
        "vllm serve -h",
        "vllm bench",
        "vllm bench serve --model m",
        "vllm bench sweep plot results",
        "vllm bench sweep serve --help",
        "vllm bench latency --help",
        "vllm chat",
        "vllm complete",
        "vllm collect-env",
        "vllm download-kernels",
        "vllm launch render m --gpu-memory-utilization 0.4",
        "vllm preload --help",
        "vllm snapshot inspect d",
        "vllm snapshot restore --help",
        "python",
        "python -",
        "python -m",
        "python -c 'import vllm' vllm serve m",
        "python -Ic 'run(\"/v/bin/vllm\")' serve m",
        "python -B -c 'from multiprocessing.spawn import spawn_main' --multiprocessing-fork",
        "python -m pip install vllm",
        "python -m pytest vllm serve",
        "python vllm_serve.py serve",
        "/opt/vllm/vllm-rs frontend --listen-fd 5",
        "bash -c 'vllm serve m'",
        "env vllm serve m",
        "less vllm serve",
        "llama-server --help",
        "llama-server --version",
        "llama-server --list-devices",
        "ollama run llama3",
        "ollama list",
        "python -m sglang.launch_server --help",
        "python -m sglang.bench_serving",
        "sglang version",
        "trtllm-serve --help",
        "trtllm-build",
    ],
)
def test_no_server(line: str) -> None:
    """One-shots, clients and mere mentions hold nothing."""
    assert recognise(line) is None


@pytest.mark.parametrize("argv", [[], [""], ["", "serve"]])
def test_no_program(argv: list[str]) -> None:
    """A process may have no arguments at all."""
    assert engines.recognise(argv, no_file) is None


@pytest.mark.parametrize(
    "line, note",
    [
        ("vllm serve m --omni", "--omni: each stage's share stands in a stage file"),
        ("vllm serve m --config gone.yaml", "config gone.yaml cannot be read"),
        ("vllm serve m --gpu-memory-utilization 40%", "--gpu-memory-utilization 40% is no number"),
        ("vllm snapshot restore d --port 8001", "vllm snapshot restore names no share"),
        ("vllm preload --model m -tp 2", "vllm preload names no share"),
        ("python -m dynamo.vllm --extra-engine-args x.yaml", "the share stands in a file or in code"),
        ("python3 -m vllm_nvext.entrypoints.openai.api_server", "the share stands in a file or in code"),
    ],
)
def test_vllm_of_unknown_size(line: str, note: str) -> None:
    """Where the command line does not say the size, it is unknown and not zero, and the reason is told."""
    found = recognise(line)
    assert found is not None and found.declared is None and found.note == note
    assert engines.GROWS[found.engine]


@pytest.mark.parametrize(
    "line, share, port, gpus, devices",
    [
        ("python -m sglang.launch_server --model-path m --mem-fraction-static 0.7", "0.7", 30000, 1, None),
        ("python /s/sglang/launch_server.py --mem-fraction-static=0.7", "0.7", 30000, 1, None),
        ("sglang serve --model-path m --mem-fraction 0.7 --port 31000", "0.7", 31000, 1, None),
        ("python -m sglang.launch_server --mem-fraction-static 0.9 --mem-fraction-static 0.7 --tp 2", "0.7", 30000, 2, None),
        ("python -m sglang.launch_server --mem-fraction-static 0.7 --tp-size 2 --dp-size 2", "0.7", 30000, 4, None),
        ("python -m sglang.launch_server --mem-fraction-static 0.7 --tp 2 --dp 2 --enable-dp-attention", "0.7", 30000, 2, None),
        ("python -m sglang.launch_server --mem-fraction-static 0.7 --tp 2 --base-gpu-id 2", "0.7", 30000, 2, "2,3"),
        ("python -m sglang.launch_server --config c.yaml", "0.6", 31000, 1, None),
        ("python -m sglang.launch_server --config=c.yaml --mem-fraction-static 0.7", "0.7", 31000, 1, None),
    ],
)
def test_sglang(line: str, share: str, port: int, gpus: int, devices: str | None) -> None:
    """SGLang declares weights and KV cache as a fraction of the capacity."""
    found = recognise(line, CONFIG)
    assert found is not None and found.declared is not None and found.engine == "sglang"
    declared = found.declared
    assert (declared.share, found.port, declared.gpus, declared.device_ids) == (parse_share(share), port, gpus, devices)
    assert declared.source == ("config" if share == "0.6" else "argument")


@pytest.mark.parametrize(
    "line, engine, port, note",
    [
        ("python -m sglang.launch_server --model-path m", "sglang", 30000, "no --mem-fraction-static"),
        ("sglang serve --mem-fraction-static most", "sglang", 30000, "no --mem-fraction-static"),
        ("sglang serve --config gone.yaml", "sglang", None, "its --config cannot be read"),
        (
            "/v/bin/python /v/bin/trtllm-serve m --port 8002",
            "tensorrt-llm",
            8002,
            "its fraction is of what is free after its weights",
        ),
        ("python -m tensorrt_llm.commands.serve m", "tensorrt-llm", 8000, "its fraction is of what is free after its weights"),
        ("llama-server -m x.gguf", "llama-server", 8080, ""),
        ("/usr/bin/llama-server-11434 -hf org/m --port=8090", "llama-server", 8090, ""),
        ("llama-server --models-dir d --port 80a", "llama-server", 8080, "router"),
        ("'spark-runner: folder/m' --model m.gguf --host /run/m.sock", "llama-server", None, "runner of folder/m"),
        ("ollama serve", "ollama", 11434, "loads models on demand"),
        ("/usr/bin/ollama runner --model b --port 40001", "ollama", 40001, "loads models on demand"),
    ],
)
def test_engines_of_unknown_size(line: str, engine: str, port: int | None, note: str) -> None:
    """What the other engines take is not on their command lines."""
    found = recognise(line)
    assert found == Found(engine, None, port, note)


def test_who_grows() -> None:
    """Beside an idle Ollama or llama-server the live check decides; beside the others an unknown size is refused."""
    assert engines.GROWS == {"vllm": True, "sglang": True, "tensorrt-llm": True, "llama-server": False, "ollama": False}


@pytest.mark.parametrize(
    "line, share",
    [
        ("docker run --rm -it vllm/vllm-openai:latest org/m --gp 0.4", "0.4"),
        ("docker run vllm/vllm-openai --model org/m --gp 0.4", "0.4"),
        ("docker run -v /m:/m -p 8001:8000 --gpus all --ipc=host vllm/vllm-openai /m --gp 0.4", "0.4"),
        ("podman run --replace --name x ghcr.io/me/my-vllm:1 --model m --gp 0.4", "0.4"),
        ("docker run nvcr.io/nvidia/vllm:25.09-py3 vllm serve m --gp 0.4", "0.4"),
        ("docker run --entrypoint vllm img serve m --gp 0.4", "0.4"),
        ("docker run --entrypoint=python3 img -m vllm.entrypoints.openai.api_server --gp 0.4", "0.4"),
        ("docker run img bash -c 'pip install x && vllm serve m --gp 0.4'", "0.4"),
        ("""docker run img bash -lc "cd /x; vllm serve m --served-model-name 'y --gp 0.9' --gp 0.4" """, "0.4"),
        ("docker run img bash -c 'vllm serve m --gp 0.4; true'", "0.4"),
        ("docker run img sh -c 'cd /vllm && exec vllm serve m --gp 0.4 >log 2>&1 &'", "0.4"),
        ("docker run img sh -c 'vllm serve m --gp 0.4 | tee /log/vllm'", "0.4"),
        ("docker run img sh -c 'vllm serve m \\\n --gp 0.4\necho --gp 0.9'", "0.4"),
        ("docker run img sh -c 'HF_HOME=/x /opt/v/bin/python -m vllm.entrypoints.openai.api_server --gp=0.4'", "0.4"),
        ("docker run vllm/vllm-openai sh -c 'vllm serve m --gp 0.4'", "0.4"),
        ("docker run vllm/vllm-openai m", None),
        ("docker exec -it box vllm serve m --gp 0.4", "0.4"),
        ("nerdctl run img vllm serve m --gp 0.4", "0.4"),
        ("docker run lmsysorg/sglang python3 -m sglang.launch_server --mem-fraction-static 0.4", "0.4"),
    ],
)
def test_clients(line: str, share: str | None) -> None:
    """A container client declares what it starts inside."""
    started = engines.recognise_client(shlex.split(line), no_file)
    assert started is not None
    declared = started[1].declared
    assert declared is not None and declared.share == (parse_share(share) if share else None)


@pytest.mark.parametrize(
    "line",
    [
        "docker ps",
        "docker run -it vllm/vllm-openai bash",
        "docker run -it nvcr.io/nvidia/vllm:25.09-py3",
        "docker run -it nvcr.io/nvidia/vllm:25.09-py3 nvidia-smi",
        "docker run --entrypoint nvidia-smi vllm/vllm-openai -L",
        "docker run vllm/vllm-openai --help",
        "docker run ubuntu echo vllm serve m",
        "docker exec -it box bash",
        "docker logs -f vllm",
        "docker run -it img bash -c 'echo vllm'",
        "docker run -it img bash -c 'grep vllm; cat serve'",
        "docker pull vllm/vllm-openai",
        "docker run",
        "vllm serve m",
    ],
)
def test_clients_of_no_server(line: str) -> None:
    """A shell in a container, a client of something else: no server."""
    assert engines.recognise_client(shlex.split(line), no_file) is None


def test_a_quote_that_is_not_closed() -> None:
    """A shell would refuse it; it is read as far as it goes."""
    started = engines.recognise_client(["docker", "run", "img", "bash", "-c", "vllm serve m --gp 0.4 'x"], no_file)
    assert started is not None and started[1].declared is not None and started[1].declared.share == parse_share("0.4")


@pytest.mark.parametrize(
    "argv, title",
    [
        (["VLLM::EngineCore"], ("vllm", "EngineCore")),
        (["VLLM::EngineCore_DP1"], ("vllm", "EngineCore")),
        (["VLLM::Worker_DP0_PP1_TP3_EP3"], ("vllm", "Worker")),
        (["VLLM::APIServer_0"], ("vllm", "APIServer")),
        (["VLLM::APIServer_DP2"], ("vllm", "APIServer")),
        (["VLLM::DPCoordinator"], ("vllm", "DPCoordinator")),
        (["my prefix/x::EngineCore"], ("vllm", "EngineCore")),
        (["sglang::scheduler_TP0"], ("sglang", "scheduler_TP0")),
        (["std::Worker"], None),
        (["VLLM::EngineCorePlus"], None),
        (["VLLM::EngineCore", "x"], None),
        (["EngineCore"], None),
        (["grep", "VLLM::EngineCore"], None),
        ([], None),
    ],
)
def test_titles(argv: list[str], title: tuple[str, str] | None) -> None:
    """The titles that vLLM's and SGLang's children give themselves."""
    assert engines.title_of(argv) == title


@pytest.mark.parametrize(
    "raw",
    [
        b"VLLM::EngineCore\0\0",
        b"python\0-m\0vllm.x\0",
        b"/u/llama-server\0",
        b"ollama\0serve\0",
        b"sglang::detokenizer\0",
        b"trtllm-serve\0",
    ],
)
def test_markers(raw: bytes) -> None:
    """What the scan looks for stands in the command line of every engine and every title."""
    assert any(marker in raw for marker in engines.MARKERS)


NINES = "9" * 5000


@pytest.mark.parametrize("share", ["-1", "-0.9", "0", "1.5", "1e9", "1e999", "9" * 4200 + "e999"])
@pytest.mark.parametrize("start", ["vllm serve m --gpu-memory-utilization", "sglang serve --mem-fraction-static"])
def test_a_share_that_no_server_takes_is_unknown(start: str, share: str) -> None:
    """A fraction outside of 0 to 1 is neither believed nor counted as nothing: a real server with it ends, a fake is named."""
    found = recognise(f"{start} {share}")
    assert found is not None and found.declared is None and found.note


@pytest.mark.parametrize(
    "options",
    [
        f"--kv-cache-memory-bytes {'9' * 400}k",
        f"--kv-cache-memory-bytes {'9' * 400}",
        f"--kv-cache-memory-bytes {NINES}",
        "--kv-cache-memory-bytes -5",
        f"--gpu-memory-utilization-gb {'9' * 400}",
        "--gpu-memory-utilization-gb -5",
        f"--port {'9' * 400}",
        f"-tp {NINES}",
    ],
)
def test_a_size_beyond_any_machine_is_unknown(options: str) -> None:
    """Anybody may start such a process; it may be refused beside, and must not end the guard."""
    found = recognise(f"vllm serve m --gpu-memory-utilization 0.1 {options}")
    assert found is not None and found.declared is None and len(found.note) < 200


@pytest.mark.parametrize(
    "line",
    [
        f"llama-server --port {NINES}",
        f"ollama runner --port {NINES}",
        f"trtllm-serve m --port {NINES}",
        f"sglang serve --mem-fraction-static 0.1 --port {NINES} --tp {NINES} --base-gpu-id 1",
        f"docker run -p {NINES}:{NINES} vllm/vllm-openai --model m",
    ],
)
def test_numbers_that_are_none(line: str) -> None:
    """A number of 5000 digits in somebody's command line costs neither the guard nor its time."""
    words = shlex.split(line)
    found = engines.recognise(words, no_file) or engines.recognise_client(words, no_file)
    assert found is not None


@pytest.mark.parametrize("line", ["docker run i bash -c", "vllm bench sweep serve --serve-cmd"])
def test_a_script_of_megabytes(line: str) -> None:
    """A process can give itself an argument longer than the kernel would take, and shlex would take hours for it."""
    words = [*shlex.split(line), "vllm serve m --gpu-memory-utilization 0.4 " + "y" * 5_000_000]
    client = engines.recognise_client(words, no_file)
    found = client[1] if client else engines.recognise(words, no_file)
    assert found is not None and found.declared is not None and found.declared.share == parse_share("0.4")
