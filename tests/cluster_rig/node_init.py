"""The first process of a node's namespaces: mounts what is the node's own, runs sshd, and ends with whoever holds its stdin.

argv: the node's folder, its hostname. stdout: "here" when the network may be moved in, "up" when sshd listens. stdin: a line
"ADDRESS/BITS GATEWAY", then nothing; its end ends the node, and with this process every other in its namespaces.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys

MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
libc = ctypes.CDLL(None, use_errno=True)
FOLDER, HOST = sys.argv[1:3]


def mount(source, target, kind="", flags=0, data=""):
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()):
        sys.exit(f"mount {source} {target}: {os.strerror(ctypes.get_errno())}")


def ip(*words):
    subprocess.run(("ip", *words), check=True)


def power(*_):
    os._exit(77)


signal.signal(signal.SIGUSR1, power)
mount("none", "/", "", MS_REC | MS_PRIVATE)
mount("proc", "/proc", "proc")
mount("sysfs", "/sys", "sysfs")
mount("tmpfs", "/run", "tmpfs", 0, "mode=755")
os.makedirs("/run/sshd", 0o755)
with open("/run/rig", "w") as file:
    file.write(FOLDER)
mount(FOLDER + "/home", "/root", "", MS_BIND)
mount(FOLDER + "/boot_id", "/proc/sys/kernel/random/boot_id", "", MS_BIND)
mount(FOLDER + "/meminfo", "/proc/meminfo", "", MS_BIND)
mount(FOLDER + "/shadow", "/etc/shadow", "", MS_BIND)
for program in ("/usr/bin/systemctl", "/usr/bin/sudo"):
    if os.path.exists(program):
        mount(FOLDER + "/bin/" + os.path.basename(program), program, "", MS_BIND)
libc.sethostname(HOST.encode(), len(HOST))
print("here", flush=True)

address, gateway = sys.stdin.readline().split()
ip("link", "set", "lo", "up")
ip("addr", "add", address, "dev", "lan0")
ip("link", "set", "lan0", "up")
ip("route", "add", "default", "via", gateway)
# The QSFP port's two halves; the far end stays here, so that both are up.
for name in ("enp1s0f1np1", "enP2p1s0f1np1"):
    ip("link", "add", name, "type", "veth", "peer", "name", name[:9] + "far")
    ip("link", "set", name[:9] + "far", "up")
    ip("link", "set", name, "up")

# The environment that sshd's sessions have is its own: SetEnv in its configuration.
with open(FOLDER + "/sshd.log", "ab") as log:
    sshd = subprocess.Popen(
        ("/usr/sbin/sshd", "-D", "-e", "-f", FOLDER + "/sshd_config"), stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )

wake_read, wake_write = os.pipe()
os.set_blocking(wake_write, False)
signal.set_wakeup_fd(wake_write)
signal.signal(signal.SIGCHLD, lambda *_: None)
print("up", flush=True)
poll = selectors.DefaultSelector()
poll.register(0, selectors.EVENT_READ)
poll.register(wake_read, selectors.EVENT_READ)
while True:
    for key, _ in poll.select():
        if not os.read(key.fd, 4096):
            os._exit(0)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
